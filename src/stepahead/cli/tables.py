"""What a run was like, as a table for people.  Knows figures, no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from stepahead.llm.figures import Figures, RunTally
from stepahead.observe.books import BookSummary
from stepahead.observe.probes import ALL, Probes
from stepahead.observe.spread import Spread
from stepahead.sync import SyncCounts


@dataclass(frozen=True)
class Summary:
    """A finished run: its requests, its seconds, and over them both books, the pulls back to serial
    work, and the probes of its steps."""

    tally: RunTally
    wall_s: float
    books: BookSummary
    syncs: SyncCounts
    probes: Probes

    @property
    def figures(self) -> Figures:
        """Its rates and latencies."""
        return self.tally.figures(self.wall_s, self.books, self.syncs)


_ROWS: dict[str, Callable[[Summary], str]] = {
    "requests": lambda run: f"{run.tally.requests:,} in {run.wall_s:.1f} s",
    "prompt tokens": lambda run: f"{run.tally.prompt_tokens:,}, {run.tally.cached_tokens:,} cached",
    "output tokens": lambda run: f"{run.tally.output_tokens:,}",
    "output tokens/s": lambda run: f"{run.figures.tokens_per_s:,.1f}",
    "TTFT p50 / p99": lambda run: (
        f"{run.figures.ttft_ms_p50:,.1f} / {run.figures.ttft_ms_p99:,.1f} ms"
    ),
    "TPOT p50 / p99": lambda run: (
        f"{run.figures.tpot_ms_p50:,.2f} / {run.figures.tpot_ms_p99:,.2f} ms"
    ),
    "host hidden": lambda run: f"{run.figures.host_hidden_us:,.0f} µs a step",
    "host exposed": lambda run: f"{run.figures.host_exposed_us:,.0f} µs a step",
    "device busy": lambda run: _share(run.books.busy_ns, run.books),
}


def summary_table(runs: Mapping[str, Summary]) -> Table:
    """One column a run; at the end the idle device's time by cause, and what held steps up."""
    table = Table("", *(f"[bold]{name}" for name in runs), show_header=len(runs) > 1)
    for label, show in _ROWS.items():
        table.add_row(label, *(show(run) for run in runs.values()))
    causes = dict.fromkeys(cause for run in runs.values() for cause in run.books.idle_ns)
    for cause in causes:
        shares = [_share(run.books.idle_ns.get(cause, 0), run.books) for run in runs.values()]
        table.add_row(f"  idle: {cause}", *shares)
    for row in sync_rows(run.syncs for run in runs.values()):
        table.add_row(*row)
    return table


def sync_rows(runs: Iterable[SyncCounts]) -> Iterator[tuple[str, ...]]:
    """A label and a cell a run for each reason that occurred in any of them."""
    counts = [run.as_dict() for run in runs]
    for reason in dict.fromkeys(reason for run in counts for reason in run):
        cells = (_held(run[reason]) if reason in run else "-" for run in counts)
        yield (f"sync: {reason}", *cells)


# label, probe, figure
_PROBED = (
    ("host works", "host", "work"),
    ("  exposed", "host", "exposed"),
    ("host waits", "host", "blocked"),
    ("launched ahead", "results", "land_after_launch"),
    ("step", "launches", "interval"),
    ("token to token", "tokens", "gap"),
)


def probe_table(runs: Mapping[str, Probes]) -> Table:
    """One column a run with p50/p90/p99 of the probes, in ms; a row for each kind of step where
    they are not to be added up."""
    heads = (f"[bold]{name or 'p50/p90/p99'}" for name in runs)
    table = Table("ms" if "" in runs else "ms, p50/p90/p99", *heads, show_header=True)
    for label, probe, figure in _PROBED:
        spreads = [run.four[probe].spreads[figure] for run in runs.values()]
        kinds = dict.fromkeys(kind for one in spreads for kind in one)
        for kind in [ALL] if ALL in kinds else kinds:
            shown = label if kind == ALL else f"{kind} {label}"
            table.add_row(shown, *(_spread(one.get(kind)) for one in spreads))
    return table


def _spread(one: Spread | None) -> str:
    if one is None:
        return "-"
    return "/".join(f"{ns / 1e6:.3g}" for ns in (one.p50_ns, one.p90_ns, one.p99_ns))


def verdict_lines(runs: Mapping[str, Probes]) -> list[str]:
    """What the probes mean: a line for each run; of a single one, each probe's too."""
    lines = [f"{name}: {run.verdict}" if name else run.verdict for name, run in runs.items()]
    only = next(iter(runs.values()))
    if len(runs) == 1 and only.totals.steps:
        lines += [f"  {name:<9} {probe.verdict}" for name, probe in only.four.items()]
    return lines


def show_probes(console: Console, runs: Mapping[str, Probes]) -> None:
    """The probes of some runs, figures first; without a step there are none."""
    if any(run.totals.steps for run in runs.values()):
        console.print(probe_table(runs))
    for line in verdict_lines(runs):
        console.print(line, highlight=False)


def _held(count: dict[str, int]) -> str:
    return f"{count['steps']:,} steps, {count['rows']:,} rows"


def _share(part_ns: int, books: BookSummary) -> str:
    return f"{100 * part_ns / books.wall_ns:.1f} %" if books.wall_ns else "-"
