"""Reads a GGUF file's metadata and stops before its tensors.  Knows bytes, no tokenizer.

Not the gguf package's reader: that one makes two numpy views of every string and walks the tensors
too, 1.6 s for a vocabulary of 49,000 tokens and its merges, which take 0.04 s here.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from stepahead.errors import ModelError, UnsupportedModel

Value: TypeAlias = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    kind: struct.Struct("<" + letter)
    for kind, letter in [*enumerate("BbHhIif?"), (10, "Q"), (11, "q"), (12, "d")]
}
_LENGTH: Final = struct.Struct("<Q")
_KIND: Final = struct.Struct("<I")
_ARRAY_HEAD: Final = struct.Struct("<IQ")
_FILE_HEAD: Final = struct.Struct("<4sIQQ")
_LEAST_KEY_BYTES: Final = 8 + 4 + 1
# more than any vocabulary's lists: a damaged count must not make us walk the whole file
_MOST_ITEMS: Final = 1 << 22


def read_metadata(path: Path) -> dict[str, Value]:
    """Every key of the file's metadata with its value; arrays are lists.

    Raises UnsupportedModel if the file is no GGUF of version 2 or 3 in little-endian order,
    ModelError if it can't be read, is cut off inside the metadata, or holds what GGUF has no word
    for.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < _FILE_HEAD.size:  # an empty file can't even be mapped
                raise UnsupportedModel(_not_gguf(path, file.read(4)))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}") from error


def _not_gguf(path: Path, start: bytes) -> str:
    return (
        f"{path} is not a GGUF file: it starts with {start!r}, not b'GGUF'; "
        "name a .gguf file or a folder with a tokenizer.json"
    )


class _Reader:
    """A cursor over the mapped file; every step checks the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._key = "the header"

    def read(self) -> dict[str, Value]:
        magic, version, _tensors, count = self._take(_FILE_HEAD)
        if magic != b"GGUF":
            raise UnsupportedModel(_not_gguf(self._path, magic))
        if version not in (2, 3):
            raise UnsupportedModel(
                f"{self._path} is GGUF version {version} or big-endian; only versions 2 and 3 in "
                "little-endian order are known: convert the model again"
            )
        self._check(count * _LEAST_KEY_BYTES)
        values: dict[str, Value] = {}
        for index in range(count):
            self._key = f"metadata key {index}"
            key = self._string()
            if not key or key in values:  # zeros are the empty one, over and over
                self._damaged(f"{self._key} is {key!r}, which has no name or was there before")
            self._key = key
            values[key] = self._value(self._take(_KIND)[0])
        return values

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(*self._take(_ARRAY_HEAD))
        return self._take(self._scalar(kind))[0]

    def _array(self, kind: int, count: int) -> Value:
        item = _LENGTH if kind == _STRING else self._scalar(kind)
        self._check(item.size * count)  # a count of 2**62 is beyond what struct can say
        if count > _MOST_ITEMS:
            self._damaged(f"{self._key} has {count:,} items")
        if kind == _STRING:
            return self._strings(count)
        return list(self._take(struct.Struct(f"<{count}{item.format[1:]}")))

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            self._damaged(f"{self._key} has the unknown type {kind}")
        return _SCALARS[kind]

    def _strings(self, count: int) -> list[str]:
        data, size, at = self._data, len(self._data), self._at
        length_at = _LENGTH.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = at + _LENGTH.size
                at = start + length_at(data, at)[0]
                if at > size:
                    self._cut_off()
                strings.append(data[start:at].decode())
        except struct.error:
            self._cut_off()
        except UnicodeDecodeError as error:
            self._damaged(f"{self._key} is not UTF-8 ({error})")
        self._at = at
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _take(self, layout: struct.Struct) -> tuple[Any, ...]:
        self._check(layout.size)
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _check(self, size: int) -> None:
        if self._at + size > len(self._data):
            self._cut_off()

    def _cut_off(self) -> NoReturn:
        raise ModelError(
            f"{self._path} is cut off: it ends inside {self._key}, "
            f"after {len(self._data):,} bytes; fetch it again"
        )

    def _damaged(self, what: str) -> NoReturn:
        raise ModelError(f"{self._path}: {what}; the file is damaged, fetch it again")
