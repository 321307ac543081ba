"""What a run was like, as a table for people.  Knows figures, no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from stepahead.llm.figures import Figures, RunTally
from stepahead.observe.books import BookSummary
from stepahead.sync import SyncCounts


@dataclass(frozen=True)
class Summary:
    """A finished run: its requests, its seconds, and over them both books and the pulls back to
    serial work."""

    tally: RunTally
    wall_s: float
    books: BookSummary
    syncs: SyncCounts

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


def _held(count: dict[str, int]) -> str:
    return f"{count['steps']:,} steps, {count['rows']:,} rows"


def _share(part_ns: int, books: BookSummary) -> str:
    return f"{100 * part_ns / books.wall_ns:.1f} %" if books.wall_ns else "-"
