"""Fills a model with weights, one tensor at a time, from safetensors, GGUF, or a seed.

It knows files and how their tensors are named and stacked; it must not know how a model computes.

A parameter gets its memory when its tensors are read, on the device where it is to stay, and is
filled in place; nothing but the tensor being read exists twice.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.fp8 import SCALE, dequantize_into, scales_shape
from stepahead.model.gguf import GGUFFile, open_gguf
from stepahead.model.glm_moe_dsa import GlmMoeDsa
from stepahead.model.layers import Linear, RMSNorm, Rope, pack_linears
from stepahead.model.llama import Llama
from stepahead.model.sparse_names import sparse_names
from stepahead.model.spec import ARCHITECTURES, ModelSpec

DTypeName = Literal["float32", "bfloat16"]
AnyModel = Llama | GlmMoeDsa
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Our module names -> Hugging Face's names of the tensors stacked in it.
_LAYER_PARTS = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
# where attention and MLP are normed before and after
_POST_NORM_PARTS = _LAYER_PARTS | {
    "after_attention_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "after_mlp_norm": ("post_feedforward_layernorm",),
}
_TOP_PARTS = {"embed": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)}
# Hugging Face's names -> GGUF's.
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_POST_NORM_LAYER = _GGUF_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Dequantised at a time; a whole embedding would be gigabytes of float32.
_VALUES_AT_A_TIME = 1 << 22


class WeightSource(Protocol):
    """Named tensors of one checkpoint, by Hugging Face's names."""

    def names(self) -> set[str]:
        """All tensors, by the names `copy_into` takes."""
        ...

    def copy_into(self, name: str, target: Tensor) -> None:
        """Fill `target` with a tensor of exactly its shape, converted to its dtype.

        Raises WeightError naming file, tensor and what was expected.
        """
        ...


def load_model(
    spec: ModelSpec,
    dtype: DTypeName,
    device: str = "cpu",
    cut: Callable[[Llama], None] | None = None,
) -> Llama:
    """The model that `spec` was read from, ready for inference on `device`.

    `cut` may take modules out before anything is read: what it takes out is never in memory.
    Raises WeightError for a missing, misshapen or unexpected tensor or a file that is cut off, and
    UnsupportedModel for values stored in a way that can't be read.
    """
    model = _without_memory(spec)
    known = _known(model)
    if cut is not None:
        cut(model)
    _read(model, known, dtype, device)
    return model


def load_sparse(
    spec: ModelSpec, dtype: DTypeName, device: str = "cpu", *, drafts: bool = False
) -> GlmMoeDsa:
    """As `load_model`, for a spec with `sparse`.  Without `drafts` the MTP layer stays on disk.

    Weights in fp8 become `dtype`; a router stays in float32.
    """
    model = GlmMoeDsa(spec, drafts=True)
    known = _known(model)
    if not drafts:
        model.mtp = None
    _read(model, known, dtype, device)
    return model


def _known(model: AnyModel) -> set[str]:
    """The tensors that have a place in the model."""
    return {name for _, _, _, names in _stored(model) for name in names}


def _read(model: AnyModel, known: set[str], dtype: DTypeName, device: str) -> None:
    with _open(model.spec) as source:
        # before anything is read: that may be hundreds of gigabytes
        _refuse_unread(model.spec, source.names() - known - {name + SCALE for name in known})
        _fill(model, source, DTYPES[dtype], device)
    _ready(model, device)


def random_model(spec: ModelSpec, seed: int, dtype: DTypeName, device: str = "cpu") -> Llama:
    """A model with random weights: normal with variance 1 / columns, norms 1; the same on every
    device, because they are drawn on the CPU."""
    model = _without_memory(spec)
    generator = torch.Generator().manual_seed(seed)
    for module, name, parameter in _parameters(model):
        value = torch.ones(parameter.shape)
        if parameter.ndim > 1:
            value.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name == "bias":
            value.normal_(0.0, 0.1, generator=generator)
        _assign(module, name, value.to(device, _kept_as(module, DTYPES[dtype])))
    _ready(model, device)
    return model


def _without_memory(spec: ModelSpec) -> Llama:
    module, name = ARCHITECTURES[spec.architecture].split(":")
    return getattr(importlib.import_module(module), name)(spec)


def _ready(model: AnyModel, device: str) -> None:
    if model.spec.tied_head and isinstance(model.head, Linear):
        model.head.weight = model.embed.weight
    for module in model.modules():
        if isinstance(module, Rope):
            module.to(device)  # its tables alone are neither read nor drawn
    pack_linears(model)
    model.eval()


def _parameters(model: AnyModel) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, parameter name, parameter) of all that has weights of its own."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not (module is model.head and model.spec.tied_head):
                yield module, name, parameter


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, requires_grad=False))


def _stored(model: AnyModel) -> Iterator[tuple[nn.Module, str, nn.Parameter, list[str]]]:
    """As `_parameters`, each with the names of the tensors that are stacked in it."""
    paths = {module: path for path, module in model.named_modules()}
    sparse = model.spec.sparse
    for module, name, parameter in _parameters(model):
        if sparse is not None:
            parts = len(module.parts) if isinstance(module, Linear) else 1
            names = sparse_names(sparse, paths[module], name, parts)
        else:
            names = (f"{part}.{name}" for part in _hugging_face_names(paths[module], model.spec))
        yield module, name, parameter, list(names)


def _fill(model: AnyModel, source: WeightSource, dtype: torch.dtype, device: str) -> None:
    for module, name, parameter, parts in _stored(model):
        is_norm = isinstance(module, RMSNorm)
        offset = model.spec.norm_offset if is_norm else 0.0
        # Gemma's norms are 1 + weight, added here or in the file: bfloat16 would lose most of it
        kept_as = torch.float32 if is_norm and model.spec.post_norms else _kept_as(module, dtype)
        value = torch.empty(parameter.shape, dtype=kept_as, device=device)
        flat = value.flatten(0, -2) if value.ndim > 1 else value
        rows = (
            module.parts if isinstance(module, Linear) else [len(flat) // len(parts)] * len(parts)
        )
        for part, target in zip(parts, flat.split(rows), strict=True):
            source.copy_into(part, target)
        _assign(module, name, value.add_(offset) if offset else value)


def _kept_as(module: nn.Module, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if getattr(module, "keeps_float32", False) else dtype


def _hugging_face_names(path: str, spec: ModelSpec) -> tuple[str, ...]:
    """The tensors stacked in our module `path`, without .weight or .bias."""
    if path in _TOP_PARTS:
        return _TOP_PARTS[path]
    _, layer, inner = path.split(".", 2)
    parts = _POST_NORM_PARTS if spec.post_norms else _LAYER_PARTS
    return tuple(f"model.layers.{layer}.{part}" for part in parts[inner])


def _refuse_unread(spec: ModelSpec, unread: set[str]) -> None:
    """A tensor that the model has no place for would change what it computes."""
    allowed = {"lm_head.weight"} if spec.tied_head else set()
    unknown = sorted(n for n in unread - allowed if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise WeightError(
            f"{spec.path}: tensor '{unknown[0]}' (and {len(unknown) - 1} more) has no place in "
            f"{spec.architecture} as its config describes it; use the config that belongs to it"
        )


def _open(spec: ModelSpec) -> contextlib.AbstractContextManager[WeightSource]:
    if spec.format == "gguf":
        return contextlib.nullcontext(_GGUFSource(spec, open_gguf(Path(spec.path))))
    if spec.format == "safetensors":
        block = None if spec.sparse is None else spec.sparse.weight_block
        return _open_folder(Path(spec.path), block)
    raise UnsupportedModel(
        f"{spec.path or 'the spec'}: format '{spec.format}' has no files to load"
    )


def _check_shape(file: Path, name: str, shape: tuple[int, ...], target: Tensor) -> None:
    if shape != tuple(target.shape):
        raise WeightError(
            f"{file}: tensor '{name}' has shape {list(shape)}, expected {list(target.shape)}; "
            "the config does not belong to these weights"
        )


# --- safetensors ------------------------------------------------------------------------------


class _FolderSource:
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
        _check_shape(file, name, tuple(value.shape), target)
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
def _open_folder(folder: Path, block: tuple[int, int] | None = None) -> Generator[_FolderSource]:
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
        yield _FolderSource(folder, files, homes, block)


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


# --- GGUF -------------------------------------------------------------------------------------


class _GGUFSource:
    """The tensors of a GGUF file under Hugging Face's names and in their row order."""

    def __init__(self, spec: ModelSpec, file: GGUFFile) -> None:
        self._spec = spec
        self._file = file
        self._inner = _GGUF_POST_NORM_LAYER if spec.post_norms else _GGUF_LAYER
        ours = ((_from_gguf(name, self._inner), name) for name in file.tensors)
        self._homes = {our: name for our, name in ours if our}

    def names(self) -> set[str]:
        return set(self._homes)

    def copy_into(self, name: str, target: Tensor) -> None:
        home = self._homes.get(name, _to_gguf(name, self._inner))
        tensor = self._file.tensors.get(home)
        if tensor is None:
            raise WeightError(
                f"{self._file.path}: tensor '{home}' is missing, expected with shape "
                f"{list(target.shape)}; convert the model again"
            )
        _check_shape(self._file.path, home, tensor.shape, target)
        blocks = self._file.blocks(home)
        if self._spec.architecture == "LlamaForCausalLM":
            blocks = self._unpermuted(name, blocks, target.shape[0])
        flat = target.view(len(blocks), -1)
        step = max(1, _VALUES_AT_A_TIME // flat.shape[1])
        for begin in range(0, len(blocks), step):
            rows = self._file.dequantize(home, blocks[begin : begin + step])
            flat[begin : begin + step].copy_(torch.from_numpy(rows))

    def _unpermuted(self, name: str, blocks: np.ndarray, rows: int) -> np.ndarray:
        """Arch llama stores the rows of q and k in pairs (i, i + head_dim / 2); undo that.

        Rows are whole blocks, so they can be moved before they are dequantised.
        """
        if ".q_proj." not in name and ".k_proj." not in name:
            return blocks
        if blocks.shape[0] != rows:  # a bias: one row of float32 values
            blocks = blocks.reshape(rows, -1)
        pairs = blocks.reshape(-1, self._spec.head_dim // 2, 2, blocks.shape[1])
        return pairs.swapaxes(1, 2).reshape(blocks.shape)


def _to_gguf(name: str, inner_names: dict[str, str]) -> str:
    """GGUF's name of a tensor: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{inner_names[inner]}.{kind}"


def _from_gguf(name: str, inner_names: dict[str, str]) -> str | None:
    """The way back; a name unknown to us stays as it is, None for what the spec has read."""
    if name == "rope_freqs.weight":
        return None
    stem, _, kind = name.rpartition(".")
    top = {theirs: ours for ours, theirs in _GGUF_TOP.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    inner = {theirs: ours for ours, theirs in inner_names.items()}
    begin, _, rest = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and rest in inner:
        return f"model.layers.{begin}.{inner[rest]}.{kind}"
    return name
