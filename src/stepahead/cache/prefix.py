"""The prefix tree: full pages of tokens that a later prompt may begin with.  Host only.

A node is a page.  It is found by (parent page, the bytes of its tokens), so a look-up is exact:
no hash can collide.  A page in use has `holders > 0`; a page with none stays, evictable, in
least-recently-used order.

Why eviction never orphans a child: whoever holds a page holds its ancestors, and `release` lists
a chain leaf first.  So in LRU order each page comes before its ancestors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ROOT = 0  # the padding page: parent of all first pages

_Key = tuple[int, bytes]


class PrefixTree:
    """Pages by content.  `num_pages` counts the padding page too."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_bytes = page_size * 4
        self._index: dict[_Key, int] = {}
        self._key: list[_Key | None] = [None] * num_pages
        self.holders = [0] * num_pages  # a list: chains are short, and scalars cheaper there
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def evictable(self) -> int:
        """Pages in the tree that nobody holds."""
        return len(self._idle)

    def match(self, tokens: np.ndarray, most: int) -> list[int]:
        """Pages that hold the first tokens of int32 `tokens`, at most `most`.  Changes nothing."""
        data, width = tokens[: most * self._page_bytes // 4].tobytes(), self._page_bytes
        pages: list[int] = []
        parent = ROOT
        for first in range(0, most * width, width):
            page = self._index.get((parent, data[first : first + width]))
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder for each page of a chain: none of them can be evicted."""
        holders = self.holders
        for page in pages:
            if not holders[page]:
                del self._idle[page]
            holders[page] += 1

    def publish(self, parent: int, pages: Sequence[int], tokens: np.ndarray) -> int:
        """Adds a holder's own pages below `parent`, which it holds.  Returns how many went in.

        `tokens` int32[len(pages), page_size].  Stops at the first page whose content is there
        already: the holder goes on with its own copy, private until it is released.
        """
        data, width = tokens.tobytes(), self._page_bytes
        for i, page in enumerate(pages):
            key = (parent, data[i * width : (i + 1) * width])
            if key in self._index:
                break
            self._index[key] = page
            self._key[page] = key
            self.holders[page] += 1
            parent = page
        else:
            return len(pages)
        return i

    def release(self, held: Sequence[int], own: Sequence[int], tokens: np.ndarray) -> list[int]:
        """A holder lets go of its chain: `held` pages in the tree, then full pages of its `own`.

        `tokens` int32[len(own), page_size].  Own pages enter the tree unless their content is
        there; the duplicates are returned, for the free list.
        """
        chain = list(held)
        for page in chain:
            self.holders[page] -= 1
        duplicates: list[int] = []
        parent = chain[-1] if chain else ROOT
        data, width = tokens.tobytes(), self._page_bytes
        for i, page in enumerate(own):
            key = (parent, data[i * width : (i + 1) * width])
            known = self._index.setdefault(key, page)
            if known == page:
                self._key[page] = key
            else:
                duplicates.append(page)
            chain.append(known)
            parent = known
        self._touch(chain)
        return duplicates

    def _touch(self, chain: list[int]) -> None:
        # leaf first: an ancestor must never be evicted before its child
        idle, holders = self._idle, self.holders
        for page in reversed(chain):
            if not holders[page]:
                idle[page] = None
                idle.move_to_end(page)

    def evict(self, count: int) -> np.ndarray:
        """Forgets the `count` pages unused for longest; returns them as int32[count]."""
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self._forget(pages)
        return np.array(pages, np.int32)

    def clear(self) -> np.ndarray:
        """Forgets every page that nobody holds; returns them as int32[n]."""
        return self.evict(len(self._idle))

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            key = self._key[page]
            assert key is not None, "evicted a page that is not in the tree"
            del self._index[key]
            self._key[page] = None

    def listed(self) -> np.ndarray:
        """All pages in the tree, for checks."""
        return np.fromiter(self._index.values(), np.int32, len(self._index))

    def check(self) -> None:
        """Raises AssertionError when the tree is not sound."""
        pages = set(self._index.values())
        assert len(pages) == len(self._index), "a page stands twice in the tree"
        assert all(parent == ROOT or parent in pages for parent, _ in self._index), (
            "a page's parent was evicted before it"
        )
        idle = {page for page in pages if not self.holders[page]}
        assert idle == set(self._idle), "the evictable list and the holders disagree"
        assert min(self.holders) >= 0, "a page has fewer than no holders"
