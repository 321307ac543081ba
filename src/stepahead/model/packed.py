"""Matrices laid out for the CPU's kernels: float weights in oneDNN's blocked order, or int8.

A pass over a plain model that has its weights: `pack_linears` replaces its Linears.  Knows kernels
and their layouts; it must not know what a model computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.errors import UnsupportedModel
from stepahead.model.int8 import Int8Choice, int8_choice, quantize, row_scales, turn, turning
from stepahead.model.layers import Linear

# Below this many weights, oneDNN's set-up (10 us a call) costs more than its kernels save.
_LEAST_PACKED = 1 << 18
# Columns that a float32 product adds up in a row; MKL, which transformers runs on, has the same.
_SUMMED_IN_A_ROW = 192
# Rows of every float product where a row must not depend on their number.
_INVARIANT_ROWS = 16

Quantization = Literal["none", "float16", "int8"]


@dataclass(frozen=True)
class Packing:
    """How matrices are laid out.

    quantization  what weights become: float16; int8, and the head's float16; none, what they are
    invariant     what a row gets is the same to the bit, whatever rows are beside it
    """

    quantization: Quantization = "none"
    invariant: bool = False


AS_READ = Packing()


class PackedLinear(nn.Module):
    """A Linear whose weights lie in oneDNN's blocked order: about twice as fast on AVX-512 CPUs.

    F.linear hands float32 to MKL, which runs at AVX2 speed on AMD, and makes oneDNN reorder
    bfloat16 weights in every call.
    """

    def __init__(self, plain: Linear) -> None:
        super().__init__()
        weight = plain.weight.data
        # bfloat16 sums are kept in float32 inside a call, and rounded between calls
        pieces = plain.fine_sums and weight.dtype == torch.float32
        self._columns = _SUMMED_IN_A_ROW if pieces else weight.shape[1]
        self._packed = [
            torch.ops.mkldnn._reorder_linear_weight(piece.contiguous(), None)
            for piece in weight.split(self._columns, 1)
        ]
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum(parts)]."""
        first, *rest = x.split(self._columns, 1)
        out = torch.ops.mkldnn._linear_pointwise.default(
            first, self._packed[0], self.bias, "none", [], ""
        )
        for piece, packed in zip(rest, self._packed[1:], strict=True):
            out = torch.ops.mkldnn._linear_pointwise.binary(piece, out, packed, None, "add")
        return out


class InvariantLinear(nn.Module):
    """A float product in tiles of a constant number of rows: how many there are chooses the kernel,
    and with it the order in which a row is added up."""

    def __init__(self, packed: PackedLinear | Float16Linear) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum(parts)]."""
        count = len(x)
        padded = F.pad(x, (0, 0, 0, -count % _INVARIANT_ROWS))
        tiles = [self.packed(tile) for tile in padded.split(_INVARIANT_ROWS)]
        return torch.cat(tiles)[:count]


class Float16Linear(nn.Module):
    """A Linear in float32 whose weights lie in float16: half of what is read."""

    def __init__(self, plain: Linear) -> None:
        super().__init__()
        weight = plain.weight.data.float()
        if not _has_fbgemm():
            raise UnsupportedModel(
                "quantization=float16: torch has no such product for this CPU; use "
                "quantization=none"
            )
        if not weight.abs().amax() <= torch.finfo(torch.float16).max:
            raise UnsupportedModel(
                "quantization=float16: the model has weights beyond 65504; use quantization=none"
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum(parts)]."""
        out = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)


class Int8Linear(nn.Module):
    """A Linear whose products are in int8, with a scale for each row of x and each of W.

    `choice` makes the product; the machine's own if None.
    """

    def __init__(self, plain: Linear, choice: Int8Choice | None = None) -> None:
        super().__init__()
        choice = choice or int8_choice()
        weight = plain.weight.data
        self._turning = turning(weight.shape[1])
        turned = turn(weight.float(), self._turning)
        self._product = choice.kernel(*quantize(turned, choice.most_of_a_pair))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum(parts)]."""
        wide = turn(x.float(), self._turning)
        scales = row_scales(wide)
        out = self._product(wide / scales).mul_(scales)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)


def pack_linears(model: nn.Module, how: Packing = AS_READ) -> None:
    """Replace the Linears on the CPU by what `how` asks for, one at a time, so that there is never
    a second copy of more than one matrix.  In float, those stay that torch multiplies as fast.
    """
    # A list of all modules would keep every plain matrix until the last one is packed.
    parents = [module for module in model.modules() if not isinstance(module, Linear)]
    for parent in parents:
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                pack(parent, name, child, how)


def pack(parent: nn.Module, name: str, plain: Linear, how: Packing) -> None:
    """As `pack_linears`, for the child `name` of `parent`."""
    if plain.weight.device.type != "cpu":
        return
    if how.quantization == "int8" and not _is_fine_head(plain):
        setattr(parent, name, Int8Linear(plain))
    elif how.quantization != "none":
        packed = Float16Linear(plain)
        setattr(parent, name, InvariantLinear(packed) if how.invariant else packed)
    elif how.invariant:
        setattr(parent, name, InvariantLinear(PackedLinear(plain)))
    elif _worth_packing(plain):
        setattr(parent, name, PackedLinear(plain))


def _is_fine_head(plain: Linear) -> bool:
    """Whether it is the head, and can be kept in float16: rounded to int8, it alone brings a fifth
    of all first choices that change."""
    return not plain.fine_sums and _has_fbgemm()


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _worth_packing(plain: Linear) -> bool:
    weight = plain.weight
    if weight.numel() < _LEAST_PACKED or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype != torch.float32:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # sums in pieces are calls in pieces; with AVX2 alone MKL, which makes such sums itself, is the
    # faster one at every number of rows
    return not plain.fine_sums or torch.backends.cpu.get_cpu_capability() != "AVX2"
