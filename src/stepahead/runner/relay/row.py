"""The relay by row: the tokens of the last steps stay on the device, and each step picks its own.

Every step leaves its sampled rows in a ring.  A decode row of a later step finds its token by age
(how many steps ago it was sampled) and row (its place among the rows sampled then); the host knows
both, and sends them only when a row changed its place.  A row whose last token has been retired
(it was left out for a while) gets it from the host.  The slot state holds no tokens.

    ring, newest first     [ step n-1: r0 r1 r2 .. | step n-2: r0 r1 .. | .. ]
    index of (age, row)      rows of all newer steps + row

Under drafts a row of the ring has those as well.

Where the model is cut into stages a step's tokens come back `lag` steps later: the ring's newest
step is n - lag, and no row is younger.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.runner.relay import Upload, last_of, shape_of
from stepahead.runner.trap import trap


@dataclass(frozen=True)
class RowRoute:
    """Where `count` input tokens are.  `index_dev` int64[count] into the ring, None when they are
    the newest step's first rows as they stand; `tokens_dev` int64[count] has those that the host
    brings, -1 elsewhere, or is None."""

    count: int
    index_dev: Tensor | None
    tokens_dev: Tensor | None


class RowRelay:
    """`depth` steps back, from `lag` steps on.  `route` runs on the host at launch; the others on
    the forward stream."""

    waiting_dev: Tensor | None = None

    def __init__(
        self,
        num_slots: int,
        depth: int,
        check: bool,
        place: torch.device,
        lag: int = 1,
        width: int = 1,
    ) -> None:
        # so that an empty ring can be indexed, and no row has to be taken from it
        self._padding = torch.full(shape_of(1, width), -1, dtype=torch.int64, device=place)
        self._ring: deque[Tensor] = deque(maxlen=depth)
        self._sizes: deque[int] = deque(maxlen=depth)  # rows of each, as the host knows them
        self._step_of = np.full(num_slots, -1 - depth, np.int64)
        self._row_of = np.zeros(num_slots, np.int64)
        self._step = 0
        self._lag = lag
        self._check = check

    def route(
        self,
        rows: np.ndarray,
        rows_dev: Tensor,
        sampled: np.ndarray,
        tokens: np.ndarray | None,
        upload: Upload,
    ) -> RowRoute:
        """As in Relay."""
        tokens_dev = None if tokens is None else upload(tokens)
        index = self._index(rows, tokens)
        index_dev = None if index is None else upload(index)
        self._step_of[sampled] = self._step
        self._row_of[sampled] = np.arange(len(sampled))
        self._sizes.appendleft(len(sampled))
        self._step += 1
        return RowRoute(len(rows), index_dev, tokens_dev)

    def _index(self, rows: np.ndarray, tokens: np.ndarray | None) -> np.ndarray | None:
        age = self._step - self._step_of[rows]
        row = self._row_of[rows]
        lag = self._lag
        if tokens is None and (age == lag).all() and (row == np.arange(len(rows))).all():
            return None
        known = np.zeros(len(rows), np.bool_) if tokens is None else tokens >= 0
        assert (known | (age <= len(self._sizes))).all(), "a row's token has left the ring"
        assert (known | (age >= lag)).all(), "a row's token is still on its way"
        newer = np.concatenate([[0], np.cumsum([*self._sizes][lag - 1 :])])
        return np.where(known, 0, newer[np.where(known, lag, age) - lag] + row)

    def resolve(self, route: RowRoute) -> Tensor:
        """As in Relay.  A row whose token the host brings has no drafts: the ring may not reach
        back to them."""
        tokens = self._pick(route)
        if self._check:
            trap(last_of(tokens) >= 0, "relay: a row's token was taken from where none is")
        return tokens

    def _pick(self, route: RowRoute) -> Tensor:
        if route.index_dev is None:
            return self._ring[0][: route.count] if route.count else self._padding[:0]
        ring = torch.cat([*self._ring, self._padding])
        if route.tokens_dev is None:
            return ring[route.index_dev]
        brought, picked = route.tokens_dev, ring[route.index_dev]
        if picked.ndim == 1:
            return torch.where(brought >= 0, brought, picked)
        whole = F.pad(brought.unsqueeze(1), (0, picked.shape[1] - 1), value=-1)
        return torch.where(whole[:, :1] >= 0, whole, picked)

    def stash(self, slots_dev: Tensor, tokens_dev: Tensor) -> None:
        """Leaves a step's sampled rows; one that samples none need not, it has no rows to pass."""
        self._ring.appendleft(tokens_dev)
