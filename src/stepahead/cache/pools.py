"""The memory that holds keys and values, in pages. Knows neither requests nor who owns a page.

Every cell is finite from the start and stays so: attention reads cells past a row's end with weight
zero, and zero times NaN is NaN.  Without that, a request whose own states overflow would spoil all
who get its pages after it.

On the CPU a pool is memory that the kernel gives, zeroed, at its first use: what no row has used is
not resident, and to start costs the same whatever the pool's size.
"""

from __future__ import annotations

import mmap
import sys
from math import prod

import torch
from torch import Tensor


class KVPool:
    """Keys and values of all layers, mapped once and zero.

    `k[layer]` and `v[layer]` are [num_pages, page_size, num_kv_heads, head_dim].
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.k = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self._k_cells = [pages.flatten(0, 1) for pages in self.k]
        self._v_cells = [pages.flatten(0, 1) for pages in self.v]

    def write(self, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [T, num_kv_heads, head_dim], in `cells`, int64[T] = page * size + offset.

        NaN becomes zero and infinity the largest number, in k and v too.  Where a cell is named
        twice (padding), either value may stay.
        """
        k.nan_to_num_()
        v.nan_to_num_()
        self._k_cells[layer].index_copy_(0, cells, k)
        self._v_cells[layer].index_copy_(0, cells, v)


class LatentPool:
    """Two groups of page tensors under one page table, mapped once and zero.

    `rows[layer]`  [num_pages, page_size, row_values], what all heads of a layer read
    `keys[layer]`  [num_pages, page_size, key_values] of the layers that own an indexer, for which a
                   page id means the same positions

    A page that is shared, freed or evicted is so in both: whoever holds a page id has all of it.
    """

    def __init__(
        self,
        indexers: tuple[bool, ...],
        num_pages: int,
        page_size: int,
        row_values: int,
        key_values: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`indexers`: for each layer whether it owns an indexer."""

        def pages(values: int) -> Tensor:
            return _zeros((num_pages, page_size, values), dtype, device)

        self.page_size = page_size
        self.rows = [pages(row_values) for _ in indexers]
        self.keys = {layer: pages(key_values) for layer, owns in enumerate(indexers) if owns}

    def write_rows(self, layer: int, cells: Tensor, rows: Tensor) -> None:
        """Store rows [T, row_values] in `cells`, int64[T], as `KVPool.write` does."""
        _store(self.rows[layer], cells, rows)

    def write_keys(self, layer: int, cells: Tensor, keys: Tensor) -> None:
        """Store keys [T, key_values] in `cells`, int64[T], as `KVPool.write` does."""
        _store(self.keys[layer], cells, keys)


def _store(pages: Tensor, cells: Tensor, values: Tensor) -> None:
    values.nan_to_num_()
    pages.flatten(0, 1).index_copy_(0, cells, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; MemoryError or torch's own error when they can't be had."""
    nbytes = prod(shape) * dtype.itemsize
    # torch.zeros writes to all of its memory
    if torch.device(device).type != "cpu" or not nbytes or sys.platform == "win32":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        # private, else it counts as shared memory
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes of KV pool: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
