"""The tensors of a Hugging Face folder: one or several safetensors files, mapped into memory.

It knows the files and what may be wrong with them; it must not know what a model is.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.fp8 import SCALE, dequantize_into, scales_shape


class FolderSource:
    """The tensors of one or several safetensors files, kept open as memory maps.

    A tensor is quantised if it is in fp8 and has a scale beside it, whatever the config says of it;
    `block` is how much of it shares a scale, None where the config knows of no quantisation.
    """

    def __init__(
        self,
        folder: Path,
        files: dict[Path, safe_open],
        homes: dict[str, Path],
        block: tuple[int, int] | None,
    ) -> None:
        self._folder = folder
        self._files = files
        self._homes = homes
        self._block = block

    def names(self) -> set[str]:
        return set(self._homes)

    def copy_into(self, name: str, target: Tensor) -> None:
        if name not in self._homes:
            raise WeightError(
                f"{self._folder}: tensor '{name}' is missing, expected with shape "
                f"{list(target.shape)}; download the folder again"
            )
        file, value = self._tensor(name)
        check_shape(file, name, tuple(value.shape), target)
        if self._block is not None and value.dtype == torch.float8_e4m3fn:
            dequantize_into(target, value, self._scales(name, value, self._block), self._block)
            return
        if name + SCALE in self._homes:
            raise UnsupportedModel(
                f"{file}: tensor '{name}' has a scale and is stored as {value.dtype}, expected "
                "float8_e4m3fn and quantization_config in config.json; use the float model"
            )
        if value.dtype.itemsize == 1 or not value.is_floating_point():
            raise UnsupportedModel(
                f"{file}: tensor '{name}' is stored as {value.dtype}, expected float16, bfloat16 "
                "or float32; use the float model"
            )
        target.copy_(value)

    def _tensor(self, name: str) -> tuple[Path, Tensor]:
        file = self._homes[name]
        try:
            return file, self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise WeightError(f"{file}: tensor '{name}' can't be read: {error}") from error

    def _scales(self, name: str, value: Tensor, block: tuple[int, int]) -> Tensor:
        scale = name + SCALE
        if scale not in self._homes:
            raise WeightError(
                f"{self._homes[name]}: tensor '{name}' is stored as {value.dtype}, and its scale "
                f"'{scale}' is missing; download the folder again"
            )
        file, scales = self._tensor(scale)
        if value.ndim != 2:
            raise UnsupportedModel(
                f"{file}: tensor '{name}' of shape {list(value.shape)} is stored as {value.dtype}, "
                "only matrices may be; use the float model"
            )
        if not scales.is_floating_point():
            raise UnsupportedModel(
                f"{file}: tensor '{scale}' is stored as {scales.dtype}, expected float32; use the "
                "float model"
            )
        expected = scales_shape(tuple(value.shape), block)
        if list(scales.shape) != expected:
            raise WeightError(
                f"{file}: tensor '{scale}' has shape {list(scales.shape)}, expected {expected}: "
                f"one for each block of {block[0]} by {block[1]}; the config does not belong to "
                "these weights"
            )
        return scales


@contextlib.contextmanager
def open_folder(folder: Path, block: tuple[int, int] | None = None) -> Generator[FolderSource]:
    homes = _homes(folder)
    with contextlib.ExitStack() as stack:
        files: dict[Path, safe_open] = {}
        for file in sorted(set(homes.values())):
            files[file] = stack.enter_context(_open_safetensors(file))
        if not homes:
            file = folder / "model.safetensors"
            files[file] = stack.enter_context(_open_safetensors(file))
            homes = dict.fromkeys(files[file].keys(), file)
        for name, file in homes.items():
            if name not in set(files[file].keys()):
                raise WeightError(f"{file}: tensor '{name}' is missing, the index expects it here")
        yield FolderSource(folder, files, homes, block)


def _homes(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor, from the index of a sharded folder; empty without one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        homes = {name: folder / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightError(
            f"{index}: no index of tensors ({error!r}); expected a JSON object with 'weight_map'"
        ) from error
    for name, file in homes.items():
        if not os.path.isfile(file):  # not Path's own, which raises for a name that is too long
            raise WeightError(f"{file}: missing; expected with tensor '{name}'; download it")
    return homes


def _open_safetensors(file: Path) -> safe_open:
    if not file.is_file():
        raise WeightError(
            f"{file}: missing; expected with all tensors; download it, or convert the folder's "
            "weights to safetensors"
        )
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file}: {_what_is_cut(file) or error}; download it again") from error


def _what_is_cut(file: Path) -> str | None:
    """Which tensor lies beyond the end of a safetensors file, None if that isn't what is wrong."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            head = data.read(8)
            start = 8 + int.from_bytes(head, "little")
            header = data.read(start - 8) if start < 1 << 30 else b""
        if len(head) < 8 or 8 + len(header) < start:
            return f"cut off inside its header: {size} bytes, expected {start} and more"
        tensors = {k: v["data_offsets"][1] for k, v in json.loads(header).items() if k[0] != "_"}
        beyond = [(start + end, name) for name, end in tensors.items() if start + end > size]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    if not beyond:
        return None
    end, name = min(beyond)
    return f"cut off: tensor '{name}' is expected to end at byte {end}, the file has {size}"


def check_shape(file: Path, name: str, shape: tuple[int, ...], target: Tensor) -> None:
    if shape != tuple(target.shape):
        raise WeightError(
            f"{file}: tensor '{name}' has shape {list(shape)}, expected {list(target.shape)}; "
            "the config does not belong to these weights"
        )
