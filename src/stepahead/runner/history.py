"""The tokens of some rows in their order, on the device, one row for each slot that needs them.

A token lies in the column of its position.  The sampler writes what it samples on the forward
stream, so the host need not have seen a token for it to count.  Under drafts it first writes those
that stand before a sampled token, and then all that it samples: what was sampled after a wrong
draft lies behind the row's newest token, and is written over before anybody looks there.

Not yet run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepahead.runner.places import Places

_SPARE = 2  # columns: of the token behind the last position, and of what is for nobody


class TokenHistory:
    """`tokens_dev` int32[capacity, length]; grows when needed, as `PenaltyCounts` does, and is
    nothing until the first slot that needs it.

    A row costs 4 bytes a position of the model's length.  Which slot has which row is known on the
    host; the tensor changes on the forward stream only.
    """

    def __init__(self, positions: int, place: torch.device) -> None:
        """`positions`: most of a request."""
        self.places = Places()
        self._length = positions + _SPARE
        self.tokens_dev = torch.zeros((0, self._length), dtype=torch.int32, device=place)

    def start(self, row: int, tokens_dev: Tensor) -> None:
        """A new owner's tokens, int64[n]: its prompt, and what outputs are known (forward
        stream)."""
        have = len(self.tokens_dev)
        if row >= have:
            pad = self.tokens_dev.new_zeros((max(row + 1, 2 * have) - have, self._length))
            self.tokens_dev = torch.cat([self.tokens_dev, pad])
        self.tokens_dev[row] = -1  # or what is left of an old owner might pass for what is missing
        self.tokens_dev[row, : len(tokens_dev)] = tokens_dev.to(torch.int32)

    def write(self, rows_dev: Tensor, positions_dev: Tensor, tokens_dev: Tensor) -> None:
        """Tokens int64[m] at positions int64[m] of rows int64[m] (forward stream).

        The dead run on past their last position: the last column takes that, and is never read.
        """
        columns = positions_dev.clamp(max=self._length - 1)
        self.tokens_dev[rows_dev, columns] = tokens_dev.to(torch.int32)

    def nowhere(self, like_dev: Tensor) -> Tensor:
        """As many positions as `like_dev` has, of tokens that are for nobody."""
        return torch.full_like(like_dev, self._length - 1)

    def read(self, rows_dev: Tensor, positions_dev: Tensor) -> Tensor:
        """int32 tokens, of the shape that rows and positions have together; -1 where a position is
        below 0 (forward stream)."""
        columns = positions_dev.clamp(0, self._length - 1)
        return self.tokens_dev[rows_dev, columns].masked_fill(positions_dev < 0, -1)
