"""Paged attention against softmax written out, and its rows' independence of one another."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from stepahead.cache.pools import KVPool
from stepahead.model.attention.paged import HeadShape, group_rows, lay_out
from stepahead.model.batch import ChunkRow, StepInputs

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 3, 8, 16
SHAPE = HeadShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32, PAGE)
EMPTY = torch.empty(0, dtype=torch.int64)


def filled_pool(num_pages: int) -> KVPool:
    torch.manual_seed(num_pages)
    pool = KVPool(1, num_pages, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    pool.k[0].normal_()
    pool.v[0].normal_()
    return pool


def written_out(
    q: Tensor, pool: KVPool, pages: Tensor, length: int, shape: HeadShape = SHAPE
) -> Tensor:
    """[heads, head_dim] in float64: softmax of one query over what it sees of a row's first
    `length` cells."""
    begin = 0 if shape.window is None else max(0, length - shape.window)
    scale = HEAD_DIM**-0.5 if shape.scale is None else shape.scale
    k = pool.k[0][pages].flatten(0, 1)[begin:length].double()
    v = pool.v[0][pages].flatten(0, 1)[begin:length].double()
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        weights = torch.softmax(k[:, kv_head] @ q[head].double() * scale, 0)
        out.append(weights @ v[:, kv_head])
    return torch.stack(out)


def decode_inputs(table: Tensor, lens: list[int]) -> StepInputs:
    n = len(lens)
    zeros = torch.zeros(n, dtype=torch.int64)
    bounds = np.array(lens)
    return StepInputs(zeros, zeros, zeros, n, table, torch.tensor(lens), bounds, max(lens), ())


def page_table(lens: list[int], num_pages: int) -> Tensor:
    counts = [-(-length // PAGE) for length in lens]
    free = (torch.randperm(num_pages - 1) + 1).tolist()
    table = torch.zeros((len(lens), max(counts)), dtype=torch.int64)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    return table


@pytest.mark.parametrize(
    "lens",
    [[1], [16], [17], [1, 16, 200, 33], [1500, 40, 1, 700, 41, 650, 90, 1400]],
    ids=str,
)
def test_decode_rows(lens: list[int]) -> None:
    pool = filled_pool(400)
    table = page_table(lens, 400)
    q = torch.randn(len(lens), HEADS, HEAD_DIM)
    step = lay_out(decode_inputs(table, lens), SHAPE, 400)
    out = step.attend(q, q, q, pool.k[0], pool.v[0]).view(-1, HEADS, HEAD_DIM)
    for row, length in enumerate(lens):
        expected = written_out(q[row], pool, table[row], length)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=2e-6)
    assert len(step.groups) == (3 if max(lens) == 1500 else 1)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 100, 2000])
def test_decode_rows_see_a_window(window: int) -> None:
    """They read no more pages than a window can touch, wherever in a page it begins."""
    lens = [1, 16, 17, 33, 47, 64, 200, 333]
    shape = replace(SHAPE, window=window, scale=0.3)
    pool = filled_pool(400)
    table = page_table(lens, 400)
    q = torch.randn(len(lens), HEADS, HEAD_DIM)
    step = lay_out(decode_inputs(table, lens), shape, 400)
    out = step.attend(q, q, q, pool.k[0], pool.v[0]).view(-1, HEADS, HEAD_DIM)
    for row, length in enumerate(lens):
        expected = written_out(q[row], pool, table[row], length, shape)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=2e-6)
    read = sum(len(group.pages_dev) for group in step.groups) // len(lens)
    assert read <= min(21, (window - 1 + PAGE - 1) // PAGE + 1)


@pytest.mark.parametrize("window", [1, 3, 10, 16, 24, 44, 60])
@pytest.mark.parametrize("start", [0, 16, 43])
def test_chunk_rows_see_a_window(window: int, start: int) -> None:
    shape = replace(SHAPE, window=window, scale=0.3)
    pool = filled_pool(20)
    pages = torch.tensor([7, 3, 19, 1])[: -(-(start + 10) // PAGE)]
    chunk = ChunkRow(first=0, count=10, context_len=start + 10, pages_dev=pages)
    zeros = torch.zeros(10, dtype=torch.int64)
    none = np.zeros(0, np.int64)
    inputs = StepInputs(zeros, zeros, zeros, 0, EMPTY.view(0, 0), EMPTY, none, 0, (chunk,))
    q = torch.randn(10, HEADS, HEAD_DIM)
    here = slice(start, start + 10)
    cells = pool.k[0][pages].flatten(0, 1)[here], pool.v[0][pages].flatten(0, 1)[here]
    step = lay_out(inputs, shape, 20)
    out = step.attend(q, *cells, pool.k[0], pool.v[0])
    for place in range(10):
        expected = written_out(q[place], pool, pages, start + place + 1, shape)
        ours = out[place].view(HEADS, HEAD_DIM).double()
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    (read,) = step.chunks
    assert len(read.pages_dev) == len(pages) - max(0, start - window + 1) // PAGE


def test_chunk_rows() -> None:
    """A chunk in the middle sees the pages before it and, in itself, only what came before."""
    pool = filled_pool(20)
    pages = torch.tensor([7, 3, 19, 1])
    chunk = ChunkRow(first=0, count=10, context_len=53, pages_dev=pages)
    zeros = torch.zeros(10, dtype=torch.int64)
    none = np.zeros(0, np.int64)
    inputs = StepInputs(zeros, zeros, zeros, 0, EMPTY.view(0, 0), EMPTY, none, 0, (chunk,))
    q = torch.randn(10, HEADS, HEAD_DIM)
    cells = pool.k[0][pages].flatten(0, 1)[43:53], pool.v[0][pages].flatten(0, 1)[43:53]
    out = lay_out(inputs, SHAPE, 20).attend(q, *cells, pool.k[0], pool.v[0])
    for place in range(10):
        expected = written_out(q[place], pool, pages, 44 + place)
        ours = out[place].view(HEADS, HEAD_DIM).double()
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone, or padded to a neighbour's length: the same to the last bits of a float32."""
    pool = filled_pool(400)
    lens = [100, 900, 1, 333]
    table = page_table(lens, 400)
    q = torch.randn(4, HEADS, HEAD_DIM)
    step = lay_out(decode_inputs(table, lens), SHAPE, 400)
    together = step.attend(q, q, q, pool.k[0], pool.v[0])
    for row, length in enumerate(lens):
        alone = lay_out(decode_inputs(table[row : row + 1], [length]), SHAPE, 400)
        one = q[row : row + 1]
        single = alone.attend(one, one, one, pool.k[0], pool.v[0])
        torch.testing.assert_close(together[row : row + 1], single, rtol=0, atol=1e-6)


def test_an_empty_row_spoils_nothing() -> None:
    """A padding row may come with length 0: it must stay finite, for its NaN would be written."""
    pool = filled_pool(10)
    q = torch.randn(2, HEADS, HEAD_DIM)
    step = lay_out(decode_inputs(torch.tensor([[0], [4]]), [0, 5]), SHAPE, 10)
    out = step.attend(q, q, q, pool.k[0], pool.v[0])
    assert out.isfinite().all()
    expected = written_out(q[1], pool, torch.tensor([4]), 5)
    torch.testing.assert_close(out[1].view(HEADS, HEAD_DIM).double(), expected, rtol=0, atol=2e-6)


def test_groups_hold_every_row_once_and_bound_the_padding() -> None:
    lens = [1 + (37 * i) % 900 for i in range(256)]
    groups = group_rows(lens, SHAPE)
    rows = list(itertools.chain.from_iterable(rows or [] for rows, _ in groups))
    assert sorted(rows) == list(range(256))
    for members, longest in groups:
        assert members is not None
        assert longest == max(lens[row] for row in members)
    padded = sum(len(members or []) * longest for members, longest in groups)
    assert padded < 1.2 * sum(lens)


def test_groups_bound_the_memory() -> None:
    wide = HeadShape(32, 32, 128, torch.float32, PAGE)
    groups = group_rows([4000] * 8, wide)
    assert [len(rows or []) for rows, _ in groups] == [1] * 8
    assert group_rows([4000] * 8, SHAPE) == [(None, 4000)]
    assert group_rows([], SHAPE) == []


def test_the_pool_begins_with_zeros_and_keeps_what_is_written() -> None:
    pool = KVPool(2, 5, PAGE, KV_HEADS, HEAD_DIM, torch.bfloat16)
    assert [tuple(pages.shape) for pages in pool.k] == [(5, PAGE, KV_HEADS, HEAD_DIM)] * 2
    assert not any(pages.any() for pages in (*pool.k, *pool.v))
    k, v = torch.randn(2, 2, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    pool.write(1, torch.tensor([3 * PAGE + 2, 4 * PAGE]), k, v)
    assert torch.equal(pool.k[1][3, 2], k[0])
    assert torch.equal(pool.v[1][4, 0], v[1])
    assert not pool.k[0].any()
    assert int(pool.v[1].any(-1).any(-1).sum()) == 2


def test_a_page_stays_finite_whatever_is_written() -> None:
    # one request with NaN states once spoiled whoever got its pages after it
    pool = KVPool(1, 2, 4, 1, 2, torch.float32)
    bad = torch.tensor([[[float("nan"), float("inf")]], [[-float("inf"), 1.0]]])
    pool.write(0, torch.tensor([4, 5]), bad.clone(), bad.clone())
    for pages in (pool.k[0], pool.v[0]):
        assert torch.isfinite(pages).all()
        assert pages[1, 0, 0, 0] == 0.0
        assert pages[1, 1, 0, 1] == 1.0
