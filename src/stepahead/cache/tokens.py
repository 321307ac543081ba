"""Token ids, laid out as the KV pages are: `tokens[page, offset]`.  Host only.

The mirror holds exactly the tokens whose KV is (or is about to be) in the same cell, so appending
a token is one indexed store, and a page's key in the prefix tree is its row.
"""

from __future__ import annotations

import numpy as np


class TokenMirror:
    """int32[num_pages, page_size] and the arithmetic of its cells.

    position p of a slot        p // page_size -> index in its page table -> page
    cell of the position        page * page_size + p % page_size
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.by_page = np.zeros((num_pages, page_size), np.int32)
        self.by_cell = self.by_page.reshape(-1)

    def write(self, pages: np.ndarray, tokens: np.ndarray) -> None:
        """Stores a sequence's tokens in its pages, from the first cell of the first page on."""
        full = len(tokens) // self.page_size
        size = self.page_size
        if full:
            self.by_page[pages[:full]] = tokens[: full * size].reshape(full, size)
        if rest := len(tokens) - full * size:
            self.by_page[pages[full], :rest] = tokens[full * size :]

    def read(self, pages: np.ndarray, start: int, end: int) -> np.ndarray:
        """The tokens at positions start..end of the sequence in `pages`, int32[end - start]."""
        first = start // self.page_size
        last = -(-end // self.page_size)
        base = first * self.page_size
        return self.by_page[pages[first:last]].reshape(-1)[start - base : end - base]
