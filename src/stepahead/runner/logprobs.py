"""Log-probabilities of the raw distribution: chosen token, its rank, the best alternatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, HostArray
from stepahead.types import LogprobRows

# Logits of a long chunk would fill the memory: 4,096 rows of 150,000 float32 are 2.4 GB, and their
# log_softmax and a comparison come on top.
_ROWS_AT_ONCE = 64


class LogprobTensors(NamedTuple):
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


def describe_hidden(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tokens_dev: Tensor, width: int
) -> LogprobTensors:
    """As `describe`, of the logits of one or more hidden states, without having all at once."""
    blocks = zip(hidden.split(_ROWS_AT_ONCE), tokens_dev.split(_ROWS_AT_ONCE), strict=True)
    parts = [describe(logits_of(rows), tokens, width) for rows, tokens in blocks]
    return LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))


class LogprobDownload:
    """Four arrays on their way to the host, for the rows `rows` int32[r]; `source` gives them
    once the forward has run."""

    def __init__(
        self,
        device: Device,
        source: Callable[[], LogprobTensors],
        rows: np.ndarray,
        name: str,
    ) -> None:
        self._rows = rows
        self._parts: tuple[HostArray, ...] = (
            device.download(lambda: source().chosen_dev, name),
            device.download(lambda: source().rank_dev, name),
            device.download(lambda: source().ids_dev, name),
            device.download(lambda: source().best_dev, name),
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
