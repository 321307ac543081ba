"""Products in int8: weights scaled by output channel, activations by row, sums exact in int32.

A row's scale comes from that row alone, and integer sums do not depend on their order: what a row
gets does not depend on who else is in the step, to the bit.

A few activations of a language model are a hundred times as large as the others, and a scale that
has room for them leaves the others a step or two.  So x and W are both turned first, 64 columns at
a time, by a matrix whose rows are orthogonal: the product stays what it is, and what was large in
one column is a little in all 64 (`turn`).

Two of torch's kernels do the product: oneDNN's, which uses VNNI where the CPU has it, and fbgemm's,
faster where it has not.  Without VNNI both multiply unsigned activations with signed weights in
pairs and add each pair up in 16 bits, which saturate; there weights are scaled until no pair of
neighbours can (`quantize`).  That costs less than the bit that is usually given up.  A kernel is
not believed: it is tried on the worst case first.

It knows numbers; it must not know models or files.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.errors import UnsupportedModel

_MOST = 127  # of an int8
_ZERO = 128  # what an activation of 0 is as uint8; the kernels want activations without a sign
# what two neighbouring weights may be together: anything, or such that 255 times it is below 2^15
PAIRS = (2 * _MOST, 128)
_TURNED = 64  # columns that are turned together, or the largest power of 2 below that divides them
# smaller than any activation that counts, so that a row of zeros stays one
_LEAST_SCALE = 1e-30
_VALUES_AT_A_TIME = 1 << 22

# float32[T, N] of float32[T, K] between -1 and 1, for weights int8[N, K] and scales float32[N]
Int8Product = Callable[[Tensor], Tensor]
Int8Kernel = Callable[[Tensor, Tensor], Int8Product]


@dataclass(frozen=True)
class Int8Choice:
    """A kernel, and up to what pairs of weights it is exact."""

    kernel: Int8Kernel
    most_of_a_pair: int


def quantize(weight: Tensor, most_of_a_pair: int) -> tuple[Tensor, Tensor]:
    """int8[N, K] and float32[N], which multiplied give about `weight`, float[N, K].

    Neighbours (columns 2j and 2j + 1) add up to at most `most_of_a_pair`, signs apart.
    """
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    step = max(1, _VALUES_AT_A_TIME // weight.shape[1])
    for begin in range(0, len(weight), step):
        here = slice(begin, begin + step)
        rows = weight[here].float()
        scales[here] = _scales(rows.abs(), most_of_a_pair)
        quantized[here] = (rows / scales[here].unsqueeze(1)).round_()
    return quantized, scales


def _scales(sizes: Tensor, most_of_a_pair: int) -> Tensor:
    pairs = F.pad(sizes, (0, sizes.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    # one less than allowed: both of a pair may be rounded up
    most = most_of_a_pair - (most_of_a_pair < 2 * _MOST)
    scales = torch.maximum(sizes.amax(1) / _MOST, pairs.amax(1) / most)
    return scales.clamp_(min=_LEAST_SCALE)


def row_scales(x: Tensor) -> Tensor:
    """float32[T, 1]: each row's largest number, signs apart."""
    return x.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_SCALE)


def turning(columns: int) -> Tensor:
    """float32[b, b], orthogonal and symmetric, for a number of columns that b divides."""
    matrix = torch.ones(1, 1)
    while len(matrix) < _TURNED and columns % (2 * len(matrix)) == 0:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * len(matrix) ** -0.5


def turn(x: Tensor, by: Tensor) -> Tensor:
    """[T, K], each b columns multiplied by [b, b].

    A product for each row: one for all would have another shape for each number of rows, and may
    add up in another order.
    """
    blocks = x.reshape(len(x), -1, len(by))
    return torch.bmm(blocks, by.expand(len(x), *by.shape)).view(x.shape)


# --- kernels ----------------------------------------------------------------------------------


def onednn(weight: Tensor, scale: Tensor) -> Int8Product:
    """oneDNN's product, its weights packed."""
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = scale / _MOST, torch.zeros(len(scale), dtype=torch.int64)
    middle = torch.tensor(_ZERO + 0.5)  # what follows cuts off

    def product(x: Tensor) -> Tensor:
        quantized = torch.add(middle, x, alpha=_MOST).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise.default(
            *(quantized, 1.0, _ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32),
            *("none", [], ""),
        )

    return product


def fbgemm(weight: Tensor, scale: Tensor) -> Int8Product:
    """fbgemm's product, its weights packed."""
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():
        # there is no other way to its packed weights yet
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(tensor, None)
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    return lambda x: product(x, 1 / _MOST, _ZERO, packed)


@functools.cache
def int8_choice() -> Int8Choice:
    """The machine's; UnsupportedModel where none is exact."""
    wide = torch.cpu.get_capabilities()
    vnni = wide.get("avx512_vnni") or wide.get("avx_vnni") or wide.get("amx_int8")
    kernels = (onednn, fbgemm) if vnni else (fbgemm, onednn)
    for kernel in kernels:
        for most in PAIRS:
            if is_exact(kernel, most):
                return Int8Choice(kernel, most)
    raise UnsupportedModel(
        "quantization=int8: torch has no int8 product for this CPU that is exact; use "
        "quantization=none"
    )


def is_exact(kernel: Int8Kernel, most_of_a_pair: int) -> bool:
    """Whether it sums up the largest products, and those with the sign turned, without a loss;
    False too where torch does not have it."""
    size = 64
    pair = [_MOST, most_of_a_pair - _MOST]
    weight = torch.tensor(pair * (size // 2), dtype=torch.int8).repeat(size, 1)
    weight[1::2] *= -1
    x = torch.ones(3, size)
    x[1].neg_()
    x[2, ::2] = 0.0
    try:
        found = kernel(weight, torch.full((size,), float(_MOST)))(x)
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(found, _MOST * x @ weight.t().float(), rtol=1e-5, atol=0.0)
