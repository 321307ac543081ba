"""What a model is, read from a folder's config.json; GGUF files are read by `gguf_spec.py`.

It knows names, sizes and rules of architectures; it must not know weights, nor import torch.
What can't be computed exactly is refused by name, or changed with a note in `ModelSpec.notes`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.sparse import SparseSpec, bytes_per_token, groups_of
from stepahead.model.sparse_config import SparseConfig, sparse_of

Format = Literal["safetensors", "gguf", "random"]
RopeScaling = Literal["none", "linear", "llama3", "table"]
Activation = Literal["silu", "gelu_tanh"]

# Hugging Face's name of an architecture, and the class that computes it.
_SPARSE = "stepahead.model.glm_moe_dsa:GlmMoeDsa"
ARCHITECTURES = {
    "LlamaForCausalLM": "stepahead.model.llama:Llama",
    "MistralForCausalLM": "stepahead.model.llama:Llama",
    "Qwen2ForCausalLM": "stepahead.model.llama:Llama",
    "Qwen3ForCausalLM": "stepahead.model.llama:Llama",
    "Gemma3ForCausalLM": "stepahead.model.llama:Llama",
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV32ForCausalLM": _SPARSE,
}
GEMMA = "Gemma3ForCausalLM"
GEMMA_PERIOD = 6  # every sixth layer sees all, the others a window


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

    `windowed` says of each layer whether its queries see the last `sliding_window` positions only,
    () where none does; such layers have `window_rope` where it is given.  `post_norms`: what
    attention and MLP give is normed as well.  `norm_offset` is added to the norms' weights as they
    are stored.  `embed_scale` and `attention_scale`: None for 1 and for 1 / sqrt(head_dim).

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
    windowed: tuple[bool, ...] = ()
    window_rope: RopeSpec | None = None
    activation: Activation = "silu"
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float | None = None
    attention_scale: float | None = None
    notes: tuple[str, ...] = ()
    sparse: SparseSpec | None = None

    @property
    def fusable(self) -> bool:
        """Whether the CPU's kernels can run all layers in one call: heads are whole vectors and
        states whole panels of any CPU."""
        return self.sparse is None and self.head_dim % 16 == 0 and self.hidden_size % 32 == 0

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

    def sees_window(self, layer: int) -> bool:
        """Whether the layer's queries see no more than `sliding_window` positions."""
        return bool(self.windowed) and self.windowed[layer]

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self.path or 'the model'}: {reason}; choose another model")


def kv_width(spec: ModelSpec, dtype_bytes: int, quantization: str) -> int:
    """Bytes of a number in the KV pool: models whose matrices are rounded keep float16 there, where
    kernels read it."""
    return dtype_bytes if quantization == "none" or not spec.fusable else 2


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
        from stepahead.model.gguf_spec import read_gguf_spec  # 0.1 s that folders need not pay

        return read_gguf_spec(path)
    if not os.path.exists(path):
        raise WeightError(f"{path}: no such file or folder; give a model's folder or a .gguf file")
    raise UnsupportedModel(f"{path}: neither a folder nor a .gguf file; give one of these")


# --- Hugging Face folders ---------------------------------------------------------------------

_Count = Annotated[int, msgspec.Meta(ge=1)]
# More than any model has: whoever lists what its layers are would run out of memory.
_Layers = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
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
    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None


class _Config(msgspec.Struct):
    """config.json; what has no default there has none here, so its absence is an error."""

    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Layers
    num_attention_heads: _Count
    max_position_embeddings: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: _NotNegative = 1e-6
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    original_max_position_embeddings: _Count | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool | None = None
    use_sliding_window: bool = False
    sliding_window: _Count | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    # of Gemma 3 alone
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: _Positive = 256.0
    rope_local_base_freq: _Positive = 10_000.0
    sliding_window_pattern: _Count = GEMMA_PERIOD
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False


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
    _refuse_variants(file, kinds[0], config)
    window, windowed, notes = _folder_window(file, kinds[0], config)
    rope, window_rope = _folder_ropes(file, kinds[0], config)
    return ModelSpec(
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
        rope=rope,
        window_rope=window_rope,
        tied_head=_tied(kinds[0], config),
        **_biases(kinds[0], config),
        qk_norm=kinds[0] in ("Qwen3ForCausalLM", GEMMA),
        eos_token_ids=_folder_eos(folder, config),
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        path=str(folder),
        format="safetensors",
        sliding_window=window,
        windowed=windowed,
        notes=(*notes, *sparse_notes),
        sparse=sparse,
        **(_gemma_ways(config) if kinds[0] == GEMMA else {}),
    )


def _tied(architecture: str, config: _Config) -> bool:
    given = config.tie_word_embeddings
    return architecture == GEMMA if given is None else given


def _gemma_ways(config: _Config) -> dict[str, Any]:
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "norm_offset": 1.0,
        "embed_scale": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
    }


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
    except FileNotFoundError as error:
        raise WeightError(
            f"{file.parent}: not a model's folder: there is no {file.name}; give the folder that "
            "has it, or a .gguf file"
        ) from error
    except OSError as error:
        raise WeightError(f"{file}: can't be read: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{file}: {error}; the model needs a complete config") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightError(f"{file}: not JSON: {error}; download it again") from error


def _refuse_variants(file: Path, architecture: str, config: _Config) -> None:
    if architecture == GEMMA:
        _refuse_gemma_variants(file, config)
    elif config.hidden_act != "silu":
        raise UnsupportedModel(
            f"{file}: hidden_act '{config.hidden_act}' is not supported, only 'silu'"
        )
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"{file}: weights quantised by '{method}' are not supported; use the float model or a "
            "GGUF file"
        )


def _refuse_gemma_variants(file: Path, config: _Config) -> None:
    for name, only in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
        ("use_bidirectional_attention", False),
    ):
        value = getattr(config, name)
        if value != only and value:
            raise UnsupportedModel(f"{file}: {name} = {value!r} is not supported, only {only!r}")


def _biases(architecture: str, config: _Config) -> dict[str, Any]:
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
    if architecture in ("Qwen3ForCausalLM", GEMMA):
        raise UnsupportedModel(f"{file}: head_dim is missing; add it")
    return config.hidden_size // config.num_attention_heads


def _folder_ropes(
    file: Path, architecture: str, config: _Config
) -> tuple[RopeSpec, RopeSpec | None]:
    """Those of layers that see all, and of layers that see a window where they have their own."""
    older, newer = config.rope_scaling, config.rope_parameters
    if older is not None and newer is not None and older != newer:
        raise UnsupportedModel(
            f"{file}: rope_scaling and rope_parameters are both there and differ; take one out"
        )
    given = newer or older or _Rope()
    if architecture != GEMMA:
        if given.full_attention is not None or given.sliding_attention is not None:
            raise UnsupportedModel(f"{file}: one rope for each kind of layer is not supported")
        return _folder_rope(file, config, given, config.rope_theta or 10_000.0), None
    local = config.rope_local_base_freq
    everywhere = config.rope_theta or 1_000_000.0
    return (
        _folder_rope(file, config, given.full_attention or given, everywhere),
        _folder_rope(file, config, given.sliding_attention or _Rope(), local),
    )


def _folder_rope(file: Path, config: _Config, given: _Rope, theta: float) -> RopeSpec:
    theta = given.rope_theta or theta
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
    return distinct_ids(config.eos_token_id, generation.eos_token_id)


def distinct_ids(*given: int | list[int] | None) -> tuple[int, ...]:
    """All ids once, in the order given."""
    ids: dict[int, None] = {}
    for item in given:
        ids.update(dict.fromkeys([item] if isinstance(item, int) else item or []))
    return tuple(ids)


def _folder_window(
    file: Path, architecture: str, config: _Config
) -> tuple[int | None, tuple[bool, ...], tuple[str, ...]]:
    """The sliding window, which layers have it, and notes; None and () where none has."""
    window, notes = config.sliding_window, ()
    if window is msgspec.UNSET and architecture != "LlamaForCausalLM":
        window = 4096  # what their config classes fill in, so the model has it
        if architecture == "MistralForCausalLM":
            notes = ("sliding_window is not in config.json; Mistral's default is 4096",)
    windowed = _windowed(file, architecture, config)
    if architecture == GEMMA and window is None and any(windowed):
        # without one, layers that were trained to see a window would turn as if they saw all
        raise UnsupportedModel(
            f"{file}: sliding_window = None is not supported where layer_types has "
            "'sliding_attention'; set it"
        )
    if not isinstance(window, int) or not any(windowed):
        return None, (), ()
    return window, windowed, notes


def _windowed(file: Path, architecture: str, config: _Config) -> tuple[bool, ...]:
    """Which layers see a window if there is one: a rule of the architecture, or as listed."""
    count = config.num_hidden_layers
    if architecture == "MistralForCausalLM":
        return (True,) * count
    if architecture == GEMMA or (architecture.startswith("Qwen") and config.use_sliding_window):
        if config.layer_types is not None:
            return _listed(file, config.layer_types, count)
        if architecture == GEMMA:
            period = config.sliding_window_pattern
            return tuple((layer + 1) % period != 0 for layer in range(count))
        return tuple(layer >= config.max_window_layers for layer in range(count))
    return ()  # Llama has none, whatever its config says


def _listed(file: Path, kinds: list[str], count: int) -> tuple[bool, ...]:
    for kind in set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"{file}: layer_types = {kind!r} is not supported, only 'sliding_attention' and "
            "'full_attention'"
        )
    if len(kinds) != count:
        raise UnsupportedModel(
            f"{file}: layer_types is for {len(kinds)} layers, num_hidden_layers = {count}; "
            "correct one"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)
