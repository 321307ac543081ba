"""Free pages and the prefix tree as one store: what can be had, and where pages go back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepahead.cache.pages import FreePages
from stepahead.cache.prefix import ROOT, PrefixTree
from stepahead.cache.tokens import TokenMirror


class PageStore:
    """Every page is free, in the tree, or privately owned by a slot.  Page 0 is padding."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.free = FreePages(num_pages)
        self.tree = PrefixTree(num_pages, page_size)
        self.mirror = TokenMirror(num_pages, page_size)
        self.changes = 0  # counts what may let somebody in: pages published, pages given back
        self._cached = prefix_cache

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now: free, or evictable."""
        return self.free.count + self.tree.evictable

    def take(self, count: int) -> np.ndarray:
        """`count` pages, int32[count], evicting cached ones only when none are free."""
        lacking = count - self.free.count
        if lacking > 0:
            self.free.give(self.tree.evict(lacking))
        return self.free.take(count)

    def match(self, tokens: np.ndarray) -> list[int]:
        """Cached pages that `tokens` begins with; at least one token is left to compute."""
        most = (len(tokens) - 1) // self.page_size
        return self.tree.match(tokens, most) if self._cached and most else []

    def publish(self, pages: np.ndarray, first: int, end: int) -> int:
        """Offers a slot's pages first..end to the tree; returns how many were taken up.

        The slot holds pages[:first] in the tree already.
        """
        if not self._cached or first >= end:
            return 0
        parent = int(pages[first - 1]) if first else ROOT
        own = pages[first:end]
        taken = self.tree.publish(parent, own.tolist(), self.mirror.by_page[own])
        self.changes += taken > 0
        return taken

    def release(self, pages: np.ndarray, held: int, full: int) -> None:
        """A slot gives up all its pages: `held` are in the tree, `full` hold settled tokens."""
        self.changes += 1
        if not self._cached:
            self.free.give(pages)
            return
        own = pages[held:full]
        duplicates: Sequence[int] = self.tree.release(
            pages[:held].tolist(), own.tolist(), self.mirror.by_page[own]
        )
        self.free.give(pages[max(held, full) :])
        if duplicates:
            self.free.give(np.array(duplicates, np.int32))

    def flush(self) -> int:
        """Empties the tree of all that nobody holds; returns how many pages that freed."""
        self.changes += 1
        pages = self.tree.clear()
        self.free.give(pages)
        return len(pages)

    def check(self, owned: np.ndarray) -> None:
        """AssertionError unless free, cached and `owned` (private) pages are all pages, once."""
        self.tree.check()
        everything = np.concatenate([self.free.listed(), self.tree.listed(), owned])
        assert len(everything) == self.num_pages - 1, (
            f"{len(everything)} pages are accounted for, {self.num_pages - 1} exist"
        )
        assert len(np.unique(everything)) == len(everything), "a page has two owners"
