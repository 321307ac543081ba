"""Attention of one query position and one head of keys and values, over pages where they lie.

Everything is summed in the order of the positions, so what a query gets depends on what it sees and
on nothing else: not on its neighbours, nor on where a chunk of its prompt began.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from stepahead.kernels.emit import F16, F32, LANES, Emitter, Value, emitted
from stepahead.kernels.jit import inner
from stepahead.kernels.memory import floats, int64s
from stepahead.kernels.rows import exp

_KEYS = 4  # that share what is read of a query
_VECTORS = 8  # of values that are summed in registers


def _loaded(emit: Emitter, half: bool, place: Value) -> Value:
    """A vector of a pool's numbers, as float32."""
    if not half:
        return emit.load(place, emit.vector(F32), 4)
    return emit.builder.fpext(emit.load(place, emit.vector(F16), 2), emit.vector(F32))


def _dots(keys: int, half: bool) -> Any:
    """out[i] = q . k[i] for `keys` keys."""
    size = (2 if half else 4) * LANES

    def write(emit: Emitter, q: Value, vectors: Value, k: Value, stride: Value, out: Value) -> None:
        kind = emit.vector(F32)

        def some(index: Value, sums: list[Value]) -> list[Value]:
            query = emit.load(emit.at(q, emit.times(index, 4 * LANES)), kind, 4)
            given = []
            for key, before in enumerate(sums):
                place = emit.at(k, emit.times(index, size), emit.times(stride, key))
                given.append(emit.fma(query, _loaded(emit, half, place), before))
            return given

        sums = emit.loop(vectors, [emit.zeros(kind)] * keys, some)
        for key, total in enumerate(sums):
            emit.store(emit.total(total), emit.at(out, 4 * key), 4)

    return emitted(5, write)


def _blend(vectors: int, half: bool) -> Any:
    """out += sum of weights[i] * v[i] over `count` values, for `vectors` vectors of each."""
    size = (2 if half else 4) * LANES

    def write(
        emit: Emitter, weights: Value, v: Value, stride: Value, count: Value, out: Value
    ) -> None:
        kind = emit.vector(F32)
        places = [emit.at(out, 4 * LANES * at) for at in range(vectors)]

        def some(index: Value, sums: list[Value]) -> list[Value]:
            weight = emit.splat(emit.load(emit.at(weights, emit.times(index, 4)), F32, 4))
            value = emit.at(v, emit.times(index, stride))
            return [
                emit.fma(weight, _loaded(emit, half, emit.at(value, size * at)), before)
                for at, before in enumerate(sums)
            ]

        sums = emit.loop(count, [emit.load(place, kind, 4) for place in places], some)
        for place, total in zip(places, sums, strict=True):
            emit.store(total, place, 4)

    return emitted(5, write)


def _write_exps(emit: Emitter, scores: Value, most: Value, vectors: Value, total: Value) -> None:
    """scores = exp(scores - most), and their sum; most and total are addresses of float32."""
    kind, builder = emit.vector(F32), emit.builder
    highest = emit.splat(emit.load(most, F32, 4))
    least = ir.Constant(kind, [float("-inf")] * LANES)

    def some(index: Value, sums: list[Value]) -> list[Value]:
        place = emit.at(scores, emit.times(index, 4 * LANES))
        score = emit.load(place, kind, 4)
        weight = exp(emit, builder.fsub(score, highest))
        unseen = builder.fcmp_ordered("==", score, least)
        weight = builder.select(unseen, emit.zeros(kind), weight)
        emit.store(weight, place, 4)
        return [builder.fadd(sums[0], weight)]

    (sums,) = emit.loop(vectors, [emit.zeros(kind)], some)
    emit.store(emit.total(sums), total, 4)


_dots_of_four, _dot = _dots(_KEYS, half=False), _dots(1, half=False)
_half_dots_of_four, _half_dot = _dots(_KEYS, half=True), _dots(1, half=True)
_blend_many, _blend_one = _blend(_VECTORS, half=False), _blend(1, half=False)
_half_blend_many, _half_blend_one = _blend(_VECTORS, half=True), _blend(1, half=True)
_exps = emitted(4, _write_exps)


@inner
def _score(size: int, q: int, head_dim: int, k: int, stride: int, count: int, out: int) -> None:
    vectors = head_dim // LANES
    at = 0
    while at + _KEYS <= count:
        args = (q, vectors, k + at * stride, stride, out + at * 4)
        if size == 2:
            _half_dots_of_four(args)
        else:
            _dots_of_four(args)
        at += _KEYS
    while at < count:
        args = (q, vectors, k + at * stride, stride, out + at * 4)
        if size == 2:
            _half_dot(args)
        else:
            _dot(args)
        at += 1


@inner
def _add_values(
    size: int, weights: int, v: int, stride: int, count: int, head_dim: int, out: int
) -> None:
    at, vectors = 0, head_dim // LANES
    while at + _VECTORS <= vectors:
        args = (weights, v + at * LANES * size, stride, count, out + at * LANES * 4)
        if size == 2:
            _half_blend_many(args)
        else:
            _blend_many(args)
        at += _VECTORS
    while at < vectors:
        args = (weights, v + at * LANES * size, stride, count, out + at * LANES * 4)
        if size == 2:
            _half_blend_one(args)
        else:
            _blend_one(args)
        at += 1


@inner
def _weigh(scores: int, count: int, scale: float, spare: int) -> float:
    """Scores become weights; 1 / their sum."""
    padded = -(-count // LANES) * LANES
    values, pair = floats(scores, padded), floats(spare, 2)
    most = np.float32(-np.inf)
    for at in range(count):
        values[at] *= np.float32(scale)
        most = values[at] if values[at] > most else most
    for at in range(count, padded):
        values[at] = -np.inf
    pair[0] = most
    _exps((scores, spare, padded // LANES, spare + 4))
    return np.float32(1) / pair[1]


@inner
def attend(
    size: int,
    q: int,
    heads: int,
    head_dim: int,
    k: int,
    v: int,
    stride: int,
    page_size: int,
    table: int,
    begin: int,
    end: int,
    scale: float,
    scratch: int,
    out: int,
) -> None:
    """Query heads that share a head of keys and values, over positions begin .. end.

    size     bytes of a number in the pools: 4 for float32, 2 for float16
    q, out   float32[heads, head_dim]
    k, v     this head's numbers in the pools' first cell, and bytes from cell to cell
    table    int64 pages of the row, in order of its positions
    scratch  float32[end - begin + LANES + 2], this thread's own
    """
    spare, scores = scratch, scratch + 8
    pages = int64s(table, -(-end // page_size))
    for head in range(heads):
        query = q + head * head_dim * 4
        position = begin
        while position < end:
            offset = position % page_size
            count = min(page_size - offset, end - position)
            cell = (pages[position // page_size] * page_size + offset) * stride
            _score(size, query, head_dim, k + cell, stride, count, scores + (position - begin) * 4)
            position += count
        share = _weigh(scores, end - begin, scale, spare)
        _zero(out + head * head_dim * 4, head_dim)
        position = begin
        while position < end:
            offset = position % page_size
            count = min(page_size - offset, end - position)
            cell = (pages[position // page_size] * page_size + offset) * stride
            weights = scores + (position - begin) * 4
            _add_values(size, weights, v + cell, stride, count, head_dim, out + head * head_dim * 4)
            position += count
        given = floats(out + head * head_dim * 4, head_dim)
        for at in range(head_dim):
            given[at] *= share


@inner
def _zero(out: int, count: int) -> None:
    given = floats(out, count)
    for at in range(count):
        given[at] = 0
