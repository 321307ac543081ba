"""Attention of some query positions and some heads of keys and values, over pages where they lie.

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
from stepahead.kernels.rows import exp_below

_HEADS = 3  # of queries that read a key or value together: more sums than registers hold
_KEYS = 4  # that are read together
_VECTORS = 4  # of values that are summed in registers
_WIDE = 2 * LANES  # scores that become weights together, for one's steps to fill the others' waits


def _loaded(emit: Emitter, half: bool, place: Value) -> Value:
    """A vector of a pool's numbers, as float32."""
    if not half:
        return emit.load(place, emit.vector(F32), 4)
    return emit.builder.fpext(emit.load(place, emit.vector(F16), 2), emit.vector(F32))


def _dots(heads: int, half: bool) -> Any:
    """out[h][i] = q[h] . k[i] for `count` keys, four by four; what is behind them, up to the next
    four, is the last one's again."""
    size = (2 if half else 4) * LANES

    def write(emit: Emitter, *args: Value) -> None:
        q, q_stride, vectors, k, stride, count, out, out_stride = args
        kind, builder = emit.vector(F32), emit.builder
        rows = [emit.at(q, emit.times(q_stride, head)) for head in range(heads)]
        last = emit.at(count, -1)

        def four(block: Value, carried: list[Value]) -> list[Value]:
            places = []
            for key in range(_KEYS):
                there = emit.at(emit.times(block, _KEYS), key)
                there = builder.select(builder.icmp_signed("<", there, last), there, last)
                places.append(emit.at(k, emit.times(there, stride)))

            def some(index: Value, sums: list[Value]) -> list[Value]:
                at = emit.times(index, 4 * LANES)
                queries = [emit.load(emit.at(row, at), kind, 4) for row in rows]
                given = list(sums)
                # a key at a time: sums, queries and a key are as many as there are registers
                for key, place in enumerate(places):
                    value = _loaded(emit, half, emit.at(place, emit.times(index, size)))
                    for head, query in enumerate(queries):
                        at = head * _KEYS + key
                        given[at] = emit.fma(query, value, given[at])
                return given

            sums = emit.loop(vectors, [emit.zeros(kind)] * (heads * _KEYS), some)
            for head in range(heads):
                found = emit.totals(sums[head * _KEYS : (head + 1) * _KEYS])
                place = emit.at(out, emit.times(out_stride, head), emit.times(block, 4 * _KEYS))
                emit.store(found, place, 4)
            return []

        emit.loop(builder.sdiv(emit.at(count, _KEYS - 1), emit.i64(_KEYS)), [], four)

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
    and 1 / their sum after; _WIDE more floats than `count` may be written."""
    kind, builder = emit.vector(F32, _WIDE), emit.builder
    scale = emit.splat(emit.load(share, F32, 4), _WIDE)
    least = ir.Constant(kind, [float("-inf")] * _WIDE)
    vectors = builder.sdiv(emit.at(count, _WIDE - 1), emit.i64(_WIDE))
    emit.store(least, emit.at(scores, emit.times(count, 4)), 4)

    def largest(index: Value, found: list[Value]) -> list[Value]:
        place = emit.at(scores, emit.times(index, 4 * _WIDE))
        score = builder.fmul(emit.load(place, kind, 4), scale)
        emit.store(score, place, 4)
        return [emit.larger(score, found[0])]

    (most,) = emit.loop(vectors, [least], largest)
    most = emit.splat(emit.largest(most), _WIDE)

    def some(index: Value, sums: list[Value]) -> list[Value]:
        place = emit.at(scores, emit.times(index, 4 * _WIDE))
        weight = exp_below(emit, builder.fsub(emit.load(place, kind, 4), most))
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
    q_stride: int,
    head_dim: int,
    k: int,
    stride: int,
    count: int,
    out: int,
    out_stride: int,
) -> None:
    """Scores of `count` keys, which is above 0; three more than those may be written."""
    vectors = head_dim // LANES
    for first in range(0, heads, _HEADS):
        query, to = q + first * q_stride, out + first * out_stride
        args = (query, q_stride, vectors, k, stride, count, to, out_stride)
        _dots_of(size, min(heads - first, _HEADS), args)


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
    out_stride: int,
) -> None:
    at, vectors = 0, head_dim // LANES
    while at < vectors:
        many = at + _VECTORS <= vectors
        for first in range(0, heads, _HEADS):
            some, given = min(heads - first, _HEADS), weights + first * weights_stride
            here, to = v + at * LANES * size, out + first * out_stride + at * LANES * 4
            args = (given, weights_stride, here, stride, count, to, out_stride)
            if many:
                _blend_many(size, some, args)
            else:
                _blend_one(size, some, args)
        at += _VECTORS if many else 1


def scratch_floats(positions: int, heads: int) -> int:
    """Of a thread that attends with so many heads at once, those of all rows together; positions
    are those that any of the rows sees."""
    return heads * (_row_floats(positions) + 1)


@inner
def _row_floats(positions: int) -> int:
    """Room for one head's scores, and as many more as may be written behind them."""
    return -(-positions // LANES) * LANES + _WIDE


@inner
def first_seen(end: int, window: int) -> int:
    """The first position of a row that sees none from `end` on; a window of 0 is none."""
    return max(0, end - window) if window else 0


@inner
def _over_pages(
    size: int,
    rows: int,
    groups: int,
    heads: int,
    head_dim: int,
    stride: int,
    page_size: int,
    table: int,
    window: int,
    end: int,
    scores: int,
    room: int,
    pool: int,
    given: int,
    given_stride: int,
    add: bool,
) -> None:
    """Scores of all keys, where `given` are queries; or values are added to it, times scores.

    A page is read for all rows before the next one is.  What a row does not see it does not touch,
    so it is added up as if the row were alone."""
    begin, last = first_seen(end, window), end + rows - 1
    pages = int64s(table, -(-last // page_size))
    position = begin
    while position < last:
        behind = min(position - position % page_size + page_size, last)
        cell = pages[position // page_size] * page_size + position % page_size
        # one head of queries: those of several rows read a key together, where all see the page
        several = heads == 1 and first_seen(last, window) <= position and behind <= end
        queries, scores_apart = rows if several else heads, groups * room if several else room
        apart = given_stride if several else head_dim * 4
        for group in range(groups):
            for row in range(1 if several else rows):
                first = max(position, first_seen(end + row, window))
                count = min(behind, end + row) - first
                if count <= 0:
                    continue
                here = pool + (cell + first - position) * stride + group * head_dim * size
                some = scores + (row * groups + group) * heads * room + (first - begin) * 4
                at = given + row * given_stride + group * heads * head_dim * 4
                if add:
                    args = (some, scores_apart, here, stride, count, head_dim, at, apart)
                    _add_values(size, queries, *args)
                else:
                    args = (at, apart, head_dim, here, stride, count, some, scores_apart)
                    _score(size, queries, *args)
        position = behind


@inner
def attend(
    size: int,
    rows: int,
    q: int,
    q_stride: int,
    groups: int,
    heads: int,
    head_dim: int,
    k: int,
    v: int,
    stride: int,
    page_size: int,
    table: int,
    window: int,
    end: int,
    scale: float,
    scratch: int,
    out: int,
    out_stride: int,
) -> None:
    """`groups` heads of keys and values, each with `heads` heads of queries, over what each of some
    rows sees that follow each other: the first one positions up to `end`, the next one a position
    more.  What lies together is read together.

    size     bytes of a number in the pools: 4 for float32, 2 for float16
    q, out   float32[rows, groups * heads, head_dim], and bytes from row to row
    k, v     the first of these heads' numbers in the pools' first cell; bytes from cell to cell
    table    int64 pages of the rows, in order of their positions
    window   how many positions a row sees at most; 0 for all
    scratch  float32[scratch_floats(positions that are seen, rows * groups * heads)], this thread's
    """
    every, begin = groups * heads, first_seen(end, window)
    shares, scores = floats(scratch, rows * every), scratch + rows * every * 4
    room = _row_floats(end + rows - 1 - begin) * 4
    sizes = (size, rows, groups, heads, head_dim, stride, page_size, table, window, end)
    _over_pages(*sizes, scores, room, k, q, q_stride, False)
    for row in range(rows):
        floats(out + row * out_stride, every * head_dim)[:] = 0
        first = first_seen(end + row, window)
        for query in range(row * every, (row + 1) * every):
            shares[query] = scale
            seen = scores + query * room + (first - begin) * 4
            _weigh((seen, end + row - first, scratch + query * 4))
    _over_pages(*sizes, scores, room, v, out, out_stride, True)
    for query in range(rows * every):
        at = out + query // every * out_stride + query % every * head_dim * 4
        _scale((at, head_dim // LANES, scratch + query * 4))
