"""Which positions a query of sparse attention reads: the best by a small score over index keys.

    score(t, s) = sum over heads h of  w[t, h] * relu(q[t, h] . k[s]),   s <= t

Scores of all queries for all positions would be [tokens, context]: they are made a tile at a time,
and of each tile only the best so far are kept.  Scores that are equal go to the earlier position,
so what is chosen depends neither on the tiles nor on who else is in the step.

It knows pages and positions; it must not know requests, weights or who owns a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Values of a tile, heads counted: 64 MB of float32.
TILE_VALUES = 1 << 24
_MOST_KEYS = 8192  # of a tile
_LOW = (1 << 32) - 1
_NOTHING = -(1 << 63)


@dataclass(frozen=True)
class Span:
    """g rows of the same kind, t queries each, that are read together: decode rows (t = 1), or one
    chunk (g = 1).

    place          their tokens among the step's, a slice or int64[g * t]
    pages_dev      int64[g, P], page tables
    positions_dev  int64[g, t]; a query sees positions up to its own
    longest        an upper bound of contexts; P * page_size >= longest
    """

    place: slice | Tensor
    pages_dev: Tensor
    positions_dev: Tensor
    longest: int


def select(
    span: Span,
    q: Tensor,
    weights: Tensor,
    key_pages: Tensor,
    topk: int,
    tile_values: int = TILE_VALUES,
) -> Tensor:
    """The chosen positions int64[g * t, topk] in any order, -1 where there are fewer.

    q [g * t, heads, dim], weights float32[g * t, heads] with all scales in them, one layer's
    index keys [num_pages, page_size, dim].  span.longest must be above topk.  Nothing made on the
    way has more than tile_values values, but for what is chosen and what a query needs for a page.
    """
    groups, queries = span.positions_dev.shape
    q = q.view(groups, queries, *q.shape[1:])
    weights = weights.view(groups, queries, 1, -1)
    chosen = [
        _best(span, rows, q[rows], weights[rows], key_pages, topk, step)
        for rows, step in _tiles(span, q.shape[2], key_pages, tile_values, topk)
    ]
    return torch.cat(chosen)


def _tiles(
    span: Span, heads: int, key_pages: Tensor, tile_values: int, topk: int
) -> Iterator[tuple[tuple[slice, slice], int]]:
    """Queries that are scored together, and pages of a tile."""
    groups, queries = span.positions_dev.shape
    page_size, dim = key_pages.shape[1:]
    pages = min(_MOST_KEYS, tile_values // max(heads, dim)) // page_size
    pages = max(1, min(pages, span.pages_dev.shape[1]))
    keys = pages * page_size
    # of a query: itself, its products with the keys, and the best so far beside the new ones; in a
    # decode row the keys are gathered for it alone
    each = max(heads * max(keys, dim), topk + keys, dim * keys if groups > 1 else 0)
    rows = max(1, tile_values // each)
    more_groups = max(1, rows // queries)
    for group in range(0, groups, more_groups):
        here = slice(group, group + more_groups)
        for query in range(0, queries, rows):
            yield (here, slice(query, query + rows)), pages


def _best(
    span: Span,
    rows: tuple[slice, slice],
    q: Tensor,
    weights: Tensor,
    key_pages: Tensor,
    topk: int,
    step: int,
) -> Tensor:
    """As `select`, for some of its queries, `step` pages at a time."""
    tables, positions = span.pages_dev[rows[0]], span.positions_dev[rows].unsqueeze(-1)
    groups, page_size = len(tables), key_pages.shape[1]
    flat_q = q.flatten(1, 2).float()
    best: Tensor | None = None
    for first in range(0, tables.shape[1], step):
        pages = tables[:, first : first + step]
        keys = key_pages.index_select(0, pages.reshape(-1)).view(groups, -1, q.shape[-1]).float()
        dots = torch.bmm(flat_q, keys.transpose(1, 2)).relu_().unflatten(1, q.shape[1:3])
        scores = torch.matmul(weights, dots).squeeze(-2)
        at = torch.arange(keys.shape[1], device=keys.device) + first * page_size
        ranked = _ranks(scores, at).masked_fill_(at > positions, _NOTHING)
        if best is not None:
            ranked = torch.cat((best, ranked), -1)
        best = ranked.topk(min(topk, ranked.shape[-1]), -1, sorted=False).values
    assert best is not None, "a page table without pages"
    return _positions(best).flatten(0, 1)


def _ranks(scores: Tensor, at: Tensor) -> Tensor:
    """int64 that sort as (score, earlier position first); one for each score, none equal."""
    bits = (scores + 0.0).view(torch.int32)  # 0.0: of both zeros the positive one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) + (_LOW - at)


def _positions(ranks: Tensor) -> Tensor:
    return torch.where(ranks == _NOTHING, -1, _LOW - (ranks & _LOW))
