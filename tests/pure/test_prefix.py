"""The prefix tree, through the page store, against a model that keeps whole prefixes in a dict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.cache.prefix import ROOT, PrefixTree
from stepahead.cache.store import PageStore

SIZE = 2
PAGES = 9  # with the padding page


@dataclass
class Node:
    """A page of the model: who holds it, and when it was last let go (later is larger)."""

    page: int
    holders: int = 0
    idle_since: tuple[int, int] = (0, 0)


@dataclass
class Holder:
    """A slot: its tokens, its pages, and how many of them are in the tree."""

    tokens: np.ndarray
    pages: np.ndarray
    held: int

    def prefix(self, pages: int) -> tuple[int, ...]:
        """The tokens of its first pages."""
        return tuple(self.tokens[: pages * SIZE].tolist())


class Twins:
    """The store and its model, doing the same."""

    def __init__(self) -> None:
        self.store = PageStore(PAGES, SIZE, prefix_cache=True)
        self.nodes: dict[tuple[int, ...], Node] = {}
        self.holders: list[Holder] = []
        self.now = 0

    def admit(self, tokens: list[int]) -> None:
        """A request comes: what is cached is held, the rest taken, evicting if need be."""
        array, store = np.array(tokens, np.int32), self.store
        hit = store.match(array)
        most = (len(tokens) - 1) // SIZE  # a token must be left to compute
        prefixes = [tuple(tokens[: (i + 1) * SIZE]) for i in range(most)]
        cached = 0
        while cached < most and prefixes[cached] in self.nodes:
            cached += 1
        assert hit == [self.nodes[prefix].page for prefix in prefixes[:cached]]
        store.tree.hold(hit)
        for prefix in prefixes[:cached]:
            self.nodes[prefix].holders += 1
        needed = -(-len(tokens) // SIZE) - cached
        if store.available < needed:
            store.tree.release(hit, (), array[:0])
            self._let_go(prefixes[:cached])
            return
        free = store.free.count
        fresh = store.take(needed)
        self._evict(max(0, needed - free), fresh)
        pages = np.array([*hit, *fresh.tolist()], np.int32)
        store.mirror.write(fresh, array[cached * SIZE :])
        self.holders.append(Holder(array, pages, cached))

    def publish(self, which: int, settled: int) -> None:
        """A holder offers the full pages of its first `settled` tokens."""
        if not self.holders:
            return
        one = self.holders[which % len(self.holders)]
        full = min(settled, len(one.tokens)) // SIZE
        wanted = one.held
        while wanted < full and one.prefix(wanted + 1) not in self.nodes:
            self.nodes[one.prefix(wanted + 1)] = Node(int(one.pages[wanted]), 1)
            wanted += 1
        one.held += self.store.publish(one.pages, one.held, full)
        assert one.held == wanted

    def release(self, which: int, settled: int) -> None:
        """A holder goes; the pages of its settled tokens stay, unless their content is there."""
        if not self.holders:
            return
        one = self.holders.pop(which % len(self.holders))
        full = max(one.held, min(settled, len(one.tokens)) // SIZE)
        free = self.store.free.count
        self.store.release(one.pages, one.held, full)
        for i in range(one.held, full):
            self.nodes.setdefault(one.prefix(i + 1), Node(int(one.pages[i])))
        for i in range(one.held):
            self.nodes[one.prefix(i + 1)].holders -= 1
        self._let_go([one.prefix(i + 1) for i in range(full)], held=False)
        kept = {node.page for node in self.nodes.values()}
        back = [page for page in one.pages.tolist() if page not in kept]
        assert self.store.free.count == free + len(back)

    def flush(self) -> None:
        """All that nobody holds is forgotten."""
        idle = [prefix for prefix, node in self.nodes.items() if not node.holders]
        assert self.store.flush() == len(idle)
        for prefix in idle:
            del self.nodes[prefix]

    def _let_go(self, chain: list[tuple[int, ...]], held: bool = True) -> None:
        self.now += 1
        for depth, prefix in enumerate(chain):
            self.nodes[prefix].holders -= held
            self.nodes[prefix].idle_since = self.now, -depth  # leaf first

    def _evict(self, count: int, fresh: np.ndarray) -> None:
        """The pages idle for longest go, and of one chain the leaf first."""
        idle = [(node.idle_since, p) for p, node in self.nodes.items() if not node.holders]
        for _, prefix in sorted(idle)[:count]:
            assert self.nodes.pop(prefix).page in fresh, "not the page unused for longest"

    def check(self) -> None:
        """The same pages in the tree, and none lost."""
        owned = [one.pages[one.held :] for one in self.holders]
        self.store.check(np.concatenate([np.zeros(0, np.int32), *owned]))
        assert sorted(self.store.tree.listed()) == sorted(n.page for n in self.nodes.values())
        assert len(self.store.tree) == len(self.nodes)
        idle = sum(not node.holders for node in self.nodes.values())
        assert self.store.tree.evictable == idle
        private = sum(len(pages) for pages in owned)
        assert self.store.available == PAGES - 1 - private - len(self.nodes) + idle
        for node in self.nodes.values():
            assert self.store.tree.holders[node.page] == node.holders


# two token ids: most prompts begin like another one
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
NUMBER = st.integers(0, 9)
ACTS = st.one_of(
    st.tuples(st.just("admit"), TOKENS),
    st.tuples(st.just("admit"), TOKENS),
    st.tuples(st.just("publish"), NUMBER, NUMBER),
    st.tuples(st.just("release"), NUMBER, NUMBER),
    st.tuples(st.just("flush")),
)


@settings(max_examples=300)
@given(st.lists(ACTS, min_size=8, max_size=40))
def test_the_tree_is_its_model(acts: list[tuple[str, ...]]) -> None:
    twins = Twins()
    for name, *rest in acts:
        getattr(twins, name)(*rest)
        twins.check()
    while twins.holders:
        twins.release(0, 9)
        twins.check()
    assert twins.store.available == PAGES - 1


def tokens(*pages: tuple[int, int]) -> np.ndarray:
    """int32[len(pages), SIZE]."""
    return np.array(pages, np.int32)


def test_a_page_is_found_only_below_its_own_parent() -> None:
    tree = PrefixTree(8, SIZE)
    assert tree.publish(ROOT, [1, 2], tokens((5, 5), (6, 6))) == 2
    assert tree.match(np.array([5, 5, 6, 6], np.int32), 2) == [1, 2]
    assert tree.match(np.array([6, 6, 5, 5], np.int32), 2) == []
    assert tree.match(np.array([5, 5, 6, 6], np.int32), 1) == [1]


def test_a_second_copy_stays_private_until_it_is_released() -> None:
    store = PageStore(8, SIZE, prefix_cache=True)
    one, two = store.take(2), store.take(2)
    store.mirror.write(one, np.array([5, 5, 6, 6], np.int32))
    store.mirror.write(two, np.array([5, 5, 6, 6], np.int32))
    assert store.publish(one, 0, 2) == 2
    assert store.publish(two, 0, 2) == 0
    store.release(two, 0, 2)
    store.check(np.zeros(0, np.int32))
    store.release(one, 2, 2)
    store.check(np.zeros(0, np.int32))
    assert (store.free.count, len(store.tree)) == (5, 2)


def test_a_duplicate_makes_its_twin_young_again() -> None:
    store = PageStore(4, SIZE, prefix_cache=True)
    pages = store.take(3)
    for page, token in zip(pages.tolist(), (5, 6, 5), strict=True):
        store.mirror.write(np.array([page]), np.array([token] * SIZE, np.int32))
    for i in range(3):
        store.release(pages[i : i + 1], 0, 1)
    # the second copy of 5 is free again, and the first was used after 6
    assert store.take(2).tolist() == [pages[2], pages[1]]
    assert store.match(np.array([5, 5, 0], np.int32)) == [pages[0]]


def test_what_is_held_is_never_evicted() -> None:
    store = PageStore(5, SIZE, prefix_cache=True)
    pages = store.take(2)
    store.mirror.write(pages, np.array([5, 5, 6, 6], np.int32))
    store.release(pages, 0, 2)
    hit = store.match(np.array([5, 5, 7], np.int32))
    store.tree.hold(hit)
    assert store.available == 3
    taken = store.take(3)
    assert hit[0] not in taken
    assert store.match(np.array([5, 5, 6, 6, 0], np.int32)) == hit


def test_the_tree_sees_when_it_is_unsound() -> None:
    tree = PrefixTree(8, SIZE)
    tree.publish(ROOT, [1, 2], tokens((5, 5), (6, 6)))
    tree.check()
    tree._forget([1])
    with pytest.raises(AssertionError, match="parent was evicted before it"):
        tree.check()
