"""The two books: what the host did, and what the device did meanwhile.  Always on.

The host's time is cut into contiguous segments, each with a stage; the device's busy intervals
come in later, when their steps land.  Laid over each other (`observe.causes`) they say, for every
nanosecond, what the host was at and whether the device ran, and if not, the one cause of that.  So
two sums hold exactly, in integers:

    host     hidden + exposed + waiting   = wall clock
    device   busy + idle, cause by cause  = wall clock

*hidden* is host work done while the device is busy, *exposed* is host work done while it is idle.
An event costs an append; all else is done in batches, while the host waits, or when somebody reads.
Knows stages and times, not what a plan says nor what a step computes.  For one thread, the loop's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from stepahead.observe.causes import BUSY, CAUSES, Events, no_cells, tally
from stepahead.observe.stages import REST, WORK, Enter, Stage
from stepahead.sync import Cause, Held

_POSTS = 6  # numbers of a landed step


def hidden_ns(cells: np.ndarray) -> np.ndarray:
    """Host work under a busy device: int64[...] of cells int64[..., s, 9] as of `tally`."""
    return cells[..., WORK, BUSY].sum(-1)


def exposed_ns(cells: np.ndarray) -> np.ndarray:
    """Host work while the device is idle: int64[...] of cells int64[..., s, 9]."""
    return cells[..., WORK, :BUSY].sum((-1, -2))


def waiting_ns(cells: np.ndarray) -> np.ndarray:
    """Host at rest: int64[...] of cells int64[..., s, 9]."""
    return cells[..., REST, :].sum((-1, -2))


def idle_ns(cells: np.ndarray) -> dict[str, int]:
    """Idle time of the device by cause, of cells int64[s, 9]."""
    return dict(zip(CAUSES, cells[:, :BUSY].sum(0).tolist(), strict=True))


@dataclass(frozen=True)
class BookSummary:
    """Both books over a stretch of time, in ns; `idle_ns` is by cause, `host_ns` by stage.

    hidden + exposed + waiting = sum of host = wall, and busy + sum of idle = wall, exactly.
    `steps` are those whose device run ended in this time.  `under_device_ns` is the part of
    `host_ns` in which the device ran.
    """

    wall_ns: int
    hidden_ns: int
    exposed_ns: int
    waiting_ns: int
    busy_ns: int
    idle_ns: dict[str, int]
    host_ns: dict[Stage, int]
    steps: int
    under_device_ns: dict[Stage, int]

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
    """Both books step by step: `step` int64[n] and `cells` int64[n, s, 9] as of `tally`.

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
        return self.cells[:, :, BUSY].sum(1)

    @property
    def idle_ns(self) -> dict[str, np.ndarray]:
        """Device idle by cause, int64[n] each."""
        return dict(zip(CAUSES, self.cells[:, :, :BUSY].sum(1).T, strict=True))


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

    `clock_ns` is the clock of all times given to `busy` too.  `enter(stage)` says that the host
    leaves what it was at and starts `stage` now, and returns the time of that.  Memory is bounded:
    when the host rests after `batch` segments the older ones are folded into totals; the last
    `keep` raw events of each lane stay for pictures.
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
        now_ns = clock_ns()
        # Not yet in the totals, but for a part of the first ones.  Of the kinds whose appends are
        # cheapest: that is what an event costs.
        self._stages = bytearray((Stage.IDLE,))
        self._starts_ns = [now_ns]
        self._landed: list[int] = []  # step, start, end, launch, received, submitted of each
        self._held: list[int] = []  # cause, start, end of each
        self.enter = _entering(clock_ns, self._stages.append, self._starts_ns.append)
        self._marks: list[Mark] = []
        # laid over each other for good, up to `_settled_ns`
        self._start_ns = self._settled_ns = self._last_end_ns = self._held_until_ns = now_ns
        self._known_ns = now_ns  # how far `known` has told of them
        self._settled = _Totals(no_cells(1)[0], 0)
        self._host_ring: deque[np.ndarray] = deque()
        self._device_ring: deque[np.ndarray] = deque()
        self._held_ring: deque[np.ndarray] = deque()

    def rest(self, stage: Stage) -> int:
        """As `enter`, for a stage in which the host has time: older events may be folded now.

        Whoever enters stages has to come to rest now and then, or the books grow.
        """
        now_ns = self.enter(stage)
        if len(self._stages) >= self._batch:
            self._fold()
        return now_ns

    @property
    def stage(self) -> Stage:
        """What the host is at."""
        return Stage(self._stages[-1])

    def busy(
        self,
        step: int,
        start_ns: int,
        end_ns: int,
        launch_ns: int = 0,
        received_ns: int = 0,
        submitted_ns: int = 0,
        held: Iterable[Held] = (),
    ) -> None:
        """The device ran `step` in this time.  Given in launch order, about when the step lands.

        The posts and `held` are as in `Events`; 0 and nothing where nobody says.  A start before
        the previous end is moved there; being held before that is no business of this step.  Where
        it was held in the midst of the step, for masks, it stood idle.
        """
        posts = (launch_ns, received_ns, submitted_ns)
        if held:
            self._hold(held)
        for one in held:
            if one.cause is Cause.MASK_LATE and start_ns < one.start_ns < one.end_ns < end_ns:
                # a stretch that no step ends with is told by the complement of its step
                self._landed += (~step, start_ns, one.start_ns, *posts)
                start_ns = one.end_ns
        self._landed += (step, start_ns, end_ns, *posts)

    def _hold(self, held: Iterable[Held]) -> None:
        until_ns = max(self._held_until_ns, self._last_end_ns, *self._landed[2::_POSTS], 0)
        for one in sorted(held, key=lambda one: one.start_ns):
            start_ns = max(one.start_ns, until_ns)
            if start_ns < one.end_ns:
                self._held += (one.cause, start_ns, one.end_ns)
                until_ns = one.end_ns
        self._held_until_ns = until_ns

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

    def known(self, at_rest: bool) -> BookSummary:
        """Both books from the start up to where nothing can change any more.

        That is up to now if `at_rest`, with nothing in the air; else up to the end of the last step
        that has landed, or to where they were known before.  So no number is ever smaller than it
        was: fit for counters.
        """
        pending = self._pending()
        ends_ns = pending.busy_end_ns
        until_ns = pending.until_ns
        if not at_rest:
            until_ns = min(until_ns, int(ends_ns[-1]) if len(ends_ns) else 0)
        self._known_ns = max(until_ns, self._known_ns, self._settled_ns)
        (total,) = self._totals(pending, [self._known_ns])
        return _summary(total.cells, total.steps)

    def recent(self, since_ns: int | None = None) -> Events:
        """The last `keep` raw events of each lane; the open host segment ends now.

        With `since_ns`, what reaches into the time after it and some of what came before: that
        costs what is asked for, and not what is kept.
        """
        events = self._recent(since_ns)
        return replace(events, step=np.where(events.step < 0, ~events.step, events.step))

    def _recent(self, since_ns: int | None = None) -> Events:
        pending, keep = self._pending(), self._keep
        stage, start_ns = _tail(self._host_ring, _host_rows(pending), keep, since_ns)
        device = _tail(self._device_ring, _device_rows(pending), keep, since_ns)
        held = _tail(self._held_ring, pending.held, keep, since_ns)
        step, busy_start_ns, busy_end_ns = device[:3]
        lane = (step, busy_start_ns, busy_end_ns, device[3:])
        return Events(stage, start_ns, pending.until_ns, *lane, held)

    def per_step(self) -> StepBooks:
        """Both books of each recent step whose whole window is still among the raw events."""
        events = self._recent()
        last = events.step >= 0
        cuts_ns = np.concatenate(([self._start_ns], events.busy_end_ns[last]))
        lost = int(np.searchsorted(cuts_ns[:-1], events.start_ns[0]))
        return StepBooks(events.step[last][lost:], tally(events, cuts_ns[lost:]))

    def _fold(self) -> None:
        """Moves into the totals what can't change any more.

        That is all up to the last known device interval's end: the next one begins later.  While
        nothing is to be done nothing is in the air, and the older half goes as well, or an idle
        engine would fill the memory.  Else it waits for a landing, whatever comes in meanwhile.
        """
        landed_ns = self._landed[2 - _POSTS] if self._landed else self._settled_ns
        horizon_ns = min(landed_ns, self._starts_ns[-1])
        if self.stage is Stage.IDLE:
            horizon_ns = max(horizon_ns, self._starts_ns[-(self._batch // 2)])
        if horizon_ns > self._settled_ns:
            self._settle(horizon_ns)

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
        settled_ns = self._settled_ns
        host = int(np.searchsorted(pending.start_ns, settled_ns, side="right")) - 1
        device = int(np.searchsorted(pending.busy_end_ns, settled_ns, side="right"))
        held = int(np.searchsorted(pending.held[2], settled_ns, side="right"))
        _push(self._host_ring, _host_rows(pending)[:, :host], self._keep)
        _push(self._device_ring, _device_rows(pending)[:, :device], self._keep)
        _push(self._held_ring, pending.held[:, :held], self._keep)
        if device:
            self._last_end_ns = int(pending.busy_end_ns[device - 1])
        del self._stages[:host]
        del self._starts_ns[:host]
        del self._landed[: device * _POSTS]
        del self._held[: held * 3]

    def _pending(self) -> Events:
        """What is not settled yet, with device intervals made disjoint; the host's end is now."""
        stages = np.frombuffer(bytes(self._stages), np.uint8).astype(np.int64)
        step, starts_ns, ends_ns, *posts = _columns(self._landed, _POSTS)
        ends_ns = np.maximum.accumulate(np.maximum(ends_ns, self._last_end_ns))
        before_ns = np.concatenate(([self._last_end_ns], ends_ns))[:-1]
        return Events(
            stages,
            np.array(self._starts_ns, np.int64),
            self._clock_ns(),
            step,
            np.clip(starts_ns, before_ns, ends_ns),
            ends_ns,
            np.stack(posts),
            _columns(self._held, 3),
        )

    def _totals(self, pending: Events, at_ns: list[int]) -> list[_Totals]:
        """The totals at each of these moments, ascending and none in the settled time."""
        cuts_ns = np.array([self._settled_ns, *at_ns])
        cells = self._settled.cells + np.cumsum(tally(pending, cuts_ns), axis=0)
        ends_ns = pending.busy_end_ns[pending.step >= 0]
        ended = np.searchsorted(ends_ns, cuts_ns[1:], side="right")
        steps = (self._settled.steps + int(count) for count in ended)
        return [_Totals(*pair) for pair in zip(cells, steps, strict=True)]


def _entering(
    clock_ns: Callable[[], int],
    append_stage: Callable[[int], None],
    append_ns: Callable[[int], None],
) -> Enter:
    """What is called most: no attribute is looked up.  It may be called in the midst of another
    call of the books, where Python collects garbage."""

    def enter(stage: Stage) -> int:
        """The host leaves what it was at and starts `stage` now; the time of that."""
        now_ns = clock_ns()
        append_stage(stage)
        append_ns(now_ns)
        return now_ns

    return enter


def _summary(cells: np.ndarray, steps: int) -> BookSummary:
    return BookSummary(
        wall_ns=int(cells.sum()),
        hidden_ns=int(hidden_ns(cells)),
        exposed_ns=int(exposed_ns(cells)),
        waiting_ns=int(waiting_ns(cells)),
        busy_ns=int(cells[:, BUSY].sum()),
        idle_ns=idle_ns(cells),
        host_ns={stage: int(cells[stage].sum()) for stage in Stage},
        steps=steps,
        under_device_ns={stage: int(cells[stage, BUSY]) for stage in Stage},
    )


def _columns(flat: list[int], width: int) -> np.ndarray:
    """Rows one after the other, as int64[width, n]."""
    return np.array(flat, np.int64).reshape(-1, width).T


def _host_rows(events: Events) -> np.ndarray:
    return np.stack((events.stage, events.start_ns))


def _device_rows(events: Events) -> np.ndarray:
    lane = np.stack((events.step, events.busy_start_ns, events.busy_end_ns))
    return np.concatenate((lane, events.posts_ns))


def _push(ring: deque[np.ndarray], rows: np.ndarray, keep: int) -> None:
    """Adds a block int64[rows, n] and drops the oldest that `keep` columns do not need."""
    if not rows.shape[1]:
        return  # blocks of nothing would never be dropped
    ring.append(rows)
    while sum(block.shape[1] for block in ring) - ring[0].shape[1] >= keep:
        ring.popleft()


def _tail(
    ring: deque[np.ndarray], rows: np.ndarray, keep: int, since_ns: int | None = None
) -> np.ndarray:
    """The last `keep` columns of the ring and `rows` together.

    Row 1 is when each began: blocks before the one that was there at `since_ns` are left out.
    """
    blocks = [rows]
    for block in reversed(ring):
        first = blocks[-1]
        if since_ns is not None and first.shape[1] and first[1, 0] <= since_ns:
            break
        blocks.append(block)
    return np.concatenate(blocks[::-1], axis=1)[:, -keep:]
