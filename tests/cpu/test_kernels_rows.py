"""What kernels do to one row, against the same in numpy's float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.kernels import rows
from stepahead.kernels.emit import LANES
from stepahead.kernels.tile import FLOAT16, FLOAT32, GROUP, INT4, INT8

KINDS = [FLOAT32, FLOAT16, INT8, INT4]
SEEDS = st.integers(0, 9999)
MOST = 32767
BESIDE = -7.25  # what lies around a row, and must stay


def drawn(count: int, seed: int, size: float = 1.0) -> np.ndarray:
    """float32[count]."""
    generator = np.random.default_rng(seed)
    most = np.finfo(np.float32).max  # 1e38 times a number of a normal distribution can be above it
    return (generator.standard_normal(count) * size).clip(-most, most).astype(np.float32)


def room(count: int, dtype: type = np.float32) -> np.ndarray:
    """[count + 64], of which the first are to be written and the others not."""
    return np.full(count + 64, BESIDE, dtype)


def untouched(given: np.ndarray, count: int) -> bool:
    return bool((given[count:] == given.dtype.type(BESIDE)).all())


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean() + eps) * weight


@settings(max_examples=60)
@given(st.integers(1, 300), SEEDS, st.sampled_from([1e-3, 1.0, 1e3]), st.booleans())
def test_a_row_is_normed(count: int, seed: int, size: float, in_place: bool) -> None:
    """At the smallest, eps decides."""
    x, weight = drawn(count, seed, size), drawn(count, seed + 1)
    expected = normed(x, weight, 1e-3)
    out = room(count)
    if in_place:
        out[:count] = x
    rows.norm(at(out) if in_place else at(x), at(weight), 1e-3, at(out), count)
    np.testing.assert_allclose(out[:count], expected, rtol=2e-6, atol=1e-30)
    assert untouched(out, count)


@settings(max_examples=40)
@given(st.integers(1, 300), SEEDS)
def test_a_row_is_normed_and_added(count: int, seed: int) -> None:
    x, weight = drawn(count, seed), drawn(count, seed + 1)
    expected = normed(x, weight, 1e-5)
    out = room(count)
    out[:count] = before = drawn(count, seed + 2)
    rows.add_normed(at(x), at(weight), 1e-5, at(out), count)
    np.testing.assert_allclose(out[:count], before + expected, rtol=0, atol=4e-6)
    assert untouched(out, count)


class Prepared:
    """What `rows.prepare` makes of a row."""

    def __init__(self, kind: int, x: np.ndarray, most: int = MOST) -> None:
        self.groups = -(-len(x) // GROUP[kind])
        self.padded = self.groups * GROUP[kind]
        self.out = room(self.padded, np.int16 if kind >= INT8 else np.float32)
        self.sums, self.scale = room(self.groups), room(1)
        args = at(self.out), at(self.sums), at(self.scale)
        rows.prepare(kind, most, at(x), len(x), self.groups, *args)

    @property
    def values(self) -> np.ndarray:
        return self.out[: self.padded]

    def stayed_inside(self) -> bool:
        given = (self.out, self.padded), (self.sums, self.groups), (self.scale, 1)
        return all(untouched(array, count) for array, count in given)


def near_steps(
    count: int, seed: int, largest: float, most: int = MOST
) -> tuple[np.ndarray, np.ndarray]:
    """A row whose values are off whole steps of its scale by no more than 0.4, and the steps: what
    it is rounded to does not hang on the last bit of a quotient."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(-most, most + 1, count) >> generator.integers(0, 16, count)
    largest_at = generator.integers(count)
    steps[largest_at] = most if seed % 2 else -most
    off = generator.uniform(-0.4, 0.4, count)
    off[largest_at] = 0.0
    inside = np.abs(steps) < most
    x = (steps + off * inside) * (np.float64(largest) / most)
    return x.astype(np.float32), steps


@settings(max_examples=100)
@given(
    st.sampled_from([INT8, INT4]),
    st.integers(1, 300),
    SEEDS,
    st.sampled_from([1e-20, 3e-3, 1.0, 777.0, 1e30]),
    st.sampled_from([1, 300, 4635, MOST]),
)
def test_a_row_is_rounded_to_its_own_scale(
    kind: int, count: int, seed: int, largest: float, most: int
) -> None:
    x, steps = near_steps(count, seed, largest, most)
    found = Prepared(kind, x, most)
    assert (found.values[:count] == steps).all()
    assert (found.values[count:] == 0).all()
    scale = np.float64(np.abs(x).max()) / most / (rows.UNIT if kind == INT4 else 1)
    np.testing.assert_allclose(found.scale[0], scale, rtol=1e-6)
    if kind == INT4:
        sums = found.values.astype(np.int64).reshape(found.groups, -1).sum(1)
        assert (found.sums[: found.groups] == sums).all()
    assert found.stayed_inside()


@settings(max_examples=30)
@given(st.sampled_from([FLOAT32, FLOAT16]), st.integers(1, 300), SEEDS)
def test_a_row_stays_as_it_is_for_matrices_in_float(kind: int, count: int, seed: int) -> None:
    x = drawn(count, seed)
    found = Prepared(kind, x)
    assert (found.values[:count] == x).all()
    assert (found.values[count:] == 0).all()
    assert found.scale[0] == 1
    assert found.stayed_inside()


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 16, 36])
def test_a_row_that_is_not_finite_has_the_scale_nan(kind: int, bad: float, place: int) -> None:
    x = drawn(37, 1)
    x[place] = bad
    found = Prepared(kind, x)
    assert np.isnan(found.scale[0])
    assert (found.values == 0).all()


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-31, 1e-45])
def test_a_row_of_nearly_nothing_is_nothing(kind: int, size: float) -> None:
    found = Prepared(kind, np.full(40, size, np.float32))
    assert found.scale[0] == 0
    assert (found.values == 0).all()


def activated(activation: int, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if activation == rows.SILU:
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@settings(max_examples=60)
@given(
    st.sampled_from([rows.SILU, rows.GELU_TANH]),
    st.integers(1, 200),
    SEEDS,
    st.sampled_from([0.1, 1.0, 8.0, 60.0]),
)
def test_gates_are_activated_and_multiplied(
    activation: int, count: int, seed: int, size: float
) -> None:
    whole = -(-count // LANES) * LANES
    gates, ups = drawn(whole, seed, size), drawn(whole, seed + 1)
    out = room(whole)
    rows.gate(activation, at(gates), at(ups), at(out), count)
    expected = activated(activation, gates) * ups
    # of tanh near -1 nothing is left in float64 either
    np.testing.assert_allclose(out[:count], expected[:count], rtol=4e-6, atol=1e-6)
    assert untouched(out, whole)


def test_gates_have_the_ends_that_they_should() -> None:
    gates = np.array([0, -0.0, 1e-30, -3e38, 1e30, 100, -100, np.inf], np.float32)
    padded = np.zeros(-(-8 // LANES) * LANES, np.float32)
    for activation in (rows.SILU, rows.GELU_TANH):
        padded[:8], out = gates, room(LANES)
        rows.gate(activation, at(padded), at(np.ones(LANES, np.float32)), at(out), 8)
        close = np.array([0, 0, 5e-31, 0, 1e30, 100, 0, np.inf])
        np.testing.assert_allclose(out[:8], close, rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(st.integers(1, 64), st.integers(1, 9), SEEDS)
def test_a_row_is_turned_by_its_position(half: int, heads: int, seed: int) -> None:
    """As complex numbers: pair (i, i + half) is multiplied by e^(i * angle)."""
    head_dim = 2 * half
    angles = np.random.default_rng(seed).uniform(0, 7, half)
    table = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)
    x = drawn(heads * head_dim, seed)
    out = room(len(x))
    out[: len(x)] = x
    rows.rotate(at(out), at(table), head_dim, heads)
    pairs = x.reshape(heads, 2, half).astype(np.float64)
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], 1).ravel()
    np.testing.assert_allclose(out[: len(x)], expected, rtol=0, atol=2e-6)
    assert untouched(out, len(x))


@settings(max_examples=60)
@given(
    st.sampled_from([np.float32, np.float16]),
    st.integers(1, 100),
    SEEDS,
    st.sampled_from([0.0, 0.1, 0.9]),
    st.sampled_from([1.0, 3e4, 1e38]),
)
def test_what_is_stored_is_finite(
    dtype: type[np.floating], count: int, seed: int, share: float, size: float
) -> None:
    generator = np.random.default_rng(seed)
    x = drawn(count, seed, size)
    bad = generator.random(count) < share
    x[bad] = generator.choice(np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32), bad.sum())
    largest = np.float32(np.finfo(dtype).max)
    expected = np.clip(np.nan_to_num(x, nan=0.0), -largest, largest)
    out, source = room(count, dtype), room(count)
    source[:count] = x
    rows.store_finite(out.itemsize, at(source), at(out), count)
    assert (out[:count] == expected.astype(dtype)).all()
    assert (source[:count] == expected).all()
    assert untouched(out, count)
    assert untouched(source, count)
