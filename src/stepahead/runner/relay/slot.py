"""The relay by slot: a sampled token waits in its slot until the next step takes it.

The host never sees it in between.  In check mode a token can be taken once: taking leaves poison,
and poison that is taken is an error, so a step that reads a token nobody stashed is caught.
"""

from __future__ import annotations

import torch
from torch import Tensor

POISON = -1


class SlotRelay:
    """`tokens_dev` int64[num_slots]; all calls run on the forward stream."""

    def __init__(self, num_slots: int, check: bool) -> None:
        self.tokens_dev = torch.full((num_slots,), POISON, dtype=torch.int64)
        self._check = check

    def stash(self, slots_dev: Tensor, tokens_dev: Tensor) -> None:
        """Leaves each slot's new token."""
        self.tokens_dev[slots_dev] = tokens_dev

    def resolve(self, slots_dev: Tensor) -> Tensor:
        """The tokens waiting in `slots_dev`, int64[n]."""
        tokens = self.tokens_dev[slots_dev]
        if self._check:
            self.tokens_dev[slots_dev] = POISON
            if bool((tokens < 0).any()):
                raise AssertionError("relay: a token was taken that no step had stashed")
        return tokens
