"""Attention over pages where they lie, against softmax in float64 over what the pages hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.kernels.attend import attend, scratch_floats
from stepahead.kernels.emit import LANES

HEAD_DIMS = [size for size in (8, 16, 24, 32, 64, 80, 128, 136) if size % LANES == 0]
BESIDE = -7.25  # what lies behind what is written, and must stay


@dataclass(frozen=True)
class Case:
    """Some query positions that follow each other, and their pages in a pool full of what must not
    be read."""

    dtype: type[np.floating] = np.float32  # of the pool
    group: int = 1
    head_dim: int = HEAD_DIMS[0]
    kv_heads: int = 1
    kv_head: int = 0  # the first one that is asked for
    together: int = 1  # and how many
    page_size: int = 4
    rows: int = 1
    window: int = 0
    end: int = 1  # of what the first row sees
    size: float = 1.0  # of queries: large ones leave one position
    seed: int = 0

    @property
    def last(self) -> int:
        return self.end + self.rows - 1

    @property
    def pages(self) -> int:
        return -(-self.last // self.page_size)

    def begin(self, row: int) -> int:
        return max(0, self.end + row - self.window) if self.window else 0

    def alone(self, row: int) -> Case:
        return replace(self, rows=1, end=self.end + row)


class Memory:
    """What a case is given: queries, pools, a page table in random order."""

    def __init__(self, case: Case) -> None:
        generator = np.random.default_rng(case.seed)
        self.case = case
        queries = case.rows, case.together * case.group, case.head_dim
        self.q = generator.standard_normal(queries).astype(np.float32)
        self.q *= np.float32(case.size)
        many = 2 * case.pages + 3
        shape = (many, case.page_size, case.kv_heads, case.head_dim)
        # whatever is read and should not be would decide alone
        self.k, self.v = np.full(shape, 1e4, case.dtype), np.full(shape, -6e4, case.dtype)
        self.table = generator.permutation(many)[: case.pages].astype(np.int64)
        for position in range(case.begin(0), case.last):
            where = self.where(position)
            heads = slice(case.kv_head, case.kv_head + case.together)
            shape = case.together, case.head_dim
            self.k[where][heads] = generator.standard_normal(shape)
            self.v[where][heads] = generator.standard_normal(shape)

    def where(self, position: int) -> tuple[int, int]:
        """Of a position's cell: its page, and its place there."""
        size = self.case.page_size
        return int(self.table[position // size]), position % size

    def attended(self) -> np.ndarray:
        """float32[rows, together * group, head_dim] from the kernel."""
        case, (rows, queries, head_dim) = self.case, self.q.shape
        floats = scratch_floats(case.last - case.begin(0), rows * queries)
        scratch = np.full(floats + 64, BESIDE, np.float32)
        q = np.full((rows, queries + 1, head_dim), BESIDE, np.float32)
        q[:, :-1] = self.q
        out = np.full((rows, queries + 3, head_dim), BESIDE, np.float32)
        size = self.k.itemsize
        head = size * case.kv_head * case.head_dim
        attend(
            *(size, rows, q.ctypes.data, q.strides[0], case.together, case.group, head_dim),
            *(self.k.ctypes.data + head, self.v.ctypes.data + head),
            *(size * case.kv_heads * case.head_dim, case.page_size, self.table.ctypes.data),
            *(case.window, case.end, case.head_dim**-0.5, scratch.ctypes.data),
            *(out.ctypes.data, out.strides[0]),
        )
        assert (scratch[-64:] == BESIDE).all()
        assert (out[:, queries:] == BESIDE).all()
        return out[:, :queries]

    def expected(self) -> np.ndarray:
        """The same in float64."""
        case = self.case
        found = np.empty(self.q.shape)
        shape = case.pages * case.page_size, case.kv_heads, case.head_dim
        k, v = (pool[self.table].reshape(shape).astype(np.float64) for pool in (self.k, self.v))
        for row, query in np.ndindex(self.q.shape[:2]):
            here = slice(case.begin(row), case.end + row), case.kv_head + query // case.group
            scores = k[here] @ self.q[row, query].astype(np.float64) * case.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            found[row, query] = weights @ v[here] / weights.sum()
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    kv_head = draw(st.integers(0, kv_heads - 1))
    end = draw(st.integers(1, 70))
    return Case(
        dtype=draw(st.sampled_from([np.float32, np.float16])),
        group=draw(st.one_of(st.just(1), st.integers(1, 8))),
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        kv_heads=kv_heads,
        kv_head=kv_head,
        together=draw(st.integers(1, kv_heads - kv_head)),
        page_size=draw(st.integers(1, 16)),
        rows=draw(st.one_of(st.just(1), st.integers(2, 7))),
        window=draw(st.one_of(st.just(0), st.integers(1, end))),
        end=end,
        size=draw(st.sampled_from([0.0, 1.0, 1.0, 30.0])),
        seed=draw(st.integers(0, 9999)),
    )


@settings(max_examples=250)
@given(cases())
def test_a_query_sees_its_positions_and_no_others(case: Case) -> None:
    memory = Memory(case)
    atol = 4e-6 * max(1.0, case.size)
    np.testing.assert_allclose(memory.attended(), memory.expected(), rtol=0, atol=atol)


@pytest.mark.parametrize("length", [1000, 4096, 5003])
def test_a_query_sees_a_long_context(length: int) -> None:
    memory = Memory(
        Case(np.float32, 2, HEAD_DIMS[-1], 2, 1, 1, page_size=16, end=length, seed=length)
    )
    np.testing.assert_allclose(memory.attended(), memory.expected(), rtol=0, atol=4e-6)


@settings(max_examples=40)
@given(cases(), st.integers(1, 16))
def test_what_is_attended_to_is_the_same_to_the_bit_in_any_pages_of_a_size(
    case: Case, seed: int
) -> None:
    """Which pages a row was given depends on who was there before it."""
    memory = Memory(case)
    other = Memory(case)
    moved = np.random.default_rng(seed).permutation(len(memory.k))
    other.k[moved], other.v[moved] = memory.k, memory.v
    other.table = moved[memory.table]
    assert (memory.attended() == other.attended()).all()


@settings(max_examples=100)
@given(cases())
def test_rows_that_go_together_get_to_the_bit_what_each_gets_alone(case: Case) -> None:
    """Where a chunk begins and ends, and how many threads share it out, decides who goes with
    whom; what the others see, and what they get, is theirs alone."""
    memory = Memory(case)
    together = memory.attended()
    for row in range(case.rows):
        alone = Memory(case.alone(row))
        alone.q, alone.table = memory.q[row : row + 1], memory.table
        alone.k, alone.v = memory.k.copy(), memory.v.copy()
        for position in (*range(case.begin(0), case.begin(row)), *range(case.end + row, case.last)):
            alone.k[alone.where(position)] = alone.v[alone.where(position)] = np.nan
        assert alone.attended().tobytes() == together[row].tobytes()


@settings(max_examples=40)
@given(cases())
def test_heads_of_a_group_do_not_see_each_other(case: Case) -> None:
    memory = Memory(case)
    together = memory.attended()
    for head in range(memory.q.shape[1]):
        kv_head = case.kv_head + head // case.group
        alone = Memory(replace(case, group=1, together=1, kv_head=kv_head))
        alone.q, alone.k, alone.v = memory.q[:, head : head + 1], memory.k, memory.v
        alone.table = memory.table
        assert (alone.attended() == together[:, head : head + 1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_not_finite_spoils_no_other_of_its_group(bad: float) -> None:
    case = Case(np.float32, 3, HEAD_DIMS[1], 1, 0, 1, page_size=4, end=19)
    memory, spoiled = Memory(case), Memory(case)
    spoiled.q[0, 1, 3] = bad
    found, expected = spoiled.attended()[0], memory.attended()[0]
    assert (found[[0, 2]] == expected[[0, 2]]).all()
    assert not np.isfinite(found[1]).all()
