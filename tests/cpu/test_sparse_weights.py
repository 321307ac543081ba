"""Checkpoints of GLM-5's kind: released names, fp8 with block scales, experts in one piece."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Pages, random_ids
from tiny_sparse import change_config, make_sparse, make_with_mtp, reference, save_sparse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepahead.errors import ModelError, UnsupportedModel, WeightError
from stepahead.model import weights
from stepahead.model.fp8 import dequantize_into, scales_shape
from stepahead.model.load import load
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_sparse

BLOCK = (16, 32)  # so that a tiny matrix has several, and parts of some at its edges
FP8 = torch.float8_e4m3fn
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [*BLOCK],
}
# what released files keep in a float type
FLOAT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "weights_proj")


def quantized(value: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and a float32 scale for each block: its largest value is 448, e4m3's largest."""
    scales = torch.empty(scales_shape(tuple(value.shape), BLOCK))
    out = torch.empty(value.shape, dtype=FP8)
    for i, rows in enumerate(value.split(BLOCK[0])):
        for j, block in enumerate(rows.split(BLOCK[1], 1)):
            scales[i, j] = block.abs().max() / 448
            at = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            out[at] = (block / scales[i, j]).to(FP8)
    return out, scales


def written_out(values: Tensor, scales: Tensor) -> Tensor:
    """values times scales, each scale as often as its block has values."""
    rows, columns = values.shape
    wide = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return values.float() * wide[:rows, :columns]


def to_fp8(folder: Path, kept: tuple[str, ...] = FLOAT) -> dict[str, Tensor]:
    """Quantises the folder's matrices; gives the float32 values that they stand for now."""
    file, tensors, plain = folder / "model.safetensors", {}, {}
    for name, value in load_file(file).items():
        if value.ndim != 2 or any(part in name for part in kept):
            tensors[name] = plain[name] = value
            continue
        tensors[name], tensors[name + "_scale_inv"] = quantized(value)
        plain[name] = written_out(tensors[name], tensors[name + "_scale_inv"])
    save_file(tensors, file)
    change_config(folder, quantization_config=QUANTIZED)
    return plain


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the folder's tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    save_sparse(make_sparse(), folder)
    to_fp8(folder)
    return folder


@pytest.mark.parametrize("shape", [(1, 1), (300, 200), (128, 128), (129, 256), (5, 400)], ids=str)
def test_a_block_of_128_by_128_shares_a_scale(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    values = torch.randn(shape).to(FP8)
    scales = torch.rand(scales_shape(shape, (128, 128))) + 0.1
    out = torch.empty(shape)
    dequantize_into(out, values, scales, (128, 128))
    at = [(i, j) for i in range(0, shape[0], 43) for j in range(0, shape[1], 37)]
    at.append((shape[0] - 1, shape[1] - 1))
    for i, j in at:
        assert out[i, j] == values.float()[i, j] * scales[i // 128, j // 128]


def test_fp8_weights_are_what_their_scales_say(tmp_path: Path) -> None:
    """Which tensors are in fp8 is told by themselves: some of each kind are not, and load."""
    theirs = save_sparse(make_sparse(), tmp_path)
    plain = to_fp8(tmp_path, (*FLOAT, "layers.2.self_attn.o_proj", "layers.1.mlp.experts.3."))
    stored = load_file(tmp_path / "model.safetensors")
    kinds = {name: value.dtype for name, value in stored.items()}
    assert kinds["model.layers.1.mlp.experts.2.up_proj.weight"] == FP8
    assert kinds["model.layers.1.mlp.experts.3.up_proj.weight"] == torch.float32
    assert kinds["model.layers.0.self_attn.indexer.wk.weight"] == FP8
    other = tmp_path / "exact"
    save_sparse(theirs, other)
    save_file(plain, other / "model.safetensors")
    exact = type(theirs).from_pretrained(other, dtype=torch.float32, attn_implementation="eager")
    spec = read_spec(tmp_path)
    assert spec.sparse is not None
    assert spec.sparse.weight_block == BLOCK
    ids = random_ids(40, seed=3)
    expected = reference(exact, ids)
    close(Pages(load_sparse(spec, "float32")).step(chunks={"a": ids})["a"], expected)
    assert (expected - reference(theirs, ids)).abs().max() > 1e-2, "quantising changed nothing"


def test_a_router_stays_in_float32(tmp_path: Path) -> None:
    """Its biases are a few units in bfloat16's last place apart; and a bfloat16 file loads."""
    save_sparse(make_sparse().bfloat16(), tmp_path)
    wide = load_sparse(read_spec(tmp_path), "float32")
    narrow = load_sparse(read_spec(tmp_path), "bfloat16")
    router = narrow.layers[1].mlp.router
    assert router.weight.dtype == router.bias.dtype == torch.float32
    assert narrow.layers[1].mlp.experts.down.dtype == narrow.embed.weight.dtype == torch.bfloat16
    assert torch.equal(narrow.head.weight.float(), wide.head.weight)
    ids = random_ids(12, seed=3)
    pages = Pages(narrow)
    assert pages.kv.rows[0].dtype == pages.kv.keys[0].dtype == torch.bfloat16
    apart = pages.step(chunks={"a": ids})["a"] - Pages(wide).step(chunks={"a": ids})["a"]
    assert apart.abs().mean() < 0.1
    assert pages.step(decode={"a": 5})["a"].isfinite().all()


# --- what is wrong with files -------------------------------------------------------------------

WQ = "model.layers.1.self_attn.q_b_proj.weight"
UP = "model.layers.3.mlp.experts.5.up_proj.weight"


def _drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(name, value)


def _norm_in_fp8(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(48).to(FP8)
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_drop(UP), WeightError, rf"'{UP}' is missing, expected with shape \[24, 48\]"),
        (_drop(WQ + "_scale_inv"), WeightError, f"'{WQ}' is stored as .*e4m3fn, and its scale"),
        (
            _put(WQ + "_scale_inv", torch.ones(2, 2)),
            WeightError,
            rf"'{WQ}_scale_inv' has shape \[2, 2\], expected \[5, 2\]: one for each block of 16 by",
        ),
        (
            _put(WQ + "_scale_inv", torch.ones(5, 2, dtype=torch.int32)),
            UnsupportedModel,
            f"'{WQ}_scale_inv' is stored as torch.int32, expected float32",
        ),
        (_norm_in_fp8, UnsupportedModel, r"'model.norm.weight' of shape \[48\] .* only matrices"),
        (_put(WQ, torch.ones(80, 40)), UnsupportedModel, "has a scale and is stored as .*float32"),
        (_put("x_scale_inv", torch.ones(1)), WeightError, "'x_scale_inv' .* has no place"),
        (_put(UP, torch.ones(3, 48)), WeightError, rf"'{UP}' has shape \[3, 48\], expected"),
        (
            _put("model.layers.2.self_attn.indexer.wk.weight", torch.ones(16, 48)),
            WeightError,
            r"'model.layers.2.self_attn.indexer.wk.weight' \(and 0 more\) has no place",
        ),
        (
            _put(WQ, torch.ones(80, 40).to(torch.float8_e5m2)),
            UnsupportedModel,
            "has a scale and is stored as torch.float8_e5m2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_wrong_is_told_by_tensor(
    change: Callable[[dict[str, Tensor]], Any],
    error: type[ModelError],
    words: str,
    tmp_path: Path,
    fp8_folder: Path,
) -> None:
    shutil.copytree(fp8_folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, change)
    with pytest.raises(error, match=words):
        load_sparse(read_spec(tmp_path), "float32")


def test_a_tensor_without_a_place_is_told_before_any_is_read(
    tmp_path: Path, fp8_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading may take an hour, and what it reads may not fit."""
    shutil.copytree(fp8_folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, _put("model.layers.9.input_layernorm.weight", torch.ones(48)))
    monkeypatch.setattr(weights, "_fill", lambda *_: pytest.fail("it was read"))
    with pytest.raises(WeightError, match=r"layers.9.input_layernorm.weight' .* has no place"):
        load_sparse(read_spec(tmp_path), "float32")


def test_fp8_that_the_config_does_not_know_of_is_refused(tmp_path: Path, fp8_folder: Path) -> None:
    shutil.copytree(fp8_folder, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(UnsupportedModel, match=r"and quantization_config in config\.json"):
        load_sparse(read_spec(tmp_path), "float32")


# --- the layer that drafts ----------------------------------------------------------------------


def test_a_folder_without_the_mtp_layer_loads_and_says_so(tmp_path: Path) -> None:
    theirs = make_with_mtp(tmp_path, absent=True)
    spec = read_spec(tmp_path)
    assert spec.notes == (
        "num_nextn_predict_layers 1 -> 0: the folder has no tensors of model.layers.6, so nothing "
        "drafts",
    )
    model = load(str(tmp_path), "float32", drafts=True)
    assert model.mtp is None
    assert len(model.new_kv(2, 4).rows) == 6
    ids = random_ids(30, seed=4)
    close(Pages(model).step(chunks={"a": ids})["a"], reference(theirs.model, ids))


@pytest.mark.parametrize("sharded", [False, True])
def test_the_mtp_layer_is_loaded_for_those_who_draft(sharded: bool, tmp_path: Path) -> None:
    theirs = make_with_mtp(tmp_path)
    if sharded:
        tensors = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        parts: list[dict[str, Tensor]] = [{}, {}]
        for i, (name, value) in enumerate(tensors.items()):
            parts[i % 2][name] = value
        homes = {name: f"{i}.safetensors" for i, part in enumerate(parts) for name in part}
        for i, part in enumerate(parts):
            save_file(part, tmp_path / f"{i}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    spec = read_spec(tmp_path)
    assert spec.notes == ()
    plain, drafting = load(str(tmp_path), "float32"), load(str(tmp_path), "float32", drafts=True)
    assert plain.mtp is None
    assert drafting.mtp is not None
    assert torch.equal(drafting.mtp.combine.weight, theirs.extra["model.layers.6.eh_proj.weight"])
    ids = random_ids(30, seed=4)
    ours = [Pages(model).step(chunks={"a": ids})["a"] for model in (plain, drafting)]
    assert torch.equal(*ours)
    close(ours[0], reference(theirs.model, ids))


# --- memory -------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of all tensors that operations have made and that are still there; `peak`, the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._see(value.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("kept", ["float32", "fp8"])
def test_experts_are_loaded_without_a_second_copy(kept: str, tmp_path: Path) -> None:
    """One stack of a layer's experts is a third of the model here; a copy of it would show."""
    save_sparse(
        make_sparse(n_routed_experts=40, moe_intermediate_size=64, num_hidden_layers=2), tmp_path
    )
    if kept == "fp8":
        to_fp8(tmp_path)
    largest = max(value.nbytes for value in load_file(tmp_path / "model.safetensors").values())
    with Allocations() as memory:
        model = load_sparse(read_spec(tmp_path), "float32")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    table = model.rope.table.nbytes
    stack = model.layers[1].mlp.experts.gate_up.nbytes
    assert stack > 20 * largest
    assert weights <= memory.peak < weights + table * 8 + 4 * largest
    assert memory.peak < weights + stack / 2
