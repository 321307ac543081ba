"""Token counts for penalties, on the device, one row for each slot that asks for them.

The sampler counts what it samples on the forward stream, so counts are exact at any depth: the
host need not have seen a token for it to be penalised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepahead.runner.places import Places


class PenaltyCounts:
    """`outputs_dev` int32[capacity, vocab], `prompt_dev` bool[capacity, vocab]; grows when needed.

    Which slot has which row is known on the host; the tensors change on the forward stream only.
    A row costs 5 bytes a token of the vocabulary, 0.75 MB of 150,000.  Capacity doubles inside a
    forward, which then holds old and new at once, and is never given back: it follows the most
    rows with penalties at a time, and is nothing until the first.
    """

    def __init__(self, vocab_size: int, place: torch.device) -> None:
        self.vocab_size = vocab_size
        self.outputs_dev = torch.zeros((0, vocab_size), dtype=torch.int32, device=place)
        self.prompt_dev = torch.zeros((0, vocab_size), dtype=torch.bool, device=place)
        self._places = Places()

    def take(self, slot: int) -> int:
        """A row for the slot (host)."""
        return self._places.take(slot)

    def give(self, slot: int) -> None:
        """The slot is given up, whether or not it has a row (host)."""
        self._places.give(slot)

    def start(self, row: int, prompt_dev: Tensor, outputs_dev: Tensor) -> None:
        """Counts a new owner's tokens, int64[..] each (forward stream)."""
        self._grow(row + 1)
        self.prompt_dev[row] = False
        self.prompt_dev[row, prompt_dev] = True
        # not bincount, which makes the host wait for the largest token
        ones = torch.ones(outputs_dev.shape, dtype=torch.int32, device=outputs_dev.device)
        self.outputs_dev[row] = 0
        self.outputs_dev[row].index_add_(0, outputs_dev, ones)

    def count(self, rows_dev: Tensor, tokens_dev: Tensor) -> None:
        """One more of each token (forward stream)."""
        self.outputs_dev[rows_dev, tokens_dev] += 1

    def count_where(self, rows_dev: Tensor, tokens_dev: Tensor, counts_dev: Tensor) -> None:
        """One more of each token whose bool `counts_dev` is true; rows and tokens may come several
        times (forward stream)."""
        ones = counts_dev.to(torch.int32)
        self.outputs_dev.index_put_((rows_dev, tokens_dev), ones, accumulate=True)

    def _grow(self, rows: int) -> None:
        have = len(self.outputs_dev)
        if rows <= have:
            return
        more = max(rows, 2 * have) - have
        pad = self.outputs_dev.new_zeros((more, self.vocab_size))
        self.outputs_dev = torch.cat([self.outputs_dev, pad])
        self.prompt_dev = torch.cat([self.prompt_dev, pad.to(torch.bool)])
