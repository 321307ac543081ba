"""A tiny chat model on disk, and the toy behind the public API; for the tests of offline use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from text_makers import chat_folder

VOCAB = 900
HIDDEN = 32
INNER = 48
LAYERS = 2
HEADS = 4
KV_HEADS = 2
MAX_LEN = 512
# what a small pool of the toy looks like to every command and every LLM
TOY_OPTIONS: dict[str, Any] = {
    "executor": "inline",
    "max_model_len": 256,
    "max_rows": 8,
    "threads": 1,
    "debug": True,
}


def toy_flags(**more: Any) -> list[str]:
    """TOY_OPTIONS as flags of a command."""
    options = TOY_OPTIONS | more
    return [word for name, value in options.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def tiny_llama(folder: Path, seed: int = 0, max_len: int = MAX_LEN) -> Path:
    """A Llama of random weights with a byte-level tokenizer and a chat template: 60 kB in all."""
    chat_folder(folder)
    head = HIDDEN // HEADS
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        parts = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * head, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * head),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    random = np.random.default_rng(seed)
    tensors = {f"{name}.weight": _values(random, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    # large enough that the best tokens are no near ties
    return (random.standard_normal(shape) * 2 * shape[1] ** -0.5).astype(np.float32)
