"""Free pages, the mirror of tokens, and the store that balances them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.cache.pages import FreePages
from stepahead.cache.store import PageStore
from stepahead.cache.tokens import TokenMirror

NONE = np.zeros(0, np.int32)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_free_pages_hand_out_each_page_once(acts: list[tuple[bool, int]]) -> None:
    free, taken = FreePages(9), []
    for take, count in acts:
        if take and count <= free.count:
            taken += free.take(count).tolist()
        elif not take:
            back, taken = taken[:count], taken[count:]
            free.give(np.array(back, np.int32))
        # page 0 is padding
        assert sorted([*taken, *free.listed().tolist()]) == list(range(1, 9))
        assert free.count == 8 - len(taken)


def test_the_warmest_page_is_taken_first() -> None:
    free = FreePages(6)
    free.take(5)
    free.give(np.array([2, 4], np.int32))
    assert free.take(1).tolist() == [4]


def test_taken_pages_are_a_copy() -> None:
    free = FreePages(4)
    taken = free.take(2)
    free.give(taken)
    again = free.take(1)
    free.give(again)
    assert len({*taken.tolist()}) == 2


def test_more_than_there_is_cannot_be_taken_or_given() -> None:
    free = FreePages(3)
    with pytest.raises(AssertionError, match="more pages than are free"):
        free.take(3)
    with pytest.raises(AssertionError, match="more pages than there are"):
        free.give(np.array([1], np.int32))


@given(
    size=st.sampled_from([1, 2, 4, 16]),
    length=st.integers(1, 40),
    cut=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    seed=st.integers(0, 99),
)
def test_the_mirror_reads_what_was_written_through_any_pages(
    size: int, length: int, cut: tuple[int, int], seed: int
) -> None:
    mirror, order = TokenMirror(64, size), np.random.default_rng(seed)
    pages = order.permutation(np.arange(1, 64, dtype=np.int32))[: -(-length // size)]
    written = order.integers(0, 1000, length).astype(np.int32)
    mirror.write(pages, written)
    start, end = sorted(min(place, length) for place in cut)
    assert mirror.read(pages, start, end).tolist() == written[start:end].tolist()
    cell = pages[(length - 1) // size] * size + (length - 1) % size
    assert mirror.by_cell[cell] == written[-1]
    assert not mirror.by_page[0].any(), "wrote into the padding page"


def test_without_a_cache_nothing_is_kept() -> None:
    store = PageStore(6, 2, prefix_cache=False)
    pages = store.take(2)
    store.mirror.write(pages, np.array([5, 5, 6, 6], np.int32))
    assert store.publish(pages, 0, 2) == 0
    store.check(pages)
    store.release(pages, 0, 2)
    assert store.match(np.array([5, 5, 6, 6, 7], np.int32)) == []
    assert (store.free.count, len(store.tree)) == (5, 0)


def test_cached_pages_are_evicted_only_when_none_are_free() -> None:
    store = PageStore(6, 2, prefix_cache=True)
    pages = store.take(2)
    store.mirror.write(pages, np.array([5, 5, 6, 6], np.int32))
    store.release(pages, 0, 2)
    store.take(3)
    assert len(store.tree) == 2
    assert store.available == 2
    # the leaf goes first: its parent may still be found alone
    store.take(1)
    assert store.match(np.array([5, 5, 6, 6, 7], np.int32)) == [pages[0]]


@pytest.mark.parametrize("tail", [1, 2])
def test_a_hit_leaves_a_token_to_compute(tail: int) -> None:
    store = PageStore(6, 2, prefix_cache=True)
    pages = store.take(1)
    store.mirror.write(pages, np.array([5, 5], np.int32))
    store.release(pages, 0, 1)
    assert len(store.match(np.array([5] * (1 + tail), np.int32))) == tail - 1


def test_a_lost_and_a_doubled_page_are_seen() -> None:
    store = PageStore(6, 2, prefix_cache=True)
    pages = store.take(2)
    store.check(pages)
    with pytest.raises(AssertionError, match="4 pages are accounted for, 5 exist"):
        store.check(pages[:1])
    with pytest.raises(AssertionError, match="two owners"):
        store.check(np.array([pages[0], pages[0]], np.int32))
    store.free.give(pages)
    store.check(NONE)
