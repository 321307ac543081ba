"""Matrices as the CPU's kernels want them: int8 against arithmetic in float64, and rows that must
not depend on their neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Pages, make_reference, random_ids, save
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.assemble import weight_bytes, weight_values
from stepahead.config import config_from
from stepahead.errors import UnsupportedModel
from stepahead.model import int8, weights
from stepahead.model.int8 import (
    PAIRS,
    Int8Choice,
    Int8Product,
    fbgemm,
    int8_choice,
    is_exact,
    onednn,
    quantize,
    turn,
    turning,
)
from stepahead.model.layers import Linear
from stepahead.model.packed import Int8Linear, InvariantLinear, Packing, pack_linears
from stepahead.model.spec import ModelSpec, read_spec
from stepahead.model.weights import load_model, random_model

CHOICES = [
    Int8Choice(kernel, most)
    for kernel in (fbgemm, onednn)
    for most in PAIRS
    if is_exact(kernel, most)
]


def filled(columns: int, rows: tuple[int, ...], bias: bool = False, seed: int = 0) -> Linear:
    linear = Linear(columns, rows, bias)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(linear.named_parameters()):
        value = torch.randn(parameter.shape, generator=generator)
        setattr(linear, name, nn.Parameter(value, requires_grad=False))
    return linear


def packed(linear: Linear, how: Packing) -> nn.Module:
    model = nn.Sequential(linear)
    pack_linears(model, how)
    return model[0]


def in_float64(linear: Linear, x: Tensor) -> Tensor:
    """What int8 is: both sides turned, rounded to 127 steps of their scales, and summed up."""
    by = turning(x.shape[1])
    weight, scale = quantize(turn(linear.weight.data, by), int8_choice().most_of_a_pair)
    x = turn(x, by)
    largest = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
    steps = (x / largest * 127).round().double()
    out = steps @ weight.double().t() * scale.double() * largest.double() / 127
    return out if linear.bias is None else out + linear.bias.double()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 99),
)
def test_int8_is_rounding_and_exact_sums(
    columns: int, rows: int, tokens: int, bias: bool, seed: int
) -> None:
    linear = filled(columns, (rows,), bias, seed)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed + 1))
    x[0] *= 1e4
    x[tokens // 2] = 0.0
    expected = in_float64(linear, x)
    apart = (Int8Linear(linear)(x).double() - expected).abs() - 1e-5 * expected.abs()
    # where a number lies between two steps, kernels may choose either: one step of one product
    step = 8 * (x.abs().amax(1) / 127 * linear.weight.abs().max()).double().unsqueeze(1)
    assert (apart <= 1.1 * step).all()
    assert (apart <= 1e-5 * step).double().mean() > 0.9


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9999))
def test_no_pair_of_neighbours_can_overflow_sixteen_bits(
    columns: int, rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) ** 3
    weight[torch.rand(rows, columns, generator=generator) < 0.3] = 0.0
    most = PAIRS[seed % 2]
    whole, scale = quantize(weight, most)
    pairs = F.pad(whole.int().abs(), (0, columns % 2)).unflatten(1, (-1, 2)).sum(2)
    assert int(pairs.max()) <= most
    assert (whole * scale[:, None] - weight).abs().le(0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("choice", CHOICES)
def test_int8_kernels_agree_on_the_largest_numbers(choice: Int8Choice) -> None:
    less = choice.most_of_a_pair - 127
    rows = [[127, less] * 300, [less, 127] * 300, [-127, -less] * 300]
    weight = torch.tensor(rows, dtype=torch.int8)
    x = torch.stack(
        [
            torch.ones(600),
            -torch.ones(600),
            torch.ones(600).index_fill_(0, torch.arange(0, 600, 2), 0.0),
        ]
    )
    found = choice.kernel(weight, torch.ones(3))(x)
    torch.testing.assert_close(found, x @ weight.t().float(), rtol=1e-5, atol=0.01)


def test_an_int8_kernel_that_saturates_is_not_believed() -> None:
    """fbgemm and oneDNN without VNNI do it for any pair above 2^15."""

    def saturating(weight: Tensor, scale: Tensor) -> Int8Product:
        def product(x: Tensor) -> Tensor:
            pairs = ((x * 127 + 128).unsqueeze(1) * weight).unflatten(2, (-1, 2)).sum(3)
            sums = pairs.clamp(-(2**15), 2**15 - 1 - 200).sum(2)  # 200 too early
            return (sums - 128 * weight.float().sum(1)) * scale / 127

        return product

    assert not is_exact(saturating, 128)


def test_an_int8_kernel_that_torch_lacks_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(weight: Tensor, scale: Tensor) -> Int8Product:
        raise AttributeError("no such operator")

    monkeypatch.setattr(int8, "fbgemm", lacking)
    monkeypatch.setattr(int8, "onednn", lacking)
    int8.int8_choice.cache_clear()
    with pytest.raises(UnsupportedModel, match="quantization=none"):
        int8.int8_choice()
    int8.int8_choice.cache_clear()


@pytest.mark.parametrize("columns", [1, 6, 16, 100, 576])
def test_turning_both_sides_leaves_the_product(columns: int) -> None:
    by = turning(columns)
    assert len(by) == {1: 1, 6: 2, 16: 16, 100: 4, 576: 64}[columns]
    x, weight = torch.randn(7, columns), torch.randn(5, columns)
    together = turn(x, by) @ turn(weight, by).t()
    torch.testing.assert_close(together, x @ weight.t(), rtol=0, atol=1e-4)


def test_one_large_activation_does_not_drown_the_others() -> None:
    """The old scale left the others of its row a step or two: one answer in eight was another."""
    linear = filled(576, (64,))
    x = torch.randn(4, 576, generator=torch.Generator().manual_seed(1))
    x[:, 100] = 200.0
    exact = F.linear(x, linear.weight)
    without = x.clone()
    without[:, 100] = 0.0
    apart = (Int8Linear(linear)(x) - exact).norm() / F.linear(without, linear.weight).norm()
    assert apart < 0.2  # 0.9 if the row were not turned


WAYS = {
    "int8": Packing("int8"),
    "float32": Packing(invariant=True),
    "float16": Packing("float16", invariant=True),
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("columns", "rows"), [(48, 96), (1536, 192)])
def test_a_row_is_the_same_to_the_bit_beside_any_others(
    how: Packing, columns: int, rows: int
) -> None:
    product = packed(filled(columns, (rows,), bias=True), how)
    assert isinstance(product, Int8Linear | InvariantLinear)
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        alone = torch.cat([product(row) for row in x.split(1)])
        for count in range(1, 34):
            for first in (0, 7):
                here = slice(first, first + count)
                assert torch.equal(product(x[here]), alone[here]), (first, count)


@pytest.mark.parametrize("bad", [1e30, float("inf"), float("nan")])
def test_a_row_that_overflows_leaves_the_others_alone(bad: float) -> None:
    """A scale for all of them would be this row's, and the others would be zeros."""
    product = packed(filled(64, (32,)), Packing("int8"))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    expected = product(x)
    x[2, 3] = bad
    found = product(x)
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[keep], expected[keep])


# --- whole models -----------------------------------------------------------------------------

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


@pytest.mark.parametrize("quantization", ["none", "float16", "int8"])
def test_a_requests_logits_are_the_same_to_the_bit_beside_any_others(quantization: Any) -> None:
    """Decoded alone or beside 1 to 32 others, its prompt at once or in chunks, beside prompts or
    not."""
    model = random_model(SPEC, 3, "float32", packing=Packing(quantization, invariant=True))
    prompt = random_ids(37, seed=1, vocab_size=200)

    def told(others: int, cuts: list[int], beside: bool) -> Tensor:
        pages = Pages(model, num_pages=900, seed=others)
        for name in range(others):
            pages.step(chunks={f"other {name}": random_ids(1 + 5 * name % 60, name, 200)})
        rows = []
        for begin, end in zip([0, *cuts], [*cuts, 30], strict=True):
            chunks = {"new": random_ids(9, seed=begin, vocab_size=200)} if beside else {}
            decode = {f"other {name}": name for name in range(others)}
            step = pages.step(decode, {"it": prompt[begin:end], **chunks})
            rows.append(step["it"])
        for token in prompt[30:]:
            decode = {f"other {name}": name for name in range(others)}
            middle = dict(list(decode.items())[: others // 2])
            late = dict(list(decode.items())[others // 2 :])
            rows.append(pages.step({**middle, "it": token, **late})["it"])
        return torch.cat(rows)

    alone = told(0, [], False)
    for others, cuts, beside in ((1, [7], True), (3, [16, 17], False), (32, [1, 20], True)):
        assert torch.equal(told(others, cuts, beside), alone), (others, cuts, beside)


@pytest.mark.parametrize(("kind", "bound"), [("float16", 1e-3), ("int8", 0.08)])
def test_quantised_weights_give_nearly_what_float32_gives(kind: Any, bound: float) -> None:
    prompt = random_ids(60, seed=1, vocab_size=200)
    exact, near = (
        Pages(random_model(SPEC, 3, "float32", packing=Packing(how))).step(chunks={"a": prompt})
        for how in ("none", kind)
    )
    apart = (exact["a"] - near["a"]).norm() / exact["a"].norm()
    assert bound / 1000 < apart < bound


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_file_gives_in_int8_nearly_what_it_gives_in_float32(family: str, tmp_path: Path) -> None:
    """Biases, a tied head and norms of all kinds; matrices are packed as they are read."""
    save(make_reference(family), tmp_path)
    prompt = random_ids(30, seed=2)
    exact, half, near = (
        Pages(load_model(read_spec(tmp_path), "float32", packing=Packing(how)))
        for how in ("none", "float16", "int8")
    )
    logits = [pages.step(chunks={"a": prompt})["a"] for pages in (exact, half, near)]
    for found, bound in zip(logits[1:], (0.01, 0.15), strict=True):
        assert (found - logits[0]).norm() < bound * logits[0].norm()
    assert not any(isinstance(module, Linear) for module in near.model.modules())


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
    load_model(read_spec(tmp_path), "float32", packing=Packing("int8"))
    assert plain == [1] * 9  # four of each layer, and the head


def test_weights_are_counted_as_they_will_be_kept() -> None:
    """A tied table is there as embeddings and, laid out for a kernel, as the head."""
    spec = replace(SPEC, tied_head=True)
    table, layers = 200 * 96, 2 * 96 * (96 + 2 * 48 + 96 + 3 * 160)
    assert weight_values(spec) == table + layers
    rows = 2 * (96 + 2 * 48 + 96 + 2 * 160 + 96)
    for options, expected in (
        ({}, 4 * (2 * table + layers)),
        ({"dtype": "bfloat16"}, 2 * (2 * table + layers)),
        ({"device": "cuda"}, 4 * (table + layers)),
        ({"quantization": "float16"}, 4 * table + 2 * (table + layers)),
        ({"quantization": "int8"}, 4 * table + 2 * table + layers + 4 * rows),
    ):
        config = config_from("model", dict(options))
        assert weight_bytes(spec, config) == expected, options
    untied = config_from("model", {"quantization": "int8"})
    assert weight_bytes(SPEC, untied) == weight_bytes(spec, untied)


def test_weights_beyond_float16_are_refused_by_name() -> None:
    linear = filled(16, (8,))
    linear.weight.data[3, 3] = 1e5
    with pytest.raises(UnsupportedModel, match="beyond 65504; use quantization=none"):
        packed(linear, Packing("float16"))
