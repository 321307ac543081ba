"""Arrays over memory that somebody else holds, by address; for use inside kernels.

Nothing is checked: whoever passes an address promises that the memory is there, contiguous, and
stays while the kernel runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from stepahead.kernels.jit import inner


@intrinsic
def _as_pointer(typing_context: Any, address: Any) -> Any:
    """An integer as a pointer to anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


_pointer: Any = _as_pointer


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
