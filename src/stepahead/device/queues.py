"""Streams that run in any order the declared edges allow, chosen by a seed.

Each stream is a queue of operations to run, points to pass and points to wait for.  Nothing runs by
itself: whoever plays the device says when, and `Pace` how much.  Times are those of the virtual
clock, whatever the order.

Knows nothing of memory, and what an operation does only as a call that says how long it took.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from stepahead.device.base import Stream
from stepahead.device.counts import DeviceCounts
from stepahead.device.timing import VirtualClock

Run = Callable[[], int]
# a stream; where a host has several devices, with the name of its device
Lane = Stream | tuple[str, Stream]


class StuckError(AssertionError):
    """The host waits for an event that no legal order can reach."""


class Pace(Enum):
    """How far a device gets while the host calls it."""

    RANDOM = "random"  # often nowhere, now and then far
    ALL = "all"  # as far as it can
    NONE = "none"  # nowhere, until the host waits


@dataclass(eq=False)
class Point:
    """A place in a stream.  `passed_ns`: when the stream passed it, None if it has not."""

    stream: Lane
    passed_ns: int | None = None


@dataclass
class _Entry:
    """Something to run, a point to pass, or one to wait for; the host put it there at
    `queued_ns`."""

    queued_ns: int
    run: Run | None = None
    passes: Point | None = None
    needs: Point | None = None


class Queues:
    """An operation that raises stops its stream, and so whatever waits for a later point of that.

    `failure`: the first that one raised.  Counts operations and idle time in `counts`.
    """

    def __init__(self, seed: int, pace: Pace, time: VirtualClock, counts: DeviceCounts) -> None:
        self.failure: Exception | None = None
        self._random = random.Random(seed)
        self._pace = pace
        self._time = time
        self._counts = counts
        self._entries: dict[Lane, deque[_Entry]] = {stream: deque() for stream in Stream}
        self._stopped: set[Lane] = set()

    def add(self, device: str) -> None:
        """The streams of one more device."""
        for stream in Stream:
            self._entries[device, stream] = deque()

    def put(self, stream: Lane, run: Run) -> None:
        """An operation, at the stream's end."""
        self._entries[stream].append(_Entry(self._time.host_ns, run=run))

    def point(self, stream: Lane) -> Point:
        """A new point at the stream's end."""
        point = Point(stream)
        self._entries[stream].append(_Entry(self._time.host_ns, passes=point))
        return point

    def hold(self, stream: Lane, point: Point) -> None:
        """What is put there from now on runs after the point."""
        self._entries[stream].append(_Entry(self._time.host_ns, needs=point))

    def clear(self) -> None:
        """Drops what has not run."""
        for entries in self._entries.values():
            entries.clear()

    def run_some(self) -> None:
        """As much as the pace says."""
        if self._pace is Pace.ALL:
            while self._run_one():
                pass
        elif self._pace is Pace.RANDOM:
            for _ in range(self._random.choice((0, 0, 0, 1, 2, 8))):
                self._run_one()

    def run_until(self, point: Point) -> None:
        """Until the point has passed; raises what keeps it from that.  The host waits meanwhile."""
        while point.passed_ns is None:
            if not self._run_one():
                raise self.failure or StuckError(
                    "the host waits for an event that nothing will reach"
                )
        self._time.host_reaches(point.passed_ns)

    def is_cut_off(self, point: Point) -> bool:
        """Whether a stopped stream lies before a point."""
        if point.passed_ns is not None:
            return False
        if point.stream in self._stopped:
            return True
        for entry in self._entries[point.stream]:
            if entry.passes is point:
                break
            if entry.needs is not None and self.is_cut_off(entry.needs):
                return True
        return False

    def _run_one(self) -> bool:
        ready = [stream for stream in self._entries if self._can_go_on(stream)]
        if not ready:
            return False
        stream = self._random.choice(ready)
        entry = self._entries[stream].popleft()
        if entry.passes is not None:
            entry.passes.passed_ns = self._time.reaches_ns(stream, entry.queued_ns)
        if entry.needs is not None and entry.needs.passed_ns is not None:
            self._time.hold(stream, entry.needs.passed_ns)
        if entry.run is not None:
            self._run(stream, entry.run, entry.queued_ns)
        return True

    def _run(self, stream: Lane, run: Run, queued_ns: int) -> None:
        try:
            took_ns = run()
        except Exception as error:
            self.failure = self.failure or error
            self._stopped.add(stream)
            return
        kind = stream if isinstance(stream, Stream) else stream[1]
        self._counts.operations[kind] += 1
        idle_ns = self._time.run(stream, queued_ns, took_ns)
        if kind is Stream.FORWARD:
            self._counts.idle_ns += idle_ns

    def _can_go_on(self, stream: Lane) -> bool:
        entries = self._entries[stream]
        if not entries or stream in self._stopped:
            return False
        point = entries[0].needs
        return point is None or point.passed_ns is not None
