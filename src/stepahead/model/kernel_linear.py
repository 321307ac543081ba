"""Matrices for the CPU's own kernels: float32, or rounded to float16, int8 or int4.

Knows a matrix and how many rows come at a time; it must not know what a model computes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from stepahead.errors import UnsupportedModel
from stepahead.kernels import gemm, step
from stepahead.kernels.gemm import Layout
from stepahead.kernels.pack import pack, unpack
from stepahead.kernels.rows import MOST, UNIT
from stepahead.kernels.team import Team
from stepahead.kernels.tile import FLOAT16, FLOAT32, GROUP, INT4, INT8, PANEL, ROOM_BYTES
from stepahead.model.layers import Linear

FORMATS = {"none": FLOAT32, "float16": FLOAT16, "int8": INT8, "int4": INT4}
_MOST_INT32 = 2**31 - 1
_LINE = 64  # bytes that a vector of weights must not cross
# Beyond these a weight, or the scale of a group, has no place in float16, and in int8 a channel's
# unit times a sum none in float32.
_MOST = {"float16": 65504.0, "int8": 1e30, "int4": 65504.0 / UNIT}


def aligned(size: int) -> np.ndarray:
    """uint8[size], zero, at the beginning of a cache line."""
    room = np.zeros(size + _LINE, np.uint8)
    begin = -room.ctypes.data % _LINE
    return room[begin : begin + size]


class KernelLinear(nn.Module):
    """A Linear whose weights lie as kernels read them.

    `matrix` is int64[gemm.FIELDS], what kernels are told of it.
    """

    def __init__(self, plain: Linear, quantization: str, team: Team) -> None:
        """Raises UnsupportedModel for weights that the format has no room for."""
        super().__init__()
        weight = plain.weight.data.float().contiguous()
        channels, columns = weight.shape
        _refuse_large(weight, quantization)
        self.layout = Layout(FORMATS[quantization], channels, columns)
        self._team = team
        self._inputs = Inputs(0, [self.layout], team.threads)
        self._weights = aligned(self.layout.weight_bytes)
        self._scales = aligned(self.layout.scale_bytes)
        self._bias = np.zeros((self.layout.panels + 1) * PANEL, np.float32)
        if plain.bias is not None:
            self._bias[:channels] = plain.bias.float().numpy()
        self.matrix = np.zeros(gemm.FIELDS, np.int64)
        self.matrix[gemm.FORMAT] = self.layout.kind
        self.matrix[gemm.PANELS] = self.layout.panels
        self.matrix[gemm.GROUPS] = self.layout.groups
        self.matrix[gemm.WEIGHTS] = self._weights.ctypes.data
        self.matrix[gemm.SCALES] = self._scales.ctypes.data
        self.matrix[gemm.BIAS] = self._bias.ctypes.data
        sums = np.zeros(self.layout.panels, np.int64)
        team.run(
            pack,
            *(team.address, self.layout.kind, weight.data_ptr(), channels, columns),
            *(self.layout.groups, self._weights.ctypes.data),
            *(self._scales.ctypes.data, sums.ctypes.data),
        )
        # no sum of products of rounded numbers may leave int32
        self.matrix[gemm.MOST_X] = min(MOST, _MOST_INT32 // max(int(sums.max()), 1))

    def forward(self, x: Tensor) -> Tensor:
        """[T, columns] to [T, channels].  Raises ValueError for any other shape."""
        if x.ndim != 2 or x.shape[1] != self.layout.columns:
            raise ValueError(f"rows of {self.layout.columns} are multiplied, not {tuple(x.shape)}")
        wide = x.float().contiguous()
        count, padded = len(wide), self.layout.panels * PANEL
        out = torch.empty(count, padded)
        if count > self._inputs.count:
            self._inputs = Inputs(max(count, self._team.threads), [self.layout], self._team.threads)
        self._team.run(
            step.linear,
            *(self._team.address, wide.data_ptr(), wide.shape[1] * 4, count, wide.shape[1]),
            *(self.matrix, self._inputs.fields, out.data_ptr(), padded * 4),
        )
        return out[:, : self.layout.channels].to(x.dtype)

    def rows(self, channels: Tensor) -> Tensor:
        """float32[T, columns]: the weights of channels int64[T], as they were rounded; NaN for a
        channel that is not there."""
        wanted = channels.long().contiguous()
        out = torch.empty(len(wanted), self.layout.columns)
        layout = self.layout
        unpack(
            *(0, self._team.alone, layout.kind, wanted.data_ptr(), layout.channels, len(wanted)),
            *(layout.columns, layout.groups, self._weights.ctypes.data),
            *(self._scales.ctypes.data, out.data_ptr()),
        )
        return out


class TiedEmbedding(nn.Module):
    """Embeddings that are the head's weights, looked up where these lie: they are there once."""

    def __init__(self, head: KernelLinear, scale: float | None) -> None:
        super().__init__()
        self._head = (head,)  # not as a module of its own: the model has it
        self._scale = 1.0 if scale is None else scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64[T] to float32[T, hidden]."""
        return self._head[0].rows(token_ids).mul_(self._scale)


class Inputs:
    """Memory for `count` rows of activations, as the widest of some matrices takes them, and for
    what each of `threads` writes out of a matrix in int8.

    `fields` is int64[step.BUFFER_FIELDS] with those of them that are about inputs.
    """

    def __init__(self, count: int, layouts: list[Layout], threads: int) -> None:
        self.count = count
        row = max(lay.groups * GROUP[lay.kind] * (2 if lay.kind >= INT8 else 4) for lay in layouts)
        sums = max(lay.groups for lay in layouts) * 4
        self._memory = np.empty(count * (row + sums + 4), np.uint8)
        at = self._memory.ctypes.data
        self._wide = aligned(threads * ROOM_BYTES if count else 0)
        self.fields = np.zeros(step.BUFFER_FIELDS, np.int64)
        self.fields[step.INPUTS], self.fields[step.INPUTS_BYTES] = at, row
        self.fields[step.SUMS], self.fields[step.SUMS_BYTES] = at + count * row, sums
        self.fields[step.INPUT_SCALES] = at + count * (row + sums)
        self.fields[step.WIDE_ROOM] = self._wide.ctypes.data


def _refuse_large(weight: Tensor, quantization: str) -> None:
    most = _MOST.get(quantization)
    if most is None:
        return
    low, high = weight.aminmax()
    if not (-most <= low and high <= most):  # NaN is refused as well
        raise UnsupportedModel(
            f"quantization={quantization}: the model has weights beyond {most:g}; use "
            "quantization=none"
        )
