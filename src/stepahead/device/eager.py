"""The CPU as a device: every operation runs at once, in the calling thread.

Streams and events are there and cost nothing.  Overlap with the host comes from running the whole
runner in its own process, and with the runner from a thread (`beside.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Event, Graph, HostArray, Staging, Stream, Work
from stepahead.device.side import SideThread
from stepahead.sync import SyncReason, Waited

_PLACE = torch.device("cpu")
_PAUSE_S = 2e-4  # for what a launch does in Python between its last job for a side and its forward


class _Passed:
    """An event that had passed when it was recorded."""

    __slots__ = ("_at_ns",)

    def __init__(self) -> None:
        self._at_ns = time.perf_counter_ns()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def at_ns(self) -> int:
        return self._at_ns


class _Here:
    """A download that is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> np.ndarray:
        return self._tensor.numpy()


class _Direct:
    """Staging without a stage: the copies that `add` makes are the device's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64))

    def send(self) -> None:
        return


class _Given(_Direct):
    """As above, but the arrays are the device's from now on."""

    def add(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)


class _Again:
    """A graph that is the functions themselves."""

    def __init__(self, first: Callable[[], None], rest: Callable[[], None]) -> None:
        self._first, self._rest = first, rest

    def launch(self, first: Work, rest: Work) -> Event:
        self._first()
        between = _Passed()
        self._rest()
        return between


class EagerDevice:
    """Runs operations where they are enqueued; errors surface there too."""

    def __init__(self) -> None:
        self._waited: list[Waited] = []

    @property
    def place(self) -> torch.device:
        """The CPU."""
        return _PLACE

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Calls `fn`."""
        fn()

    def record(self, stream: Stream) -> Event:
        """An event in the past."""
        return _Passed()

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing to do: what came before has run."""

    def sync(self, event: Event, reason: SyncReason) -> None:
        """Nothing to wait for either; that somebody would have is told all the same."""
        now_ns = self.now_ns()
        self._waited.append(Waited(reason, now_ns, now_ns))

    def waited(self) -> tuple[Waited, ...]:
        """What `sync` was called for."""
        if not self._waited:
            return ()
        waited = tuple(self._waited)
        self._waited.clear()
        return waited

    def stage(self, step: int) -> Staging:
        """Copies as int64; the plan's own memory is not kept."""
        return _Direct(f"staging {step}")

    def stage_late(self, step: int) -> _Direct:
        """Copies nothing: what is staged late was made for the device alone."""
        return _Given(f"late staging {step}")

    def side(self, name: str) -> SideThread:
        """A thread, which leaves the one that calls it the time to come to its forward."""
        return SideThread(name=name, pause_s=_PAUSE_S)

    def download(self, source: Callable[[], Tensor], name: str) -> HostArray:
        """The tensor itself: results are never written again."""
        return _Here(source())

    def free(self, names: tuple[str, ...]) -> None:
        """Nothing to do: what nobody names is freed by itself."""

    def capture(self, first: Callable[[], None], rest: Callable[[], None]) -> Graph | None:
        """The functions, called anew each time; nothing would be gained by more."""
        return _Again(first, rest)

    def long_next(self) -> None:
        """Nobody waits: events have passed when they are recorded."""

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC, which all processes of a machine share."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """Nothing is held."""
