"""Our logits are transformers', however a prompt is cut into steps and pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import Pages, make_reference, random_ids, reference_logits, save

from stepahead.model.llama import Llama
from stepahead.model.load import load
from stepahead.model.spec import RopeSpec, read_spec
from stepahead.model.weights import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LENGTHS = {"a": 9, "b": 40, "c": 11, "d": 33}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 10,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head_dim": ("llama", {"head_dim": 16}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "mistral-head_dim": ("mistral", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-llama3": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-biases": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2-window": (
        "qwen2",
        {"sliding_window": 13, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3-window": (
        "qwen3",
        {"head_dim": 8, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "gemma3": ("gemma3", GEMMA),
    "gemma3-scaled": ("gemma3", GEMMA | {"query_pre_attn_scalar": 24, "sliding_window": 1}),
    "qwen3-linear": ("qwen3", {"head_dim": 8, "rope_parameters": LINEAR}),
}


@pytest.fixture(scope="module", params=list(KINDS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    family, config = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(make_reference(family, **config), folder)


@pytest.fixture(scope="module", params=["torch", "kernels"])
def pair(
    request: pytest.FixtureRequest, checkpoint: tuple[Path, PreTrainedModel]
) -> tuple[Llama, PreTrainedModel]:
    """Ours by plain layers, and as it is loaded for a CPU, and transformers'."""
    folder, reference = checkpoint
    if request.param == "torch":
        return load_model(read_spec(folder), "float32"), reference
    model = load(str(folder), "float32")
    assert isinstance(model, Llama)
    return model, reference


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # the promise is 1e-4; at this size nothing but a mistake comes near it
    torch.testing.assert_close(ours, theirs, rtol=0, atol=8e-5)


def test_full_prefill(pair: tuple[Llama, PreTrainedModel]) -> None:
    model, reference = pair
    ids = random_ids(61, seed=1)
    close(Pages(model).step(chunks={"a": ids})["a"], reference_logits(reference, ids))


def test_chunked_prefill(pair: tuple[Llama, PreTrainedModel]) -> None:
    model, reference = pair
    ids = random_ids(61, seed=2)
    pages = Pages(model)
    cuts = [0, 7, 8, 30, 61]  # inside a page, one token alone, at and past page ends
    parts = [
        pages.step(chunks={"a": ids[begin:end]})["a"] for begin, end in itertools.pairwise(cuts)
    ]
    close(torch.cat(parts), reference_logits(reference, ids))


def test_decode_from_the_first_token(pair: tuple[Llama, PreTrainedModel]) -> None:
    model, reference = pair
    ids = random_ids(23, seed=3)
    pages = Pages(model)
    steps = [pages.step(decode={"a": token})["a"] for token in ids]
    close(torch.cat(steps), reference_logits(reference, ids))


def test_ragged_steps(pair: tuple[Llama, PreTrainedModel]) -> None:
    """Prompts that arrive, run in chunks and decode beside one another."""
    model, reference = pair
    ids = {name: random_ids(count, seed=10 + count) for name, count in LENGTHS.items()}
    done = dict.fromkeys(ids, 0)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    pages = Pages(model)
    script: list[tuple[str, dict[str, int]]] = [  # decode rows, chunks with their counts
        ("", {"a": 5}),
        ("a", {"b": 17, "c": 6}),
        ("ac", {"b": 20, "d": 1}),
        ("cab", {"d": 31}),
        ("dcba", {}),
        ("bc", {}),
        ("c", {}),
    ]
    for decoding, counts in script:
        decode = {name: ids[name][done[name]] for name in decoding}
        chunks = {name: ids[name][done[name] :][:count] for name, count in counts.items()}
        for name, rows in pages.step(decode, chunks).items():
            logits[name].append(rows)
            done[name] += len(rows)
    assert done == LENGTHS
    for name, rows in logits.items():
        close(torch.cat(rows), reference_logits(reference, ids[name][: done[name]]))


@pytest.mark.parametrize("kind", ["llama-linear", "llama-llama3", "qwen2-tied-llama3"])
def test_rope_scaling_matters_here(kind: str, tmp_path: Path) -> None:
    """Guards the tests above: without its scaling the model would be far off."""
    family, config = KINDS[kind]
    reference = save(make_reference(family, **config), tmp_path)
    spec = read_spec(tmp_path)
    model = load_model(replace(spec, rope=RopeSpec(spec.rope.theta)), "float32")
    ids = random_ids(61, seed=1)
    wrong = Pages(model).step(chunks={"a": ids})["a"] - reference_logits(reference, ids)
    assert wrong.abs().max() > 0.1


def test_bfloat16_is_as_close_as_transformers(tmp_path: Path) -> None:
    exact = save(make_reference("llama"), tmp_path)
    model = load_model(read_spec(tmp_path), "bfloat16")
    ids = random_ids(61, seed=5)
    truth = reference_logits(exact, ids)
    theirs = (reference_logits(exact.bfloat16(), ids) - truth).abs().mean()
    pages = Pages(model)
    ours = [pages.step(chunks={"a": ids[:40]})["a"]]
    ours += [pages.step(decode={"a": token})["a"] for token in ids[40:]]
    assert model.embed.weight.dtype == torch.bfloat16
    assert pages.kv.k[0].dtype == torch.bfloat16
    assert (torch.cat(ours) - truth).abs().mean() < 1.5 * theirs


def test_no_gradients(tmp_path: Path) -> None:
    save(make_reference("qwen3", head_dim=8), tmp_path)
    model = load_model(read_spec(tmp_path), "float32")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_sharded_folder(tmp_path: Path) -> None:
    reference = save(make_reference("llama"), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load_model(read_spec(tmp_path), "float32")
    ids = random_ids(30, seed=6)
    close(Pages(model).step(chunks={"a": ids})["a"], reference_logits(reference, ids))
