"""A toy that mostly says again what it said some tokens ago, so that prompt lookup finds something.

As exact as the hash model, and as sensitive: which places break the pattern is a hash of every KV
cell, read through the real page table, and what is copied is read there, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepahead.model.batch import StepInputs
from stepahead.model.toy import ToyKV, ToyModel, mix

PERIOD = 5


class CopyKV(ToyKV):
    """Beside the toy's cells, the tokens themselves."""

    def __init__(self, num_pages: int, page_size: int, place: torch.device) -> None:
        super().__init__(num_pages, page_size, place)
        self.tokens_dev = torch.full_like(self.pages_dev, -1)


class CopyToy(ToyModel):
    """Of 8 places about `breaks` have a token of the hash, and all others that of 5 places ago."""

    breaks = 1

    def new_kv(self, num_pages: int, page_size: int) -> CopyKV:
        """As in ToyModel."""
        return CopyKV(num_pages, page_size, self._place)

    def forward(self, inputs: StepInputs, kv: ToyKV) -> Tensor:
        """int64[T, 2]: the hash of the context, and the token to be said again, -1 for none."""
        assert isinstance(kv, CopyKV)
        kv.tokens_dev.view(-1)[inputs.cells_dev] = inputs.token_ids_dev
        states = self.run(self.embed(inputs), inputs, kv)
        n = inputs.n_decode
        back = inputs.decode_lens_dev - PERIOD
        rows = kv.tokens_dev[inputs.decode_pages_dev].flatten(1)
        copied = [rows.gather(1, back.clamp(min=0).unsqueeze(1)).squeeze(1).where(back >= 0, -1)]
        for chunk in inputs.chunks:
            context = kv.tokens_dev[chunk.pages_dev].flatten()[: chunk.context_len]
            ends = torch.arange(chunk.context_len - chunk.count + 1, chunk.context_len + 1) - PERIOD
            copied.append(context[ends.clamp(min=0)].where(ends >= 0, -1))
        assert len(copied[0]) == n
        says = torch.cat(copied)
        return torch.stack([states, says.where(mix(states + 1) % 8 >= self.breaks, -1)], 1)

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab]: the hash's, and 16 more for what is said again."""
        logits = super().logits(hidden[:, :1])
        says = hidden[:, 1:]
        more = torch.where(says >= 0, 16.0, 0.0)
        return logits.scatter_add_(1, says.clamp(min=0), more)
