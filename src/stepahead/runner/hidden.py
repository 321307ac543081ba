"""Hidden states on their way to the host, for whoever wants them: of rows, and sums of prompts'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from stepahead.device.base import Device
from stepahead.types import HiddenRows, StateSums

if TYPE_CHECKING:
    from torch import Tensor


class HiddenDownload:
    """float32[r, hidden] for the rows `rows` int32[r]; `source` gives it after the forward."""

    def __init__(
        self, device: Device, source: Callable[[], Tensor], rows: np.ndarray, name: str
    ) -> None:
        self._rows = rows
        self._values = device.download(source, name)

    def read(self) -> HiddenRows:
        """Valid once an event recorded after it has passed."""
        values = self._values.read()
        return HiddenRows(self._rows, values.shape[-1], values.astype(np.float32).reshape(-1))


@dataclass(frozen=True)
class PromptPool:
    """Prompt positions `start`.. of a slot whose states are wanted as a sum: tokens
    first..first+count of the step."""

    slot: int
    start: int
    first: int
    count: int


def state_sums(states: Tensor, pools: Sequence[PromptPool]) -> Tensor:
    """float64[p, hidden] of the step's states [T, hidden]."""
    sums = [states[pool.first : pool.first + pool.count].double().sum(0) for pool in pools]
    return torch.stack(sums)


class PoolDownload:
    """The sums that `source` gives after the forward, float64[p, hidden], for `pools`."""

    def __init__(
        self, device: Device, source: Callable[[], Tensor], pools: Sequence[PromptPool], name: str
    ) -> None:
        self._pools = pools
        self._sums = device.download(source, name)

    def read(self) -> StateSums:
        """Valid once an event recorded after it has passed."""
        table = [(pool.slot, pool.start, pool.count) for pool in self._pools]
        slots, starts, counts = np.array(table, np.int64).T
        sums = self._sums.read().astype(np.float64)
        return StateSums(slots, starts, counts, sums.shape[-1], sums.reshape(-1))
