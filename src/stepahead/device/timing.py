"""A virtual clock: when the host and each stream would have been where, if operations took the time
that a test says.

An operation starts when its stream is free, the events it waits for have passed and the host has
enqueued it; in which order a device really runs what may run in any is not seen.  Knows no
operations, only how long they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from stepahead.device.base import Stream

_HOST_CALL_NS = 1000
_WORK_NS = 500  # less than a call: what has run is in the host's past when it next asks


def _operation_ns(stream: Stream, writes: tuple[str, ...]) -> int:
    return _WORK_NS


def _copy_ns(nbytes: int) -> int:
    return _WORK_NS


@dataclass(frozen=True)
class Timing:
    """How long things take, in virtual nanoseconds.

    `host_call_ns`: each call to the device.  `operation_ns`: an operation, by its stream and the
    names of what it writes.  `copy_ns`: a copy between host and device, by its bytes.
    """

    host_call_ns: int = _HOST_CALL_NS
    operation_ns: Callable[[Stream, tuple[str, ...]], int] = _operation_ns
    copy_ns: Callable[[int], int] = _copy_ns


class VirtualClock:
    """`host_ns`: where the host is.  Streams have an end each, which moves as operations run."""

    def __init__(self) -> None:
        self.host_ns = 0
        self._free_ns: dict[Hashable, int] = defaultdict(int)
        self._worked_ns: dict[Hashable, int] = {}  # end of each stream's last operation

    def spend(self, ns: int) -> None:
        """The host works for so long."""
        self.host_ns += ns

    def host_reaches(self, at_ns: int) -> None:
        """The host waits until then, if it is not that late already."""
        self.host_ns = max(self.host_ns, at_ns)

    def hold(self, stream: Hashable, at_ns: int) -> None:
        """The stream's next operation does not start before."""
        self._free_ns[stream] = max(self._free_ns[stream], at_ns)

    def reaches_ns(self, stream: Hashable, queued_ns: int) -> int:
        """When the stream comes to a point that the host enqueued at `queued_ns`."""
        return max(self._free_ns[stream], queued_ns)

    def run(self, stream: Hashable, queued_ns: int, ns: int) -> int:
        """The stream runs its next operation, `ns` long; returns how long it had stood idle since
        the one before, 0 if there was none."""
        start_ns = self.reaches_ns(stream, queued_ns)
        idle_ns = start_ns - self._worked_ns.get(stream, start_ns)
        self._free_ns[stream] = self._worked_ns[stream] = start_ns + ns
        return idle_ns
