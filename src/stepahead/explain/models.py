"""What is known of a model by its name or its files, supported or not; no weights are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stepahead.config import DTYPE_BYTES, EngineConfig, ModelFacts
from stepahead.errors import UnsupportedModel, WeightError
from stepahead.explain import glm
from stepahead.explain.report import Entry
from stepahead.explain.sizes import Cache, Part, Sizes
from stepahead.model.sparse import CellKind, bytes_per_token, told
from stepahead.model.spec import ModelSpec, kv_bytes_per_token, kv_width, read_spec

TOY = "toy"
# described in the package, so that it is explained where there is no such file
BUILTIN = "glm-5.3"
_SPELLINGS = {
    f"{owner}{BUILTIN}{kind}" for owner in ("", "zai-org/") for kind in ("", "-bf16", "-fp8")
}

_TRIED = "computed here, and tried on tiny random weights only: the released ones are 755 GB"
_PACE = (
    "a decode step of 1, 32 or 256 rows takes about 7, 25 or 49 ms on 8 H200 (fp8, tensor "
    "parallel, 8K context; calculated, not measured): what the host has to stay below"
)


@dataclass(frozen=True)
class Described:
    """A model as far as it is known.

    facts    for `config.resolve`; kv_bytes_per_token or max_len is 0 where it is not known
    lines    for people
    refused  why this engine can't run it, if so
    sizes    for the estimate of memory; None where the files do not say enough
    drafts   layers of its own that propose tokens (MTP)
    ordinary whether it is known to be a plain decoder: one token a step, a cache of keys alone
    """

    name: str
    architecture: str
    facts: ModelFacts
    lines: tuple[str, ...] = ()
    refused: tuple[Entry, ...] = ()
    sizes: Sizes | None = None
    drafts: int = 0
    ordinary: bool = True


def describe(name: str, options: Mapping[str, Any]) -> Described:
    """A model that runs with these options of EngineConfig, as far as its memory depends on them;
    WeightError where there is nothing to read."""
    dtype = options.get("dtype", EngineConfig.dtype)
    if name == TOY:
        return _toy()
    if name.lower() in _SPELLINGS and not os.path.exists(name):
        known = _glm(name, glm.ARCHITECTURE, glm.builtin_shape(), dtype)
        return replace(known, lines=(*known.lines, _TRIED, _PACE))
    try:
        spec = read_spec(name)
    except UnsupportedModel as error:
        return _unsupported(Path(name), error, dtype)
    except WeightError as error:
        if os.path.exists(name):
            raise
        raise WeightError(
            f"{error}; {BUILTIN} and {TOY} are known by name. A command line of another engine "
            "goes after --"
        ) from error
    if spec.sparse is not None:
        file = Path(name) / "config.json"
        shape = glm.as_read(glm.read_shape(file.read_bytes(), str(file)), spec)
        known = _glm(name, spec.architecture, shape, dtype)
        return replace(known, lines=(*known.lines, *spec.notes))
    return _dense(name, spec, options)


def _toy() -> Described:
    from stepahead.assemble import toy_parts  # 0.2 s that a model known by name need not pay

    facts = toy_parts().facts
    return Described(TOY, "ToyModel", facts, ("a hash of the cache, for tests; no weights",))


def _dense(name: str, spec: ModelSpec, options: Mapping[str, Any]) -> Described:
    from stepahead.assemble import weight_bytes, weight_values

    kept = {key: options[key] for key in ("dtype", "quantization", "device") if key in options}
    config = EngineConfig(name, **kept)
    width = kv_width(spec, DTYPE_BYTES[config.dtype], config.quantization)
    facts = ModelFacts(
        vocab_size=spec.vocab_size,
        max_len=spec.max_len,
        eos_ids=spec.eos_token_ids,
        kv_bytes_per_token=kv_bytes_per_token(spec, width),
        weight_bytes=weight_bytes(spec, config),
        packs=True,
    )
    lines = (
        f"{spec.num_layers} layers, {spec.num_heads} heads of {spec.head_dim} on "
        f"{spec.num_kv_heads} heads of keys and values",
        *spec.notes,
    )
    sizes = _dense_sizes(spec, weight_values(spec))
    return Described(name, spec.architecture, facts, lines, sizes=sizes)


def _dense_sizes(spec: ModelSpec, values: int) -> Sizes:
    table = spec.vocab_size * spec.hidden_size
    tables = table if spec.tied_head else 2 * table
    return Sizes(
        parts=(
            Part("embeddings", tables, quantized=False, spread=True),
            Part("layers", values - tables),
        ),
        active_values=values - tables + table,
        caches=tuple(Cache(kind, kv_bytes_per_token(spec, DTYPE_BYTES[kind])) for kind in _KINDS),
        splits_cache=spec.num_kv_heads,
        max_len=spec.max_len,
    )


_KINDS = ("bfloat16", "float32")


def _glm(
    name: str,
    architecture: str,
    shape: glm.GlmShape,
    dtype: str,
    refused: tuple[Entry, ...] = (),
) -> Described:
    sizes, width = glm.sizes_of(shape), DTYPE_BYTES[dtype]
    kept: CellKind = "float32" if width == 4 else "bfloat16"
    groups = glm.pool_groups(shape, kept, kept)
    ends = shape.eos_token_id
    facts = ModelFacts(
        vocab_size=shape.vocab_size,
        max_len=shape.max_position_embeddings,
        eos_ids=tuple([ends] if isinstance(ends, int) else ends or ()),
        kv_bytes_per_token=bytes_per_token(groups),
        weight_bytes=sizes.values * width,
    )
    return Described(
        name,
        architecture,
        facts,
        (*_glm_lines(shape, sizes), f"this engine's pool, as {kept}: {told(groups)}"),
        refused,
        sizes,
        shape.num_nextn_predict_layers,
    )


def _glm_lines(shape: glm.GlmShape, sizes: Sizes) -> Iterator[str]:
    layers, owners = shape.num_hidden_layers, shape.indexers
    plain = glm.sizes_of(msgspec.structs.replace(shape, num_nextn_predict_layers=0)).values
    yield (
        f"{plain / 1e9:.1f} B parameters, a token meets {sizes.active_values / 1e9:.1f} B of them; "
        f"{(sizes.values - plain) / 1e9:.1f} B more draft tokens"
    )
    yield (
        f"{layers} layers, {layers - shape.first_k_dense_replace} of them with "
        f"{shape.n_routed_experts} experts: {shape.num_experts_per_tok} chosen by a router and "
        f"{shape.n_shared_experts} shared, for each token"
    )
    yield (
        f"sparse attention: {owners} layers own an indexer that chooses {shape.index_topk:,} "
        f"positions, {layers - owners} use the choice of the last one that does"
    )
    yield (
        f"compressed cache: a row of {shape.latent_values} values a layer for all "
        f"{shape.num_attention_heads} heads, and a key of {shape.index_head_dim} in a layer that "
        "owns an indexer"
    )


# --- what this engine can't run, from its files alone ------------------------------------------


class _Bare(msgspec.Struct):
    """What any config.json may say; nothing here is required."""

    architectures: list[str] | None = None
    vocab_size: Any = None
    max_position_embeddings: Any = None


def _unsupported(path: Path, error: UnsupportedModel, dtype: str) -> Described:
    refused = Entry(UnsupportedModel.__name__, None, str(error))
    if path.suffix == ".gguf":
        return _bare_gguf(path, refused)
    if not path.is_dir():
        raise error
    config = (path / "config.json").read_bytes()
    try:
        bare = msgspec.json.decode(config, type=_Bare)
    except msgspec.MsgspecError:
        raise error from None
    architecture = (bare.architectures or ["unnamed"])[0]
    if architecture == glm.ARCHITECTURE:
        shape = glm.read_shape(config, str(path / "config.json"))
        return _glm(str(path), architecture, shape, dtype, (refused,))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return _bare(
        str(path), architecture, bare.vocab_size, bare.max_position_embeddings, size, refused
    )


def _bare_gguf(path: Path, refused: Entry) -> Described:
    from stepahead.text.gguf_metadata import read_metadata

    values = read_metadata(path)
    kind = str(values.get("general.architecture", "unnamed"))
    tokens = values.get("tokenizer.ggml.tokens")
    vocabulary = len(tokens) if isinstance(tokens, list) else 0
    length, size = values.get(f"{kind}.context_length"), path.stat().st_size
    return _bare(str(path), kind, vocabulary, length, size, refused)


def _bare(
    name: str, architecture: str, vocabulary: Any, length: Any, size: int, refused: Entry
) -> Described:
    facts = ModelFacts(_count(vocabulary), _count(length), (), 0, size)
    lines = (f"{size / 1e9:.2f} GB of weights in its files",) if size else ()
    return Described(name, architecture, facts, lines, (refused,), ordinary=False)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
