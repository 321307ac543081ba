"""A CPU device that tries to break the engine.

Operations queue up and run in any order that the streams and the declared edges allow, chosen by
a seed.  Memory that a copy will fill holds poison until the copy runs, and again once it is freed.
Each declared read and write, the host's too, is checked with vector clocks: two accesses that no
edge orders are a race, reported by name whether or not this run's order happened to show it.

Time is virtual: an operation takes as long as `Timing` says, and starts when streams, events and
the host's calls let it, whatever order it really ran in.

For one thread: it plays the device in whichever calls it, and two would each see half a clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Event, Stream, Work
from stepahead.device.clocks import HOST, Clock, Clocks, RaceError
from stepahead.device.counts import DeviceCounts, call_site
from stepahead.device.queues import Lane, Pace, Point, Queues, Run
from stepahead.device.side import Later
from stepahead.device.staging import LATE, RingStaging, StagingRing
from stepahead.device.tape import capture
from stepahead.device.timing import Timing, VirtualClock
from stepahead.errors import ConfigError, EngineError
from stepahead.sync import SyncReason, Waited

POISON = -7_777_777
_PLACE = torch.device("cpu")


class InjectedFailure(RuntimeError):
    """The operation that `HostileModes.fail_at` chose."""


@dataclass(frozen=True)
class HostileModes:
    """Ways to be hostile beyond the order.

    `slow_host`: whenever the host enqueues or asks, all that may run runs.  `slow_device`: nothing
    does until the host waits.  `blocking_copies`: a download returns when it has run.  `fail_at`:
    the operation that fails instead of running, counted from 1 as they are enqueued, copies too.
    """

    slow_host: bool = False
    slow_device: bool = False
    blocking_copies: bool = False
    fail_at: int | None = None

    def __post_init__(self) -> None:
        if self.slow_host and self.slow_device:
            raise ConfigError("slow_host and slow_device contradict each other; take one")

    @property
    def pace(self) -> Pace:
        """How far the device gets at each call of the host."""
        if self.slow_host:
            return Pace.ALL
        return Pace.NONE if self.slow_device else Pace.RANDOM


_NO_MODES = HostileModes()
_TIMING = Timing()
_Fn = Callable[[], None]


class HostileEvent:
    """Passes when the device has run what lies before it."""

    def __init__(self, device: HostileDevice, point: Point, clock: Clock) -> None:
        self._device = device
        self.point = point
        self.clock = clock

    def done(self) -> bool:
        """Asking gives the device a chance to run something.  True is an edge, as waiting is.

        Raises what an operation raised that lies before the event.
        """
        return self._device.has_passed(self)

    def wait(self) -> None:
        """Runs operations in a legal order until this event has passed."""
        self._device.land(self)

    def at_ns(self) -> int:
        """When it passed; RaceError unless the host knows that it has."""
        return self._device.passed_ns(self)


class HostileArray:
    """Host memory full of poison until its copy has run, and again when it is reused."""

    def __init__(self, name: str, read: Callable[[str], None]) -> None:
        self.name = name
        self.values = np.full(1, POISON, np.int64)
        self._read = read

    def read(self) -> np.ndarray:
        """The values; RaceError if nobody waited for the copy, or it was `depth` steps ago."""
        self._read(self.name)
        return self.values

    def poison(self) -> None:
        """Somebody else's values, in place: whoever kept a view sees them."""
        with np.errstate(all="ignore"):  # in float16 they are infinite
            self.values[...] = np.array(POISON).astype(self.values.dtype)


class HostileGraph:
    """Two captured functions."""

    def __init__(self, launch: Callable[[Work, Work], HostileEvent], fns: tuple[_Fn, _Fn]) -> None:
        self._launch = launch
        self._first, self._rest = fns

    def launch(self, first: Work, rest: Work) -> HostileEvent:
        """One call to the device, two operations."""
        return self._launch(
            Work(self._first, first.reads, first.writes), Work(self._rest, rest.reads, rest.writes)
        )


class HostileDevice:
    """Random legal orders by `seed`, rings for `depth` steps ahead; counts all it does in `counts`.

    Belongs to the thread that first gives it something; EngineError for any other.  An operation
    that raises stops its stream, and so whatever waits for a later point of that.

    `beside` another one, under a `name` of its own, it is a second device of the same host: they
    share order, clocks, time and counts, and each may wait for the other's events.
    """

    def __init__(
        self,
        seed: int = 0,
        depth: int = 1,
        modes: HostileModes = _NO_MODES,
        timing: Timing = _TIMING,
        beside: HostileDevice | None = None,
        name: str = "",
    ) -> None:
        self._waited: list[Waited] = []
        self._depth = depth
        self._modes = modes
        self._timing = timing
        self._name = name
        if beside is None:
            self.counts = DeviceCounts()
            self._time = VirtualClock()
            self._queues = Queues(seed, modes.pace, self._time, self.counts)
            self._clocks = Clocks(map(self._actor, Stream))
            if name:
                self._queues.add(name)
        else:
            self.counts, self._time = beside.counts, beside._time
            self._queues, self._clocks = beside._queues, beside._clocks
            self._queues.add(name)
            self._clocks.add(map(self._actor, Stream))
        self._owner: int | None = None
        self._queued = 0
        self._ring = StagingRing(self, depth)
        # masks are made when the late rows before them have landed: theirs are used
        self._late_ring = StagingRing(self, 1, kind=LATE)
        self._pinned: dict[int, Tensor] = {}  # by address, kept so that no other takes it over
        self._blocks: dict[str, list[Tensor]] = {}
        self._downloads: deque[list[HostileArray]] = deque()  # of the last `depth` steps
        self._downloaded: dict[str, int] = {}

    # --- the seam ---------------------------------------------------------------------------

    @property
    def place(self) -> torch.device:
        """The CPU."""
        return _PLACE

    def enqueue(
        self,
        stream: Stream,
        fn: _Fn,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Queues `fn`; RaceError if its accesses are not ordered after all before it."""
        self._begin_call()
        self._queue(stream, Work(fn, reads, writes))
        self._queues.run_some()

    def record(self, stream: Stream) -> HostileEvent:
        """A fresh event at the stream's end."""
        self._begin_call()
        return self._point(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Holds the stream until the event."""
        self._begin_call()
        assert isinstance(event, HostileEvent)
        self._clocks.join(self._actor(stream), event.clock)
        self._queues.hold(self._lane(stream), event.point)

    def sync(self, event: Event, reason: SyncReason) -> None:
        """Waits, and counts it under the reason."""
        self._begin_call()
        assert isinstance(event, HostileEvent)
        began_ns = self._time.host_ns
        self._run_until(event)
        self._count_sync(reason, began_ns)

    def waited(self) -> tuple[Waited, ...]:
        """What the host has waited for since it was last asked, landings excepted."""
        self._check_thread()
        waited = tuple(self._waited)
        self._waited.clear()
        return waited

    def _count_sync(self, reason: SyncReason, began_ns: int) -> None:
        self.counts.syncs[reason] += 1
        self._waited.append(Waited(reason, began_ns, self._time.host_ns))

    def stage(self, step: int) -> RingStaging:
        """A step's staging block.  What the step of `depth` calls ago downloaded is overwritten."""
        self._begin_call()
        if len(self._downloads) == self._depth:
            for array in self._downloads.popleft():
                self._clocks.free(self._named(array.name))
                array.poison()
        self._downloads.append([])
        return self._ring.open(step)

    def stage_late(self, step: int) -> RingStaging:
        """The step's second block."""
        self._begin_call()
        return self._late_ring.open(step)

    def side(self, name: str) -> Later:
        """This thread, whenever it asks for what is to be done."""
        return Later()

    def download(self, source: Callable[[], Tensor], name: str) -> HostileArray:
        """Poison at first; the values once the copy stream gets there."""
        self._begin_call()
        target = HostileArray(self._host_name(name), self._host_reads)
        if self._downloads:
            self._downloads[-1].append(target)

        def copy() -> int:
            target.values = source().numpy().copy()
            self.counts.download(name, target.values.nbytes)
            return self._timing.copy_ns(target.values.nbytes)

        self._queue_timed(Stream.COPY, copy, (name,), (target.name,))
        if self._modes.blocking_copies:
            began_ns = self._time.host_ns
            self._run_until(self._point(Stream.COPY))
            self._count_sync(SyncReason.BLOCKING_COPY, began_ns)
        self._queues.run_some()
        return target

    def free(self, names: tuple[str, ...]) -> None:
        """Poisons the memory at once; RaceError if something still touches it, or comes to."""
        self._begin_call()
        for name in names:
            self._clocks.free(self._named(name))
            for block in self._blocks.pop(name, ()):
                block.fill_(POISON)

    def capture(self, first: _Fn, rest: _Fn) -> HostileGraph:
        """What both parts do to tensors, as the tape has it; RaceError while anything is in flight,
        EngineError for what a graph can't hold."""
        self._begin_call()
        self._clocks.check_idle("a graph is captured")
        return HostileGraph(self._launch, capture(first, rest))

    def long_next(self) -> None:
        """Nobody sleeps for its sake."""

    def now_ns(self) -> int:
        """The virtual clock, at the host; asking takes no time."""
        return self._time.host_ns

    def close(self) -> None:
        """Drops what has not run."""
        self._queues.clear()

    # --- for tests --------------------------------------------------------------------------

    def spend(self, ns: int) -> None:
        """The host works for so long, on the virtual clock."""
        self._check_thread()
        self._time.spend(ns)

    # --- for the staging ring ---------------------------------------------------------------

    def pinned(self, count: int, name: str) -> Tensor:
        """Memory that copies do not block for."""
        self._check_thread()
        host = torch.full((count,), POISON, dtype=torch.int64)
        self._pinned[_address(host)] = host
        return host

    def block(self, count: int, name: str) -> Tensor:
        """Fresh memory, poisoned; RaceError when it is read before it is written."""
        self._check_thread()
        block = torch.full((count,), POISON, dtype=torch.int64)
        self._clocks.hand_out(self._named(name))
        self._blocks.setdefault(name, []).append(block)
        return block

    def host_writes(self, name: str) -> None:
        """RaceError if an operation may still read it."""
        self._check_thread()
        self._clocks.host_writes(self._named(name))

    def copy_in(self, target: Tensor, name: str, source: Tensor, source_name: str) -> None:
        """Reads the source when it runs.  Pageable memory makes the host wait until it has."""
        self._begin_call()

        def copy() -> int:
            target.copy_(source)
            self.counts.upload(name, target.nbytes)
            return self._timing.copy_ns(target.nbytes)

        self._queue_timed(Stream.SCHEDULE, copy, (source_name,), (name,))
        if _address(source) not in self._pinned:
            self.counts.hidden[f"pageable {call_site(name)}"] += 1
            self._run_until(self._point(Stream.SCHEDULE))
        self._queues.run_some()

    # --- for events and arrays --------------------------------------------------------------

    def has_passed(self, event: HostileEvent) -> bool:
        """Whether it has, as far as the host can see at its time."""
        self._begin_call()
        self._queues.run_some()
        passed_ns, failure = event.point.passed_ns, self._queues.failure
        if failure is not None and self._queues.is_cut_off(event.point):
            raise failure
        if passed_ns is None or passed_ns > self._time.host_ns:
            return False
        self._clocks.join(HOST, event.clock)
        return True

    def land(self, event: HostileEvent) -> None:
        """A wait that needs no reason."""
        self._begin_call()
        self.counts.landings += 1
        self._run_until(event)

    def passed_ns(self, event: HostileEvent) -> int:
        """When an event passed."""
        self._check_thread()
        if event.point.passed_ns is None or not self._clocks.host_is_past(event.clock):
            raise RaceError(
                f"the host asks when an event of {_told(event.point.stream)} passed, "
                "and did not wait for it"
            )
        return event.point.passed_ns

    def _run_until(self, event: HostileEvent) -> None:
        self._queues.run_until(event.point)
        self._clocks.join(HOST, event.clock)

    def _host_reads(self, name: str) -> None:
        self._check_thread()
        self._clocks.host_reads(self._named(name))

    def _host_name(self, name: str) -> str:
        # each array has its own: one may be waited for while the next one is still to come
        number = self._downloaded[name] = self._downloaded.get(name, 0) + 1
        return f"{name} on the host" if number == 1 else f"{name} on the host, {number}"

    # --- queues -----------------------------------------------------------------------------

    def _begin_call(self) -> None:
        self._check_thread()
        self._time.spend(self._timing.host_call_ns)

    def _check_thread(self) -> None:
        here = threading.get_ident()
        if self._owner is None:
            self._owner = here
        if self._owner != here:
            raise EngineError(
                "device=hostile is for one thread, and a second one uses it; "
                "drive the engine from one thread, with executor=inline, or take device=cpu"
            )

    def _launch(self, first: Work, rest: Work) -> HostileEvent:
        self._begin_call()
        self._queue(Stream.FORWARD, first)
        between = self._point(Stream.FORWARD)
        self._queue(Stream.FORWARD, rest)
        self._queues.run_some()
        return between

    def _queue(self, stream: Stream, work: Work) -> None:
        def run() -> int:
            work.fn()
            return self._timing.operation_ns(stream, work.writes)

        self._queue_timed(stream, run, work.reads, work.writes)

    def _queue_timed(
        self,
        stream: Stream,
        run: Run,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
    ) -> None:
        self._access(stream, reads, writes)
        self._queued += 1
        if self._queued == self._modes.fail_at:
            run = _failing(self._queued, self._actor(stream))
        self._queues.put(self._lane(stream), run)

    def _access(self, stream: Stream, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        named = self._named
        self._clocks.access(
            self._actor(stream), tuple(map(named, reads)), tuple(map(named, writes))
        )

    def _point(self, stream: Stream) -> HostileEvent:
        clock = self._clocks.point(self._actor(stream))
        return HostileEvent(self, self._queues.point(self._lane(stream)), clock)

    # --- one of several ---------------------------------------------------------------------

    def _lane(self, stream: Stream) -> Lane:
        return (self._name, stream) if self._name else stream

    def _actor(self, stream: Stream) -> str:
        return _told(self._lane(stream))

    def _named(self, name: str) -> str:
        return f"{self._name}: {name}" if self._name and not name.startswith("/") else name


def _told(lane: Lane) -> str:
    if isinstance(lane, Stream):
        return f"stream {lane.value}"
    device, stream = lane
    return f"stream {stream.value} of {device}"


def _address(memory: Tensor) -> int:
    return memory.untyped_storage().data_ptr()


def _failing(number: int, actor: str) -> Run:
    def fail() -> int:
        raise InjectedFailure(f"operation {number}, on {actor}, failed as it was asked to")

    return fail
