"""Drafts by prompt lookup: what followed the last tokens where they came before.

The drafter keeps each slot's tokens on the device, prompt and outputs, and looks for the newest
place where the last few of them stood already: the more of them, the better.  What followed there
is the draft; where that runs into the end of the sequence it goes round, as a period does.

    tokens    .. a b c d e f .. x a b c          the last three are there, before d e f
    drafts                              d e f
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.plan import Join
from stepahead.runner.draft import NONE, Brought, Upload
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec

LONGEST = 4  # tokens that are looked for, at most
SHORTEST = 2  # a single one says too little


class _Entering(NamedTuple):
    """Cells int64[t] of the history, and the tokens int64[t] that stand there."""

    cells_dev: Tensor
    tokens_dev: Tensor


class NgramDrafter:
    """`tokens_dev` int32[slots, positions]: what the host or the model has said so far.  Slot 0,
    padding, takes what is for nobody."""

    uses_pages = False

    def __init__(self, spec: RunnerSpec, slots: SlotState, model: object, kv: object) -> None:
        self._drafts = spec.draft_tokens
        self._length = spec.max_pages * spec.page_size + 1
        shape = (spec.num_slots, self._length)
        self.tokens_dev = torch.zeros(shape, dtype=torch.int32, device=slots.length_dev.device)

    def stage(self, joins: Sequence[Join], upload: Upload) -> _Entering:
        """As in Drafter."""
        cells = [join.slot * self._length + np.arange(len(join.tokens)) for join in joins]
        tokens = [join.tokens for join in joins]
        both = upload(np.stack([np.concatenate(cells), np.concatenate(tokens)]))
        return _Entering(both[0], both[1])

    def enter(self, staged: _Entering) -> None:
        """As in Drafter."""
        self._write(staged.cells_dev, staged.tokens_dev)

    def propose(self, brought: Brought) -> Tensor:
        """As in Drafter."""
        counts = brought.tokens_dev >= 0
        cells = brought.owners_dev * self._length + brought.positions_dev
        self._write(cells * counts, brought.tokens_dev)
        width = min(brought.step.most + 1, self._length)
        known = self.tokens_dev[:, :width].index_select(0, brought.slots_dev)
        return lookup(known, brought.ends_dev, self._drafts)

    def _write(self, cells_dev: Tensor, tokens_dev: Tensor) -> None:
        self.tokens_dev.view(-1)[cells_dev] = tokens_dev.to(torch.int32)


def lookup(known_dev: Tensor, ends_dev: Tensor, drafts: int) -> Tensor:
    """Drafts int64[m, drafts] after tokens int[m, w], of which those up to `ends_dev` int64[m]
    count; NONE throughout where the last tokens are new."""
    places = torch.arange(known_dev.shape[1], device=known_dev.device)
    ends = ends_dev.unsqueeze(1)
    same = places < ends  # an occurrence ends before the last token
    length = torch.zeros_like(known_dev)
    for back in range(LONGEST):
        tail = known_dev.gather(1, (ends - back).clamp(min=0))
        here = (known_dev == tail) & (ends >= back)
        same = same & F.pad(here, (back, 0))[:, : len(places)]
        length += same
    # the longest, and of these the newest
    best = (length.to(torch.int64) * len(places) + places).argmax(1, keepdim=True)
    found = length.gather(1, best) >= SHORTEST
    ahead = torch.arange(drafts, device=known_dev.device) % (ends - best).clamp(min=1)
    follow = known_dev.gather(1, (best + 1 + ahead).clamp(max=len(places) - 1))
    return follow.to(torch.int64).masked_fill_(~found, NONE)
