"""Attention of a step's rows over pages, in plain torch operations, laid out for CPUs.

It knows pages and lengths of one step; it must not know requests, weights or who owns a page.
`varlen.py` is its counterpart for devices with their own memory.

What depends on the step alone (masks, which cells a row reads, which rows go together) is made
once a step by `lay_out` and used by every layer.

Decode rows are read in groups of similar length, by whole pages.  Memory traffic is what decode
attention on a CPU costs, so float32 pools are read where they lie:

- Scores are a product sampled at the cells of a row's pages: `sampled_addmm` of all query heads
  with all rows of the pool, [cells * kv_heads, head_dim], at the places that a sparse matrix names.
- Values are summed by their weights by `embedding_bag`, at the same places.

Both add up in an order that depends on the row alone: padding adds zeros at its end.  So what a row
gets does not depend on its neighbours, to the bit.

`sampled_addmm` knows no bfloat16.  There keys are gathered, and scores are one product a row over
all KV heads at once: each query head is widened with zeros to the width of a whole cell, because
products per KV head would copy the keys once more, head by head.

    per row:   scores[heads, L] = wide_query[heads, kv_heads * head_dim] @ keys^T
               query head h of KV head j:   0 ... 0 | h's head_dim numbers | 0 ... 0
                                                      ^ place j
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.model.batch import ChunkRow, StepInputs

# Another group of decode rows costs about as much as reading this many cells of padding.
_CELLS_WORTH_A_GROUP = 2048
# Gathered keys of one group: above this they neither stay in cache nor get their memory reused.
_GATHERED_BYTES = 16 << 20


@dataclass(frozen=True)
class HeadShape:
    """How queries, keys and values of one token are divided, and what a query sees: the last
    `window` positions, its own among them; all up to its own if None.

    `scale` is what scores are multiplied with, 1 / sqrt(head_dim) if None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    scale: float | None = None
    window: int | None = None

    @property
    def cell_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def cells_read(self, longest: int) -> int:
        """How many cells of whole pages hold what rows of up to `longest` positions see."""
        pages = -(-longest // self.page_size)
        if self.window is not None:  # as many as its positions can touch, wherever they begin
            pages = min(pages, -(-(self.window - 1) // self.page_size) + 1)
        return pages * self.page_size


@dataclass(frozen=True)
class DecodeGroup:
    """n decode rows that read L cells each, L a multiple of the page size.

    rows_dev    int64[n] their places among the decode rows, None when it is all of them in order
    pages_dev   int64[n * L / page_size]
    mask_dev    [n, 1, L], 0 where the row sees a cell and -inf elsewhere
    places_dev  int32[n * heads * L], rows of a pool seen as [cells * kv_heads, head_dim]
    starts_dev  int32[n * heads + 1], where each head's part of places_dev begins, and their end
    scores_dev  [n, heads, L], written anew by each layer
    sampled_dev the same memory as a sparse matrix [n * heads, cells * kv_heads], filled at
                places_dev; None where keys are gathered
    """

    rows_dev: Tensor | None
    pages_dev: Tensor
    mask_dev: Tensor
    places_dev: Tensor
    starts_dev: Tensor
    scores_dev: Tensor
    sampled_dev: Tensor | None


@dataclass(frozen=True)
class ChunkReads:
    """One chunk, the pages int64[p] that it reads, and its mask [count, n] over their n first
    cells; None for a prompt from its first token on, of which each sees all before it."""

    row: ChunkRow
    pages_dev: Tensor
    mask_dev: Tensor | None
    scale: float | None

    @property
    def place(self) -> slice:
        """Its tokens among the step's."""
        return slice(self.row.first, self.row.first + self.row.count)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """[count, heads, head_dim] for the chunk's own q, k and v, and one layer's pages."""
        if self.mask_dev is not None:
            cells = self.mask_dev.shape[1]
            k = k_pages.index_select(0, self.pages_dev).flatten(0, 1)[:cells]
            v = v_pages.index_select(0, self.pages_dev).flatten(0, 1)[:cells]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=self.mask_dev,
            is_causal=self.mask_dev is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True)
class StepAttention:
    """A step's attention, ready for every layer. `own_head_dev` [heads, kv_heads, 1] holds the
    softmax scale where a KV head serves a query head, else 0."""

    shape: HeadShape
    n_decode: int
    own_head_dev: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkReads, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """[T, heads * head_dim] for q [T, heads, head_dim] and one layer's pages.

        k and v, [T, kv_heads, head_dim], are this step's own, already written to the pages.
        """
        if not self.chunks and len(self.groups) == 1 and self.groups[0].rows_dev is None:
            return self._decode(self.groups[0], q, k_pages, v_pages).view(q.shape[0], -1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self.groups:
            if group.rows_dev is None:
                out[: self.n_decode] = self._decode(
                    group, q[: self.n_decode], k_pages, v_pages
                ).view(-1, *q.shape[1:])
            else:
                rows = q.index_select(0, group.rows_dev)
                read = self._decode(group, rows, k_pages, v_pages)
                out.index_copy_(0, group.rows_dev, read.view(rows.shape))
        for chunk in self.chunks:
            here = chunk.place
            out[here] = chunk.attend(q[here], k[here], v[here], k_pages, v_pages)
        return out.flatten(1)

    def _decode(self, group: DecodeGroup, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        head_dim = q.shape[2]
        if group.sampled_dev is None:
            scores = self._gathered(group, q, k_pages)
        else:
            scores = group.scores_dev.copy_(group.mask_dev)
            torch.sparse.sampled_addmm(
                group.sampled_dev,
                q.reshape(-1, head_dim),
                k_pages.view(-1, head_dim).t(),
                alpha=self.shape.softmax_scale,
                out=group.sampled_dev,
            )
        return F.embedding_bag(
            group.places_dev,
            v_pages.view(-1, head_dim),
            group.starts_dev,
            mode="sum",
            per_sample_weights=torch.softmax(scores, -1).view(-1),
            include_last_offset=True,
        )

    def _gathered(self, group: DecodeGroup, q: Tensor, k_pages: Tensor) -> Tensor:
        """Scores [n, heads, L] from a copy of the keys."""
        n, heads, _ = q.shape
        cell = k_pages[0, 0].numel()
        keys = torch.embedding(k_pages.flatten(1), group.pages_dev).view(n, -1, cell)
        wide = (q.unsqueeze(2) * self.own_head_dev).view(n, heads, cell)
        return torch.baddbmm(group.mask_dev, wide, keys.transpose(1, 2))


def lay_out(inputs: StepInputs, shape: HeadShape, num_pages: int) -> StepAttention:
    """Prepare a step's attention over pools of `num_pages`. Rows are grouped by what the host says
    of their lengths."""
    device = inputs.token_ids_dev.device
    per_kv_head = shape.num_heads // shape.num_kv_heads
    own_head = own_heads(shape, device)
    bounds = inputs.decode_bounds
    if shape.window is not None:
        bounds = np.minimum(bounds, shape.cells_read(inputs.max_decode_len))
    heads_dev = torch.arange(shape.num_heads, dtype=torch.int32, device=device)
    kv_head_dev = heads_dev.view(1, -1, 1) // per_kv_head
    # An empty row has no softmax; its NaN would be written to its page and spread from there.
    lens_dev = inputs.decode_lens_dev.clamp(min=1)
    groups = tuple(
        _decode_group(inputs.decode_pages_dev, lens_dev, shape, kv_head_dev, num_pages, *which)
        for which in group_rows(np.maximum(bounds, 1).tolist(), shape)
    )
    return StepAttention(shape, inputs.n_decode, own_head, groups, lay_out_chunks(inputs, shape))


def own_heads(shape: HeadShape, device: torch.device) -> Tensor:
    """[heads, kv_heads, 1]: the softmax scale where a KV head serves a query head, else 0."""
    per_kv_head = shape.num_heads // shape.num_kv_heads
    own_head = torch.eye(shape.num_kv_heads, dtype=shape.dtype, device=device)
    return own_head.mul_(shape.softmax_scale).repeat_interleave(per_kv_head, 0).unsqueeze(-1)


def lay_out_chunks(inputs: StepInputs, shape: HeadShape) -> tuple[ChunkReads, ...]:
    """The step's chunks, with their masks."""
    return tuple(_chunk_reads(row, shape) for row in inputs.chunks)


def group_rows(lens: list[int], shape: HeadShape) -> list[tuple[list[int] | None, int]]:
    """Rows that are read together, and the longest of each group; None for all rows in order.

    `lens` are as many as a row reads.  Longest first; a group ends where the rows left would save
    enough by being padded less, or where its keys would take too much memory.
    """
    most_cells = _GATHERED_BYTES // shape.cell_bytes
    order = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
    groups: list[tuple[list[int] | None, int]] = []
    begin = 0
    for place, row in enumerate(order):
        longest = lens[order[begin]]
        saved = (len(order) - place) * (longest - lens[row])
        if place > begin and (
            saved > _CELLS_WORTH_A_GROUP or (place - begin + 1) * longest > most_cells
        ):
            groups.append((order[begin:place], longest))
            begin = place
    if order:
        groups.append((order[begin:] if groups else None, lens[order[begin]]))
    return groups


def _decode_group(
    pages: Tensor,
    lens: Tensor,
    shape: HeadShape,
    kv_head_dev: Tensor,
    num_pages: int,
    rows: list[int] | None,
    longest: int,
) -> DecodeGroup:
    rows_dev = None
    if rows is not None:
        rows_dev = torch.tensor(rows, dtype=torch.int64, device=pages.device)
        pages, lens = pages.index_select(0, rows_dev), lens.index_select(0, rows_dev)
    cells_read = shape.cells_read(longest)
    pages, places = _pages_seen(pages, lens, cells_read, shape)
    mask = torch.zeros((len(pages), 1, cells_read), dtype=shape.dtype, device=pages.device)
    mask.masked_fill_(unseen(places, lens.unsqueeze(1), shape.window).unsqueeze(1), float("-inf"))
    page_rows = shape.page_size * shape.num_kv_heads
    offsets = torch.arange(0, page_rows, shape.num_kv_heads, dtype=torch.int32, device=pages.device)
    cells = pages.to(torch.int32).unsqueeze(-1) * page_rows + offsets
    at = (cells.view(len(pages), 1, -1) + kv_head_dev).view(-1)
    starts = torch.arange(0, len(at) + 1, cells_read, dtype=torch.int32, device=pages.device)
    scores = torch.zeros((len(pages), shape.num_heads, cells_read), dtype=shape.dtype)
    sampled = None
    if shape.dtype == torch.float32:
        sampled = _sparse(starts, at, scores.view(-1), num_pages * page_rows)
    return DecodeGroup(rows_dev, pages.reshape(-1), mask, at, starts, scores, sampled)


def _sparse(starts: Tensor, places: Tensor, values: Tensor, columns: int) -> Tensor:
    """A matrix of `columns` that is filled at `places`; `values` stay where they are."""
    _hear_of_beta()
    # unchecked: a row's places are neither sorted nor all different, and need not be
    return torch.sparse_csr_tensor(
        starts, places, values, (len(starts) - 1, columns), check_invariants=False
    )


@functools.cache
def _hear_of_beta() -> None:
    """torch warns once a process, with the first sparse matrix, that they are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), check_invariants=False)


def _pages_seen(
    pages: Tensor, lens: Tensor, cells_read: int, shape: HeadShape
) -> tuple[Tensor, Tensor]:
    """The pages int64[n, p] that hold what each row sees, and its positions of their cells, [n, L]
    or [L] where they are the same for all."""
    count = cells_read // shape.page_size
    if shape.window is None or count >= pages.shape[1]:
        return pages[:, :count], torch.arange(cells_read, device=pages.device)
    first = (lens - shape.window).clamp_(min=0).div_(shape.page_size, rounding_mode="floor")
    columns = first.unsqueeze(1) + torch.arange(count, device=pages.device)
    offsets = torch.arange(shape.page_size, device=pages.device)
    places = (columns.unsqueeze(-1) * shape.page_size + offsets).flatten(1)
    # a column past the table's end lies past the row's end as well: nobody sees what is read there
    return pages.gather(1, columns.clamp_(max=pages.shape[1] - 1)), places


def unseen(places: Tensor, lens: Tensor, window: int | None) -> Tensor:
    """Which positions the last of `lens` positions does not see; of the shapes' common one."""
    past = places >= lens
    return past if window is None else past | (places < lens - window)


def _chunk_reads(row: ChunkRow, shape: HeadShape) -> ChunkReads:
    start, window = row.context_len - row.count, shape.window
    if start == 0 and (window is None or row.count <= window):
        return ChunkReads(row, row.pages_dev, None, shape.scale)
    first = 0 if window is None else max(0, start - window + 1) // shape.page_size
    begin = first * shape.page_size
    size = (row.count, row.context_len - begin)
    mask = torch.full(size, float("-inf"), dtype=shape.dtype, device=row.pages_dev.device)
    mask.triu_(start - begin + 1)
    if window is not None:
        before = torch.ones(size, dtype=torch.bool, device=mask.device).tril_(
            start - begin - window
        )
        mask.masked_fill_(before, float("-inf"))
    return ChunkReads(row, row.pages_dev[first:], mask, shape.scale)
