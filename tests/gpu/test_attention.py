"""Attention on a real GPU against the CPU's.  Not yet run on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stepahead.model.attention import paged, varlen
from stepahead.model.attention.paged import HeadShape
from stepahead.model.batch import ChunkRow, StepInputs

PLACE = torch.device("cuda", 0)


def step(shape: HeadShape, lens: list[int], chunks: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Inputs, and q, k, v and both pools, on the CPU; chunks are (start, count)."""
    draw = np.random.default_rng(len(lens))
    free = (draw.permutation(200) + 1).tolist()
    width = -(-max(lens) // shape.page_size)
    pools = [
        torch.randn(201, shape.page_size, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        for _ in "kv"
    ]
    table = torch.zeros(len(lens), width, dtype=torch.int64)
    for row, length in enumerate(lens):
        count = -(-length // shape.page_size)
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    rows, tokens = [], len(lens)
    q_rows = [torch.randn(len(lens), shape.num_heads, shape.head_dim)]
    own = [[torch.randn(len(lens), shape.num_kv_heads, shape.head_dim)] for _ in "kv"]
    for start, count in chunks:
        end = start + count
        pages = torch.tensor([free.pop() for _ in range(-(-end // shape.page_size))])
        rows.append(ChunkRow(tokens, count, end, pages))
        tokens += count
        q_rows.append(torch.randn(count, shape.num_heads, shape.head_dim))
        for parts, pool in zip(own, pools, strict=True):
            parts.append(pool[pages].flatten(0, 1)[start:end])
    zeros = torch.zeros(tokens, dtype=torch.int64)
    bounds = np.array(lens)
    inputs = StepInputs(
        *(zeros, zeros, zeros, len(lens), table, torch.tensor(lens)),
        bounds,
        max(lens),
        tuple(rows),
    )
    return inputs, torch.cat(q_rows).to(shape.dtype), *(torch.cat(p) for p in own), *pools


def moved(inputs: StepInputs) -> StepInputs:
    """The same on the GPU."""
    tensors = {
        field.name: value.to(PLACE)
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    chunks = tuple(
        dataclasses.replace(chunk, pages_dev=chunk.pages_dev.to(PLACE)) for chunk in inputs.chunks
    )
    return dataclasses.replace(inputs, **tensors, chunks=chunks)


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [[], [(0, 40), (300, 17)]], ids=["decode", "mixed"])
def test_a_step_gives_what_the_cpu_gives(
    page_size: int, dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    shape = HeadShape(8, 2, 64, dtype, page_size)
    inputs, *arrays = step(shape, [1, 700, 33, 256], chunks)
    exact = HeadShape(8, 2, 64, torch.float32, page_size)
    floats = [array.float() for array in arrays]
    expected = paged.lay_out(inputs, exact, len(floats[-1])).attend(*floats)
    here = moved(inputs)
    on_gpu = [array.to(PLACE) for array in arrays]
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for found in (
        varlen.lay_out(here, shape).attend(*on_gpu),
        varlen.gather(here, shape).attend(*on_gpu),
    ):
        torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=tolerance)
