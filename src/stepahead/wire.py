"""How messages travel: typed structs as msgpack, numpy arrays as raw bytes.  Knows no message."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        contiguous = np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(ord(value.dtype.char), contiguous.data)
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{type(value).__name__} can't be sent; messages hold integers and arrays")


def _from_wire(code: int, data: memoryview) -> np.ndarray:
    return np.frombuffer(data, chr(code))


Message = TypeVar("Message", bound=msgspec.Struct)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes; arrays arrive one-dimensional."""
    return _ENCODER.encode(message)


def decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    """What turns the bytes back into a message of this kind; its arrays are read-only views."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_from_wire)


def decoder_of(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    """The same for a union of tagged kinds."""
    return msgspec.msgpack.Decoder(kinds, ext_hook=_from_wire)
