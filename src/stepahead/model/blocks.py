"""GGUF's commonest blocks of 32 values as floats, in torch: several times as fast as the gguf
package, which makes 16 rows at a time in numpy, and the same values to the bit.

It knows how values lie in a block; it must not know files or models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

VALUES = 32  # of a block of each type below
_SCALE_BYTES = 2  # a float16


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, and 16 bytes: values 0 to 15 in the low halves, 16 to 31 in the high ones."""
    scale = _float16(blocks, 0)
    _halves(blocks, _SCALE_BYTES, out)
    out.sub_(8).mul_(scale)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """A scale, the least value, and 16 bytes as above."""
    scale, least = _float16(blocks, 0), _float16(blocks, _SCALE_BYTES)
    _halves(blocks, 2 * _SCALE_BYTES, out)
    out.mul_(scale).add_(least)  # two roundings, as everywhere; a fused one would differ


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, and 32 int8."""
    scale = _float16(blocks, 0)
    out.copy_(blocks[:, _SCALE_BYTES:].view(torch.int8)).mul_(scale)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """float32[n, 1] of the float16 that begins at byte `at` of each block."""
    return blocks[:, at : at + _SCALE_BYTES].contiguous().view(torch.float16).float()


def _halves(blocks: Tensor, at: int, out: Tensor) -> None:
    """The 16 bytes from `at` on; taken apart with those before them, for that is one long run."""
    low, high = out.unflatten(1, (2, -1)).unbind(1)
    low.copy_((blocks & 15)[:, at:])
    high.copy_((blocks >> 4)[:, at:])


_READERS: dict[GGMLQuantizationType, Callable[[Tensor, Tensor], None]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}


def block_reader(kind: GGMLQuantizationType) -> Callable[[Tensor, Tensor], None] | None:
    """What fills float32[n, 32] from blocks uint8[n, bytes of a block]; None for other types."""
    return _READERS.get(kind)
