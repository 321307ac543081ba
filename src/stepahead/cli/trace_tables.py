"""Summaries and differences of timelines as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from stepahead.observe.probes import ALL
from stepahead.trace.diff import TraceDiff
from stepahead.trace.summary import TraceSummary

_SMALLEST_US = 0.05  # a part that never took this long is left out of a difference


def summary_tables(found: TraceSummary) -> Iterator[Table]:
    """What is there to say, most important first."""
    yield _whole(found)
    yield _stages(found)
    if found.idle_ns:
        yield _idle(found)
    if found.bubbles:
        yield _bubbles(found)
    if found.kinds:
        yield _kinds(found)


def _whole(found: TraceSummary) -> Table:
    about = found.about
    table = Table(title=f"{about.get('model', '')}, {about.get('loop', '')}", show_header=False)
    table.add_row("steps", f"{found.steps:,} in {found.wall_ns / 1e6:,.1f} ms")
    table.add_row("device busy", _share(found.busy_ns, found.wall_ns))
    work_ns = found.hidden_ns + found.exposed_ns
    for name, ns in (("host hidden", found.hidden_ns), ("host exposed", found.exposed_ns)):
        share = f", {_share(ns, work_ns)} of its work" if work_ns else ""
        table.add_row(name, f"{found.per_step_us(ns):,.1f} µs a step{share}")
    table.add_row("host waiting", _share(found.waiting_ns, found.wall_ns))
    gap = found.probes.tokens.spreads["gap"].get(ALL)
    if gap is not None:
        told = " / ".join(f"{ns / 1e6:,.2f}" for ns in (gap.p50_ns, gap.p90_ns, gap.p99_ns))
        table.add_row("TPOT p50 / p90 / p99", f"{told} ms")
    for reason, steps in found.syncs.items():
        table.add_row(f"sync: {reason}", f"{steps:,} steps")
    return table


def _stages(found: TraceSummary) -> Table:
    table = Table("stage", title="the host, µs a step")
    for name in ("times", "hidden", "exposed", "all", "of the time"):
        table.add_column(name, justify="right")
    for stage in sorted(found.stages, key=lambda stage: (stage.rests, -stage.total_ns)):
        split = (
            ("", "")
            if stage.rests
            else (
                f"{found.per_step_us(stage.hidden_ns):,.1f}",
                f"{found.per_step_us(stage.exposed_ns):,.1f}",
            )
        )
        total = f"{found.per_step_us(stage.total_ns):,.1f}"
        share = _share(stage.total_ns, found.wall_ns)
        table.add_row(stage.name, f"{stage.count:,}", *split, total, share)
    return table


def _idle(found: TraceSummary) -> Table:
    table = Table("cause", title="the device idle")
    for name in ("ms", "µs a step", "of the time"):
        table.add_column(name, justify="right")
    for cause, ns in found.idle_ns.items():
        each = f"{found.per_step_us(ns):,.1f}"
        table.add_row(cause, f"{ns / 1e6:,.2f}", each, _share(ns, found.wall_ns))
    return table


def _bubbles(found: TraceSummary) -> Table:
    table = Table("between steps", title="the longest bubbles")
    for name in ("at ms", "idle ms"):
        table.add_column(name, justify="right")
    table.add_column("for")
    for bubble in found.bubbles:
        why = ", ".join(f"{cause} {ns / 1e6:,.2f}" for cause, ns in bubble.causes.items())
        place = f"{bubble.after} and {bubble.before}"
        table.add_row(place, f"{bubble.at_us / 1e3:,.1f}", f"{bubble.idle_ns / 1e6:,.2f}", why)
    return table


def _kinds(found: TraceSummary) -> Table:
    table = Table("kind", title="kinds of steps, medians")
    for name in ("steps", "rows", "prompt tokens", "device ms", "period ms"):
        table.add_column(name, justify="right")
    for kind in found.kinds:
        sizes = (f"{kind.steps:,}", f"{kind.rows:,.0f}", f"{kind.prompt_tokens:,.0f}")
        period = f"{kind.period_us / 1e3:,.2f}" if kind.period_us else "-"
        times = (f"{kind.device_us / 1e3:,.2f}", period)
        table.add_row(kind.kind, *sizes, *times)
    return table


def diff_table(found: TraceDiff, names: tuple[str, str]) -> Table:
    """Medians of aligned steps, what moved most first."""
    steps = f"{found.aligned:,} steps aligned {found.how} of {found.steps[0]:,} and"
    table = Table("µs a step, median", title=f"{steps} {found.steps[1]:,}")
    for name in (*names, "difference"):
        table.add_column(name, justify="right")
    for change in (found.step, *found.changes):
        if max(change.before_us, change.after_us) >= _SMALLEST_US:
            values = (f"{change.before_us:,.1f}", f"{change.after_us:,.1f}")
            table.add_row(change.name, *values, f"{change.by_us:+,.1f}")
    return table


def _share(part_ns: int, whole_ns: int) -> str:
    return f"{100 * part_ns / whole_ns:.1f} %" if whole_ns else "-"
