"""Attention of one query position and some heads of keys and values, over pages where they lie.

Everything is summed in the order of the positions, so what a query gets depends on what it sees and
on nothing else: not on its neighbours, nor on where a chunk of its prompt began.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from stepahead.kernels.emit import F16, F32, LANES, Emitter, Value, emitted
from stepahead.kernels.jit import inner
from stepahead.kernels.memory import floats, int64s
from stepahead.kernels.rows import exp

_HEADS = 3  # of queries that read a key or value together: more sums than registers hold
_KEYS = 4  # that are read together
_VECTORS = 4  # of values that are summed in registers


def _loaded(emit: Emitter, half: bool, place: Value) -> Value:
    """A vector of a pool's numbers, as float32."""
    if not half:
        return emit.load(place, emit.vector(F32), 4)
    return emit.builder.fpext(emit.load(place, emit.vector(F16), 2), emit.vector(F32))


def _dots(heads: int, half: bool) -> Any:
    """out[h][i] = q[h] . k[i] for four keys; those behind `last` are `last` again."""
    size = (2 if half else 4) * LANES

    def write(emit: Emitter, *args: Value) -> None:
        q, q_stride, vectors, k, stride, last, out, out_stride = args
        kind, builder = emit.vector(F32), emit.builder
        places = []
        for key in map(emit.i64, range(_KEYS)):
            there = builder.select(builder.icmp_signed("<", key, last), key, last)
            places.append(emit.at(k, emit.times(there, stride)))
        rows = [emit.at(q, emit.times(q_stride, head)) for head in range(heads)]

        def some(index: Value, sums: list[Value]) -> list[Value]:
            queries = [emit.load(emit.at(at, emit.times(index, 4 * LANES)), kind, 4) for at in rows]
            given = list(sums)
            # a key at a time: sums, queries and a key are as many as there are registers
            for key, at in enumerate(places):
                value = _loaded(emit, half, emit.at(at, emit.times(index, size)))
                for head, query in enumerate(queries):
                    place = head * _KEYS + key
                    given[place] = emit.fma(query, value, given[place])
            return given

        sums = emit.loop(vectors, [emit.zeros(kind)] * (heads * _KEYS), some)
        for head in range(heads):
            four = emit.totals(sums[head * _KEYS : (head + 1) * _KEYS])
            emit.store(four, emit.at(out, emit.times(out_stride, head)), 4)

    return emitted(8, write)


def _blend(vectors: int, heads: int, half: bool) -> Any:
    """out[h] += sum of weights[h][i] * v[i] over `count` values, for `vectors` vectors of each."""
    size = (2 if half else 4) * LANES

    def write(emit: Emitter, *args: Value) -> None:
        weights, weights_stride, v, stride, count, out, out_stride = args
        kind = emit.vector(F32)
        places = [
            emit.at(out, emit.times(out_stride, head), 4 * LANES * at)
            for head in range(heads)
            for at in range(vectors)
        ]
        rows = [emit.at(weights, emit.times(weights_stride, head)) for head in range(heads)]

        def some(index: Value, sums: list[Value]) -> list[Value]:
            shares = [
                emit.splat(emit.load(emit.at(at, emit.times(index, 4)), F32, 4)) for at in rows
            ]
            given, begin = list(sums), emit.at(v, emit.times(index, stride))
            # a vector at a time, as above
            for at in range(vectors):
                value = _loaded(emit, half, emit.at(begin, size * at))
                for head, share in enumerate(shares):
                    place = head * vectors + at
                    given[place] = emit.fma(share, value, given[place])
            return given

        sums = emit.loop(count, [emit.load(place, kind, 4) for place in places], some)
        for place, total in zip(places, sums, strict=True):
            emit.store(total, place, 4)

    return emitted(7, write)


def _write_weights(emit: Emitter, scores: Value, count: Value, share: Value) -> None:
    """Scores become exp(scores * scale - the largest of these).  float32 at `share` is scale before
    and 1 / their sum after; LANES more floats than `count` may be written."""
    kind, builder = emit.vector(F32), emit.builder
    scale, least = emit.splat(emit.load(share, F32, 4)), ir.Constant(kind, [float("-inf")] * LANES)
    vectors = builder.sdiv(emit.at(count, LANES - 1), emit.i64(LANES))
    emit.store(least, emit.at(scores, emit.times(count, 4)), 4)

    def largest(index: Value, found: list[Value]) -> list[Value]:
        place = emit.at(scores, emit.times(index, 4 * LANES))
        score = builder.fmul(emit.load(place, kind, 4), scale)
        emit.store(score, place, 4)
        return [emit.larger(score, found[0])]

    (most,) = emit.loop(vectors, [least], largest)
    most = emit.splat(emit.largest(most))

    def some(index: Value, sums: list[Value]) -> list[Value]:
        place = emit.at(scores, emit.times(index, 4 * LANES))
        score = emit.load(place, kind, 4)
        weight = exp(emit, builder.fsub(score, most))
        unseen = builder.fcmp_ordered("==", score, least)
        weight = builder.select(unseen, emit.zeros(kind), weight)
        emit.store(weight, place, 4)
        return [builder.fadd(sums[0], weight)]

    (sums,) = emit.loop(vectors, [emit.zeros(kind)], some)
    emit.store(builder.fdiv(ir.Constant(F32, 1.0), emit.total(sums)), share, 4)


def _write_scaled(emit: Emitter, values: Value, vectors: Value, share: Value) -> None:
    """Vectors of float32 times float32 at `share`."""
    scale = emit.splat(emit.load(share, F32, 4))

    def some(index: Value, carried: list[Value]) -> list[Value]:
        place = emit.at(values, emit.times(index, 4 * LANES))
        emit.store(emit.builder.fmul(emit.load(place, scale.type, 4), scale), place, 4)
        return []

    emit.loop(vectors, [], some)


def _chooser(make: Callable[[int, bool], Any]) -> Any:
    """A function for 1 to _HEADS heads, over float32 or float16."""
    one, two, three = (make(heads, False) for heads in range(1, _HEADS + 1))
    half_one, half_two, half_three = (make(heads, True) for heads in range(1, _HEADS + 1))

    @inner
    def chosen(size: int, heads: int, args: tuple[int, ...]) -> None:
        if size == 2:
            if heads == 3:
                half_three(args)
            elif heads == 2:
                half_two(args)
            else:
                half_one(args)
        elif heads == 3:
            three(args)
        elif heads == 2:
            two(args)
        else:
            one(args)

    return chosen


_dots_of = _chooser(_dots)
_blend_many, _blend_one = (_chooser(partial(_blend, vectors)) for vectors in (_VECTORS, 1))
_weigh, _scale = emitted(3, _write_weights), emitted(3, _write_scaled)


@inner
def _score(
    size: int,
    heads: int,
    q: int,
    head_dim: int,
    k: int,
    stride: int,
    count: int,
    out: int,
    out_stride: int,
) -> None:
    """Scores of `count` keys, which is above 0; three more than those may be written."""
    for first in range(0, heads, _HEADS):
        some, query = min(heads - first, _HEADS), q + first * head_dim * 4
        for at in range(0, count, _KEYS):
            here, to = k + at * stride, out + first * out_stride + at * 4
            last = min(count - at, _KEYS) - 1
            args = (query, head_dim * 4, head_dim // LANES, here, stride, last, to, out_stride)
            _dots_of(size, some, args)


@inner
def _add_values(
    size: int,
    heads: int,
    weights: int,
    weights_stride: int,
    v: int,
    stride: int,
    count: int,
    head_dim: int,
    out: int,
) -> None:
    at, vectors = 0, head_dim // LANES
    while at < vectors:
        many = at + _VECTORS <= vectors
        for first in range(0, heads, _HEADS):
            some, given = min(heads - first, _HEADS), weights + first * weights_stride
            here, to = v + at * LANES * size, out + (first * head_dim + at * LANES) * 4
            args = (given, weights_stride, here, stride, count, to, head_dim * 4)
            if many:
                _blend_many(size, some, args)
            else:
                _blend_one(size, some, args)
        at += _VECTORS if many else 1


def scratch_floats(positions: int, heads: int) -> int:
    """Of a thread that attends with so many heads at once."""
    return heads * (_row_floats(positions) + 1)


@inner
def _row_floats(positions: int) -> int:
    """Room for one head's scores: whole vectors, and one more."""
    return (-(-positions // LANES) + 1) * LANES


@inner
def attend(
    size: int,
    q: int,
    groups: int,
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
    """`groups` heads of keys and values, each with `heads` heads of queries, over positions
    begin .. end.  What lies together is read together.

    size     bytes of a number in the pools: 4 for float32, 2 for float16
    q, out   float32[groups * heads, head_dim]
    k, v     the first of these heads' numbers in the pools' first cell; bytes from cell to cell
    table    int64 pages of the row, in order of its positions
    scratch  float32[scratch_floats(end - begin, groups * heads)], this thread's own
    """
    every = groups * heads
    shares, scores = floats(scratch, every), scratch + every * 4
    row = _row_floats(end - begin) * 4
    pages = int64s(table, -(-end // page_size))
    position = begin
    while position < end:
        offset = position % page_size
        count = min(page_size - offset, end - position)
        cell = (pages[position // page_size] * page_size + offset) * stride
        for group in range(groups):
            here, first = k + cell + group * head_dim * size, group * heads
            to = scores + first * row + (position - begin) * 4
            query = q + first * head_dim * 4
            _score(size, heads, query, head_dim, here, stride, count, to, row)
        position += count
    for head in range(every):
        shares[head] = scale
        _weigh((scores + head * row, end - begin, scratch + head * 4))
    given = floats(out, every * head_dim)
    for at in range(every * head_dim):
        given[at] = 0
    position = begin
    while position < end:
        offset = position % page_size
        count = min(page_size - offset, end - position)
        cell = (pages[position // page_size] * page_size + offset) * stride
        for group in range(groups):
            here, first = v + cell + group * head_dim * size, group * heads
            weights = scores + first * row + (position - begin) * 4
            to = out + first * head_dim * 4
            _add_values(size, heads, weights, row, here, stride, count, head_dim, to)
        position += count
    for head in range(every):
        _scale((out + head * head_dim * 4, head_dim // LANES, scratch + head * 4))
