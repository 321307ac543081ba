"""Matrices as the CPU's kernels want them: int8 against arithmetic in float64, and rows that must
not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Pages, random_ids
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.errors import UnsupportedModel
from stepahead.model import int8
from stepahead.model.int8 import Int8Product, fbgemm, is_exact, onednn, quantize
from stepahead.model.layers import Linear
from stepahead.model.packed import Int8Linear, InvariantLinear, Packing, pack_linears
from stepahead.model.spec import ModelSpec
from stepahead.model.weights import random_model

KERNELS = [kernel for kernel in (fbgemm, onednn) if is_exact(kernel)]


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
    """What int8 is: both sides rounded to 127 steps of their scales, and exact sums."""
    weight, scale = quantize(linear.weight.data)
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
    step = (x.abs().amax(1) / 127 * linear.weight.abs().max()).double().unsqueeze(1)
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
    whole, scale = quantize(weight)
    pairs = F.pad(whole.int().abs(), (0, columns % 2)).unflatten(1, (-1, 2)).sum(2)
    assert int(pairs.max()) <= 128
    assert (whole * scale[:, None] - weight).abs().le(0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_int8_kernels_agree_on_the_largest_numbers(kernel: Callable[..., Int8Product]) -> None:
    weight = torch.tensor([[127, 1] * 300, [1, 127] * 300, [-127, -1] * 300], dtype=torch.int8)
    x = torch.stack(
        [
            torch.ones(600),
            -torch.ones(600),
            torch.ones(600).index_fill_(0, torch.arange(0, 600, 2), 0.0),
        ]
    )
    found = kernel(weight, torch.ones(3))(x)
    torch.testing.assert_close(found, x @ weight.t().float(), rtol=1e-5, atol=0.01)


def test_an_int8_kernel_that_saturates_is_not_believed() -> None:
    """fbgemm and oneDNN without VNNI do it for any pair above 2^15."""

    def saturating(weight: Tensor, scale: Tensor) -> Int8Product:
        def product(x: Tensor) -> Tensor:
            pairs = ((x * 127 + 128).unsqueeze(1) * weight).unflatten(2, (-1, 2)).sum(3)
            sums = pairs.clamp(-(2**15), 2**15 - 1 - 200).sum(2)  # 200 too early
            return (sums - 128 * weight.float().sum(1)) * scale / 127

        return product

    assert not is_exact(saturating)


def test_an_int8_kernel_that_torch_lacks_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(weight: Tensor, scale: Tensor) -> Int8Product:
        raise AttributeError("no such operator")

    monkeypatch.setattr(int8, "fbgemm", lacking)
    monkeypatch.setattr(int8, "onednn", lacking)
    int8.int8_kernel.cache_clear()
    with pytest.raises(UnsupportedModel, match="quantization=none"):
        int8.int8_kernel()
    int8.int8_kernel.cache_clear()


@pytest.mark.parametrize("how", [Packing("int8"), Packing(invariant=True)], ids=["int8", "float32"])
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


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_requests_logits_are_the_same_to_the_bit_beside_any_others(quantization: str) -> None:
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


def test_int8_is_near_float32() -> None:
    prompt = random_ids(60, seed=1, vocab_size=200)
    exact, near = (
        Pages(random_model(SPEC, 3, "float32", packing=Packing(kind))).step(chunks={"a": prompt})
        for kind in ("none", "int8")
    )
    apart = (exact["a"] - near["a"]).norm() / exact["a"].norm()
    assert 1e-4 < apart < 0.08
