"""Products of packed matrices: exact sums of rounded numbers, the same for a row beside any others.

The integer twins have weights and activations that lie well inside the steps they are rounded to:
what becomes of a number between two steps is not held, and no sum hangs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import team
from test_kernels_rows import near_steps
from torch import Tensor, nn

from stepahead.errors import UnsupportedModel
from stepahead.kernels.rows import UNIT
from stepahead.kernels.tile import PANEL
from stepahead.model.kernel_linear import FORMATS, KernelLinear
from stepahead.model.layers import Linear
from stepahead.model.packed import Quantization

FLOATS: tuple[Quantization, ...] = ("none", "float16")
INTEGERS: tuple[Quantization, ...] = ("int8", "int4")
GROUP = 32  # columns that share a scale
SECTION = 2048  # columns whose sum is one int32
MOST_INT16 = 32767
SIZES = {
    "columns": st.integers(1, 300),
    "channels": st.integers(1, 70),
    "rows": st.integers(1, 20),
    "bias": st.booleans(),
    "threads": st.sampled_from([1, 2]),
    "seed": st.integers(0, 9999),
}


def plain_of(weight: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    """A Linear with these weights."""
    linear = Linear(weight.shape[1], (weight.shape[0],), bias is not None)
    linear.weight = nn.Parameter(torch.from_numpy(weight.astype(np.float32)), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(torch.from_numpy(bias.astype(np.float32)), requires_grad=False)
    return linear


def packed(weight: np.ndarray, how: Quantization, threads: int = 1, **more: Any) -> KernelLinear:
    return KernelLinear(plain_of(weight, **more), how, team(threads))


def product(linear: KernelLinear, x: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return linear(torch.from_numpy(x)).double().numpy()


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bias_of(channels: int, wanted: bool, seed: int) -> np.ndarray | None:
    return drawn(channels, seed=seed + 2) if wanted else None


@settings(max_examples=120)
@given(st.sampled_from(FLOATS), st.fixed_dictionaries(SIZES))
def test_a_product_in_float_is_what_it_should_be(how: Quantization, size: dict[str, Any]) -> None:
    seed, columns = size["seed"], size["columns"]
    weight = drawn(size["channels"], columns, seed=seed)
    bias = bias_of(size["channels"], size["bias"], seed)
    x = drawn(size["rows"], columns, seed=seed + 1)
    found = product(packed(weight, how, size["threads"], bias=bias), x)
    kept = (weight.astype(np.float16) if how == "float16" else weight).astype(np.float64)
    expected = x.astype(np.float64) @ kept.T + (0 if bias is None else bias)
    bound = 4e-6 * (np.abs(x) @ np.abs(kept).T + 1)
    assert (np.abs(found - expected) <= bound).all()


@dataclass(frozen=True)
class Steps:
    """A matrix that is rounded to whole steps of its groups' scales: level * scale + least.

    In int8 a group's scale is 1 to 8 times its channel's unit, and one group of a channel has 8.
    """

    levels: np.ndarray  # int[channels, columns]
    scales: np.ndarray  # of the groups, [channels, columns], as the next
    least: np.ndarray
    weight: np.ndarray  # less than half a step off
    units: np.ndarray  # of int8, [channels, 1]

    @classmethod
    def drawn(cls, how: Quantization, channels: int, columns: int, seed: int, off: float) -> Steps:
        generator = np.random.default_rng(seed)
        groups = -(-columns // GROUP)
        low, high = (0, 15) if how == "int4" else (-127, 127)
        levels = generator.integers(low, high + 1, (channels, columns))
        for group in range(groups):
            # the ends are what scale and least value are made from
            begin, end = group * GROUP, min((group + 1) * GROUP, columns)
            for channel in range(channels):
                here = generator.permutation(np.arange(begin, end))
                levels[channel, here[0]] = high
                if how == "int4":
                    levels[channel, here[-1]] = low  # the one of a group of one
        scales = generator.integers(1024, 2048, (channels, groups)) / 2**14
        least = generator.integers(-2047, 2048, (channels, groups)) / 2**14
        units = generator.integers(1024, 2048, (channels, 1)) / 2**18
        if how == "int8":
            multiples = generator.integers(1, 9, (channels, groups))
            multiples[np.arange(channels), generator.integers(0, groups, channels)] = 8
            scales, least = multiples * units, np.zeros_like(least)
        wide = [np.repeat(values, GROUP, 1)[:, :columns] for values in (scales, least)]
        inside = (levels > low) & (levels < high)
        apart = generator.uniform(-off, off, levels.shape) * inside
        return cls(levels, *wide, (levels + apart) * wide[0] + wide[1], units)

    @property
    def rounded(self) -> np.ndarray:
        """float64[channels, columns]."""
        return self.levels * self.scales + self.least

    def most_x(self, how: Quantization) -> int:
        """What activations are rounded up to: with no larger ones could a sum leave int32."""
        if how == "int4":
            return MOST_INT16
        whole = np.rint(np.abs(self.levels * self.scales) / self.units)
        sums = [
            part.sum(1).max()
            for part in np.split(whole, range(SECTION, whole.shape[1], SECTION), 1)
        ]
        return min(MOST_INT16, int((2**31 - 1) // max(sums)))


def activations(rows: int, columns: int, seed: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """float32[rows, columns], and what they are once rounded by rows to whole numbers."""
    x, rounded = np.empty((rows, columns), np.float32), np.empty((rows, columns))
    for row in range(rows):
        x[row], steps = near_steps(columns, seed + row, 10.0 ** (row % 5 - 2), most)
        rounded[row] = steps * np.float64(np.abs(x[row]).max()) / most
    return x, rounded


@settings(max_examples=150)
@given(st.sampled_from(INTEGERS), st.fixed_dictionaries(SIZES))
def test_a_product_in_integers_is_rounding_and_exact_sums(
    how: Quantization, size: dict[str, Any]
) -> None:
    """Rows of very different sizes: each has a scale of its own, and so has each group."""
    seed, columns = size["seed"], size["columns"]
    # off its steps int4 looks for nearer ones
    off = 0.4 if how == "int8" else 0.0
    matrix = Steps.drawn(how, size["channels"], columns, seed, off)
    bias = bias_of(size["channels"], size["bias"], seed)
    x, rounded = activations(size["rows"], columns, seed, matrix.most_x(how))
    found = product(packed(matrix.weight, how, size["threads"], bias=bias), x)
    expected = rounded @ matrix.rounded.T
    least_of_each = np.abs(matrix.levels * matrix.scales) + np.abs(matrix.least)
    bound = 1e-6 * (np.abs(rounded) @ least_of_each.T)
    if bias is not None:
        expected, bound = expected + bias, bound + 1e-6 * np.abs(bias)
    assert (np.abs(found - expected) <= bound).all()


@pytest.mark.parametrize("columns", [33, SECTION, SECTION + 1, 2 * SECTION + 700])
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_int8_stay_within_int32(columns: int, count: int, sign: int) -> None:
    """All weights and all activations as large as they get, and of one sign."""
    weight = np.full((PANEL + 1, columns), 0.5, np.float32)
    x = np.full((count, columns), sign * 3.0, np.float32)
    found = product(packed(weight, "int8"), x)
    np.testing.assert_allclose(found, sign * 1.5 * columns, rtol=1e-5)


@pytest.mark.parametrize("columns", [SECTION - 5, SECTION + 40, 3 * SECTION])
def test_sections_are_added_up(columns: int) -> None:
    """In float32, between sums in int32 that are exact; with a bias once."""
    matrix = Steps.drawn("int8", 40, columns, seed=3, off=0.4)
    bias = drawn(40, seed=4)
    x, rounded = activations(15, columns, 5, matrix.most_x("int8"))
    found = product(packed(matrix.weight, "int8", 2, bias=bias), x)
    expected = rounded @ matrix.rounded.T + bias
    bound = 1e-6 * (np.abs(rounded) @ np.abs(matrix.rounded).T + np.abs(bias))
    assert (np.abs(found - expected) <= bound).all()


def kept(weight: np.ndarray, how: Quantization) -> np.ndarray:
    """What a matrix has become: its products with unit vectors, which are rounded to themselves."""
    return product(packed(weight, how), np.eye(weight.shape[1], dtype=np.float32)).T


def by_groups(weight: np.ndarray) -> list[np.ndarray]:
    """float64[channels, 1] each group's lowest, highest and largest, as wide as the weights."""
    parts = np.split(weight.astype(np.float64), range(GROUP, weight.shape[1], GROUP), 1)
    measures = [(np.min, 1), (np.max, 1), (lambda part, axis: np.abs(part).max(axis), 1)]
    return [
        np.concatenate(
            [np.repeat(measure(part, axis)[:, None], part.shape[1], 1) for part in parts], 1
        )
        for measure, axis in measures
    ]


WEIGHTS = {
    "columns": st.integers(1, 100),
    "channels": st.integers(1, 40),
    "seed": st.integers(0, 9999),
    "size": st.sampled_from([1e-5, 0.02, 1.0, 15.0]),
    "shift": st.sampled_from([0.0, 0.5, -3.0]),
}


def some_weights(shape: dict[str, Any]) -> np.ndarray:
    seed = shape["seed"]
    weight = drawn(shape["channels"], shape["columns"], seed=seed) + np.float32(shape["shift"])
    weight *= np.float32(shape["size"])
    weight[np.random.default_rng(seed).random(weight.shape) < 0.2] = 0.0
    return np.clip(weight, -60, 60)


@settings(max_examples=60)
@given(st.fixed_dictionaries(WEIGHTS))
def test_weights_in_8_bits_are_off_by_no_more_than_half_a_step(shape: dict[str, Any]) -> None:
    weight = some_weights(shape)
    _, _, largest = by_groups(weight)
    # a group's step is the least multiple of its channel's unit that reaches the group's largest
    unit = np.abs(weight.astype(np.float64)).max(1, keepdims=True) / (127 * 8)
    step = np.maximum(np.ceil(largest / (127 * np.maximum(unit, 1e-300)) - 1e-5), 1) * unit
    bound = 0.5 * step + 2e-6 * largest + unit * 1e-5
    assert (np.abs(kept(weight, "int8") - weight) <= bound).all()


@settings(max_examples=60)
@given(st.fixed_dictionaries(WEIGHTS))
def test_weights_in_4_bits_are_no_farther_off_than_steps_from_least_to_largest(
    shape: dict[str, Any],
) -> None:
    """Summed up over each group: the steps that are looked for are nearer, or not taken."""
    weight = some_weights(shape)
    low, high, largest = by_groups(weight)
    step, least = half((high - low) / 15), half(low)
    levels = np.rint((weight - least) / np.where(step > 0, step, 1)).clip(0, 15)
    plain = np.abs(levels * step + least - weight)
    found = np.abs(kept(weight, "int4") - weight)
    for begin in range(0, weight.shape[1], GROUP):
        here = slice(begin, begin + GROUP)
        slack = GROUP * (2e-6 * largest[:, begin] + 2.0**-33) ** 2
        near, far = (np.square(apart[:, here]).sum(1) for apart in (found, plain))
        assert (near <= 1.001 * far + slack).all()


def half(values: np.ndarray) -> np.ndarray:
    """float16, as scales are kept."""
    return (values * UNIT).astype(np.float16).astype(np.float64) / UNIT


@settings(max_examples=40)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 9999))
def test_weights_of_a_file_in_4_bits_are_kept_as_they_are(
    columns: int, channels: int, seed: int
) -> None:
    """Q4_1 has a scale and a least value for 32 weights, too."""
    matrix = Steps.drawn("int4", channels, columns, seed, off=0.0)
    np.testing.assert_allclose(kept(matrix.weight, "int4"), matrix.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [*FLOATS, *INTEGERS])
def test_zeros_stay_zeros_and_one_value_stays_itself(how: Quantization) -> None:
    weight = np.zeros((5, 3 * GROUP + 7), np.float32)
    weight[2] = 0.25
    weight[3, GROUP : 2 * GROUP] = -0.75
    weight[4, 5] = -1e-30  # nothing that a scale could be made from
    found = kept(weight, how)
    expected = np.where(weight == np.float32(-1e-30), 0, weight)
    np.testing.assert_allclose(found, expected, rtol=5e-4, atol=1e-9)  # scales are float16
    assert (found[:2] == 0).all()


@pytest.mark.parametrize(("how", "most"), [("int8", 3e-2), ("int4", 1e-2)])
def test_one_large_activation_does_not_drown_the_others(how: Quantization, most: float) -> None:
    """With 8 bits it left the others of its row a step or two: one answer in eight was another."""
    weight = drawn(64, 576, seed=0)
    x = drawn(4, 576, seed=1)
    x[:, 100] = 200.0
    exact = x.astype(np.float64) @ kept(weight, how).T
    without = x.copy()
    without[:, 100] = 0.0
    apart = np.abs(product(packed(weight, how), x) - exact).max()
    assert apart < most * np.abs(without @ weight.T).mean()


@pytest.mark.parametrize("how", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize(
    ("columns", "channels"), [(48, 96), (1536, 192), (33, 2 * PANEL + 1), (SECTION + 64, 40)]
)
def test_a_row_is_the_same_to_the_bit_beside_any_others(
    how: Quantization, columns: int, channels: int
) -> None:
    weight, bias = drawn(channels, columns, seed=0), drawn(channels, seed=2)
    x = torch.from_numpy(drawn(150, columns, seed=1))
    one, two = (packed(weight, how, threads, bias=bias) for threads in (1, 2))
    with torch.inference_mode():
        alone = torch.cat([one(row) for row in x.split(1)])
        for count in (*range(1, 16), 47, 48, 49, 96, 97, 140):
            for linear, first in ((one, 0), (two, 7)):
                here = slice(first, first + count)
                assert torch.equal(linear(x[here]), alone[here]), (first, count)


@pytest.mark.parametrize("how", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("bad", [1e30, float("inf"), float("nan")])
def test_a_row_that_overflows_leaves_the_others_alone(how: Quantization, bad: float) -> None:
    """A scale for all of them would be this row's, and the others would be zeros."""
    linear = packed(drawn(32, 64, seed=0), how)
    x = torch.from_numpy(drawn(9, 64, seed=1))
    expected = linear(x)
    x[2, 3] = bad
    found = linear(x)
    keep = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8])
    assert torch.equal(found[keep], expected[keep])
    assert torch.isfinite(found[2]).all() == (bad == 1e30)


@pytest.mark.parametrize("how", [*FLOATS, *INTEGERS])
def test_rows_may_be_apart_in_memory_of_another_dtype_or_none(how: Quantization) -> None:
    linear = packed(drawn(24, 50, seed=0), how)
    x = torch.from_numpy(drawn(6, 100, seed=1))
    expected = linear(x[:, :50].contiguous())
    assert torch.equal(linear(x[:, :50]), expected)
    assert torch.equal(linear(x[::2, :50]), expected[::2])
    assert linear(x[:0, :50]).shape == (0, 24)
    rounded = x[:, :50].bfloat16()
    assert torch.equal(linear(rounded), linear(rounded.float()).bfloat16())


@pytest.mark.parametrize("how", [*FLOATS, *INTEGERS])
def test_a_row_that_is_not_there_is_nan_and_another_shape_is_refused(how: Quantization) -> None:
    """Memory beyond a matrix is somebody else's."""
    linear = packed(drawn(20, 50, seed=0), how)
    found = linear.rows(torch.tensor([19, 20, -1, 1 << 40, 0], dtype=torch.int64))
    assert torch.isfinite(found).all(1).tolist() == [True, False, False, False, True]
    assert torch.isnan(found[1:4]).all()
    assert torch.equal(linear.rows(torch.tensor([19, 0], dtype=torch.int32)), found[[0, 4]])
    for shape in ((3, 49), (3, 51), (50,), (2, 3, 50)):
        with pytest.raises(ValueError, match="rows of 50 are multiplied"):
            linear(torch.zeros(shape))


@settings(max_examples=60)
@given(st.sampled_from([*FLOATS, *INTEGERS]), st.fixed_dictionaries(SIZES))
def test_rows_that_are_looked_up_are_what_products_are_made_with(
    how: Quantization, size: dict[str, Any]
) -> None:
    """A tied embedding is looked up in the head's matrix."""
    weight = drawn(size["channels"], size["columns"], seed=size["seed"])
    wanted = np.random.default_rng(size["seed"]).integers(0, size["channels"], size["rows"])
    found = packed(weight, how, size["threads"]).rows(torch.from_numpy(wanted)).numpy()
    np.testing.assert_allclose(found, kept(weight, how)[wanted], rtol=1e-6, atol=1e-6)


def large(value: float) -> np.ndarray:
    weight = np.zeros((8, 40), np.float32)
    weight[3, 35] = value
    return weight


LIMITS = {"float16": 65504.0, "int8": 1e30, "int4": 63.9}


@pytest.mark.parametrize(("how", "most"), LIMITS.items())
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_up_to_what_a_format_has_room_for_are_taken(
    how: Quantization, most: float, sign: int
) -> None:
    weight = large(sign * most)
    np.testing.assert_allclose(kept(weight, how), weight, rtol=1e-3, atol=1e-3 * most)
    for beyond in (sign * most * 1.01, np.inf * sign, np.nan):
        words = rf"quantization={how}: .* weights beyond .*; use quantization=none"
        with pytest.raises(UnsupportedModel, match=words):
            packed(large(beyond), how)


def test_any_weights_are_taken_as_they_are() -> None:
    weight: Tensor | np.ndarray = large(3e38)
    assert (kept(weight, "none") == weight).all()
    assert set(FORMATS) == {"none", "float16", "int8", "int4"}
