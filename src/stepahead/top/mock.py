"""A server that is not there: frames that look like those of a busy engine, for a first look."""

from __future__ import annotations

import math

from stepahead.top.frame import Frame, Quantiles


class MockSource:
    """The same frames each time, one after another."""

    place = "a sample; no server is asked"

    def __init__(self) -> None:
        self._looks = 0

    def look(self) -> Frame:
        """The next frame."""
        turn = self._looks
        self._looks += 1
        swell = (1 + math.sin(turn / 4)) / 2  # load that comes and goes
        running, exposed = 140 + round(100 * swell), 0.12 + 0.3 * swell
        busy = 97.5 - 4 * swell
        return Frame(
            engine="stepahead (sample)",
            model="glm-5.3",
            loop="overlap",
            verdict=f"device busy {busy:.0f} %, host hidden {96 - 8 * swell:.0f} %, exposed "
            f"{exposed * 1e3:.0f} µs a step",
            busy_pct=busy,
            hidden_pct=96 - 8 * swell,
            exposed_ms=exposed,
            idle_ms={"plan late": exposed, "fence": 0.02, "copy": 0.04},
            in_per_s=5200 + 1800 * swell,
            out_per_s=running / 0.0112,
            ttft=Quantiles(180 + 90 * swell, 320 + 200 * swell, 610 + 500 * swell),
            itl=Quantiles(11.2, 12.4, 24 + 14 * swell),
            running=running,
            waiting=round(12 * swell),
            rows=256,
            pages_pct=48 + 30 * swell,
            pages=18_432,
            prefix_pct=41.5,
            drafts_pct=(83.0, 66.0, 49.0),
            flights=2,
            depth=2,
            syncs={"drain": 3 + turn // 8},
        )
