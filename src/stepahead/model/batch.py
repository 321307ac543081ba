"""What a step gives the model: tokens, positions, where KV is written and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChunkRow:
    """A row that runs several prompt positions; `pages_dev` int64[ceil(context_len/page_size)]."""

    first: int  # offset of its first token among the step's tokens
    count: int
    context_len: int  # positions in KV after this chunk
    pages_dev: Tensor


@dataclass(frozen=True)
class StepInputs:
    """T tokens: n_decode decode rows of one token each, then the chunks' tokens.

    `token_ids_dev`, `positions_dev`, `cells_dev` int64[T]; a cell is page * page_size + offset.
    `decode_pages_dev` int64[n_decode, P], padded with page 0; `decode_lens_dev` int64[n_decode]
    counts this token; `max_decode_len` is an upper bound of them known on the host.
    """

    token_ids_dev: Tensor
    positions_dev: Tensor
    cells_dev: Tensor
    n_decode: int
    decode_pages_dev: Tensor
    decode_lens_dev: Tensor
    max_decode_len: int
    chunks: tuple[ChunkRow, ...]
