"""The memory that holds keys and values, in pages. Knows neither requests nor who owns a page.

Every cell is finite from the start and stays so: attention reads cells past a row's end with weight
zero, and zero times NaN is NaN.  Without that, a request whose own states overflow would spoil all
who get its pages after it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Keys and values of all layers, allocated once and zero.

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
        self.page_size = page_size
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
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
