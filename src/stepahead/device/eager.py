"""The CPU as a device: every operation runs at once, in the calling thread.

Streams and events are there and cost nothing.  Overlap with the host comes from running the whole
runner in its own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Event, Stream


class _Passed:
    """An event that has always passed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _Here:
    """A download that is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> np.ndarray:
        return self._tensor.numpy()


class EagerDevice:
    """Runs operations where they are enqueued; errors surface there too."""

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

    def upload(self, array: np.ndarray, name: str) -> Tensor:
        """A copy as int64; the plan's own memory is not kept."""
        return torch.from_numpy(array.astype(np.int64))

    def download(self, source: Callable[[], Tensor], name: str) -> _Here:
        """The tensor itself: results are never written again."""
        return _Here(source())

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC, which all processes of a machine share."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """Nothing is held."""
