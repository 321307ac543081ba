"""What an engine shows of itself at one moment, as numbers; and the same as one document.

`read` is the question, short, for `Observer.ask`; all that is made of it is made by who asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import msgspec

from stepahead.errors import EngineError
from stepahead.observe.books import BookSummary
from stepahead.observe.latency import SIZES, Distribution, scale
from stepahead.observe.observer import Observer, Snapshot
from stepahead.observe.probes import Probes, probes
from stepahead.observe.requests import RequestTotals
from stepahead.observe.spread import spread
from stepahead.types import DraftCounts, Load

RATE_NS = 10_000_000_000  # rates are those of the last ten seconds
PROBED_STEPS = 2048  # probes are those of the last so many steps


class Watched(Protocol):
    """An engine, as far as who watches it must know it.

    `observer` and `failure` are for any thread; the rest is asked of the observer.
    """

    @property
    def observer(self) -> Observer:
        """Where it is asked."""
        ...

    @property
    def failure(self) -> EngineError | None:
        """What ended it, if anything did."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        ...

    @property
    def flights(self) -> int:
        """Steps launched and not yet retired."""
        ...

    def load(self) -> Load:
        """What there is to do, and to do it with, now."""
        ...

    def draft_counts(self) -> DraftCounts:
        """What came of drafts since the start."""
        ...


@dataclass(frozen=True, eq=False)
class Reading:
    """One moment of an engine: everything since its start, and in `snapshot` what is kept.

    `books` go as far as nothing in them can change any more, so they grow from reading to reading.
    """

    snapshot: Snapshot
    load: Load
    flights: int
    steps: int
    books: BookSummary
    requests: RequestTotals
    drafts: DraftCounts

    @cached_property
    def probes(self) -> Probes | None:
        """The probes of the last steps, None where none has landed."""
        steps = self.snapshot.steps.where(slice(-PROBED_STEPS, None))
        return probes(replace(self.snapshot, steps=steps)) if len(steps) else None

    def per_second(self, column: str) -> float:
        """What the steps landed in the last ten seconds had of `column`, a second; of less time
        where the first step that is kept is younger."""
        steps, at_ns = self.snapshot.steps, self.snapshot.at_ns
        if not len(steps):
            return 0.0
        from_ns = max(at_ns - RATE_NS, int(steps.plan_ns[0]))
        recent = steps.where(steps.land_ns > from_ns)
        total = len(recent) if column == "step" else int(getattr(recent, column).sum())
        return total * 1e9 / max(1, at_ns - from_ns)


def read(watched: Watched) -> Reading:
    """The engine as it is; for its own thread, or as a question to `Observer.ask`."""
    observer = watched.observer
    return Reading(
        observer.snapshot(),
        watched.load(),
        watched.flights,
        observer.steps.count,
        observer.books.known(at_rest=not watched.flights),
        observer.requests.totals(),
        watched.draft_counts(),
    )


def status(watched: Watched) -> str:
    """`ok`, `failed` or `closed`; for any thread."""
    if watched.closed:
        return "closed"
    return "ok" if watched.failure is None else "failed"


def document(reading: Reading) -> dict[str, Any]:
    """The reading as JSON can carry it.

    about      what engine it is
    at_ns      when this was, on the clock of all times here; unix_ns, the same since 1970
    load       rows, requests and pages now, with the step that was retired last
    flights    steps launched and not yet retired
    steps      steps landed since the start
    books      both books, in ns, from the start to the end of the last step that has landed, or to
               now where nothing is in the air
    probes     the four probes of the last 2,048 steps, or None where none has landed
    syncs      pulls back to serial work by reason
    requests   requests and tokens since the start
    drafts     what came of drafts since the start, None without them
    rates      a second, over the last ten seconds
    latencies  in ms, over the last values kept; None where there are none
    """
    snapshot = reading.snapshot
    return {
        "about": dict(snapshot.about),
        "at_ns": snapshot.at_ns,
        "unix_ns": snapshot.wall_ns,
        "load": msgspec.structs.asdict(reading.load),
        "flights": reading.flights,
        "steps": reading.steps,
        "books": _books(reading.books),
        "probes": None if reading.probes is None else reading.probes.as_dict(),
        "syncs": snapshot.syncs,
        "requests": _requests(reading.requests),
        "drafts": _drafts(reading.drafts),
        "rates": {
            "steps": reading.per_second("step"),
            "generated_tokens": reading.per_second("samples"),
            "prompt_tokens": reading.per_second("chunk_tokens"),
        },
        "latencies": {
            name: _latency(found, scale(name))
            for name, found in reading.requests.spreads.items()
            if name not in SIZES
        },
    }


def _books(books: BookSummary) -> dict[str, Any]:
    return {
        "wall_ns": books.wall_ns,
        "hidden_ns": books.hidden_ns,
        "exposed_ns": books.exposed_ns,
        "waiting_ns": books.waiting_ns,
        "busy_ns": books.busy_ns,
        "host_ns": {stage.name.lower(): ns for stage, ns in books.host_ns.items()},
        "idle_ns": dict(books.idle_ns),
        "hidden_us_per_step": books.hidden_us_per_step,
        "exposed_us_per_step": books.exposed_us_per_step,
        "device_idle_pct": books.device_idle_pct,
    }


def _requests(totals: RequestTotals) -> dict[str, Any]:
    return {
        "arrived": totals.arrived,
        "admitted": totals.admitted,
        "preemptions": totals.preemptions,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "generated_tokens": totals.generated_tokens,
        "ends": dict(totals.ends),
    }


def _drafts(counts: DraftCounts) -> dict[str, Any] | None:
    if not counts.accepted_at:
        return None
    return {
        "rows": counts.rows,
        "drafted": counts.drafted,
        "proposed": counts.proposed,
        "accepted_at": list(counts.accepted_at),
        "tokens_per_row": counts.tokens_per_row,
    }


def _latency(found: Distribution, unit: int) -> dict[str, float | int] | None:
    values, counts = found.recent.T
    middle = spread(values, counts)
    if middle is None:
        return None
    ms = unit / 1e3
    return {
        "count": found.count,
        "mean_ms": found.total / found.count / ms,
        "p50_ms": middle.p50_ns / ms,
        "p90_ms": middle.p90_ns / ms,
        "p99_ms": middle.p99_ns / ms,
    }
