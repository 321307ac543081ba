"""Which rows have sampled the token that ends them, seen on the device before the host hears of it.

A row that ends by a stop token still has up to D - 1 steps in the air.  From here on those write no
KV and read a single cell.  Says "ended" only where the host will say so too; stop strings and
lengths are the host's alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ends:
    """What ends the rows of a step, r of them.

    `eos_dev` bool[vocab]: the model's ends of sequence, None if no row heeds them; `heed_dev`
    int64[r]: 1 for the rows that do, None for all.  `own_dev` int64[3, k]: row, token, and the
    position from which on that token ends it, for rows with rules of their own.
    """

    eos_dev: Tensor | None
    heed_dev: Tensor | None
    own_dev: Tensor | None


def eos_table(eos_ids: tuple[int, ...], vocab_size: int, place: torch.device) -> Tensor:
    """bool[vocab_size], true for the ends of sequence."""
    table = torch.zeros(vocab_size, dtype=torch.bool, device=place)
    table[list(eos_ids)] = True
    return table


def ended(ends: Ends, tokens_dev: Tensor, positions_dev: Tensor) -> Tensor:
    """bool[r] for tokens int64[r] at positions int64[r]."""
    if ends.eos_dev is None:
        out = torch.zeros(tokens_dev.shape, dtype=torch.bool, device=tokens_dev.device)
    else:
        out = ends.eos_dev.index_select(0, tokens_dev)
    if ends.heed_dev is not None:
        out &= ends.heed_dev > 0
    if ends.own_dev is not None:
        row, token, since = ends.own_dev
        hits = (tokens_dev[row] == token) & (positions_dev[row] >= since)
        out |= torch.zeros_like(tokens_dev).index_add_(0, row, hits.to(torch.int64)) > 0
    return out
