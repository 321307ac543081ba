"""What a model is, read from a GGUF file's metadata.

It knows the keys of that format; it must not know weights, nor import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.gguf import open_gguf
from stepahead.model.spec import GEMMA, GEMMA_PERIOD, ModelSpec, RopeSpec, distinct_ids

# `general.architecture` of a file; Mistral files say "llama".
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": GEMMA,
}
_LAYERS_OF_27B = 62  # of Gemma 3


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


def read_gguf_spec(path: Path) -> ModelSpec:
    """The spec of a .gguf file; errors as of `read_spec`."""
    file = open_gguf(path)
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
    window = int(meta.number("attention.sliding_window", 0.0)) or None
    layers = meta.count("block_count")
    return ModelSpec(
        architecture=GGUF_ARCHITECTURES[kind],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=meta.count("feed_forward_length"),
        num_layers=layers,
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
        qk_norm=kind in ("qwen3", "gemma3"),
        eos_token_ids=distinct_ids(meta.token_id("eos"), meta.token_id("eot")),
        bos_token_id=meta.token_id("bos"),
        path=str(path),
        format="gguf",
        sliding_window=window,
        windowed=_windowed(kind, layers) if window else (),
        **(_gemma_ways(meta, hidden, layers) if kind == "gemma3" else {}),
    )


def _windowed(kind: str, layers: int) -> tuple[bool, ...]:
    period = GEMMA_PERIOD if kind == "gemma3" else layers + 1
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def _gemma_ways(meta: _Metadata, hidden: int, layers: int) -> dict[str, Any]:
    """The converter has added the norms' offset already."""
    meta.refuse("attention.sliding_window_pattern", unless=GEMMA_PERIOD)
    scale = (hidden / meta.count("attention.head_count")) ** -0.5
    return {
        # the file does not say: who reads it is to know that the 27B model alone has this one
        "attention_scale": scale if layers == _LAYERS_OF_27B else None,
        "activation": "gelu_tanh",
        "post_norms": True,
        "embed_scale": hidden**0.5,
        "window_rope": RopeSpec(meta.number("rope.freq_base_swa", 10_000.0)),
    }


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
    meta.refuse("attn_logit_softcapping", unless=0.0)
    meta.refuse("final_logit_softcapping", unless=0.0)


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
