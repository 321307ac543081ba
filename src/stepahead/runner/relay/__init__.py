"""How a sampled token reaches the next step without the host: by slot, or by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor

Upload = Callable[[np.ndarray], Tensor]


class Relay(Protocol):
    """`route` runs on the host at launch, step by step; the others on the forward stream.

    `waiting_dev` int64[num_slots]: where a slot's token waits, if stashing is no more than putting
    it there, and resolving no more than taking it and leaving a negative number; else None.
    """

    waiting_dev: Tensor | None

    def route(
        self,
        rows: np.ndarray,
        rows_dev: Tensor,
        sampled: np.ndarray,
        tokens: np.ndarray | None,
        upload: Upload,
    ) -> Any:
        """Where the input tokens of a step will be that decodes slots `rows` int64[n], of which the
        host brings `tokens` int32[n] (-1: not this one), and samples slots `sampled` int64[s]."""
        ...

    def resolve(self, route: Any) -> Tensor:
        """The input tokens, int64[n]; under drafts int64[n, width]: the row's last token, and its
        drafts, negative where there is none."""
        ...

    def stash(self, slots_dev: Tensor, tokens_dev: Tensor) -> None:
        """Leaves the step's sampled tokens, int64[s] or int64[s, width], for later steps."""
        ...


def shape_of(rows: int, width: int) -> tuple[int, ...]:
    """The shape of so many rows' tokens: without drafts they are not in a row of their own."""
    return (rows,) if width == 1 else (rows, width)


def last_of(tokens_dev: Tensor) -> Tensor:
    """int64[n], the last token of each of n rows, without drafts."""
    return tokens_dev if tokens_dev.ndim == 1 else tokens_dev[:, 0]


class NoRelay:
    """For the stages of a model that take hidden states instead of tokens."""

    waiting_dev: Tensor | None = None

    def route(
        self,
        rows: np.ndarray,
        rows_dev: Tensor,
        sampled: np.ndarray,
        tokens: np.ndarray | None,
        upload: Upload,
    ) -> Tensor:
        """As in Relay; nothing is staged."""
        return rows_dev

    def resolve(self, route: Tensor) -> Tensor:
        """int64[n] that nobody looks at."""
        return route

    def stash(self, slots_dev: Tensor, tokens_dev: Tensor) -> None:
        """Nobody takes them from here."""
