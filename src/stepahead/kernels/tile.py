"""A tile of a matrix product: a few rows of activations times one panel of output channels.

The heart of all products. A panel is `PANEL` channels, two vectors wide, and lies in memory in the
order in which it is read.  Each output is summed group by group of columns, always in the same
order, whatever rows are beside it: what a row gets does not depend on its neighbours, to the bit.

Weights lie as one of four formats:

    FLOAT32, FLOAT16   w[column][channel], activations float32
    INT8               w[column / 2][channel][2] and a scale for each group of 32 columns
    INT4               the same in unsigned halves of bytes: low halves are a column pair, the high
                       ones the next; each group has a scale and a least value

Integer formats take activations as int16, one scale a row.  A product of int8 and int16 is exact in
int32, and so is its sum over a group; 16 bits leave room for the few activations that are a hundred
times as large as the rest, and cost what 8 bits would: CPUs multiply pairs of 16 bits either way.
Scales of groups are float16, in units of a power of 2 that the row's scale brings along.
"""

from __future__ import annotations

from typing import Any

from stepahead.kernels.emit import F16, F32, I8, I16, I32, LANES, Emitter, Value, emitted
from stepahead.kernels.jit import inner

FLOAT32, FLOAT16, INT8, INT4 = range(4)
PANEL = 2 * LANES
# columns that are summed apart: those that share a scale, or enough to keep rounding small

GROUP = {FLOAT32: 64, FLOAT16: 64, INT8: 32, INT4: 32}
MOST_ROWS = 6  # more sums than registers hold would go through memory
_HALVES = 2  # vectors in a panel
_INT4_MASK = 15

_Sums = list[Value]  # of a tile's rows: for each, its vectors in order


def _float_columns(emit: Emitter, kind: int, rows: int, a: Value, lda: Value, w: Value) -> _Sums:
    stored = F32 if kind == FLOAT32 else F16
    size, vector = (4, 4 * LANES) if kind == FLOAT32 else (2, 2 * LANES)

    def column(index: Value, sums: list[Value]) -> list[Value]:
        lies_at = emit.at(w, emit.times(index, PANEL * size))
        weights = [
            emit.load(emit.at(lies_at, half * vector), emit.vector(stored), vector)
            for half in range(_HALVES)
        ]
        if kind == FLOAT16:
            weights = [emit.builder.fpext(half, emit.vector(F32)) for half in weights]
        at = emit.at(a, emit.times(index, 4))
        given = []
        for row in range(rows):
            x = emit.splat(emit.load(emit.at(at, emit.times(lda, row)), F32, 4))
            for half, weight in enumerate(weights):
                given.append(emit.fma(x, weight, sums[row * _HALVES + half]))
        return given

    none = [emit.zeros(emit.vector(F32))] * (rows * _HALVES)
    return emit.loop(emit.i64(GROUP[kind]), none, column)


def _int_columns(emit: Emitter, kind: int, rows: int, a: Value, lda: Value, w: Value) -> _Sums:
    pairs = 1 if kind == INT8 else 2  # column pairs of one step

    def some(index: Value, sums: list[Value]) -> list[Value]:
        weights = _int4_pairs(emit, w, index) if kind == INT4 else _int8_pair(emit, w, index)
        for pair in range(pairs):
            at = emit.at(a, emit.times(index, 4 * pairs), 4 * pair)
            for row in range(rows):
                x = emit.splat(emit.load(emit.at(at, emit.times(lda, row)), I32, 4))
                x = emit.builder.bitcast(x, emit.vector(I16, 2 * LANES))
                for half in range(_HALVES):
                    place = row * _HALVES + half
                    product = emit.pairs_product(x, weights[pair][half])
                    sums[place] = emit.builder.add(sums[place], product)
        return sums

    none = [emit.zeros(emit.vector(I32))] * (rows * _HALVES)
    return emit.loop(emit.i64(GROUP[kind] // (2 * pairs)), none, some)


def _int8_pair(emit: Emitter, w: Value, index: Value) -> list[list[Value]]:
    lies_at = emit.at(w, emit.times(index, 2 * PANEL))
    lanes = 2 * LANES
    halves = [
        emit.load(emit.at(lies_at, half * lanes), emit.vector(I8, lanes), lanes)
        for half in range(_HALVES)
    ]
    return [[emit.builder.sext(half, emit.vector(I16, lanes)) for half in halves]]


def _int4_pairs(emit: Emitter, w: Value, index: Value) -> list[list[Value]]:
    lies_at = emit.at(w, emit.times(index, 2 * PANEL))
    lanes = 2 * LANES
    both = emit.load(lies_at, emit.vector(I8, 2 * lanes), 2 * lanes)
    low = emit.builder.and_(both, emit.splat(I8(_INT4_MASK), 2 * lanes))
    high = emit.builder.lshr(both, emit.splat(I8(4), 2 * lanes))
    wide = emit.vector(I16, lanes)
    return [
        [emit.builder.zext(emit.part(pair, half * lanes, lanes), wide) for half in range(_HALVES)]
        for pair in (low, high)
    ]


def _folded(emit: Emitter, kind: int, columns: _Sums, totals: _Sums, lies_at: Value) -> _Sums:
    """Sums of a group, taken into the totals; `lies_at` is where its scales are."""
    if kind in (FLOAT32, FLOAT16):
        return [emit.builder.fadd(*both) for both in zip(totals, columns, strict=True)]
    scales = _halves(emit, lies_at)
    return [
        emit.fma(emit.builder.sitofp(some, emit.vector(F32)), scales[at % _HALVES], total)
        for at, (some, total) in enumerate(zip(columns, totals, strict=True))
    ]


def _halves(emit: Emitter, lies_at: Value) -> list[Value]:
    """A panel's float16 numbers as float32."""
    size = 2 * LANES
    stored = [
        emit.load(emit.at(lies_at, half * size), emit.vector(F16), size) for half in range(_HALVES)
    ]
    return [emit.builder.fpext(half, emit.vector(F32)) for half in stored]


def _tile(kind: int, rows: int) -> Any:
    weight_bytes = GROUP[kind] * PANEL * {FLOAT32: 8, FLOAT16: 4, INT8: 2, INT4: 1}[kind] // 2
    x_bytes = GROUP[kind] * (4 if kind in (FLOAT32, FLOAT16) else 2)
    scale_bytes = {FLOAT32: 0, FLOAT16: 0, INT8: 2 * PANEL, INT4: 4 * PANEL}[kind]
    columns_of = _float_columns if kind in (FLOAT32, FLOAT16) else _int_columns

    def write(emit: Emitter, *args: Value) -> None:
        a, lda, a_sums, lds, scales, w, s, bias, out, ldo, add, groups = args

        def group(index: Value, totals: list[Value]) -> list[Value]:
            columns = columns_of(
                emit,
                kind,
                rows,
                emit.at(a, emit.times(index, x_bytes)),
                lda,
                emit.at(w, emit.times(index, weight_bytes)),
            )
            lies_at = emit.at(s, emit.times(index, scale_bytes))
            totals = _folded(emit, kind, columns, totals, lies_at)
            if kind == INT4:
                least = _halves(emit, emit.at(lies_at, 2 * PANEL))
                at = emit.at(a_sums, emit.times(index, 4))
                for row in range(rows):
                    x = emit.splat(emit.load(emit.at(at, emit.times(lds, row)), F32, 4))
                    for half in range(_HALVES):
                        place = row * _HALVES + half
                        totals[place] = emit.fma(x, least[half], totals[place])
            return totals

        none = [emit.zeros(emit.vector(F32))] * (rows * _HALVES)
        totals = emit.loop(groups, none, group)
        adds = emit.builder.icmp_signed("!=", add, emit.i64(0))
        for place, total in enumerate(totals):
            row, half = divmod(place, _HALVES)
            here = emit.at(out, emit.times(ldo, row), half * 4 * LANES)
            more = emit.load(emit.at(bias, half * 4 * LANES), emit.vector(F32), 4)
            before = emit.load(here, emit.vector(F32), 4)
            before = emit.builder.select(adds, before, emit.zeros(emit.vector(F32)))
            scale = emit.splat(emit.load(emit.at(scales, 4 * row), F32, 4))
            emit.store(emit.builder.fadd(emit.fma(total, scale, more), before), here, 4)

    return emitted(12, write)


def _chooser(kind: int) -> Any:
    """A function for 1 to MOST_ROWS rows."""
    one, two, three, four, five, six = (_tile(kind, rows) for rows in range(1, MOST_ROWS + 1))

    @inner
    def tile(rows: int, args: tuple[int, ...]) -> None:
        if rows == 6:
            six(args)
        elif rows == 5:
            five(args)
        elif rows == 4:
            four(args)
        elif rows == 3:
            three(args)
        elif rows == 2:
            two(args)
        else:
            one(args)

    return tile


_float32, _float16, _int8, _int4 = (_chooser(kind) for kind in (FLOAT32, FLOAT16, INT8, INT4))


@inner
def tile(kind: int, rows: int, args: tuple[int, ...]) -> None:
    """`rows` rows (1 to MOST_ROWS) times one panel.  Of `args`, addresses and strides in bytes:

    a, lda         activations, float32 or int16, and from row to row
    a_sums, lds    INT4: float32 sums of each group of a row's activations
    scales         float32[rows], what each row's totals are multiplied with
    w, s           the panel's weights, and its groups' float16[PANEL] scales and, for INT4, least
                   values
    bias           float32[PANEL]
    out, ldo       float32, where the panel's channels of each row go
    add            whether they are added to what is there
    groups         how many groups of columns there are
    """
    if kind == INT8:
        _int8(rows, args)
    elif kind == INT4:
        _int4(rows, args)
    elif kind == FLOAT16:
        _float16(rows, args)
    else:
        _float32(rows, args)
