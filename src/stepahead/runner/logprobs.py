"""Log-probabilities of the raw distribution: chosen token, its rank, the best alternatives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, HostArray
from stepahead.types import LogprobRows


@dataclass(frozen=True)
class LogprobTensors:
    """On the device: `chosen_dev` float32[r], `rank_dev` int64[r], `ids_dev` int64[r, w],
    `best_dev` float32[r, w]."""

    chosen_dev: Tensor
    rank_dev: Tensor
    ids_dev: Tensor
    best_dev: Tensor


def describe(logits: Tensor, tokens_dev: Tensor, width: int) -> LogprobTensors:
    """Of float32[r, vocab] logits, for one token a row, with the `width` best beside it."""
    values = torch.log_softmax(logits, -1)
    chosen = values.gather(1, tokens_dev.unsqueeze(1)).squeeze(1)
    rank = (values > chosen.unsqueeze(1)).sum(1) + 1
    best, ids = torch.topk(values, min(width, values.shape[1]))
    return LogprobTensors(chosen, rank, ids, best)


class LogprobDownload:
    """Four arrays on their way to the host, for the rows `rows` int32[r]."""

    def __init__(self, device: Device, box: list[LogprobTensors], rows: np.ndarray, name: str):
        self._rows = rows
        self._parts: tuple[HostArray, ...] = (
            device.download(lambda: box[0].chosen_dev, name),
            device.download(lambda: box[0].rank_dev, name),
            device.download(lambda: box[0].ids_dev, name),
            device.download(lambda: box[0].best_dev, name),
        )

    def read(self) -> LogprobRows:
        """Valid once an event recorded after it has passed."""
        chosen, rank, ids, best = (part.read() for part in self._parts)
        return LogprobRows(
            self._rows,
            chosen.astype(np.float32),
            rank.astype(np.int32),
            ids.shape[1] if ids.ndim == 2 else 0,
            ids.astype(np.int32).reshape(-1),
            best.astype(np.float32).reshape(-1),
        )
