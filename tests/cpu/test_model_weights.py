"""What is wrong with a safetensors folder is said with file, tensor and what was expected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_reference, save
from torch import Tensor

from stepahead.errors import ModelError, UnsupportedModel, WeightError
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_model

UP = "model.layers.1.mlp.up_proj.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(make_reference("llama"), tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(make_reference("llama"), tmp_path, max_shard_size="20KB")
    return tmp_path


def edit(file: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = {**load_file(file), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, file, {"format": "pt"})


def refusal(folder: Path, kind: type[ModelError] = WeightError) -> str:
    with pytest.raises(kind) as caught:
        load_model(read_spec(folder), "float32")
    return str(caught.value)


def test_missing_tensor(folder: Path) -> None:
    edit(folder / WEIGHTS, {UP: None})
    message = refusal(folder)
    assert f"{folder}: tensor '{UP}' is missing, expected with shape [48, 32]" in message


def test_missing_head_of_an_untied_model(folder: Path) -> None:
    edit(folder / WEIGHTS, {"lm_head.weight": None})
    assert "tensor 'lm_head.weight' is missing, expected with shape [96, 32]" in refusal(folder)


def test_wrong_shape(folder: Path) -> None:
    edit(folder / WEIGHTS, {UP: torch.zeros(48, 31)})
    message = refusal(folder)
    assert f"{WEIGHTS}: tensor '{UP}' has shape [48, 31], expected [48, 32]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_stored_as_something_else(dtype: torch.dtype, folder: Path) -> None:
    edit(folder / WEIGHTS, {UP: torch.zeros(48, 32).to(dtype)})
    message = refusal(folder, UnsupportedModel)
    assert f"{WEIGHTS}: tensor '{UP}' is stored as {dtype}, expected float16" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_types_are_converted(dtype: torch.dtype, folder: Path) -> None:
    value = torch.randn(48, 32).to(dtype)
    edit(folder / WEIGHTS, {UP: value})
    model = load_model(read_spec(folder), "float32")
    assert torch.equal(model.layers[1].mlp.gate_up.weight[48:], value.float())


def test_tensor_without_a_place(folder: Path) -> None:
    """A bias that the config denies would silently change the model if it were skipped."""
    extra = "model.layers.0.self_attn.q_proj.bias"
    edit(folder / WEIGHTS, {extra: torch.zeros(32)})
    assert f"tensor '{extra}' (and 0 more) has no place in LlamaForCausalLM" in refusal(folder)


def test_what_may_be_skipped(folder: Path) -> None:
    """Old checkpoints store the rotary frequencies; a tied one may store its head as well."""
    edit(folder / WEIGHTS, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    model = load_model(replace(read_spec(folder), tied_head=True), "float32")
    assert model.head.weight is model.embed.weight


def test_cut_off_inside_a_tensor(folder: Path) -> None:
    file = folder / WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    message = refusal(folder)
    assert f"{file}: cut off: tensor '" in message
    assert f"expected to end at byte {len(whole)}, the file has {len(whole) - 5}" in message


@pytest.mark.parametrize("size", [0, 5, 100])
def test_cut_off_inside_the_header(size: int, folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file}: cut off inside its header: {size} bytes, expected" in refusal(folder)


def test_header_that_is_no_header(folder: Path) -> None:
    file = folder / WEIGHTS
    content = bytearray(file.read_bytes())
    content[8:12] = b"oops"
    file.write_bytes(content)
    assert f"{file}: " in refusal(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert f"{folder / WEIGHTS}: missing; expected with all tensors" in refusal(folder)


def test_missing_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    (sharded / index[UP]).unlink()
    first = next(name for name, file in index.items() if file == index[UP])
    message = refusal(sharded)
    assert f"{sharded / index[UP]}: missing; expected with tensor '{first}'" in message


def test_shard_without_its_tensor(sharded: Path) -> None:
    file = sharded / json.loads((sharded / INDEX).read_text())["weight_map"][UP]
    edit(file, {UP: None, "other": torch.zeros(1)})
    assert f"{file}: tensor '{UP}' is missing, the index expects it here" in refusal(sharded)


def test_cut_off_shard(sharded: Path) -> None:
    file = sharded / json.loads((sharded / INDEX).read_text())["weight_map"][UP]
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file}: cut off: tensor '" in refusal(sharded)


@pytest.mark.parametrize("places", ["[[[0, 1]]]", '["a", "b"]', "[0, null]", "5"])
def test_header_whose_offsets_are_none(folder: Path, places: str) -> None:
    header = f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": {places}}}}}'.encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"{folder / WEIGHTS}: " in refusal(folder)


def test_header_that_nests_deeply(folder: Path) -> None:
    header = b'{"a":' * 100_000
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"{folder / WEIGHTS}: " in refusal(folder)


def test_a_folder_where_the_weights_should_be(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert f"{folder / WEIGHTS}: missing; expected with all tensors" in refusal(folder)


@pytest.mark.parametrize("home", [".", "x" * 5000])
def test_index_that_names_no_file(home: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {UP: home}}))
    assert f"missing; expected with tensor '{UP}'" in refusal(sharded)


def test_a_folder_where_the_index_should_be(folder: Path) -> None:
    (folder / INDEX).mkdir()
    assert f"{folder / INDEX}: no index of tensors" in refusal(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_index_that_is_none(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    assert f"{sharded / INDEX}: no index of tensors" in refusal(sharded)


def test_bfloat16_weights_stay_as_stored(tmp_path: Path) -> None:
    reference = save(make_reference("qwen2").bfloat16(), tmp_path)
    model = load_model(read_spec(tmp_path), "bfloat16")
    stored = reference.bfloat16().model.layers[0].self_attn
    rows = torch.cat((stored.q_proj.weight, stored.k_proj.weight, stored.v_proj.weight))
    assert torch.equal(model.layers[0].attention.qkv.weight, rows)
    biases = torch.cat((stored.q_proj.bias, stored.k_proj.bias, stored.v_proj.bias))
    assert torch.equal(model.layers[0].attention.qkv.bias, biases)
