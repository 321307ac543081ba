"""The seam between the runner and what it runs on: streams, events, copies.

Three streams.  *schedule* brings plan differences to the device, *forward* computes, *copy* takes
results out.  The copy stream is a leaf: it waits for forward, nothing waits for it.  Operations of
one stream run in order; between streams only `record` and `wait` order them.  Each operation names
what it reads and writes, so that a device may check that the edges suffice.

Knows no plan and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
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


class HostArray(Protocol):
    """Where a download arrives; valid once an event recorded after it has passed."""

    def read(self) -> np.ndarray:
        """The values."""
        ...


class Device(Protocol):
    """Where operations run.  Host calls return at once unless the device is the host itself."""

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

    def upload(self, array: np.ndarray, name: str) -> Tensor:
        """Copies integers on the schedule stream: int64, the same shape, memory known as `name`."""
        ...

    def download(self, source: Callable[[], Tensor], name: str) -> HostArray:
        """Copies on the copy stream the tensor that `source` gives then; it reads `name`."""
        ...

    def now_ns(self) -> int:
        """Monotonic nanoseconds on the clock that the host reads too."""
        ...

    def close(self) -> None:
        """Frees what the device holds."""
        ...
