"""GGUF files: every block type, arch llama's row order, and transformers' logits."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from tiny_models import (
    Pages,
    gguf_tensors,
    make_reference,
    random_blocks,
    random_ids,
    reference_logits,
    smollm2_path,
    write_gguf,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from stepahead.errors import UnsupportedModel, WeightError
from stepahead.model.gguf import Strings, open_gguf
from stepahead.model.llama import Llama
from stepahead.model.load import load
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_model

PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
# the types that the gguf package dequantises, as it lists them itself
TYPES = (*PLAIN, *gguf.quants._type_traits)
BIG = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 8, "num_hidden_layers": 1}


def read_by_transformers(path: Path) -> PreTrainedModel:
    """What `from_pretrained(gguf_file=...)` does, without the accelerate package it asks for."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    model.tie_weights()
    return model.eval()


def quantised(
    tensors: dict[str, np.ndarray], kind: GGMLQuantizationType
) -> tuple[dict[str, np.ndarray], dict[str, GGMLQuantizationType]]:
    """The same tensors with the matrices in blocks of `kind`: quantised, or random if it can't."""
    blocks, kinds = {}, {}
    for name, value in tensors.items():
        if value.ndim == 1:
            blocks[name] = value
            continue
        try:
            blocks[name] = gguf.quants.quantize(value, kind)
        except NotImplementedError:
            blocks[name] = random_blocks(kind, *value.shape)
        if kind not in PLAIN:
            kinds[name] = kind
    return blocks, kinds


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_block_type(kind: GGMLQuantizationType, family: str, tmp_path: Path) -> None:
    """Each weight is what the gguf package makes of its blocks, q and k of llama put in order."""
    reference = make_reference(family, **BIG)
    blocks, kinds = quantised(gguf_tensors(reference), kind)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, blocks, kinds)
    values = {
        name: gguf.quants.dequantize(rows, kind) if rows.ndim == 2 else rows
        for name, rows in blocks.items()
    }
    q, k, v = (values[f"blk.0.attn_{part}.weight"] for part in "qkv")
    if family == "llama":  # rows 0, 2, 4 ... of a head are its first half
        q, k = (
            np.concatenate([head[start::2] for head in np.split(m, n) for start in (0, 1)])
            for m, n in ((q, 4), (k, 2))
        )
    model = load_model(read_spec(path), "float32")
    layer = model.layers[0]
    expected = {
        model.embed: values["token_embd.weight"],
        layer.attention.qkv: np.concatenate((q, k, v)),
        layer.attention.o: values["blk.0.attn_output.weight"],
        layer.mlp.gate_up: np.concatenate(
            (values["blk.0.ffn_gate.weight"], values["blk.0.ffn_up.weight"])
        ),
        layer.mlp.down: values["blk.0.ffn_down.weight"],
        model.head: values["output.weight"],
        layer.mlp_norm: values["blk.0.ffn_norm.weight"],
    }
    for module, weight in expected.items():
        np.testing.assert_array_equal(module.weight.numpy(), weight)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    """llama and qwen2 with a head of their own, qwen3 and mistral tied."""
    tied = family in ("mistral", "qwen3")
    shape = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    # transformers does not read a head_dim from qwen3 files, it takes 128
    head_dim = 128 if family == "qwen3" else 16
    reference = make_reference(family, head_dim=head_dim, tie_word_embeddings=tied, **shape)
    blocks, kinds = quantised(gguf_tensors(reference), GGMLQuantizationType[kind])
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, blocks, kinds)
    theirs = read_by_transformers(path)
    spec = read_spec(path)
    assert spec.tied_head == tied
    ids = random_ids(40, seed=1)
    ours = Pages(load_model(spec, "float32")).step(chunks={"a": ids})["a"]
    torch.testing.assert_close(ours, reference_logits(theirs, ids), rtol=0, atol=2e-5)


def test_gemma3_file_gives_what_its_checkpoint_gives(tmp_path: Path) -> None:
    """Windows of five layers, all for the sixth, each with its own rope, norms with offsets."""
    reference = make_reference(
        "gemma3", head_dim=16, num_hidden_layers=6, sliding_window=7, query_pre_attn_scalar=16
    )
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, gguf_tensors(reference), gemma3__attention__sliding_window=7)
    spec = read_spec(path)
    assert spec.windowed == (True,) * 5 + (False,)
    ids = random_ids(40, seed=4)
    ours = Pages(load_model(spec, "float32")).step(chunks={"a": ids})["a"]
    narrow = load_model(spec, "bfloat16")
    assert narrow.norm.weight.dtype == torch.float32
    assert torch.equal(narrow.norm.weight, reference.model.norm.weight + 1)
    # 24 norms one after the other: transformers itself is 4e-5 from float64 here
    torch.testing.assert_close(ours, reference_logits(reference, ids), rtol=0, atol=1e-4)


def test_biases_of_arch_llama(tmp_path: Path) -> None:
    """They are put in order like the rows they belong to."""
    reference = make_reference("llama", attention_bias=True, mlp_bias=True)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, gguf_tensors(reference))
    spec = read_spec(path)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)
    ids = random_ids(40, seed=2)
    ours = Pages(load_model(spec, "float32")).step(chunks={"a": ids})["a"]
    torch.testing.assert_close(ours, reference_logits(reference, ids), rtol=0, atol=2e-5)


def llama3_divisors(head_dim: int, theta: float, original: int) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter computes it (factor 8, low 1, high 4)."""
    divisors = []
    for index in range(head_dim // 2):
        wave = 2 * math.pi * theta ** (2 * index / head_dim)
        if wave < original / 4:
            divisors.append(1.0)
        elif wave > original:
            divisors.append(8.0)
        else:
            smooth = (original / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(divisors, np.float32)


def test_rope_freqs_are_llama3_scaling(tmp_path: Path) -> None:
    """transformers ignores the tensor in GGUF files, so its own llama3 scaling is the reference."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    reference = make_reference("llama", rope_parameters=scaling)
    divisors = llama3_divisors(8, 10000.0, 64)
    assert len(set(divisors.tolist())) > 2
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, gguf_tensors(reference) | {"rope_freqs.weight": divisors})
    spec = read_spec(path)
    assert spec.rope.scaling == "table"
    ids = random_ids(61, seed=3)
    ours = Pages(load_model(spec, "float32")).step(chunks={"a": ids})["a"]
    torch.testing.assert_close(ours, reference_logits(reference, ids), rtol=0, atol=2e-5)


def test_rope_freqs_of_the_wrong_length(tmp_path: Path) -> None:
    reference = make_reference("llama")
    path = tmp_path / "tiny.gguf"
    wrong = gguf_tensors(reference) | {"rope_freqs.weight": np.ones(3, np.float32)}
    write_gguf(path, reference, wrong)
    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf: rope_freqs.weight has 3 values, exp"):
        read_spec(path)


def test_linear_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    reference = make_reference("qwen2", rope_parameters=scaling)
    path = tmp_path / "tiny.gguf"
    metadata = {"qwen2__rope__scaling__type": "linear", "qwen2__rope__scaling__factor": 3.0}
    write_gguf(path, reference, gguf_tensors(reference), **metadata)
    ids = random_ids(61, seed=3)
    ours = Pages(load_model(read_spec(path), "float32")).step(chunks={"a": ids})["a"]
    torch.testing.assert_close(ours, reference_logits(reference, ids), rtol=0, atol=2e-5)


# --- what is wrong with a file ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"blk.1.ffn_up.weight": None}, "'blk.1.ffn_up.weight' is missing, .* shape [48, 32]"),
        (
            {"blk.1.ffn_up.weight": np.zeros((48, 64), np.float32)},
            "'blk.1.ffn_up.weight' has shape [48, 64], expected [48, 32]",
        ),
        (
            {"blk.0.attn_norm.weight": np.zeros(31, np.float32)},
            "'blk.0.attn_norm.weight' has shape [31], expected [32]",
        ),
        ({"blk.1.extra.weight": np.zeros(4, np.float32)}, "'blk.1.extra.weight' .* no place in"),
        ({"blk.2.ffn_norm.weight": np.zeros(32, np.float32)}, "'model.layers.2.post_.* no place"),
    ],
)
def test_wrong_tensors(
    change: dict[str, np.ndarray | None], complaint: str, tmp_path: Path
) -> None:
    reference = make_reference("llama")
    tensors = {**gguf_tensors(reference), **change}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, {k: v for k, v in tensors.items() if v is not None})
    pattern = complaint.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(WeightError, match=r"tiny\.gguf: tensor " + pattern):
        load_model(read_spec(path), "float32")


def test_a_type_that_can_not_be_dequantised(tmp_path: Path) -> None:
    reference = make_reference("llama")
    tensors = gguf_tensors(reference)
    tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.float64)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, tensors)
    with pytest.raises(UnsupportedModel, match=r"'output_norm.weight' is stored as F64, which"):
        load_model(read_spec(path), "float32")


def test_a_block_type_nobody_knows(tmp_path: Path) -> None:
    reference = make_reference("llama")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, gguf_tensors(reference))
    content = bytearray(path.read_bytes())
    # name, two dimensions, then the type number
    place = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    content[place] = 250
    path.write_bytes(content)
    with pytest.raises(
        UnsupportedModel, match=r"'token_embd\.weight' has the block type number 250"
    ):
        read_spec(path)


def without_texts(value: object) -> object:
    """A vocabulary and its merges are not read for a model."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return Strings(len(value))
    return value


def test_the_reader_agrees_with_the_gguf_packages_own() -> None:
    ours, theirs = open_gguf(smollm2_path()), gguf.GGUFReader(smollm2_path())
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == {k: without_texts(value) for k, value in fields.items()}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset_bytes, mine.n_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(tensor.shape[::-1].tolist())


# --- a real model -------------------------------------------------------------------------------

# SmolLM2's chat template around "What is gravity?", and how the model goes on
CHAT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520, 9531, 198),
    *(22007, 6463, 314, 253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282, 42548, 2952, 411),
    *(260, 4313, 282, 2389),
]


def test_smollm2_logits_are_those_of_transformers() -> None:
    """Prefill, chunks beside a decoding row, and decode, each within 1e-4 of theirs in float64.

    In float32 transformers itself is 1e-4 from that, more than twice as far as we are.
    """
    theirs = read_by_transformers(smollm2_path()).double()
    model = load(str(smollm2_path()), "float32")  # kernels run it, as they run what people ask for
    assert isinstance(model, Llama)
    assert model._fused is not None
    expected = reference_logits(theirs, CHAT)
    close = {"rtol": 0, "atol": 1e-4}
    pages = Pages(model)
    torch.testing.assert_close(pages.step(chunks={"a": CHAT})["a"], expected, **close)
    parts = [pages.step(chunks={"b": CHAT[:9], "c": CHAT[:3]})["b"]]
    parts += [pages.step({"c": CHAT[3]}, {"b": CHAT[9:20]})["b"]]
    parts += [pages.step({"b": token, "c": token})["b"] for token in CHAT[20:]]
    torch.testing.assert_close(torch.cat(parts), expected, **close)
    assert torch.cat(parts).argmax(-1)[33:-1].tolist() == CHAT[34:]
