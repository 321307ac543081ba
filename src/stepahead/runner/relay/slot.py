"""The relay by slot: a sampled token waits in its slot until the next step takes it.

The host never sees it in between, unless the plan brings the tokens (the serial loop).  Under
drafts those wait with it, and stay on the device whoever brings the token.  In check
mode a token can be taken once: taking leaves poison, and poison that is taken is an error, so a
step that reads a token nobody stashed is caught.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepahead.runner.relay import Upload, last_of, shape_of
from stepahead.runner.trap import trap

POISON = -1


@dataclass(frozen=True)
class SlotRoute:
    """Where the input tokens are: in slots `rows_dev` int64[n], or the host's `tokens_dev`."""

    rows_dev: Tensor
    tokens_dev: Tensor | None


class SlotRelay:
    """`tokens_dev` int64[num_slots], or int64[num_slots, width] with drafts.  `route` runs on the
    host at launch; the others on the forward stream."""

    def __init__(self, num_slots: int, check: bool, place: torch.device, width: int = 1) -> None:
        shape = shape_of(num_slots, width)
        self.tokens_dev = torch.full(shape, POISON, dtype=torch.int64, device=place)
        self.waiting_dev: Tensor | None = self.tokens_dev if width == 1 else None
        self._check = check

    def route(
        self,
        rows: np.ndarray,
        rows_dev: Tensor,
        sampled: np.ndarray,
        tokens: np.ndarray | None,
        upload: Upload,
    ) -> SlotRoute:
        """As in Relay; where the host brings tokens it brings all of them."""
        return SlotRoute(rows_dev, None if tokens is None else upload(tokens))

    def resolve(self, route: SlotRoute) -> Tensor:
        """As in Relay."""
        if route.tokens_dev is not None:
            return self._with_drafts(route.rows_dev, route.tokens_dev)
        tokens = self.tokens_dev.index_select(0, route.rows_dev)
        if self._check:
            self.tokens_dev[route.rows_dev] = POISON
            trap(last_of(tokens) >= 0, "relay: a token was taken that no step had stashed")
        return tokens

    def _with_drafts(self, rows_dev: Tensor, tokens_dev: Tensor) -> Tensor:
        if self.tokens_dev.ndim == 1:
            return tokens_dev
        tokens = self.tokens_dev.index_select(0, rows_dev)
        tokens[:, 0] = tokens_dev
        return tokens

    def stash(self, slots_dev: Tensor, tokens_dev: Tensor) -> None:
        """Leaves each slot's new token."""
        self.tokens_dev.index_copy_(0, slots_dev, tokens_dev)
