"""What a model is, read from a folder's config.json or a GGUF file's metadata.

It knows names, sizes and rules of architectures; it must not know weights, nor import torch.
What can't be computed exactly is refused by name, or changed with a note in `ModelSpec.notes`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.sparse import SparseSpec, bytes_per_token, groups_of
from stepahead.model.sparse_config import SparseConfig, sparse_of

Format = Literal["safetensors", "gguf", "random"]
RopeScaling = Literal["none", "linear", "llama3", "table"]

# Hugging Face's name of an architecture, and the class that computes it.
_SPARSE = "stepahead.model.glm_moe_dsa:GlmMoeDsa"
ARCHITECTURES = {
    "LlamaForCausalLM": "stepahead.model.llama:Llama",
    "MistralForCausalLM": "stepahead.model.llama:Llama",
    "Qwen2ForCausalLM": "stepahead.model.llama:Llama",
    "Qwen3ForCausalLM": "stepahead.model.llama:Llama",
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV32ForCausalLM": _SPARSE,
}
# `general.architecture` of a GGUF file; Mistral files say "llama".
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: the base `theta` and how its frequencies are stretched.

    none     as they are
    linear   all divided by `factor`
    llama3   by wavelength, between 1 and `factor` (the Llama 3.1 rule)
    table    each divided by its own of the head_dim / 2 `divisors`, and by `factor`
             (what a GGUF file's rope_freqs.weight holds)
    """

    theta: float = 10_000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Everything that a model's arrays and arithmetic follow from. Raises UnsupportedModel.

    `max_len` counts token positions. `notes` says what was changed from the file, and why.
    `sparse` is there for models with a compressed cache, sparse attention and experts; their cache
    has one head, and `head_dim` counts the dimensions that rotary positions turn.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    rms_eps: float = 1e-6
    rope: RopeSpec = RopeSpec()
    tied_head: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    path: str = ""
    format: Format = "random"
    sliding_window: int | None = None
    notes: tuple[str, ...] = ()
    sparse: SparseSpec | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path or 'the model'}: architecture {self.architecture} is not supported; "
                f"choose a model with one of {', '.join(ARCHITECTURES)}"
            )
        if self.num_heads % self.num_kv_heads:
            self._refuse(f"{self.num_heads} heads can't share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            self._refuse(f"rotary positions need an even head_dim, not {self.head_dim}")
        if self.rope.scaling == "table" and len(self.rope.divisors) != self.head_dim // 2:
            self._refuse(
                f"rope_freqs.weight has {len(self.rope.divisors)} values, expected head_dim / 2 = "
                f"{self.head_dim // 2}"
            )

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self.path or 'the model'}: {reason}; choose another model")


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int) -> int:
    """Bytes that one token position takes in the KV pool, over all layers, without drafts."""
    if spec.sparse is not None:
        return bytes_per_token(groups_of(spec.sparse, dtype_bytes))
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype_bytes


def read_spec(path: str | Path) -> ModelSpec:
    """The spec of a Hugging Face folder or a .gguf file.

    Raises UnsupportedModel for what can't be computed, WeightError for what can't be read; both
    name the file.
    """
    path = Path(path)
    if os.path.isdir(path):  # not Path's own, which raises for a name that is too long
        return _read_folder(path)
    if path.suffix == ".gguf":
        return _read_gguf(path)
    if not os.path.exists(path):
        raise WeightError(f"{path}: no such file or folder; give a model's folder or a .gguf file")
    raise UnsupportedModel(f"{path}: neither a folder nor a .gguf file; give one of these")


# --- Hugging Face folders ---------------------------------------------------------------------

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class _Kind(msgspec.Struct):
    architectures: list[str] | None = None


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: _Count | None = None
    partial_rotary_factor: float | None = None
    full_attention: Any = None
    sliding_attention: Any = None


class _Config(msgspec.Struct):
    """config.json; what has no default there has none here, so its absence is an error."""

    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    max_position_embeddings: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    original_max_position_embeddings: _Count | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: _Count | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _read_folder(folder: Path) -> ModelSpec:
    file = folder / "config.json"
    kinds = _decode(file, _Kind).architectures
    if not kinds or kinds[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file}: architecture {kinds[0] if kinds else 'unnamed'} is not supported; choose a "
            f"model with one of {', '.join(ARCHITECTURES)}"
        )
    config = _decode(file, _Config)
    sparse, config, sparse_notes = _folder_sparse(file, kinds[0], config)
    _refuse_variants(file, config)
    window, notes = _folder_window(kinds[0], config)
    return _clamp_to_window(
        ModelSpec(
            architecture=kinds[0],
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=_kv_heads(file, kinds[0], config),
            head_dim=_head_dim(file, kinds[0], config),
            max_len=config.max_position_embeddings,
            rms_eps=config.rms_norm_eps,
            rope=_folder_rope(file, config),
            tied_head=config.tie_word_embeddings,
            **_biases(kinds[0], config),
            qk_norm=kinds[0] == "Qwen3ForCausalLM",
            eos_token_ids=_folder_eos(folder, config),
            bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
            path=str(folder),
            format="safetensors",
            sliding_window=window,
            notes=(*notes, *sparse_notes),
            sparse=sparse,
        )
    )


def _folder_sparse(
    file: Path, architecture: str, config: _Config
) -> tuple[SparseSpec | None, _Config, tuple[str, ...]]:
    """The spec's `sparse`, the config as the rest is to read it, and notes."""
    if ARCHITECTURES[architecture] != _SPARSE:
        return None, config, ()
    sparse, notes = sparse_of(file, architecture, _decode(file, SparseConfig))
    shared = {"num_key_value_heads": 1, "head_dim": sparse.rope_dim, "quantization_config": None}
    return sparse, msgspec.structs.replace(config, **shared), notes


def _decode(file: Path, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise WeightError(f"{file}: can't be read: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{file}: {error}; the model needs a complete config") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightError(f"{file}: not JSON: {error}; download it again") from error


def _refuse_variants(file: Path, config: _Config) -> None:
    if config.hidden_act != "silu":
        raise UnsupportedModel(
            f"{file}: hidden_act '{config.hidden_act}' is not supported, only 'silu'"
        )
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"{file}: weights quantised by '{method}' are not supported; use the float model or a "
            "GGUF file"
        )


def _biases(architecture: str, config: _Config) -> dict[str, bool]:
    """Which matrices have a bias: a rule of the architecture or an option of its config."""
    attention = config.attention_bias and architecture != "MistralForCausalLM"
    if architecture == "Qwen2ForCausalLM":
        return {"qkv_bias": True, "o_bias": False, "mlp_bias": False}
    return {
        "qkv_bias": attention,
        "o_bias": attention,
        "mlp_bias": config.mlp_bias and architecture == "LlamaForCausalLM",
    }


def _kv_heads(file: Path, architecture: str, config: _Config) -> int:
    if config.num_key_value_heads is not None:
        return config.num_key_value_heads
    if architecture == "LlamaForCausalLM":
        return config.num_attention_heads
    raise UnsupportedModel(f"{file}: num_key_value_heads is missing; add it")


def _head_dim(file: Path, architecture: str, config: _Config) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if architecture == "Qwen3ForCausalLM":
        raise UnsupportedModel(f"{file}: head_dim is missing; add it")
    return config.hidden_size // config.num_attention_heads


def _folder_rope(file: Path, config: _Config) -> RopeSpec:
    given = config.rope_scaling or config.rope_parameters or _Rope()
    if given.full_attention is not None or given.sliding_attention is not None:
        raise UnsupportedModel(f"{file}: one rope for each kind of layer is not supported")
    theta = given.rope_theta or config.rope_theta or 10_000.0
    partial = given.partial_rotary_factor or config.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"{file}: partial_rotary_factor {partial} is not supported, only 1")
    kind = given.rope_type or given.type or "default"
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", _need(file, kind, given, "factor"))
    if kind == "llama3":
        before = config.original_max_position_embeddings or given.original_max_position_embeddings
        return RopeSpec(
            theta,
            "llama3",
            _need(file, kind, given, "factor"),
            _need(file, kind, given, "low_freq_factor"),
            _need(file, kind, given, "high_freq_factor"),
            before or config.max_position_embeddings,
        )
    raise UnsupportedModel(
        f"{file}: rope scaling '{kind}' is not supported, only default, linear and llama3"
    )


def _need(file: Path, kind: str, rope: _Rope, name: str) -> float:
    value = getattr(rope, name)
    if value is None:
        raise UnsupportedModel(f"{file}: rope scaling '{kind}' lacks '{name}'; add it")
    return value


def _folder_eos(folder: Path, config: _Config) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    generation = _decode(file, _Generation) if file.exists() else _Generation()
    return _ids(config.eos_token_id, generation.eos_token_id)


def _ids(*given: int | list[int] | None) -> tuple[int, ...]:
    """All ids once, in the order given."""
    ids: dict[int, None] = {}
    for item in given:
        ids.update(dict.fromkeys([item] if isinstance(item, int) else item or []))
    return tuple(ids)


def _folder_window(architecture: str, config: _Config) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window that some layer applies, or None."""
    window = config.sliding_window
    if architecture == "MistralForCausalLM":
        if window is msgspec.UNSET:  # Mistral's config class fills this in, so the model has it
            return 4096, ("sliding_window is not in config.json; Mistral's default is 4096",)
        return window, ()
    if not architecture.startswith("Qwen") or not config.use_sliding_window:
        return None, ()
    slides = (
        "sliding_attention" in config.layer_types
        if config.layer_types is not None
        else config.max_window_layers < config.num_hidden_layers
    )
    if window is msgspec.UNSET:
        window = 4096
    return (window if slides else None), ()


def _clamp_to_window(spec: ModelSpec) -> ModelSpec:
    # Up to the window's length, attention through the window is full attention.
    window = spec.sliding_window
    if window is None or window >= spec.max_len:
        return spec
    note = (
        f"max_len {spec.max_len} -> {window}: the model attends through a sliding window of "
        f"{window} positions, which is not supported beyond its own length"
    )
    return replace(spec, max_len=window, notes=(*spec.notes, note))


# --- GGUF files -------------------------------------------------------------------------------


class _Metadata:
    """The metadata of one GGUF file; missing or mistyped keys are errors that name file and key."""

    def __init__(self, path: Path, values: dict[str, Any], architecture: str) -> None:
        self.path = path
        self.values = values
        self.architecture = architecture

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # some files give one value a layer
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._wrong(key, value, "one whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            self._wrong(key, value, "a number of at least 0")
        return float(value)

    def optional(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def token_id(self, kind: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def refuse(self, key: str, unless: Any) -> None:
        """Refuse the file if the key is there with another value than `unless`."""
        value = self.optional(key)
        if value is not None and value != unless:
            raise UnsupportedModel(
                f"{self.path}: {self.architecture}.{key} = {value} is not supported, only {unless}"
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self.optional(key)
        return default if value is None else value

    def _wrong(self, key: str, value: Any, expected: str) -> NoReturn:
        raise UnsupportedModel(
            f"{self.path}: {self.architecture}.{key} is {value!r}, expected {expected}; convert "
            "the model again"
        )


def _read_gguf(path: Path) -> ModelSpec:
    from stepahead.model.gguf import GGUFFile, open_gguf  # 0.1 s that folders need not pay

    file: GGUFFile = open_gguf(path)
    kind = file.metadata.get("general.architecture")
    if kind not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{path}: GGUF architecture {kind} is not supported; choose a model with one of "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    meta = _Metadata(path, file.metadata, kind)
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // heads)
    _refuse_gguf_variants(meta, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightError(f"{path}: tensor 'token_embd.weight' is missing; convert the model again")
    window = meta.number("attention.sliding_window", 0.0)
    return _clamp_to_window(
        ModelSpec(
            architecture=GGUF_ARCHITECTURES[kind],
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=meta.count("feed_forward_length"),
            num_layers=meta.count("block_count"),
            num_heads=heads,
            num_kv_heads=meta.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_len=meta.count("context_length"),
            rms_eps=meta.number("attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(meta, file),
            tied_head="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm=kind == "qwen3",
            eos_token_ids=_ids(meta.token_id("eos"), meta.token_id("eot")),
            bos_token_id=meta.token_id("bos"),
            path=str(path),
            format="gguf",
            sliding_window=int(window) or None,
        )
    )


def _refuse_gguf_variants(meta: _Metadata, head_dim: int) -> None:
    parts = meta.values.get("split.count", 1)
    if parts not in (0, 1):
        raise UnsupportedModel(
            f"{meta.path}: one of {parts} parts; join them first (llama-gguf-split --merge)"
        )
    meta.refuse("attention.value_length", unless=head_dim)
    meta.refuse("rope.dimension_count", unless=head_dim)
    meta.refuse("expert_count", unless=0)
    meta.refuse("attention.causal", unless=True)
    meta.refuse("attention.scale", unless=0.0)


def _gguf_rope(meta: _Metadata, file: Any) -> RopeSpec:
    theta = meta.number("rope.freq_base", 10_000.0)
    kind = meta.optional("rope.scaling.type") or "linear"  # llama.cpp's default; factor 1 is none
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{meta.path}: rope scaling '{kind}' is not supported, only none, linear and a tensor "
            "rope_freqs.weight"
        )
    older = meta.number("rope.scale_linear", 0.0)  # what the key was called in 2023
    factor = meta.number("rope.scaling.factor", older) if kind == "linear" else 1.0
    factor = factor or 1.0
    if "rope_freqs.weight" in file.tensors:
        divisors = file.dequantize("rope_freqs.weight", file.blocks("rope_freqs.weight"))
        return RopeSpec(theta, "table", factor, divisors=tuple(divisors.ravel().tolist()))
    return RopeSpec(theta) if factor == 1.0 else RopeSpec(theta, "linear", factor)
