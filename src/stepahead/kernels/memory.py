"""Arrays over memory that somebody else holds, by address; for use inside kernels.

Nothing is checked: whoever passes an address promises that the memory is there, contiguous, and
stays while the kernel runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from stepahead.kernels.emit import F16, I16
from stepahead.kernels.jit import inner


@intrinsic
def _as_pointer(typing_context: Any, address: Any) -> Any:
    """An integer as a pointer to anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@intrinsic
def _as_half(typing_context: Any, value: Any) -> Any:
    """float32 as the bits of the nearest float16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], F16), I16)

    return types.int16(types.float32), generate


@intrinsic
def _from_half(typing_context: Any, bits: Any) -> Any:
    """The way back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.bitcast(args[0], F16)
        return builder.fpext(value, context.get_value_type(types.float32))

    return types.float32(types.int16), generate


_pointer: Any = _as_pointer
_half_bits: Any = _as_half
_half_value: Any = _from_half


@inner
def floats(address: int, count: int) -> np.ndarray:
    """float32[count]."""
    return carray(_pointer(address), (count,), np.float32)


@inner
def int16s(address: int, count: int) -> np.ndarray:
    """int16[count]."""
    return carray(_pointer(address), (count,), np.int16)


@inner
def int32s(address: int, count: int) -> np.ndarray:
    """int32[count]."""
    return carray(_pointer(address), (count,), np.int32)


@inner
def int64s(address: int, count: int) -> np.ndarray:
    """int64[count]."""
    return carray(_pointer(address), (count,), np.int64)


@inner
def bytes_at(address: int, count: int) -> np.ndarray:
    """uint8[count]."""
    return carray(_pointer(address), (count,), np.uint8)


@inner
def to_half(value: Any) -> int:
    """float32 as the bits of the nearest float16."""
    return _half_bits(np.float32(value))


@inner
def from_half(bits: Any) -> Any:
    """The way back."""
    return _half_value(np.int16(bits))


@inner
def uint32s(address: int, count: int) -> np.ndarray:
    """uint32[count]."""
    return carray(_pointer(address), (count,), np.uint32)
