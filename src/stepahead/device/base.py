"""The seam between the runner and what it runs on: streams, events, copies, graphs, time.

Three streams.  *schedule* brings plan differences to the device, *forward* computes, *copy* takes
results out.  The copy stream is a leaf: it waits for forward, nothing waits for it.  Operations of
one stream run in order; between streams only `record` and `wait` order them.  Each operation names
what it reads and writes, so that a device may check that the edges suffice.

Memory that more than one step or stream touches has a name: the runner's own ("pages", "kv", ..),
a step's staging block, its results.  Names are what devices check and what errors say.  Where a
model is cut into stages each has a device; names that begin with "/" are the same on all of them.

Knows no plan and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from stepahead.sync import SyncReason, Waited

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


class Stream(Enum):
    """The three queues of a device."""

    SCHEDULE = "schedule"
    FORWARD = "forward"
    COPY = "copy"


class Event(Protocol):
    """A point in a stream.  Always fresh: a reused one is waited for too long, or too little."""

    def done(self) -> bool:
        """Whether the device has passed it; never blocks."""
        ...

    def wait(self) -> None:
        """Blocks the host, asleep, until the device passes it; raises what operations raised."""
        ...

    def at_ns(self) -> int:
        """When the device passed it, on the clock of `Device.now_ns`.  Only once it has."""
        ...


class HostArray(Protocol):
    """Where a download arrives; valid once an event recorded after it has passed."""

    def read(self) -> np.ndarray:
        """The values.  The memory may be used again after the step has landed: copy what stays."""
        ...


class Staging(Protocol):
    """A step's way to the device: arrays are added, then all go in one copy.

    Goes through host memory of a ring as deep as the steps ahead.  `name` is the block's on the
    device, which stays until the runner frees it.
    """

    @property
    def name(self) -> str:
        """What the block is known as, for reads."""
        ...

    def add(self, array: np.ndarray) -> Tensor:
        """The array as int64 on the device, same shape.

        For operations that are ordered after what is enqueued by `send`.
        """
        ...

    def send(self) -> None:
        """Enqueues the copy on the schedule stream, if anything was added."""
        ...


class Point(Protocol):
    """A place in a side's work."""

    def done(self) -> bool:
        """Whether it has passed; never blocks."""
        ...

    def wait(self) -> None:
        """Blocks until it has; raises what a job before it raised."""
        ...


class Side(Protocol):
    """Work of the host beside the thread that launches, in the order given."""

    def do(self, job: Callable[[], None], after: Event | None = None) -> None:
        """Runs `job` after the jobs before it, and after the event."""
        ...

    def mark(self) -> Point:
        """Passes when the jobs so far have run."""
        ...

    def close(self) -> None:
        """Drops what has not begun."""
        ...


@dataclass(frozen=True)
class Work:
    """A piece of a forward: what to call, and what it touches."""

    fn: Callable[[], None]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


class Graph(Protocol):
    """Captured work of fixed shape, in two parts."""

    def launch(self, first: Work, rest: Work) -> Event:
        """Enqueues both parts on the forward stream as they were captured; only what they touch
        is taken from the arguments.  The event passes between the parts."""
        ...


class Device(Protocol):
    """Where operations run.  Host calls return at once unless the device is the host itself."""

    @property
    def place(self) -> torch.device:
        """Where tensors live."""
        ...

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Runs `fn` in the stream's order.  `reads` and `writes` name shared memory it touches."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that passes when all that was enqueued on the stream so far has run."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on the stream from now on runs after the event."""
        ...

    def sync(self, event: Event, reason: SyncReason) -> None:
        """Blocks the host for a named reason, asleep; landing is the only wait that needs none."""
        ...

    def waited(self) -> tuple[Waited, ...]:
        """What the host has waited for since it was last asked, landings excepted."""
        ...

    def stage(self, step: int) -> Staging:
        """A step's staging block, empty.  The one of `depth` steps ago must have landed."""
        ...

    def stage_late(self, step: int) -> Staging:
        """As `stage`, for what comes when the step is under way: it has memory of its own."""
        ...

    def side(self, name: str) -> Side:
        """A thread of this name, or what stands for one; it may land events of this device."""
        ...

    def download(self, source: Callable[[], Tensor], name: str) -> HostArray:
        """Copies on the copy stream the tensor that `source` gives then; it reads `name`."""
        ...

    def free(self, names: tuple[str, ...]) -> None:
        """The host gives memory back: whatever reads it must have been waited for."""
        ...

    def capture(self, first: Callable[[], None], rest: Callable[[], None]) -> Graph | None:
        """Both parts as a graph, captured now with nothing in flight; None where there are none.

        The parts use the same tensors each time and touch nothing on the host.
        """
        ...

    def long_next(self) -> None:
        """Said on the forward stream: what comes next takes long, and no interpreter.  A device of
        the host's own cores wakes now who waits for its events."""
        ...

    def now_ns(self) -> int:
        """Monotonic nanoseconds on the host's clock."""
        ...

    def close(self) -> None:
        """Drops what has not run and frees what the device holds.  Does not wait for operations."""
        ...
