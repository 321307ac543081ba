"""GGUF files as numpy: the header's metadata, and tensors in quantised blocks or dequantised.

It knows the container format; it must not know what a model is, nor import torch.

The header is walked here, not by `gguf.GGUFReader`: that one makes a numpy view of every item of
every list (1.7 s for a vocabulary of 49,152 tokens, which is only gone past here), and it reports a
file that was cut off as a numpy reshape error without a tensor's name.  Block sizes, type numbers
and dequantisation are the `gguf` package's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from stepahead.errors import UnsupportedModel, WeightError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# A damaged count must not make us walk the whole file: the fewest bytes of an entry, the most
# dimensions that ggml has, and more items than any vocabulary's lists.
_VALUE_BYTES = 8 + 4 + 1
_TENSOR_BYTES = 8 + 4 + 4 + 8
_MOST_DIMS = 4
_MOST_ITEMS = 1 << 22
_LENGTH = struct.Struct("<Q")
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class Strings(NamedTuple):
    """A list of strings in the metadata: how many there are.  What they say is for tokenizers."""

    count: int


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` has rows first, as in numpy and torch."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset_bytes: int
    row_bytes: int

    @property
    def n_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return GGML_QUANT_SIZES[self.type][1]


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose header was read and whose tensors all lie inside the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    bytes: np.ndarray  # uint8, all of the file: a read-only memory map

    def blocks(self, name: str) -> np.ndarray:
        """The tensor's bytes as stored: uint8[rows, bytes of a row], in the memory map."""
        tensor = self.tensors[name]
        rows = prod(tensor.shape[:-1])
        flat = self.bytes[tensor.offset_bytes : tensor.offset_bytes + tensor.n_bytes]
        return flat.reshape(rows, tensor.row_bytes)

    def dequantize(self, name: str, blocks: np.ndarray) -> np.ndarray:
        """float32[rows, columns] of some rows of `blocks(name)`; raises UnsupportedModel."""
        try:
            rows = dequantize(np.ascontiguousarray(blocks), self.tensors[name].type)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path}: tensor '{name}' is stored as {self.tensors[name].type.name}, which "
                "the gguf package can't dequantise; use a file with another quantisation"
            ) from None
        return rows if rows.flags.writeable else rows.copy()


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises WeightError when the file is missing, not GGUF, or cut off, and UnsupportedModel for a
    version, byte order or block type that isn't known.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise WeightError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            # unmapped when the last array of it goes
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return _read_header(path, _Cursor(path, view, size_bytes))
    except OSError as error:
        raise WeightError(f"{path}: can't be read: {error.strerror or error}") from error


class _Cursor:
    """Reads little-endian values one after another and names the file when it ends too soon."""

    def __init__(self, path: Path, view: mmap.mmap, size_bytes: int) -> None:
        self.path = path
        self.view = view
        self.size_bytes = size_bytes
        self.offset = len(MAGIC)

    def take(self, n_bytes: int) -> bytes:
        end = self.offset + n_bytes
        self._check(end)
        taken = self.view[self.offset : end]
        self.offset = end
        return taken

    def _check(self, end: int) -> None:
        if end > self.size_bytes:
            raise WeightError(
                f"{self.path}: cut off: the header needs {end} bytes, the file has "
                f"{self.size_bytes}; download it again"
            )

    def count(self, what: str, least_bytes: int, most: int | None = None) -> int:
        """How many of `what` follow, of at least so many bytes each."""
        count = self.scalar("Q")
        left = (self.size_bytes - self.offset) // least_bytes
        if count > left or (most is not None and count > most):
            raise WeightError(
                f"{self.path}: cut off or damaged: {count} {what} at byte {self.offset}, of "
                f"{self.size_bytes} in the file; download it again"
            )
        return count

    def name(self, what: str, known: Container[str]) -> str:
        """A name that none of `known` has: zeros would be read as the empty one, over and over."""
        name = self.text()
        if not name or name in known:
            raise WeightError(
                f"{self.path}: {what} '{name}' is there twice or has no name, at byte "
                f"{self.offset}; the file is damaged, download it again"
            )
        return name

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        # Vocabularies may hold bytes that are no UTF-8; surrogates keep them apart.
        return self.take(_LENGTH.unpack(self.take(8))[0]).decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> Strings:
        """Goes past `count` strings.  They may be 100,000, so this loop calls nothing."""
        view, at, length_at = self.view, self.offset, _LENGTH.unpack_from
        try:
            for _ in range(count):
                at += _LENGTH.size + length_at(view, at)[0]
        except (struct.error, OverflowError):  # not even a length is left
            at += _LENGTH.size
        self._check(at)
        self.offset = at
        return Strings(count)

    def value(self, type_number: int) -> Any:
        try:
            value_type = GGUFValueType(type_number)
        except ValueError:
            raise WeightError(
                f"{self.path}: unknown metadata type {type_number} at byte {self.offset}; "
                "the file is damaged or newer than this reader"
            ) from None
        if value_type is GGUFValueType.STRING:
            return self.text()
        if value_type is GGUFValueType.ARRAY:
            return self.array()
        return self.scalar(_SCALARS[value_type])

    def array(self) -> list[Any] | Strings:
        item_type = self.scalar("I")
        if item_type == GGUFValueType.STRING:
            return self.strings(self.count("strings", _LENGTH.size, _MOST_ITEMS))
        if item_type not in _SCALARS:
            raise WeightError(
                f"{self.path}: a list of type {item_type} at byte {self.offset}; the file is "
                "damaged or newer than this reader"
            )
        code = _SCALARS[item_type]
        item_bytes = struct.calcsize("<" + code)
        count = self.count("numbers", item_bytes, _MOST_ITEMS)
        return list(struct.unpack(f"<{count}{code}", self.take(count * item_bytes)))


def _read_header(path: Path, cursor: _Cursor) -> GGUFFile:
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        swapped = " (perhaps a big-endian file)" if version & 0xFFFF == 0 else ""
        raise UnsupportedModel(
            f"{path}: GGUF version {version}{swapped} is not one of {_VERSIONS}; convert the model "
            "again with a current llama.cpp"
        )
    tensor_count = cursor.count("tensors", _TENSOR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata keys", _VALUE_BYTES)):
        key = cursor.name("metadata key", metadata)
        metadata[key] = cursor.value(cursor.scalar("I"))
    listed = list(_tensor_entries(cursor, tensor_count))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise WeightError(f"{path}: general.alignment is {alignment!r}; the file is damaged")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {entry[0]: _place(path, start, cursor.size_bytes, *entry) for entry in listed}
    return GGUFFile(path, metadata, tensors, np.frombuffer(cursor.view, np.uint8))


def _tensor_entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """(name, shape with rows first, type number, offset in the data part) of every tensor."""
    names: set[str] = set()
    for _ in range(count):
        name = cursor.name("tensor", names)
        names.add(name)
        n_dims = cursor.scalar("I")
        if n_dims > _MOST_DIMS:
            raise WeightError(
                f"{cursor.path}: tensor '{name}' has {n_dims} dimensions, at most {_MOST_DIMS} are "
                "known; the file is damaged, download it again"
            )
        dims = tuple(cursor.scalar("Q") for _ in range(n_dims))
        yield name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _place(
    path: Path, start: int, size_bytes: int, name: str, shape: tuple[int, ...], kind: int, at: int
) -> GGUFTensor:
    try:
        quantisation = GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedModel(
            f"{path}: tensor '{name}' has the block type number {kind}, which the gguf package "
            "does not know; use a file with another quantisation"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[quantisation]
    if not shape or shape[-1] % block:
        raise WeightError(
            f"{path}: tensor '{name}' has shape {list(shape)}; {quantisation.name} expects rows of "
            f"a multiple of {block}"
        )
    tensor = GGUFTensor(name, quantisation, shape, start + at, shape[-1] // block * block_bytes)
    end = tensor.offset_bytes + tensor.n_bytes
    if end > size_bytes:
        raise WeightError(
            f"{path}: cut off: tensor '{name}' is expected at bytes {tensor.offset_bytes} to {end},"
            f" the file has {size_bytes}; download it again"
        )
    return tensor
