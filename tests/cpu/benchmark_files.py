"""What tests of the benchmarks share: where these are, and a tiny model that all engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import gguf_tensors, make_reference, write_gguf

from text_makers import byte_level_json

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# whole vectors and panels, which kernels ask for
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def tiny_file(path: Path, metadata: dict[str, Any] | None = None, **sizes: Any) -> Path:
    """A llama of random weights with a byte-level tokenizer, as a .gguf file; `metadata` as
    `write_gguf` takes it."""
    parsed = json.loads(byte_level_json())
    vocab: dict[str, int] = parsed["model"]["vocab"]
    model = make_reference("llama", vocab_size=len(vocab), max_position_embeddings=512, **sizes)
    tokenizer = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "smollm",
        "tokenizer__ggml__tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer__ggml__token_type": [1] * len(vocab),
        "tokenizer__ggml__merges": [" ".join(merge) for merge in parsed["model"]["merges"]],
    }
    write_gguf(path, model, gguf_tensors(model), **tokenizer, **(metadata or {}))
    return path
