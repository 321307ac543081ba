"""Fills a model with weights, one tensor at a time, from safetensors, GGUF, or a seed.

It knows files and how their tensors are named and stacked; it must not know how a model computes.

A parameter gets its memory when its tensors are read, on the device where it is to stay, and is
filled in place; nothing but the tensor being read exists twice.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.blocks import VALUES, block_reader
from stepahead.model.folder import check_shape, open_folder
from stepahead.model.fp8 import SCALE
from stepahead.model.gguf import GGUFFile, GGUFTensor, open_gguf
from stepahead.model.layers import Linear, RMSNorm, Rope
from stepahead.model.llama import Llama
from stepahead.model.packed import AS_READ, Packing, pack, pack_linears
from stepahead.model.sparse_names import sparse_names
from stepahead.model.spec import ARCHITECTURES, ModelSpec

if TYPE_CHECKING:
    from stepahead.model.glm_moe_dsa import GlmMoeDsa

DTypeName = Literal["float32", "bfloat16"]
AnyModel: TypeAlias = "Llama | GlmMoeDsa"
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
_VALUES_AT_A_TIME = 1 << 20


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
    packing: Packing = AS_READ,
) -> Llama:
    """The model that `spec` was read from, ready for inference on `device`.

    `cut` may take modules out before anything is read: what it takes out is never in memory.
    `packing` is how the CPU keeps its matrices.
    Raises WeightError for a missing, misshapen or unexpected tensor or a file that is cut off, and
    UnsupportedModel for values stored in a way that can't be read.
    """
    model = _without_memory(spec)
    known = _known(model)
    if cut is not None:
        cut(model)
    _read(model, known, dtype, device, packing)
    return model


def load_sparse(
    spec: ModelSpec, dtype: DTypeName, device: str = "cpu", *, drafts: bool = False
) -> GlmMoeDsa:
    """As `load_model`, for a spec with `sparse`.  Without `drafts` the MTP layer stays on disk.

    Weights in fp8 become `dtype`; a router stays in float32.
    """
    from stepahead.model.glm_moe_dsa import GlmMoeDsa  # other models start without its modules

    model = GlmMoeDsa(spec, drafts=True)
    known = _known(model)
    if not drafts:
        model.mtp = None
    _read(model, known, dtype, device)
    return model


def _known(model: AnyModel) -> set[str]:
    """The tensors that have a place in the model."""
    return {name for _, _, _, names in _stored(model) for name in names}


def _read(
    model: AnyModel,
    known: set[str],
    dtype: DTypeName,
    device: str,
    packing: Packing = AS_READ,
) -> None:
    with _open(model.spec) as source:
        # before anything is read: that may be hundreds of gigabytes
        _refuse_unread(model.spec, source.names() - known - {name + SCALE for name in known})
        _fill(model, source, DTYPES[dtype], device, packing)
    _ready(model, DTYPES[dtype], device, packing)


def random_model(
    spec: ModelSpec,
    seed: int,
    dtype: DTypeName,
    device: str = "cpu",
    packing: Packing = AS_READ,
) -> Llama:
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
    _ready(model, DTYPES[dtype], device, packing)
    return model


def _without_memory(spec: ModelSpec) -> Llama:
    module, name = ARCHITECTURES[spec.architecture].split(":")
    return getattr(importlib.import_module(module), name)(spec)


def _ready(model: AnyModel, dtype: torch.dtype, device: str, packing: Packing) -> None:
    if model.spec.tied_head and isinstance(model.head, Linear):
        model.head.weight = model.embed.weight
    for module in model.modules():
        if isinstance(module, Rope):
            module.to(device)  # its tables alone are neither read nor drawn
    pack_linears(model, packing)
    if isinstance(model, Llama):
        model.dtype, model.invariant = dtype, packing.invariant
        if packing.team is not None:
            model.fuse(packing)
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


def _fill(
    model: AnyModel, source: WeightSource, dtype: torch.dtype, device: str, packing: Packing
) -> None:
    homes = {child: (home, at) for home in model.modules() for at, child in home.named_children()}
    for module, stored in itertools.groupby(list(_stored(model)), lambda entry: entry[0]):
        for _, name, parameter, parts in stored:
            value = _filled(module, parameter, parts, model.spec, source, dtype, device)
            _assign(module, name, value)
        if isinstance(module, Linear):
            # at once: packed, all may fit where all as they were read do not
            pack(*homes[module], module, packing)
            if module not in homes[module][0].children():
                module.register_parameter("weight", None)  # lists here still hold the module


def _filled(
    module: nn.Module,
    parameter: nn.Parameter,
    parts: list[str],
    spec: ModelSpec,
    source: WeightSource,
    dtype: torch.dtype,
    device: str,
) -> Tensor:
    """What was read for a parameter of `module`."""
    is_norm = isinstance(module, RMSNorm)
    offset = spec.norm_offset if is_norm else 0.0
    # Gemma's norms are 1 + weight, added here or in the file: bfloat16 would lose most of it
    kept_as = torch.float32 if is_norm and spec.post_norms else _kept_as(module, dtype)
    value = torch.empty(parameter.shape, dtype=kept_as, device=device)
    flat = value.flatten(0, -2) if value.ndim > 1 else value
    rows = module.parts if isinstance(module, Linear) else [len(flat) // len(parts)] * len(parts)
    for part, target in zip(parts, flat.split(rows), strict=True):
        source.copy_into(part, target)
    return value.add_(offset) if offset else value


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
        return open_folder(Path(spec.path), block)
    raise UnsupportedModel(
        f"{spec.path or 'the spec'}: format '{spec.format}' has no files to load"
    )


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
        check_shape(self._file.path, home, tensor.shape, target)
        blocks = self._file.blocks(home)
        if self._spec.architecture == "LlamaForCausalLM":
            blocks = self._unpermuted(name, blocks, target.shape[0])
        flat = target.view(len(blocks), -1)
        step = max(1, _VALUES_AT_A_TIME // flat.shape[1])
        for begin in range(0, len(blocks), step):
            self._read(tensor, blocks[begin : begin + step], flat[begin : begin + step])

    def _read(self, tensor: GGUFTensor, blocks: np.ndarray, target: Tensor) -> None:
        """Fill [rows, columns] from uint8[rows, bytes of a row]."""
        reader = block_reader(tensor.type)
        if reader is None:
            rows = self._file.dequantize(tensor.name, blocks)
            target.copy_(torch.from_numpy(rows))
            return
        values = target if target.dtype == torch.float32 else torch.empty(target.shape)
        # a copy: torch wants no memory that can't be written to, and these are few bytes
        flat = torch.from_numpy(np.array(blocks)).view(-1, tensor.block_bytes)
        reader(flat, values.view(-1, VALUES))
        if values is not target:
            target.copy_(values)

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
