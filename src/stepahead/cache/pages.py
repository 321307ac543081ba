"""Which physical pages are free.  Host bookkeeping only; the memory itself is in pools.py."""

from __future__ import annotations

import numpy as np


class FreePages:
    """A stack of free page numbers.  Page 0 is padding and never handed out.

    The last page given back is the first taken again: it is the warmest in the caches.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self.count = num_pages - 1

    def take(self, count: int) -> np.ndarray:
        """`count` pages as int32[count]; the caller has checked that they are there."""
        assert 0 <= count <= self.count, "took more pages than are free"
        self.count -= count
        return self._stack[self.count : self.count + count].copy()

    def give(self, pages: np.ndarray) -> None:
        """Takes pages back; each must be one that `take` handed out."""
        end = self.count + len(pages)
        assert end <= len(self._stack), "gave back more pages than there are"
        self._stack[self.count : end] = pages
        self.count = end

    def listed(self) -> np.ndarray:
        """The free pages, for checks."""
        return self._stack[: self.count]
