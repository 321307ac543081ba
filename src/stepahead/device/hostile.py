"""A CPU device that tries to break the engine.

Operations queue up and run in any order that the streams and the declared edges allow, chosen by
a seed.  Memory that a copy will fill holds poison until the copy runs.  Each declared read and
write is checked with vector clocks: two accesses that no edge orders are a race, reported by name
whether or not this run's order happened to show it.

For one thread: it plays the device in whichever calls it, and two would each see half a clock.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Event, Stream
from stepahead.errors import EngineError

POISON = -7_777_777
_Clock = dict[str, int]
_HOST = "host"


class RaceError(AssertionError):
    """Two accesses to the same memory that no declared edge orders."""


class StuckError(AssertionError):
    """The host waits for an event that no legal order can reach."""


class HostileEvent:
    """Passes when the device has run what lies before it."""

    def __init__(self, device: HostileDevice, clock: _Clock) -> None:
        self._device = device
        self.clock = clock
        self.passed = False

    def done(self) -> bool:
        """Asking gives the device a chance to run something."""
        self._device.run_some()
        return self.passed

    def wait(self) -> None:
        """Runs operations in a legal order until this event has passed."""
        self._device.run_until(self)


class HostileArray:
    """Host memory full of poison until its copy has run."""

    def __init__(self) -> None:
        self.values = np.full(1, POISON, np.int64)

    def read(self) -> np.ndarray:
        """The values, poison if nobody waited for the copy."""
        return self.values


@dataclass
class _Operation:
    """An entry of a stream's queue: something to run, an event to pass, or one to wait for."""

    fn: Callable[[], None] | None = None
    passes: HostileEvent | None = None
    needs: HostileEvent | None = None


@dataclass
class _Memory:
    """Who touched a piece of memory last: (stream, tick) of its writer and of its readers since."""

    writer: tuple[str, int] | None = None
    readers: dict[str, int] = field(default_factory=dict)


class HostileDevice:
    """Random legal orders by `seed`; counts operations and host waits.

    Belongs to the thread that first gives it something; EngineError for any other.  An operation
    that raises stops its stream, and so whatever waits for a later point of that.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._queues: dict[Stream, deque[_Operation]] = {stream: deque() for stream in Stream}
        self._clocks: dict[str, _Clock] = {name: {} for name in [_HOST, *(s.value for s in Stream)]}
        self._memory: dict[str, _Memory] = {}
        self._owner: int | None = None
        self._failure: Exception | None = None
        self._stopped: set[Stream] = set()
        self.operations = 0
        self.host_waits = 0

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Queues `fn`; checks its accesses against all before it."""
        self._check_thread()
        self._access(stream, reads, writes)
        self._queues[stream].append(_Operation(fn=fn))
        self.run_some()

    def record(self, stream: Stream) -> HostileEvent:
        """A fresh event at the stream's end."""
        self._check_thread()
        event = HostileEvent(self, dict(self._clocks[stream.value]))
        self._queues[stream].append(_Operation(passes=event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Holds the stream until the event."""
        self._check_thread()
        assert isinstance(event, HostileEvent)
        _join(self._clocks[stream.value], event.clock)
        self._queues[stream].append(_Operation(needs=event))

    def upload(self, array: np.ndarray, name: str) -> Tensor:
        """Poison at first; the values once the schedule stream gets there."""
        target = torch.full(array.shape, POISON, dtype=torch.int64)
        staged = array.astype(np.int64)

        def copy() -> None:
            target.copy_(torch.from_numpy(staged))

        self.enqueue(Stream.SCHEDULE, copy, writes=(name,))
        return target

    def download(self, source: Callable[[], Tensor], name: str) -> HostileArray:
        """Poison at first; the values once the copy stream gets there."""
        target = HostileArray()

        def copy() -> None:
            target.values = source().numpy().copy()

        self.enqueue(Stream.COPY, copy, reads=(name,))
        return target

    def now_ns(self) -> int:
        """The host's clock."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """Drops what has not run."""
        for queue in self._queues.values():
            queue.clear()

    def _check_thread(self) -> None:
        here = threading.get_ident()
        if self._owner is None:
            self._owner = here
        if self._owner != here:
            raise EngineError(
                "device=hostile is for one thread, and a second one uses it; "
                "drive the engine from one thread, with executor=inline, or take device=cpu"
            )

    # --- running ----------------------------------------------------------------------------

    def run_some(self) -> None:
        """Runs a random number of legal operations: often none, now and then many."""
        self._check_thread()
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 8))):
            if not self._run_one():
                return

    def run_until(self, event: HostileEvent) -> None:
        """Runs legal operations until the event has passed; raises what keeps it from that."""
        self._check_thread()
        self.host_waits += 1
        while not event.passed:
            if not self._run_one():
                raise self._failure or StuckError(
                    "the host waits for an event that nothing will reach"
                )
        _join(self._clocks[_HOST], event.clock)

    def _run_one(self) -> bool:
        ready = [stream for stream in Stream if self._can_go_on(stream)]
        if not ready:
            return False
        stream = self._random.choice(ready)
        operation = self._queues[stream].popleft()
        if operation.passes is not None:
            operation.passes.passed = True
        if operation.fn is not None:
            self.operations += 1
            try:
                operation.fn()
            except Exception as error:
                self._failure = self._failure or error
                self._stopped.add(stream)
        return True

    def _can_go_on(self, stream: Stream) -> bool:
        queue = self._queues[stream]
        if not queue or stream in self._stopped:
            return False
        event = queue[0].needs
        return event is None or event.passed

    # --- happens-before ---------------------------------------------------------------------

    def _access(self, stream: Stream, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        name = stream.value
        clock = self._clocks[name]
        _join(clock, self._clocks[_HOST])  # a launch comes after all that the host has seen
        clock[name] = clock.get(name, 0) + 1
        for key in reads:
            memory = self._memory.setdefault(key, _Memory())
            self._ordered(clock, memory.writer, name, key, "reads what is being written")
            memory.readers[name] = clock[name]
        for key in writes:
            memory = self._memory.setdefault(key, _Memory())
            self._ordered(clock, memory.writer, name, key, "overwrites what is being written")
            for reader in memory.readers.items():
                self._ordered(clock, reader, name, key, "overwrites what is being read")
            self._memory[key] = _Memory(writer=(name, clock[name]))

    def _ordered(
        self, clock: _Clock, other: tuple[str, int] | None, name: str, key: str, what: str
    ) -> None:
        if other is not None and other[0] != name and clock.get(other[0], 0) < other[1]:
            raise RaceError(f"race on {key!r}: stream {name} {what} by stream {other[0]}")


def _join(into: _Clock, other: _Clock) -> None:
    for name, tick in other.items():
        into[name] = max(into.get(name, 0), tick)
