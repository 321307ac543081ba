"""What verdicts judge by: sums over steps, and percentiles of pairs, intervals and gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepahead.sync import Cause

_NO_WORK = Cause.NO_WORK.label


@dataclass(frozen=True)
class Totals:
    """Sums over `steps` steps, in ns; `idle_ns` of the device by cause, `stages_ns` of exposed host
    work by what it was.

    `host_computes`: the host's own thread is the device, so its work under a busy device is the
    model, and hides nothing.
    """

    steps: int
    depth: int
    wall_ns: int
    busy_ns: int
    hidden_ns: int
    exposed_ns: int
    blocked_ns: int
    idle_ns: Mapping[str, int]
    stages_ns: Mapping[str, int]
    host_computes: bool = False

    @property
    def work_ns(self) -> int:
        """Of the host."""
        return self.hidden_ns + self.exposed_ns

    @property
    def asked_ns(self) -> int:
        """Wall clock while there was something to do."""
        return self.wall_ns - self.idle_ns.get(_NO_WORK, 0)

    @property
    def causes(self) -> list[tuple[str, int]]:
        """Causes of idle time while there was work, the longest first; those of 0 are left out."""
        return _longest({cause: ns for cause, ns in self.idle_ns.items() if cause != _NO_WORK})

    @property
    def exposed_parts(self) -> list[tuple[str, int]]:
        """What exposed host work was, the longest first; parts of 0 are left out."""
        return _longest(self.stages_ns)

    @property
    def idle_with_work_ns(self) -> int:
        """Of the device, while there was something to do."""
        return sum(ns for _, ns in self.causes)

    def as_dict(self) -> dict[str, Any]:
        """Shares in percent of the time in which there was work, and µs a step."""
        steps = self.steps
        return {
            "device_busy_pct": _percent(self.busy_ns, self.asked_ns),
            "host_hidden_pct": _percent(self.hidden_ns, self.work_ns),
            "host_blocked_pct": _percent(self.blocked_ns, self.asked_ns),
            "no_work_pct": _percent(self.idle_ns.get(_NO_WORK, 0), self.wall_ns),
            "host_computes": self.host_computes,
            "exposed_us_per_step": _each(self.exposed_ns, steps),
            "work_us_per_step": _each(self.work_ns, steps),
            "idle_us_per_step": {cause: _each(ns, steps) for cause, ns in self.idle_ns.items()},
        }


@dataclass(frozen=True)
class Seen:
    """Launches against the results of the step before each: how many were ahead of its landing and
    of its end on the device, and by how much at the median; pulls back to serial work since the
    engine's start, by reason.  `host_computes` as in Totals."""

    pairs: int
    depth: int
    ahead_pct: float | None
    fed_pct: float | None
    land_ns: int
    end_ns: int
    syncs: Mapping[str, int]
    host_computes: bool = False


@dataclass(frozen=True)
class Quantiles:
    """Intervals of one kind of step, and the device's median run of those steps."""

    count: int
    p50_ns: int
    p99_ns: int
    run_ns: int


@dataclass(frozen=True)
class TokenGaps:
    """Gaps between tokens, how many were late, and how many of those because of prompts."""

    count: int
    p50_ns: int
    p99_ns: int
    late_pct: float
    prompt_pct: float | None


def _longest(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, ns) for name, ns in parts.items() if ns), key=lambda part: -part[1])


def _percent(part: int, whole: int) -> float | None:
    return 100.0 * part / whole if whole else None


def _each(ns: int, steps: int) -> float | None:
    return ns / 1e3 / steps if steps else None
