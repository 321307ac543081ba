"""Both lanes of the last seconds in bins of equal length, for a strip that somebody watches live.

Who watches asks again and again, each time from where the last answer ended: a bin is told once,
when nothing in it can change any more.  `read_lanes` is the question, short, for `Observer.ask`;
`lanes` is made of it by who asked.  Costs what is new, however much is kept and however many run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stepahead.observe.books import exposed_ns, hidden_ns
from stepahead.observe.causes import BUSY, CAUSES, Events, tally
from stepahead.observe.idle import known_until
from stepahead.observe.reading import Watched
from stepahead.observe.steps import REASONS, Steps
from stepahead.types import Load

BIN_NS = 10_000_000  # a pixel or two of ten seconds
MOST_BINS = 1000  # of one answer: the last ten seconds


@dataclass(frozen=True, eq=False)
class Recent:
    """What was taken down between `since_ns` and `at_ns`, and some of what came before."""

    about: dict[str, str | int]
    since_ns: int
    at_ns: int
    events: Events
    steps: Steps
    load: Load
    flights: int


def read_lanes(watched: Watched, from_bin: int | None) -> Recent:
    """What `lanes` needs from this bin on, of the last ten seconds at most; for the engine's own
    thread, or as a question to `Observer.ask`."""
    observer = watched.observer
    now_ns = observer.clock_ns()
    since_ns = now_ns - MOST_BINS * BIN_NS
    # a number beyond now is of another clock: the machine was started anew
    if from_bin is not None and from_bin * BIN_NS <= now_ns:
        since_ns = max(since_ns, from_bin * BIN_NS)
    events = observer.books.recent(since_ns)
    steps = observer.steps.landed_after(since_ns - 1)
    load, flights = watched.load(), watched.flights
    return Recent(observer.about, since_ns, events.until_ns, events, steps, load, flights)


def lanes(recent: Recent) -> dict[str, Any]:
    """The bins as JSON can carry it; columns have one number a bin, times in whole µs.

    about     what engine it is
    load      rows, requests and pages now
    flights   steps launched and not yet retired
    bin_ms    the length of a bin
    first     the number of the first bin told: bin i begins i times bin_ms after the clock's zero
    next      the number of the first bin that is not told yet; what to ask from
    now       this moment in bins, with a fraction
    host      hidden_us and exposed_us; the rest it waits
    device    busy_us, and idle_us by cause; causes that do not occur are left out
    steps, tokens, rows   of the steps that landed in the bin: their number, the tokens they gave,
              and the most decode rows that one had
    syncs     [bin, reason, steps] of steps that could not run ahead
    """
    events, steps = recent.events, recent.steps
    begun_ns = max(recent.since_ns, int(events.start_ns[0]))
    first = -(-begun_ns // BIN_NS)
    count = max(0, min(known_until(events), recent.at_ns) // BIN_NS - first)
    cells = tally(events, (first + np.arange(count + 1)) * BIN_NS)
    at = steps.land_ns // BIN_NS - first
    landed = (at >= 0) & (at < count)
    return {
        "about": dict(recent.about),
        "load": msgspec.structs.asdict(recent.load),
        "flights": recent.flights,
        "bin_ms": BIN_NS // 1_000_000,
        "first": first,
        "next": first + count,
        "now": round(recent.at_ns / BIN_NS, 2),
        "host": {"hidden_us": _us(hidden_ns(cells)), "exposed_us": _us(exposed_ns(cells))},
        "device": {"busy_us": _us(cells[:, :, BUSY].sum(1)), "idle_us": _idle(cells)},
        **_landed(steps.where(landed), at[landed], first, count),
    }


def _idle(cells: np.ndarray) -> dict[str, list[int]]:
    by_cause = cells[:, :, :BUSY].sum(1).T
    return {name: _us(ns) for name, ns in zip(CAUSES, by_cause, strict=True) if ns.any()}


def _landed(steps: Steps, at: np.ndarray, first: int, count: int) -> dict[str, Any]:
    """What landed steps were, by the bin `at` int64[n] of `count` that each landed in."""
    rows = np.zeros(count, np.int64)
    np.maximum.at(rows, at, steps.rows)
    tokens = np.zeros(count, np.int64)
    np.add.at(tokens, at, steps.samples)
    held = steps.reason >= 0
    marks, counts = np.unique(at[held] * len(REASONS) + steps.reason[held], return_counts=True)
    return {
        "steps": np.bincount(at, minlength=count).tolist(),
        "tokens": tokens.tolist(),
        "rows": rows.tolist(),
        "syncs": [
            [first + mark // len(REASONS), REASONS[mark % len(REASONS)].value, many]
            for mark, many in zip(marks.tolist(), counts.tolist(), strict=True)
        ],
    }


def _us(ns: np.ndarray) -> list[int]:
    rounded: list[int] = ((ns + 500) // 1000).tolist()
    return rounded
