"""A SparseSpec from config.json.  What can't be computed exactly is refused by field and value.

It knows names and rules of config files; it must not know weights, nor import torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from stepahead.errors import UnsupportedModel
from stepahead.model.sparse import SparseSpec

_Count = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
# Values that an expert's rows come in: 16 bytes of bfloat16, of which torch's products by group
# want whole numbers.
_EXPERT_STEP = 8
_FULL = {"F": "full", "S": "shared"}


class SparseConfig(msgspec.Struct):
    """config.json; what has no default here must be there."""

    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    q_lora_rank: _Count
    kv_lora_rank: _Count
    qk_nope_head_dim: _Count
    qk_rope_head_dim: _Count
    v_head_dim: _Count
    index_n_heads: _Count
    index_head_dim: _Count
    index_topk: _Count
    n_routed_experts: _Count
    n_shared_experts: _Count
    num_experts_per_tok: _Count
    moe_intermediate_size: _Count
    first_k_dense_replace: _NotNegative
    routed_scaling_factor: float
    rms_norm_eps: float
    norm_topk_prob: bool = True
    num_key_value_heads: int | None = None
    qk_head_dim: int | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    index_share_for_mtp_iteration: bool | None = None
    mlp_layer_types: list[str] | None = None
    layer_types: list[str] | None = None
    moe_layer_freq: int = 1
    moe_router_dtype: str | None = None
    n_group: int | None = None
    topk_group: int | None = None
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    rope_interleave: bool = True
    indexer_rope_interleave: bool | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    num_nextn_predict_layers: int = 0
    quantization_config: dict[str, Any] | None = None


def sparse_of(
    file: Path, architecture: str, config: SparseConfig
) -> tuple[SparseSpec, tuple[str, ...]]:
    """The spec, and notes on what is otherwise than the file says.

    Raises UnsupportedModel naming field and value.
    """
    _refuse(file, config)
    # in the indexer of DeepSeek-V3.2 rotary positions turn dimension i with i + half
    index_pairs = architecture != "DeepseekV32ForCausalLM"
    spec, layers = _spec(file, config, index_pairs), config.num_hidden_layers
    if not spec.mtp_layers or _has_layer(file.parent, layers):
        return spec, ()
    note = (
        f"num_nextn_predict_layers 1 -> 0: the folder has no tensors of model.layers.{layers}, "
        "so nothing drafts"
    )
    return replace(spec, mtp_layers=0), (note,)


def _spec(file: Path, config: SparseConfig, index_pairs: bool) -> SparseSpec:
    pairs = config.indexer_rope_interleave
    return SparseSpec(
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        indexers=_indexers(file, config),
        experts=_experts(file, config),
        num_experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_experts=config.n_shared_experts,
        expert_size=config.moe_intermediate_size,
        routed_scale=config.routed_scaling_factor,
        norm_topk=config.norm_topk_prob,
        latent_eps=config.rms_norm_eps,
        pairs=config.rope_interleave,
        index_pairs=index_pairs if pairs is None else pairs,
        mtp_layers=config.num_nextn_predict_layers,
        mtp_shares_index=bool(config.index_share_for_mtp_iteration),
        weight_block=_weight_block(file, config.quantization_config),
    )


def _no(file: Path, name: str, value: object, only: str) -> NoReturn:
    raise UnsupportedModel(f"{file}: {name} = {value!r} is not supported, only {only}")


def _refuse(file: Path, config: SparseConfig) -> None:
    """What would be computed wrongly."""
    heads = config.num_attention_heads
    whole = config.qk_nope_head_dim + config.qk_rope_head_dim
    allowed: dict[str, tuple[object, ...]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "n_group": (1, None),  # experts are chosen among all of them
        "topk_group": (1, None),
        "moe_layer_freq": (1,),
        "moe_router_dtype": ("float32", None),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "num_key_value_heads": (heads, None),
        "qk_head_dim": (whole, None),
        "num_nextn_predict_layers": (0, 1),
    }
    for name, values in allowed.items():
        if (value := getattr(config, name)) not in values:
            _no(file, name, value, " or ".join(str(v) for v in values if v is not None))
    if config.qk_rope_head_dim % 2:
        _no(file, "qk_rope_head_dim", config.qk_rope_head_dim, "even numbers")
    if config.index_head_dim < config.qk_rope_head_dim:
        least = f"at least qk_rope_head_dim = {config.qk_rope_head_dim}"
        _no(file, "index_head_dim", config.index_head_dim, least)
    if config.num_experts_per_tok > config.n_routed_experts:
        most = f"at most n_routed_experts = {config.n_routed_experts}"
        _no(file, "num_experts_per_tok", config.num_experts_per_tok, most)
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % _EXPERT_STEP:
            _no(file, name, getattr(config, name), f"multiples of {_EXPERT_STEP}")
    for kind in set(config.layer_types or ()) - {"indexed_attention"}:
        _no(file, "layer_types", kind, "'indexed_attention'")
    if config.layer_types is not None:
        _check_length(file, "layer_types", config.layer_types, config.num_hidden_layers)
    _refuse_ropes(file, config)


def _refuse_ropes(file: Path, config: SparseConfig) -> None:
    if config.rope_theta is None and not (config.rope_parameters or {}).get("rope_theta"):
        raise UnsupportedModel(f"{file}: rope_parameters.rope_theta is missing; add it")
    for field in ("rope_scaling", "rope_parameters"):
        given: dict[str, Any] = getattr(config, field) or {}
        for name in ("rope_type", "type"):
            if given.get(name, "default") not in ("default", None):
                _no(file, f"{field}.{name}", given[name], "'default'")
        if given.get("partial_rotary_factor", 1.0) not in (1.0, None):
            _no(file, f"{field}.partial_rotary_factor", given["partial_rotary_factor"], "1")


# --- which layers -----------------------------------------------------------------------------


def _indexers(file: Path, config: SparseConfig) -> tuple[bool, ...]:
    """For each layer whether it owns an indexer: by `indexer_types`, else by the pattern, else by
    frequency and offset.  Who serves a model may read another of the three, so they must agree."""
    plans = {}
    if config.indexer_types is not None:
        plans["indexer_types"] = config.indexer_types
    if config.index_topk_pattern is not None:
        plans["index_topk_pattern"] = [_FULL.get(c, c) for c in config.index_topk_pattern]
    if config.index_topk_freq is not None or not plans:
        plans["index_topk_freq"] = _by_frequency(config)
    for name, kinds in plans.items():
        _check_plan(file, name, kinds, config.num_hidden_layers)
    (first, chosen), *others = plans.items()
    for name, kinds in others:
        for layer, (ours, theirs) in enumerate(zip(chosen, kinds, strict=True)):
            if ours != theirs:
                raise UnsupportedModel(
                    f"{file}: {first} says that layer {layer} is {ours!r}, {_words(name, config)} "
                    f"that it is {theirs!r}; correct one of them"
                )
    return tuple(kind == "full" for kind in chosen)


def _by_frequency(config: SparseConfig) -> list[str]:
    every = max(config.index_topk_freq or 1, 1)
    offset = 2 if config.index_skip_topk_offset is None else config.index_skip_topk_offset
    return [
        "full" if max(layer - offset + 1, 0) % every == 0 else "shared"
        for layer in range(config.num_hidden_layers)
    ]


def _words(name: str, config: SparseConfig) -> str:
    value = getattr(config, name)
    if name != "index_topk_freq":
        return f"{name} = {value!r}"
    return f"{name} = {value} with index_skip_topk_offset = {config.index_skip_topk_offset}"


def _check_plan(file: Path, name: str, kinds: list[str], layers: int) -> None:
    for kind in kinds:
        if kind not in ("full", "shared"):
            _no(file, name, kind, "'full' and 'shared'")
    _check_length(file, name, kinds, layers)
    if kinds[0] != "full":
        raise UnsupportedModel(
            f"{file}: {name} begins with {kinds[0]!r}, but the first layer has nobody's choice to "
            "share; correct it"
        )


def _check_length(file: Path, name: str, kinds: list[str], layers: int) -> None:
    if len(kinds) != layers:
        raise UnsupportedModel(
            f"{file}: {name} is for {len(kinds)} layers, num_hidden_layers = {layers}; correct one"
        )


def _experts(file: Path, config: SparseConfig) -> tuple[bool, ...]:
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    by_count = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    given = config.mlp_layer_types
    if given is not None and given != by_count:
        raise UnsupportedModel(
            f"{file}: mlp_layer_types = {given!r} does not agree with first_k_dense_replace = "
            f"{dense} and num_hidden_layers = {layers}; correct one of them"
        )
    return tuple(kind == "sparse" for kind in by_count)


# --- the files beside it ----------------------------------------------------------------------


def _weight_block(file: Path, given: dict[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None for weights that are not quantised."""
    if given is None:
        return None
    allowed = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
        "scale_fmt": ("ue8m0", None),  # of activations; weights have float32 scales
    }
    for name, values in allowed.items():
        if (value := given.get(name)) not in values:
            _no(file, f"quantization_config.{name}", value, f"'{values[0]}'")
    block = given.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(_whole(size) for size in block)):
        _no(file, "quantization_config.weight_block_size", block, "two numbers, as [128, 128]")
    return block[0], block[1]


def _whole(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _has_layer(folder: Path, layer: int) -> bool:
    """Whether the folder's weights have tensors of `model.layers.<layer>`; True where that can't
    be told: whoever reads them will say what is wrong."""
    try:
        names = _tensor_names(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True
    return any(name.startswith(f"model.layers.{layer}.") for name in names)


def _tensor_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return list(json.loads(index.read_bytes())["weight_map"])
    with (folder / "model.safetensors").open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        return list(json.loads(data.read(length if length < 1 << 30 else 0)))
