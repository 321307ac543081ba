"""Attention of a step's rows over a compressed cache, in plain torch operations.

A cell of the cache is one row for all heads: a latent, of which each head's key and value are
linear functions, and a rotated part of the key.

    row = [latent c | rotated k_r]        k_h = [K_h c ; k_r]        v_h = V_h c

Two ways to the same numbers:

- *expanded*: keys and values of every head are made from the rows, once for all queries.  For
  chunks so early in their prompts that they read everything before them.
- *absorbed*: K_h goes to the query and V_h to the sum, so that a head reads rows as they lie:
  (K_h^T q_h . c + q_r . k_r) and V_h (sum p c).  For all others: each query gathers the few rows
  that it has chosen.

It reads no lengths on the host, but for the bounds that the host has said.  It knows pages and
positions of one step; it must not know requests, weights or who owns a page.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.model.attention.indexer import Span, select
from stepahead.model.attention.paged import HeadShape, group_rows
from stepahead.model.batch import ChunkRow, StepInputs

# Rows gathered at a time: on a CPU what stays in its cache, elsewhere what there is memory for.
_GATHERED_BYTES = {"cpu": 16 << 20}
_GATHERED_BYTES_ELSEWHERE = 256 << 20


class Expansion(Protocol):
    """A layer's K and V of every head."""

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [L, heads, nope] and values [L, heads, v] of latents [L, latent]."""
        ...

    def absorb(self, q: Tensor) -> Tensor:
        """[T, heads, latent] of queries [T, heads, nope]."""
        ...

    def values(self, sums: Tensor) -> Tensor:
        """[T, heads, v] of sums of latents [T, heads, latent]."""
        ...


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a step's attention; `head_dim` (nope + rotated) sets the scale of scores."""

    heads: int
    latent: int
    head_dim: int
    row_values: int
    topk: int
    page_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Selection:
    """What each of m queries reads, k cells at most.

    positions_dev  int64[m, k], -1 where there is nothing; valid as long as the request runs
    cells_dev      int64[m, k], where they lie now, 0 where there is nothing
    mask_dev       [m, 1, k], 0 where there is something and -inf where not
    """

    positions_dev: Tensor
    cells_dev: Tensor
    mask_dev: Tensor


@dataclass(frozen=True)
class EarlyChunk:
    """A chunk whose queries read all before them.  mask_dev [count, context], None if it begins
    its prompt."""

    row: ChunkRow
    mask_dev: Tensor | None

    @property
    def place(self) -> slice:
        """Its tokens among the step's."""
        return slice(self.row.first, self.row.first + self.row.count)


@dataclass(frozen=True)
class LatentAttention:
    """A step's attention, ready for every layer.  `full`: spans whose queries read everything."""

    shape: LatentShape
    early: tuple[EarlyChunk, ...]
    full: tuple[tuple[Span, Selection], ...]
    scored: tuple[Span, ...]

    def choose(self, q: Tensor, weights: Tensor, key_pages: Tensor) -> tuple[Selection, ...]:
        """What the queries of scored spans read, by a layer's indexer; its keys are in the pages.

        q [T, index heads, dim] and weights float32[T, index heads], scales in them.
        """
        shape = self.shape
        chosen: list[Selection] = []
        for span in self.scored:
            here = span.place
            positions = select(span, q[here], weights[here], key_pages, shape.topk)
            chosen.append(_lay_out_selection(span, positions, shape))
        return tuple(chosen)

    def given(self, positions: Tensor) -> tuple[Selection, ...]:
        """As `choose`, of positions int64[T, topk] that have been chosen before."""
        return tuple(
            _lay_out_selection(span, positions[span.place], self.shape) for span in self.scored
        )

    def positions(self, own: Tensor, chosen: Sequence[Selection]) -> Tensor:
        """int64[T, topk] of all the step's tokens, which stand at `own` int64[T]; -1 is nothing."""
        at = torch.arange(self.shape.topk, device=own.device)
        every = at.where(at <= own.unsqueeze(1), -1)
        for span, reads in zip(self.scored, chosen, strict=True):
            every[span.place] = reads.positions_dev
        return every

    def attend(
        self, q: Tensor, rows: Tensor, pages: Tensor, chosen: Sequence[Selection], by: Expansion
    ) -> Tensor:
        """[T, heads * v] for queries [T, heads, nope + rotated].

        rows [T, row_values] are the step's own, already written to one layer's pages.
        """
        parts = [(chunk.place, self._expanded(chunk, q, rows, pages, by)) for chunk in self.early]
        pairs = [*self.full, *zip(self.scored, chosen, strict=True)]
        parts += [
            (span.place, self._absorbed(reads, q[span.place], pages, by)) for span, reads in pairs
        ]
        if len(parts) == 1:
            return parts[0][1]
        out = torch.empty((len(q), parts[0][1].shape[1]), dtype=q.dtype, device=q.device)
        for place, part in parts:
            out[place] = part
        return out

    def _expanded(
        self, chunk: EarlyChunk, q: Tensor, rows: Tensor, pages: Tensor, by: Expansion
    ) -> Tensor:
        if chunk.mask_dev is None:
            rows = rows[chunk.place]
        else:
            rows = pages.index_select(0, chunk.row.pages_dev).flatten(0, 1)
            rows = rows[: chunk.row.context_len]
        latent, heads = self.shape.latent, self.shape.heads
        keys, values = by.expand(rows[:, :latent])
        rotated = rows[:, latent:].unsqueeze(1).expand(-1, heads, -1)
        out = F.scaled_dot_product_attention(
            q[chunk.place].transpose(0, 1).unsqueeze(0),
            torch.cat((keys, rotated), -1).transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=chunk.mask_dev,
            is_causal=chunk.mask_dev is None,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _absorbed(self, reads: Selection, q: Tensor, pages: Tensor, by: Expansion) -> Tensor:
        shape, cells = self.shape, pages.flatten(0, 1)
        nope = shape.head_dim - (shape.row_values - shape.latent)
        q = torch.cat((by.absorb(q[..., :nope]), q[..., nope:]), -1) * shape.head_dim**-0.5
        each = reads.cells_dev.shape[1] * shape.row_values * shape.dtype.itemsize
        most = _GATHERED_BYTES.get(q.device.type, _GATHERED_BYTES_ELSEWHERE)
        sums = [
            self._sums(q[begin:end], reads, cells, slice(begin, end))
            for begin, end in _cuts(len(q), max(1, most // each))
        ]
        return by.values(torch.cat(sums)).flatten(1)

    def _sums(self, q: Tensor, reads: Selection, cells: Tensor, part: slice) -> Tensor:
        where = reads.cells_dev[part]
        rows = cells.index_select(0, where.reshape(-1)).view(*where.shape, -1)
        scores = torch.baddbmm(reads.mask_dev[part], q, rows.transpose(1, 2))
        return torch.bmm(torch.softmax(scores, -1), rows[..., : self.shape.latent])


def _cuts(count: int, most: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + most, count)) for begin in range(0, count, most)]


def _lay_out_selection(span: Span, positions: Tensor, shape: LatentShape) -> Selection:
    """Where positions int64[g * t, k] of a span's queries lie; -1 is nothing."""
    there = positions >= 0
    known = positions.clamp(min=0).view(len(span.pages_dev), -1)
    pages = span.pages_dev.gather(1, known // shape.page_size)
    cells = (pages * shape.page_size + known % shape.page_size).view(positions.shape)
    mask = torch.zeros(positions.shape, dtype=shape.dtype, device=positions.device)
    mask.masked_fill_(~there, float("-inf"))
    return Selection(positions, cells.where(there, 0), mask.unsqueeze(1))


def lay_out(inputs: StepInputs, shape: LatentShape) -> LatentAttention:
    """Prepare a step's attention.  Reads no lengths on the host but its bounds."""
    early: list[EarlyChunk] = []
    spans = _decode_spans(inputs, shape)
    for row in inputs.chunks:
        if row.context_len <= shape.topk:
            early.append(EarlyChunk(row, _chunk_mask(row, shape.dtype)))
        else:
            spans.append(_chunk_span(row))
    full = [span for span in spans if span.longest <= shape.topk]
    return LatentAttention(
        shape,
        tuple(early),
        tuple((span, _everything(span, shape)) for span in full),
        tuple(span for span in spans if span.longest > shape.topk),
    )


def _everything(span: Span, shape: LatentShape) -> Selection:
    """All positions up to the query's own."""
    at = torch.arange(span.longest, device=span.positions_dev.device)
    seen = at <= span.positions_dev.reshape(-1, 1)
    return _lay_out_selection(span, at.where(seen, -1), shape)


def _decode_spans(inputs: StepInputs, shape: LatentShape) -> list[Span]:
    """The decode rows; on the CPU those of similar lengths together."""
    n, device = inputs.n_decode, inputs.token_ids_dev.device
    if not n:
        return []
    # a row of padding may say that it has no context; it reads one cell
    positions = (inputs.decode_lens_dev.clamp(min=1) - 1).unsqueeze(1)
    longest = max(1, inputs.max_decode_len)
    groups: list[tuple[list[int] | None, int]] = [(None, longest)]
    if device.type == "cpu":
        one = HeadShape(1, 1, shape.row_values, shape.dtype, shape.page_size)
        groups = group_rows(np.maximum(inputs.decode_bounds, 1).tolist(), one)
    spans = []
    for rows, most in groups:
        pages = inputs.decode_pages_dev[:, : -(-most // shape.page_size)]
        if rows is None:
            spans.append(Span(slice(0, n), pages, positions, most))
        else:
            place = torch.tensor(rows, dtype=torch.int64, device=device)
            spans.append(Span(place, pages[place], positions[place], most))
    return spans


def _chunk_span(row: ChunkRow) -> Span:
    start = row.context_len - row.count
    positions = torch.arange(start, row.context_len, device=row.pages_dev.device)
    place = slice(row.first, row.first + row.count)
    return Span(place, row.pages_dev.unsqueeze(0), positions.unsqueeze(0), row.context_len)


def _chunk_mask(row: ChunkRow, dtype: torch.dtype) -> Tensor | None:
    start = row.context_len - row.count
    if start == 0:
        return None
    shape, device = (row.count, row.context_len), row.pages_dev.device
    return torch.full(shape, float("-inf"), dtype=dtype, device=device).triu_(start + 1)
