"""The two books: what the host did, and what the device did meanwhile.  Always on.

The host's time is cut into contiguous segments, each with a stage; the device's busy intervals
come in later, when their steps land.  Laid over each other they say, for every nanosecond, what
the host was at and whether the device ran, so two sums hold exactly, in integers:

    host     hidden + exposed + waiting   = wall clock
    device   busy + idle, cause by cause  = wall clock

*hidden* is host work done while the device is busy, *exposed* is host work done while it is idle.
The cause of idle time is whatever the host was doing at that moment.  Knows stages and times, not
what a plan says nor what a step computes.  For one thread, the loop's.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Stage(IntEnum):
    """What the host is at."""

    PLAN = 0
    LAUNCH = 1
    WAIT = 2  # for a flight to land
    RETIRE = 3
    DELIVER = 4  # hands outputs to whoever asked
    IDLE = 5  # outside a step


# why the device idles while the host is in a stage
CAUSES = {
    Stage.PLAN: "plan late",
    Stage.LAUNCH: "launch late",
    Stage.WAIT: "hand-over",  # transport and wake-up: launched but not begun, or done but unheard
    Stage.RETIRE: "retire late",
    Stage.DELIVER: "deliver late",
    Stage.IDLE: "no work",
}
WORK = (Stage.PLAN, Stage.LAUNCH, Stage.RETIRE, Stage.DELIVER)
REST = (Stage.WAIT, Stage.IDLE)


@dataclass(frozen=True, eq=False)
class Events:
    """Raw events, oldest first, on the books' clock.

    Host: segment i is `stage[i]` int64[h] from `start_ns[i]` int64[h] to the next one's start, the
    last one to `until_ns`.  Device: step `step[j]` int64[d] ran from `busy_start_ns[j]` int64[d]
    to `busy_end_ns[j]` int64[d]; these intervals are ascending and disjoint.
    """

    stage: np.ndarray
    start_ns: np.ndarray
    until_ns: int
    step: np.ndarray
    busy_start_ns: np.ndarray
    busy_end_ns: np.ndarray

    @property
    def end_ns(self) -> np.ndarray:
        """Where each host segment ends, int64[h]."""
        return np.append(self.start_ns[1:], self.until_ns)


def tally(events: Events, cuts_ns: np.ndarray) -> np.ndarray:
    """Time of the windows between `cuts_ns` by stage and by whether the device ran.

    `cuts_ns` int64[w + 1], ascending, none before the first host segment.  Returns int64[w, s, 2]:
    [window, stage, 0] ns with the device idle, [window, stage, 1] ns with it busy.
    """
    inner = (events.start_ns > cuts_ns[0]) & (events.start_ns < cuts_ns[-1])
    points = np.sort(np.concatenate((events.start_ns[inner], cuts_ns)))
    windows = np.searchsorted(cuts_ns, points[:-1], side="right") - 1
    # cuts that coincide leave empty pieces behind the last window
    windows = np.minimum(windows, len(cuts_ns) - 2)
    stages = events.stage[np.searchsorted(events.start_ns, points[:-1], side="right") - 1]
    busy_ns = np.diff(_busy_before(points, events))
    cells = np.zeros((len(cuts_ns) - 1) * len(Stage) * 2, np.int64)
    idle_cell = (windows * len(Stage) + stages) * 2
    np.add.at(cells, idle_cell, np.diff(points) - busy_ns)
    np.add.at(cells, idle_cell + 1, busy_ns)
    return cells.reshape(-1, len(Stage), 2)


def _busy_before(times_ns: np.ndarray, events: Events) -> np.ndarray:
    """Busy nanoseconds before each of `times_ns`, as far as `events` know."""
    start_ns, end_ns = events.busy_start_ns, events.busy_end_ns
    begun = np.searchsorted(start_ns, times_ns, side="right")
    whole_ns = np.concatenate(([0], np.cumsum(end_ns - start_ns)))[begun]
    last_end_ns = np.concatenate(([0], end_ns))[begun]
    return whole_ns - np.where(begun > 0, np.maximum(last_end_ns - times_ns, 0), 0)


def hidden_ns(cells: np.ndarray) -> np.ndarray:
    """Host work under a busy device: int64[...] of cells int64[..., s, 2]."""
    return cells[..., WORK, 1].sum(-1)


def exposed_ns(cells: np.ndarray) -> np.ndarray:
    """Host work while the device is idle: int64[...] of cells int64[..., s, 2]."""
    return cells[..., WORK, 0].sum(-1)


def waiting_ns(cells: np.ndarray) -> np.ndarray:
    """Host at rest: int64[...] of cells int64[..., s, 2]."""
    return cells[..., REST, :].sum((-1, -2))


def idle_ns(cells: np.ndarray) -> dict[str, int]:
    """Idle time of the device by cause, of cells int64[s, 2]."""
    return {cause: int(cells[stage, 0]) for stage, cause in CAUSES.items()}


@dataclass(frozen=True)
class BookSummary:
    """Both books over a stretch of time, in ns; `idle_ns` is by cause, `host_ns` by stage.

    hidden + exposed + waiting = sum of host = wall, and busy + sum of idle = wall, exactly.
    `steps` are those whose device run ended in this time.
    """

    wall_ns: int
    hidden_ns: int
    exposed_ns: int
    waiting_ns: int
    busy_ns: int
    idle_ns: dict[str, int]
    host_ns: dict[Stage, int]
    steps: int

    @property
    def hidden_us_per_step(self) -> float:
        """Host work under a busy device, µs a step; 0 without steps."""
        return self.hidden_ns / self.steps / 1e3 if self.steps else 0.0

    @property
    def exposed_us_per_step(self) -> float:
        """Host work that the device had to wait for, µs a step; 0 without steps."""
        return self.exposed_ns / self.steps / 1e3 if self.steps else 0.0

    @property
    def device_idle_pct(self) -> float:
        """Share of the wall clock in which the device did nothing, whatever the cause."""
        return 100.0 * (self.wall_ns - self.busy_ns) / self.wall_ns if self.wall_ns else 0.0


@dataclass(frozen=True, eq=False)
class StepBooks:
    """Both books step by step: `step` int64[n] and `cells` int64[n, s, 2] as of `tally`.

    A step's window runs from the end of the device's step before it to the end of its own, so it
    holds the idle time that came before the step and then the step's run.  Windows touch: their
    sums are the sums over the whole time.
    """

    step: np.ndarray
    cells: np.ndarray

    @property
    def wall_ns(self) -> np.ndarray:
        """Length of each window, int64[n]."""
        return self.cells.sum((1, 2))

    @property
    def hidden_ns(self) -> np.ndarray:
        """Host work under a busy device, int64[n]."""
        return hidden_ns(self.cells)

    @property
    def exposed_ns(self) -> np.ndarray:
        """Host work while the device was idle, int64[n]."""
        return exposed_ns(self.cells)

    @property
    def waiting_ns(self) -> np.ndarray:
        """Host at rest, int64[n]."""
        return waiting_ns(self.cells)

    @property
    def busy_ns(self) -> np.ndarray:
        """Device busy, int64[n]."""
        return self.cells[:, :, 1].sum(1)

    @property
    def idle_ns(self) -> dict[str, np.ndarray]:
        """Device idle by cause, int64[n] each."""
        return {cause: self.cells[:, stage, 0] for stage, cause in CAUSES.items()}


@dataclass(frozen=True, eq=False)
class _Totals:
    """Everything from the books' start to some moment."""

    cells: np.ndarray
    steps: int


@dataclass(eq=False)
class Mark:
    """A moment on the books; `Books.summary(since=mark)` counts from there."""

    at_ns: int
    # Filled in once device intervals are known up to `at_ns`: a step in flight at the mark belongs
    # in part to the time before it, and only its landing tells which part.
    totals: _Totals | None = None


class Books:
    """Takes down both lanes as they happen; lays them over each other in batches.

    `clock_ns` is the clock of all times given to `busy` too.  Memory is bounded: after `batch` host
    segments the older ones are folded into totals, and the last `keep` raw events of each lane stay
    for pictures.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        keep: int = 65536,
        batch: int = 2048,
    ) -> None:
        self._clock_ns = clock_ns
        self._keep = keep
        self._batch = batch
        # not yet in the totals, but for a part of the first ones
        self._stages = array("q", (Stage.IDLE,))
        self._starts_ns = array("q", (clock_ns(),))
        self._steps = array("q")
        self._busy_starts_ns = array("q")
        self._busy_ends_ns = array("q")
        self._marks: list[Mark] = []
        # laid over each other for good, up to `_settled_ns`
        self._start_ns = self._settled_ns = self._last_end_ns = self._starts_ns[0]
        self._settled = _Totals(np.zeros((len(Stage), 2), np.int64), 0)
        self._host_ring: deque[np.ndarray] = deque()
        self._device_ring: deque[np.ndarray] = deque()

    def enter(self, stage: Stage) -> int:
        """The host leaves what it was at and starts `stage` now; the time of that."""
        now_ns = self._clock_ns()
        self._stages.append(stage)
        self._starts_ns.append(now_ns)
        if len(self._stages) >= self._batch:
            self._fold()
        return now_ns

    def busy(self, step: int, start_ns: int, end_ns: int) -> None:
        """The device ran `step` in this time.  Given in launch order, about when the step lands.

        A start before the previous end is moved there.  Only `enter` folds: call it in between.
        """
        self._steps.append(step)
        self._busy_starts_ns.append(start_ns)
        self._busy_ends_ns.append(end_ns)

    def mark(self) -> Mark:
        """This moment, to count from."""
        mark = Mark(self._clock_ns())
        self._marks.append(mark)
        return mark

    def summary(self, since: Mark | None = None) -> BookSummary:
        """Both books from `since` (the start, if None) up to now.

        What a step still in flight has run so far is not known yet and counts as idle here; it is
        busy in any summary after the step has landed.
        """
        pending = self._pending()
        (total,) = self._totals(pending, [pending.until_ns])
        if since is None:
            return _summary(total.cells, total.steps)
        before = since.totals or self._totals(pending, [since.at_ns])[0]
        return _summary(total.cells - before.cells, total.steps - before.steps)

    def recent(self) -> Events:
        """The last `keep` raw events of each lane; the open host segment ends now."""
        pending = self._pending()
        host = _tail(self._host_ring, (pending.stage, pending.start_ns), self._keep)
        landed = (pending.step, pending.busy_start_ns, pending.busy_end_ns)
        device = _tail(self._device_ring, landed, self._keep)
        return Events(host[0], host[1], pending.until_ns, device[0], device[1], device[2])

    def per_step(self) -> StepBooks:
        """Both books of each recent step whose whole window is still among the raw events."""
        events = self.recent()
        cuts_ns = np.concatenate(([self._start_ns], events.busy_end_ns))
        lost = int(np.searchsorted(cuts_ns[:-1], events.start_ns[0]))
        return StepBooks(events.step[lost:], tally(events, cuts_ns[lost:]))

    def _fold(self) -> None:
        """Moves into the totals what can't change any more.

        That is all up to the last known device interval's end: the next one begins later.  When
        nothing lands the older half goes all the same, or an idle engine would fill the memory; a
        step in flight is a few host segments old, never half a batch.
        """
        landed_ns = self._busy_ends_ns[-1] if self._busy_ends_ns else self._settled_ns
        known_ns = min(landed_ns, self._starts_ns[-1])
        self._settle(max(known_ns, self._starts_ns[-(self._batch // 2)], self._settled_ns))

    def _settle(self, horizon_ns: int) -> None:
        pending = self._pending()
        due = [mark for mark in self._marks if mark.at_ns <= horizon_ns]
        *at_marks, settled = self._totals(pending, [*(mark.at_ns for mark in due), horizon_ns])
        for mark, totals in zip(due, at_marks, strict=True):
            mark.totals = totals
        del self._marks[: len(due)]
        self._settled, self._settled_ns = settled, horizon_ns
        self._shelve(pending)

    def _shelve(self, pending: Events) -> None:
        """Moves events that lie wholly in the settled time from `pending` to the rings."""
        host = int(np.searchsorted(pending.start_ns, self._settled_ns, side="right")) - 1
        device = int(np.searchsorted(pending.busy_end_ns, self._settled_ns, side="right"))
        _push(self._host_ring, (pending.stage[:host], pending.start_ns[:host]), self._keep)
        landed = (pending.step, pending.busy_start_ns, pending.busy_end_ns)
        _push(self._device_ring, tuple(column[:device] for column in landed), self._keep)
        if device:
            self._last_end_ns = int(pending.busy_end_ns[device - 1])
        for column in (self._stages, self._starts_ns):
            del column[:host]
        for column in (self._steps, self._busy_starts_ns, self._busy_ends_ns):
            del column[:device]

    def _pending(self) -> Events:
        """What is not settled yet, with device intervals made disjoint; the host's end is now."""
        ends_ns = np.maximum(_column(self._busy_ends_ns), self._last_end_ns)
        ends_ns = np.maximum.accumulate(ends_ns)
        before_ns = np.concatenate(([self._last_end_ns], ends_ns))[:-1]
        starts_ns = np.clip(_column(self._busy_starts_ns), before_ns, ends_ns)
        host = (_column(self._stages), _column(self._starts_ns), self._clock_ns())
        return Events(*host, _column(self._steps), starts_ns, ends_ns)

    def _totals(self, pending: Events, at_ns: list[int]) -> list[_Totals]:
        """The totals at each of these moments, ascending and none in the settled time."""
        cuts_ns = np.array([self._settled_ns, *at_ns])
        cells = self._settled.cells + np.cumsum(tally(pending, cuts_ns), axis=0)
        ended = np.searchsorted(pending.busy_end_ns, cuts_ns[1:], side="right")
        steps = (self._settled.steps + int(count) for count in ended)
        return [_Totals(*pair) for pair in zip(cells, steps, strict=True)]


def _summary(cells: np.ndarray, steps: int) -> BookSummary:
    return BookSummary(
        wall_ns=int(cells.sum()),
        hidden_ns=int(hidden_ns(cells)),
        exposed_ns=int(exposed_ns(cells)),
        waiting_ns=int(waiting_ns(cells)),
        busy_ns=int(cells[:, 1].sum()),
        idle_ns=idle_ns(cells),
        host_ns={stage: int(cells[stage].sum()) for stage in Stage},
        steps=steps,
    )


def _column(values: array[int]) -> np.ndarray:
    # without the dtype it is C's long long, which equals int64 but misses numpy's fast paths
    return np.array(values, np.int64)


def _push(ring: deque[np.ndarray], columns: tuple[np.ndarray, ...], keep: int) -> None:
    """Adds a block int64[columns, n] and drops the oldest that `keep` rows do not need."""
    ring.append(np.stack(columns))
    while sum(block.shape[1] for block in ring) - ring[0].shape[1] >= keep:
        ring.popleft()


def _tail(
    ring: deque[np.ndarray], columns: tuple[np.ndarray, ...], keep: int
) -> tuple[np.ndarray, ...]:
    """The last `keep` rows of the ring and `columns` together, column by column."""
    return tuple(np.concatenate([*ring, np.stack(columns)], axis=1)[:, -keep:])
