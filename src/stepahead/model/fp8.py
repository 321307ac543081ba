"""Weights in fp8 (e4m3) with one float32 scale for each block of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = "_scale_inv"  # what a scale's name has more than its weight's


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> list[int]:
    """[ceil(rows / block rows), ceil(columns / block columns)] of a matrix."""
    return [-(-size // of) for size, of in zip(shape, block, strict=True)]


def dequantize_into(target: Tensor, values: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
    """target [rows, columns] = values, float8_e4m3fn, times the scale of each one's block.

    One row of blocks at a time: a whole matrix in float32 would be four times its file.
    """
    rows, columns = block
    for place, begin in enumerate(range(0, len(values), rows)):
        wide = scales[place].float().repeat_interleave(columns)[: values.shape[1]]
        target[begin : begin + rows].copy_(values[begin : begin + rows].to(torch.float32) * wide)
