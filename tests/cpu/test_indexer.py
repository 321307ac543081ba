"""What sparse attention chooses: whatever the tiles, whoever is beside, ties and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepahead.model.attention.indexer import Span, _ranks, select

PAGES, HEADS, DIM = 40, 3, 4


def whole_numbers(generator: torch.Generator, *shape: int) -> Tensor:
    """Small ones: sums are exact in whatever order, and many scores are equal."""
    return torch.randint(-2, 3, shape, generator=generator).float()


def span_of(
    generator: torch.Generator, groups: int, queries: int, page_size: int, longest: int
) -> Span:
    width = -(-longest // page_size)
    tables = torch.stack(
        [torch.randperm(PAGES - 1, generator=generator)[:width] + 1 for _ in range(groups)]
    )
    if groups == 1:  # a chunk: one position after the other
        positions = torch.arange(longest - queries, longest).unsqueeze(0)
    else:
        positions = torch.randint(0, longest, (groups, queries), generator=generator)
        positions[0, 0] = longest - 1
    return Span(slice(0, groups * queries), tables, positions, longest)


def written_out(span: Span, q: Tensor, weights: Tensor, pages: Tensor, topk: int) -> list[set[int]]:
    """Scores of one query after the other; of equal ones the earlier position."""
    chosen = []
    for query, position in enumerate(span.positions_dev.flatten().tolist()):
        table = span.pages_dev[query // span.positions_dev.shape[1]]
        keys = pages[table].flatten(0, 1)[: position + 1]
        scores = (torch.relu(keys @ q[query].T) @ weights[query]).tolist()
        order = sorted(range(position + 1), key=lambda at: (-scores[at], at))
        chosen.append(set(order[:topk]))
    return chosen


def as_sets(positions: Tensor) -> list[set[int]]:
    """What was chosen, without what stands for nothing; nothing twice."""
    rows = [[at for at in row if at >= 0] for row in positions.tolist()]
    assert all(len(row) == len({*row}) for row in rows)
    return [{*row} for row in rows]


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    rows=st.sampled_from([(1, 1), (1, 5), (1, 17), (4, 1), (2, 3)]),
    page_size=st.sampled_from([1, 2, 4, 16]),
    topk=st.integers(1, 12),
    beyond=st.integers(1, 20),
    tile_values=st.sampled_from([1, 30, 100, 500, 1 << 20]),
)
def test_any_tiles_choose_the_same(
    seed: int, rows: tuple[int, int], page_size: int, topk: int, beyond: int, tile_values: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    longest = max(topk + beyond, rows[1])
    span = span_of(generator, *rows, page_size, longest)
    count = rows[0] * rows[1]
    q = whole_numbers(generator, count, HEADS, DIM)
    weights = whole_numbers(generator, count, HEADS)
    pages = whole_numbers(generator, PAGES, page_size, DIM)
    found = select(span, q, weights, pages, topk, tile_values)
    assert found.shape == (count, topk)
    assert as_sets(found) == written_out(span, q, weights, pages, topk)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_scores_of_any_size_and_sign_are_in_order(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    span = span_of(generator, 1, 3, 4, 90)
    q = torch.randn(3, HEADS, DIM, generator=generator)
    weights = torch.randn(3, HEADS, generator=generator) * scale
    pages = torch.randn(PAGES, 4, DIM, generator=generator)
    found = as_sets(select(span, q, weights, pages, 20, 700))
    assert found == written_out(span, q, weights, pages, 20)


def test_nothing_and_minus_nothing_are_equal() -> None:
    """relu makes zeros, and a product with a negative weight may make them negative."""
    ranks = _ranks(torch.tensor([-0.0, 0.0, -0.0, 1e-45, -1e-45]), torch.arange(5))
    assert ranks.argsort(descending=True).tolist() == [3, 0, 1, 2, 4]


class Largest(TorchDispatchMode):
    """The most values of any tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.values = max(self.values, *sizes, 0)
        return out


@pytest.mark.parametrize("rows", [(1, 60), (60, 1)], ids=str)
def test_scores_are_never_made_beyond_a_tile(rows: tuple[int, int]) -> None:
    """Whole they would be 60 tokens x 2,000 positions x 16 heads; one token's alone are 32,000."""
    generator = torch.Generator().manual_seed(2)
    tables = torch.randint(0, 40, (rows[0], 125), generator=generator)
    positions = (1940 + torch.arange(60)).view(rows)
    span = Span(slice(0, 60), tables, positions, 2000)
    q = torch.randn(60, 16, 8, generator=generator)
    weights = torch.randn(60, 16, generator=generator)
    pages = torch.randn(40, 16, 8, generator=generator)
    assert max(x.numel() for x in (tables, q, pages)) < 8000
    with Largest() as largest:
        found = select(span, q, weights, pages, 24, tile_values=8000)
    assert largest.values <= 8000
    assert as_sets(found) == as_sets(select(span, q, weights, pages, 24))
