"""Matrices laid out for the CPU: for this project's kernels, or in oneDNN's blocked order.

A pass over a plain model that has its weights: `pack_linears` replaces its Linears.  Knows kernels
and their layouts; it must not know what a model computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from stepahead.kernels.team import Team
from stepahead.model.layers import Linear

# Below this many weights, oneDNN's set-up (10 us a call) costs more than its kernels save.
_LEAST_PACKED = 1 << 18
# Columns that a float32 product adds up in a row; MKL, which transformers runs on, has the same.
_SUMMED_IN_A_ROW = 192

Quantization = Literal["none", "float16", "int8", "int4"]


@dataclass(frozen=True)
class Packing:
    """How matrices are laid out.

    quantization  what the weights become; none, what they are
    invariant     what a row gets is the same to the bit, whatever rows are beside it
    team          who runs this project's kernels: matrices are laid out for these.  Without one
                  nothing is rounded and torch does the products, and with torch's it depends on
                  the number of rows how one is added up
    settle_threads  try how many of the team's threads are fastest, and use these
    """

    quantization: Quantization = "none"
    invariant: bool = False
    team: Team | None = None
    settle_threads: bool = False

    def __post_init__(self) -> None:
        if self.team is None and (self.invariant or self.quantization != "none"):
            raise ValueError("quantization and invariance are what kernels do: give a team")


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
    if how.team is not None:
        from stepahead.model.kernel_linear import KernelLinear  # kernels are compiled at import

        setattr(parent, name, KernelLinear(plain, _format(plain, how), how.team))
    elif _worth_packing(plain):
        setattr(parent, name, PackedLinear(plain))


def _format(plain: Linear, how: Packing) -> Quantization:
    """The head's matrix stays in int8 where others are rounded to int4: its rounding alone would
    change one first choice in eight."""
    is_head = not plain.fine_sums
    return "int8" if is_head and how.quantization == "int4" else how.quantization


def _worth_packing(plain: Linear) -> bool:
    weight = plain.weight
    if weight.numel() < _LEAST_PACKED or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype != torch.float32:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # sums in pieces are calls in pieces; with AVX2 alone MKL, which makes such sums itself, is the
    # faster one at every number of rows
    return not plain.fine_sums or torch.backends.cpu.get_cpu_capability() != "AVX2"
