"""Whole models in each precision: what is packed and what is not, and what it does to logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from teams import team
from tiny_models import Pages, laid_out, make_reference, random_ids, save
from torch import Tensor, nn

from stepahead.assemble import weight_bytes, weight_values
from stepahead.config import config_from
from stepahead.errors import UnsupportedModel
from stepahead.kernels.tile import INT4, INT8
from stepahead.model import weights
from stepahead.model.kernel_linear import KernelLinear
from stepahead.model.layers import Linear
from stepahead.model.load import load, packing_for
from stepahead.model.packed import AS_READ, Packing
from stepahead.model.spec import ModelSpec, read_spec
from stepahead.model.weights import load_model, random_model

PRECISIONS = ("none", "float16", "int8", "int4")

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=200,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    max_len=256,
)


@pytest.mark.parametrize(
    ("kind", "bound"), [("none", 1e-5), ("float16", 1e-3), ("int8", 0.03), ("int4", 0.3)]
)
def test_quantised_weights_give_nearly_what_float32_gives(kind: Any, bound: float) -> None:
    prompt = random_ids(60, seed=1, vocab_size=200)
    exact, near = (
        Pages(random_model(SPEC, 3, "float32", packing=packing)).step(chunks={"a": prompt})
        for packing in (AS_READ, laid_out(kind))
    )
    apart = (exact["a"] - near["a"]).norm() / exact["a"].norm()
    assert bound / 1000 < apart < bound


BOUNDS = {"none": 1e-5, "float16": 0.01, "int8": 0.03, "int4": 0.5}


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_file_gives_in_any_precision_nearly_what_it_gives_in_float32(
    family: str, tmp_path: Path
) -> None:
    """Biases, a tied head and norms of all kinds; matrices are packed as they are read."""
    save(make_reference(family, head_dim=16), tmp_path)
    prompt = random_ids(30, seed=2)

    def logits(packing: Packing) -> Tensor:
        model = load_model(read_spec(tmp_path), "float32", packing=packing)
        kernels = packing.team is not None
        assert any(isinstance(module, Linear) for module in model.modules()) != kernels
        return Pages(model).step(chunks={"a": prompt})["a"]

    exact = logits(AS_READ)
    for kind, bound in BOUNDS.items():
        found = logits(laid_out(kind))  # type: ignore[arg-type]
        assert (found - exact).norm() < bound * exact.norm(), kind


def test_the_head_stays_in_8_bits_where_others_have_4() -> None:
    model = random_model(SPEC, 3, "float32", packing=laid_out("int4"))
    kinds = {
        name: module.layout.kind
        for name, module in model.named_modules()
        if isinstance(module, KernelLinear)
    }
    assert kinds.pop("head") == INT8
    assert len(kinds) == 8
    assert set(kinds.values()) == {INT4}


def test_a_model_is_packed_for_as_many_threads_as_torch_has() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            packing = packing_for("float32", "cpu", "none", invariant=False)
            assert packing.team is not None
            assert packing.team.threads == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "cpu"), ("float32", "cuda")])
def test_what_kernels_have_no_code_for_stays_as_it_was_read(dtype: Any, device: str) -> None:
    assert packing_for(dtype, device, "none", invariant=False) == AS_READ


def test_a_model_in_bfloat16_can_be_quantised(tmp_path: Path) -> None:
    """Its layers stay as they are, and their matrices are kernels'."""
    save(make_reference("qwen3", head_dim=16), tmp_path)
    prompt = random_ids(30, seed=2)
    plain, near = (load(str(tmp_path), "bfloat16", quantization=kind) for kind in ("none", "int8"))
    assert not any(isinstance(module, Linear) for module in near.modules())
    exact, found = (Pages(model).step(chunks={"a": prompt})["a"] for model in (plain, near))
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"invariant": True}])
def test_nothing_is_rounded_without_somebody_to_run_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="what kernels do: give a team"):
        Packing(**options)
    assert Packing(**options, team=team()).team is team()


def test_no_more_than_one_matrix_is_there_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of what was to be read once kept all of them: 1,190 MB where 853 do."""
    save(make_reference("llama"), tmp_path)
    seen: list[Linear] = []
    plain: list[int] = []
    pack = weights.pack

    def packing(home: nn.Module, name: str, linear: Linear, how: Packing) -> None:
        seen.append(linear)
        plain.append(sum(one.weight is not None for one in seen))
        pack(home, name, linear, how)

    monkeypatch.setattr(weights, "pack", packing)
    load_model(read_spec(tmp_path), "float32", packing=laid_out("int8"))
    assert plain == [1] * 9  # four of each layer, and the head


def test_weights_are_counted_as_they_will_be_kept() -> None:
    """A tied table is there once where kernels run all layers, and else as embeddings and, laid out
    for a product, as the head."""
    spec = replace(SPEC, tied_head=True)
    table, layers = 200 * 96, 2 * 96 * (96 + 2 * 48 + 96 + 3 * 160)
    channels = 2 * (96 + 2 * 48 + 96 + 2 * 160 + 96)
    assert weight_values(spec) == table + layers
    for options, expected in (
        ({}, 4 * (table + layers)),
        ({"dtype": "bfloat16"}, 2 * (2 * table + layers)),
        ({"device": "cuda"}, 4 * (table + layers)),
        ({"quantization": "float16"}, 2 * (table + layers)),
        ({"quantization": "int8"}, (table + layers) * 33 // 32 + 4 * (200 + channels)),
        ({"quantization": "int4"}, table * 33 // 32 + layers * 20 // 32 + 4 * 200),
    ):
        config = config_from("model", dict(options))
        assert weight_bytes(spec, config) == expected, options
        plain = weight_bytes(replace(spec, head_dim=12, num_heads=8, num_kv_heads=4), config)
        elsewhere = "dtype" in options or "device" in options
        assert plain == expected + (0 if elsewhere else 4 * table), options
    untied = config_from("model", {"quantization": "int8"})
    assert weight_bytes(SPEC, untied) == weight_bytes(spec, untied) + 4 * table


@pytest.mark.parametrize("kind", PRECISIONS)
def test_what_weights_are_counted_as_is_what_kernels_keep(kind: Any) -> None:
    whole = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 256, "hidden_size": 128}
    spec = replace(SPEC, vocab_size=256, **whole)  # groups and panels have nothing left over
    model = random_model(spec, 3, "float32", packing=laid_out(kind))
    linears = [module for module in model.modules() if isinstance(module, KernelLinear)]
    kept = sum(one.layout.weight_bytes + one.layout.scale_bytes for one in linears)
    config = config_from("model", {"quantization": kind})
    assert kept + 4 * 256 * 128 == weight_bytes(spec, config)


def test_weights_beyond_float16_are_refused_while_a_model_is_packed() -> None:
    model = nn.Sequential(Linear(16, (8,)))
    model[0].weight = nn.Parameter(torch.full((8, 16), 1e5), requires_grad=False)
    with pytest.raises(UnsupportedModel, match="beyond 65504; use quantization=none"):
        weights.pack_linears(model, laid_out("float16"))
