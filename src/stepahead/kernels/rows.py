"""What is done to one row of activations: norms, rounding for integer products, gates, rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from stepahead.kernels.emit import F32, I32, LANES, Emitter, Value, emitted
from stepahead.kernels.jit import inner
from stepahead.kernels.memory import floats, int16s, int32s, to_half
from stepahead.kernels.tile import GROUP, INT4, INT8

MOST = 32767  # of an activation in int16, at most
UNIT = 1024.0  # scales of groups of weights are kept times this, so that float16 has room for them
_SIGN = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LEAST = 0x0DA24260  # the bits of 1e-30: 32767 times as many would overflow
_LARGEST, _LARGEST_HALF = np.float32(3.4028235e38), np.float32(65504.0)
_HALF_LIMIT = 0x477FE000  # the bits of 65504
SILU, GELU_TANH = range(2)

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
# Cephes' polynomial of (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LEAST_EXP, _MOST_EXP = -87.0, 88.0


def exp(emit: Emitter, x: Value) -> Value:
    """e to the x, in vectors of float32; 2 units in the last place.  Below -87 it is 1.6e-38, and
    above 88 infinity."""
    builder, kind = emit.builder, x.type

    def same(value: float) -> Value:
        return ir.Constant(kind, [value] * kind.count)

    high = same(_MOST_EXP)
    large = builder.fcmp_ordered(">", x, high)
    value = exp_below(emit, builder.select(large, high, x))
    return builder.select(large, same(float("inf")), value)


def exp_below(emit: Emitter, x: Value) -> Value:
    """The same where nothing is above 88."""
    builder, kind = emit.builder, x.type

    def same(value: float) -> Value:
        return ir.Constant(kind, [value] * kind.count)

    low = same(_LEAST_EXP)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    turns = emit.called(f"llvm.floor.v{kind.count}f32", kind, emit.fma(x, same(_LOG2_E), same(0.5)))
    rest = emit.fma(turns, same(-_LN2_HIGH), x)
    rest = emit.fma(turns, same(-_LN2_LOW), rest)
    value = same(_EXP[0])
    for factor in _EXP[1:]:
        value = emit.fma(value, rest, same(factor))
    value = builder.fadd(emit.fma(value, builder.fmul(rest, rest), rest), same(1.0))
    whole = emit.vector(I32, kind.count)
    bits = builder.add(builder.fptosi(turns, whole), ir.Constant(whole, [127] * kind.count))
    bits = builder.shl(bits, ir.Constant(whole, [23] * kind.count))
    return builder.fmul(value, builder.bitcast(bits, kind))


def _gate(tanh: bool) -> Any:
    def write(emit: Emitter, gates: Value, ups: Value, out: Value, vectors: Value) -> None:
        builder, kind = emit.builder, emit.vector(F32)
        one = ir.Constant(kind, [1.0] * LANES)

        def some(index: Value, carried: list[Value]) -> list[Value]:
            offset = emit.times(index, 4 * LANES)
            gate = emit.load(emit.at(gates, offset), kind, 4)
            up = emit.load(emit.at(ups, offset), kind, 4)
            inside = gate
            if tanh:  # gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
                cube = builder.fmul(builder.fmul(gate, gate), gate)
                inside = emit.fma(cube, ir.Constant(kind, [0.044715] * LANES), gate)
                inside = builder.fmul(inside, ir.Constant(kind, [1.5957691216057308] * LANES))
            below = builder.fadd(exp(emit, builder.fneg(inside)), one)
            emit.store(builder.fmul(builder.fdiv(gate, below), up), emit.at(out, offset), 4)
            return []

        emit.loop(vectors, [], some)

    return emitted(4, write)


_silu, _gelu_tanh = _gate(tanh=False), _gate(tanh=True)


@inner
def gate(activation: int, gates: int, ups: int, out: int, count: int) -> None:
    """out = act(gates) * ups: float32[count]; whole vectors are written."""
    args = (gates, ups, out, -(-count // LANES))
    if activation == SILU:
        _silu(args)
    else:
        _gelu_tanh(args)


@inner
def norm(x: int, weight: int, eps: float, out: int, count: int) -> None:
    """RMSNorm of float32[count]; `out` may be x."""
    values, weights, given = floats(x, count), floats(weight, count), floats(out, count)
    total = np.float32(0)
    for at in range(count):
        total += values[at] * values[at]
    scale = np.float32(1) / np.sqrt(total / np.float32(count) + np.float32(eps))
    for at in range(count):
        given[at] = values[at] * scale * weights[at]


@inner
def add_normed(x: int, weight: int, eps: float, out: int, count: int) -> None:
    """out += RMSNorm(x); x itself is overwritten."""
    norm(x, weight, eps, x, count)
    values, given = floats(x, count), floats(out, count)
    for at in range(count):
        given[at] += values[at]


@inner
def prepare(
    kind: int, most: int, x: int, count: int, groups: int, out: int, sums: int, scale: int
) -> None:
    """One row of activations as products with a matrix in format `kind` take it.

    most   what its largest becomes in int16
    x      float32[count]
    out    float32 or int16 of `groups` whole groups; what is beyond `count` becomes 0
    sums   float32[groups] of what each group adds up to, for INT4
    scale  float32[1], what the row's sums are to be multiplied with.  A row with NaN or infinity
           in it gets NaN, and zeros
    """
    padded = groups * GROUP_OF[kind]
    values = floats(x, count)
    if kind < INT8:
        copy = floats(out, padded)
        for at in range(count):
            copy[at] = values[at]
        for at in range(count, padded):
            copy[at] = 0
        floats(scale, 1)[0] = 1
        return
    _round(most, x, count, padded, out, scale)
    if kind != INT4:
        return
    floats(scale, 1)[0] /= np.float32(UNIT)
    rounded, group_sums = int16s(out, padded), floats(sums, groups)
    for group in range(groups):
        total = np.int32(0)
        for at in range(group * GROUP_OF[kind], (group + 1) * GROUP_OF[kind]):
            total += np.int32(rounded[at])
        group_sums[group] = np.float32(total)


GROUP_OF = np.array([GROUP[kind] for kind in range(4)])


@inner
def _round(whole: int, x: int, count: int, padded: int, out: int, scale: int) -> None:
    values, bits, rounded = floats(x, count), int32s(x, count), int16s(out, padded)
    most = np.int32(0)  # as bits: floats without a sign are in the order of their bits
    for at in range(count):
        most = max(most, bits[at] & np.int32(_SIGN))
    for at in range(count, padded):
        rounded[at] = 0
    if most >= _INFINITY or most < _LEAST:
        for at in range(count):
            rounded[at] = 0
        floats(scale, 1)[0] = np.float32(np.nan) if most >= _INFINITY else np.float32(0)
        return
    int32s(scale, 1)[0] = most
    largest = floats(scale, 1)[0]
    per_unit = np.float32(whole) / largest
    for at in range(count):
        rounded[at] = np.int16(np.rint(values[at] * per_unit))
    floats(scale, 1)[0] = largest / np.float32(whole)


@inner
def rotate(x: int, table: int, head_dim: int, heads: int) -> None:
    """Turn float32[heads, head_dim] by one position; `table` is its cosines and sines,
    float32[head_dim].  Dimension i pairs with i + head_dim / 2."""
    half = head_dim // 2
    turns = floats(table, head_dim)
    for head in range(heads):
        first = floats(x + head * head_dim * 4, half)
        second = floats(x + (head * head_dim + half) * 4, half)
        for at in range(half):
            cos, sin = turns[at], turns[half + at]
            a, b = first[at], second[at]
            first[at] = a * cos - b * sin
            second[at] = b * cos + a * sin


@inner
def store_finite(size: int, x: int, out: int, count: int) -> None:
    """Copy float32[count] as float32 (size 4) or float16 (2).  NaN becomes 0 and what is too large
    the largest number, in x too: a cell with NaN in it would spoil whoever gets its page next."""
    values, bits = floats(x, count), int32s(x, count)
    largest, limit = (_LARGEST_HALF, _HALF_LIMIT) if size == 2 else (_LARGEST, _INFINITY)
    worst = np.int32(0)
    for at in range(count):
        worst = max(worst, bits[at] & np.int32(_SIGN))
    if worst >= limit:
        for at in range(count):
            if bits[at] & np.int32(_SIGN) > _INFINITY:
                values[at] = 0
            else:
                values[at] = min(max(values[at], -largest), largest)
    if size == 2:
        halves = int16s(out, count)
        for at in range(count):
            halves[at] = to_half(values[at])
    else:
        cell = floats(out, count)
        for at in range(count):
            cell[at] = values[at]
