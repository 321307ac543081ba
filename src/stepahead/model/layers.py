"""The parts of a transformer: matrices, norms, rotary positions. No attention, no parallelism.

Parameters are made without memory (on torch's meta device); whoever loads them assigns real ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.model.spec import RopeSpec


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter that has a shape and no memory."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b. W may be several matrices on the same input, stacked; `parts` are their rows.

    One multiplication with stacked rows is faster than several, most of all at batch 1.
    `fine_sums` asks for sums in short pieces where a float32 kernel would add up all columns in a
    row: its rounding is passed on from layer to layer, and doubles the error of the logits.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        bias: bool = False,
        *,
        fine_sums: bool = True,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.fine_sums = fine_sums
        self.weight = empty_parameter(sum(parts), in_features)
        self.bias = empty_parameter(sum(parts)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum(parts)]."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self._per_size = 1.0 / size
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        # The norm avoids a squared copy of x; on 4,096 tokens F.rms_norm takes 20 times as long.
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale.square_().mul_(self._per_size).add_(self._eps).rsqrt_()
        return (x * scale).to(x.dtype).mul_(self.weight)


class Rope(nn.Module):
    """Rotary positions: cos and sin of every position, computed once in float32."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_len: int) -> None:
        super().__init__()
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies(spec, head_dim)
        table = torch.cat((angles.cos(), angles.sin()), 1)
        self.register_buffer("table", table, persistent=False)  # float32[max_len, head_dim]

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin for `rotate`, each [T, 1, head_dim], of positions int64[T]."""
        cos, sin = self.table.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """float32[head_dim / 2]: the angle that one position adds to each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.scaling == "linear":
        return plain / spec.factor
    if spec.scaling == "table":
        return plain / torch.tensor(spec.divisors, dtype=torch.float32) / spec.factor
    if spec.scaling == "llama3":
        return _llama3(spec, plain)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are divided by `factor`, short ones kept, those between blended."""
    waves = 2 * math.pi / plain
    turns = spec.original_max_len / waves
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn x, [T, heads, head_dim], by its positions; dimension i pairs with i + head_dim / 2."""
    # rolling by half swaps the halves; the sign of the first is in signed_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def neighbours_apart(x: Tensor) -> Tensor:
    """Dimensions (0, 1), (2, 3), .. as (0, 2, .. 1, 3, ..): what `rotate` then turns are the
    neighbours.  They stay apart, in queries and keys alike, so products are the same."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
