"""A frame, and a little of what came before it, as something that rich can draw.  Asks nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepahead.observe.verdicts import duration
from stepahead.top.frame import Frame, Quantiles

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR = 20
KEPT = 40  # looks that a sparkline shows


class History:
    """The last values of what is drawn as a line."""

    def __init__(self) -> None:
        self.out_per_s: deque[float] = deque(maxlen=KEPT)
        self.running: deque[float] = deque(maxlen=KEPT)

    def add(self, frame: Frame) -> None:
        """One look more."""
        if frame.out_per_s is not None:
            self.out_per_s.append(frame.out_per_s)
        if frame.running is not None:
            self.running.append(frame.running)


def view(frame: Frame, history: History, place: str, note: str = "") -> RenderableType:
    """One screen: the verdict, then rates, latencies, load, and where time went.

    `note` says that the frame is old, and why.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for label, shown in _rows(frame, history):
        grid.add_row(label, shown)
    parts: list[RenderableType] = [_title(frame, place), _verdict(frame, note), Text(), grid]
    if frame.missing:
        parts.append(Text(f"\n{frame.missing}", style="dim"))
    return Group(*parts)


def nothing_yet(place: str, note: str) -> RenderableType:
    """What is shown before the first frame."""
    return Group(Text(place, style="dim"), Text(note, style="bold red"))


def _title(frame: Frame, place: str) -> Text:
    ahead = f"{frame.loop}, depth {frame.depth}" if frame.loop else ""
    parts = [part for part in (frame.engine, frame.model, ahead, place) if part]
    return Text(" · ".join(parts), style="dim")


def _verdict(frame: Frame, note: str) -> Text:
    if note:
        return Text(note, style="bold red")
    return Text(frame.verdict, style="bold")


def _rows(frame: Frame, history: History) -> list[tuple[str, str]]:
    rows = [
        ("tokens/s out", f"{_number(frame.out_per_s):>9}  {sparkline(history.out_per_s)}".rstrip()),
        ("tokens/s in", f"{_number(frame.in_per_s):>9}"),
        ("first token", _quantiles(frame.ttft)),
        ("token to token", _quantiles(frame.itl)),
        ("requests", _load(frame, history)),
        ("pages", _pages(frame)),
        ("prefix hits", _percent(frame.prefix_pct)),
    ]
    if frame.drafts_pct:
        shares = "  ".join(_percent(share) for share in frame.drafts_pct)
        rows.append(("drafts accepted", f"by position: {shares}"))
    if frame.drafts_per_step:
        rows.append(("drafts", f"{frame.drafts_per_step:.2f} tokens a step"))
    if frame.depth is not None:
        rows.append(("steps in the air", f"{_number(frame.flights)} of at most {frame.depth}"))
    if frame.loop:
        rows.append(("device idles for", _idle(frame)))
        held = (f"{reason} {steps:,} steps" for reason, steps in frame.syncs.items())
        rows.append(("held up by", ", ".join(held) or "nothing"))
    return rows


def _quantiles(found: Quantiles | None) -> str:
    if found is None:
        return "-"
    return "   ".join(
        f"{name} {duration(ms * 1e6):>8}"
        for name, ms in (("p50", found.p50_ms), ("p90", found.p90_ms), ("p99", found.p99_ms))
    )


def _load(frame: Frame, history: History) -> str:
    of = f" of {frame.rows:,}" if frame.rows else ""
    words = f"{_number(frame.running)}{of} running, {_number(frame.waiting)} waiting"
    if frame.rows and frame.running is not None:
        words = f"{_bar(100 * frame.running / frame.rows)} {words}"
    return f"{words}  {sparkline(history.running)}".rstrip()


def _pages(frame: Frame) -> str:
    if frame.pages_pct is None:
        return "-"
    of = f" of {frame.pages:,}" if frame.pages else ""
    return f"{_bar(frame.pages_pct)} {_percent(frame.pages_pct)}{of} used"


def _idle(frame: Frame) -> str:
    longest = sorted(frame.idle_ms.items(), key=lambda item: -item[1])
    told = [f"{cause} {duration(ms * 1e6)}" for cause, ms in longest if ms >= 1e-3]
    return f"{', '.join(told)} a step" if told else "nothing"


def _bar(percent: float) -> str:
    full = min(_BAR, max(0, round(percent / 100 * _BAR)))
    return "█" * full + "░" * (_BAR - full)


def sparkline(values: Sequence[float]) -> str:
    """One block a value, the highest of them full; nothing for fewer than two."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    return "".join(_BLOCKS[min(7, max(0, int(8 * value / top)))] for value in values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"
