"""What one step gives a model: tokens, positions and where their keys and values lie.

Plain immutable arrays; it knows neither requests nor how they were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class ChunkRow:
    """A row of a step that runs several prompt positions.

    first        offset of its first token among the step's tokens
    count        number of tokens
    context_len  positions in KV after this chunk (start + count)
    pages_dev    int64[ceil(context_len / page_size)], its pages in order
    """

    first: int
    count: int
    context_len: int
    pages_dev: Tensor


@dataclass(frozen=True)
class StepInputs:
    """One step. T = n_decode + the chunks' counts; decode rows come first, one token each.

    token_ids_dev     int64[T]
    positions_dev     int64[T]
    cells_dev         int64[T], where each token's KV is written: page * page_size + offset
    n_decode          number of decode rows
    decode_pages_dev  int64[n_decode, P], page table of the decode rows, padded with page 0
    decode_lens_dev   int64[n_decode], context length, this token included; a row whose stop token
                      has been sampled is at position 0 of page 0, and nobody wants its result
    decode_bounds     int64 numpy[n_decode], the host's upper bounds of decode_lens
    max_decode_len    the largest of them, 0 without rows; P * page_size >= max_decode_len
    chunks            the other rows, in the order of their tokens
    wanted_dev        int64[r], in order: the tokens whose states are asked for; what others have
                      got may be anything.  None for all
    states_dev        [T, hidden] for a part of a model that is not its first: what the part before
                      it gave.  It has no use for token_ids_dev, and may write here
    """

    token_ids_dev: Tensor
    positions_dev: Tensor
    cells_dev: Tensor
    n_decode: int
    decode_pages_dev: Tensor
    decode_lens_dev: Tensor
    decode_bounds: np.ndarray
    max_decode_len: int
    chunks: tuple[ChunkRow, ...]
    wanted_dev: Tensor | None = None
    states_dev: Tensor | None = None


def one_by_one(inputs: StepInputs) -> StepInputs:
    """The same step, where each prompt position is a decode row of its own: it reads what is before
    it alone, so what it gets does not depend on where its chunk begins and ends."""
    if not inputs.chunks:
        return inputs
    width = max([inputs.decode_pages_dev.shape[1], *(len(row.pages_dev) for row in inputs.chunks)])
    tables = [F.pad(inputs.decode_pages_dev, (0, width - inputs.decode_pages_dev.shape[1]))]
    lens, bounds = [inputs.decode_lens_dev], [inputs.decode_bounds]
    for row in inputs.chunks:
        table = F.pad(row.pages_dev, (0, width - len(row.pages_dev)))
        tables.append(table.expand(row.count, width))
        ends = np.arange(row.context_len - row.count, row.context_len) + 1
        lens.append(torch.from_numpy(ends).to(table.device))
        bounds.append(ends)
    return replace(
        inputs,
        n_decode=len(inputs.cells_dev),
        decode_pages_dev=torch.cat(tables),
        decode_lens_dev=torch.cat(lens),
        decode_bounds=np.concatenate(bounds),
        max_decode_len=max([inputs.max_decode_len, *(row.context_len for row in inputs.chunks)]),
        chunks=(),
    )
