"""A tile of a matrix product: a few rows of activations times one panel of output channels.

The heart of all products. A panel is `PANEL` channels, two vectors wide, and lies in memory in the
order in which it is read.  Each output is summed in the same order, whatever rows are beside it:
what a row gets does not depend on its neighbours, to the bit.

Weights lie as one of four formats, columns in groups of `GROUP`:

    FLOAT32, FLOAT16   w[column][channel], activations float32
    INT8               w[column / 2][channel][2], levels; a level counts a channel's unit as many
                       times, 1 to MULTIPLES, as its group says: uint8[group][channel], and behind
                       all groups the units, float32[channel]
    INT4               the same order in unsigned halves of bytes: low halves are a column pair, the
                       high ones the next; each group has a scale and a least value, float16, in
                       units of a power of 2 that the row's scale brings along

Integer formats take activations as int16, one scale a row, and multiply pairs of them: that costs
what 8 bits would, and leaves room for the few activations that are a hundred times as large as the
rest.  INT4's sums are exact within a group.  INT8's are within a section of SECTION groups: weights
are whole numbers of their channel's unit there, and activations are kept so small, a matrix at a
time, that no sum outgrows int32 (pack.py).  That leaves nothing to do between two groups.  Where
rows are many, a tile of WIDENED keeps levels times multiples as int16, and tiles of WIDE read them.
"""

from __future__ import annotations

from typing import Any

from stepahead.kernels.emit import F16, F32, I8, I16, I32, LANES, Emitter, Value, emitted
from stepahead.kernels.jit import inner

FLOAT32, FLOAT16, INT8, INT4 = range(4)
WIDENED, WIDE = 4, 5
PANEL = 2 * LANES
# Columns that are summed apart: those that share a scale, or enough to keep rounding small.
GROUP = {FLOAT32: 64, FLOAT16: 64, INT8: 32, INT4: 32}
SECTION = 64  # groups of INT8 whose sum is one int32
MULTIPLES = 8
# Bytes of a group of a panel: its weights, and what it has beside them; and of a panel's units.
GROUP_BYTES = {
    kind: GROUP[kind] * PANEL * bits // 8
    for kind, bits in ((FLOAT32, 32), (FLOAT16, 16), (INT8, 8), (INT4, 4))
}
SCALE_BYTES = {FLOAT32: 0, FLOAT16: 0, INT8: PANEL, INT4: 4 * PANEL}
UNIT_BYTES = {FLOAT32: 0, FLOAT16: 0, INT8: 4 * PANEL, INT4: 0}
ROOM_BYTES = SECTION * GROUP[INT8] * PANEL * 2
MOST_ROWS = 6  # more sums than registers hold would go through memory
_HALVES = 2  # vectors in a panel
_INT4_MASK = 15
_AHEAD = 2048  # bytes of INT8 that are on their way: with few rows memory is the bound

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
        if kind == INT8:
            emit.fetch(emit.at(w, emit.times(index, 2 * PANEL), _AHEAD))
        return _add_pairs(emit, rows, emit.at(a, emit.times(index, 4 * pairs)), lda, weights, sums)

    none = [emit.zeros(emit.vector(I32))] * (rows * _HALVES)
    return emit.loop(emit.i64(GROUP[kind] // (2 * pairs)), none, some)


def _add_pairs(
    emit: Emitter, rows: int, a: Value, lda: Value, weights: list[list[Value]], sums: _Sums
) -> _Sums:
    """Column pairs of activations at `a` times their weights, added to sums in int32."""
    sums = list(sums)
    for pair, halves in enumerate(weights):
        at = emit.at(a, 4 * pair)
        for row in range(rows):
            x = emit.splat(emit.load(emit.at(at, emit.times(lda, row)), I32, 4))
            x = emit.builder.bitcast(x, emit.vector(I16, 2 * LANES))
            for half, weight in enumerate(halves):
                place = row * _HALVES + half
                sums[place] = emit.builder.add(sums[place], emit.pairs_product(x, weight))
    return sums


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


def _halves(emit: Emitter, lies_at: Value) -> list[Value]:
    """A panel's float16 numbers as float32."""
    size = 2 * LANES
    stored = [
        emit.load(emit.at(lies_at, half * size), emit.vector(F16), size) for half in range(_HALVES)
    ]
    return [emit.builder.fpext(half, emit.vector(F32)) for half in stored]


class _Tile:
    """What a tile is given, and how its sums are made; all of it instructions.

    `groups` are those of this tile; strides are in bytes.
    """

    def __init__(self, emit: Emitter, kind: int, rows: int, args: tuple[Value, ...]) -> None:
        (self.a, self.lda, self.a_sums, self.lds, self.scales, self.w, self.s) = args[:7]
        (self.units, self.room, self.ahead, self.ahead_step, self.bias) = args[7:12]
        (self.out, self.ldo, self.add, self.groups) = args[12:]
        self.emit, self.kind, self.rows = emit, kind, rows

    def none(self, kind: Any) -> _Sums:
        return [self.emit.zeros(self.emit.vector(kind))] * (self.rows * _HALVES)

    def columns(self, group: Value) -> _Sums:
        """Sums of a group's columns."""
        emit, kind = self.emit, self.kind
        columns = _float_columns if kind in (FLOAT32, FLOAT16) else _int_columns
        x_bytes = GROUP[kind] * (4 if kind in (FLOAT32, FLOAT16) else 2)
        a = emit.at(self.a, emit.times(group, x_bytes))
        w = emit.at(self.w, emit.times(group, GROUP_BYTES[kind]))
        return columns(emit, kind, self.rows, a, self.lda, w)

    def totals(self) -> _Sums:
        """float32 of all groups."""
        if self.kind == INT8:
            return self._in_units(self.emit.loop(self.groups, self.none(I32), self._int8_group))
        if self.kind in (WIDENED, WIDE):
            return self._in_units(self._wide() if self.kind == WIDE else self._int8())
        group = self._int4_group if self.kind == INT4 else self._float_group
        return self.emit.loop(self.groups, self.none(F32), group)

    def _float_group(self, index: Value, totals: _Sums) -> _Sums:
        both = zip(totals, self.columns(index), strict=True)
        return [self.emit.builder.fadd(*some) for some in both]

    def _int4_group(self, index: Value, totals: _Sums) -> _Sums:
        emit = self.emit
        columns = self.columns(index)
        lies_at = emit.at(self.s, emit.times(index, SCALE_BYTES[INT4]))
        scales, least = _halves(emit, lies_at), _halves(emit, emit.at(lies_at, 2 * PANEL))
        at = emit.at(self.a_sums, emit.times(index, 4))
        given = []
        for place, some in enumerate(columns):
            row, half = divmod(place, _HALVES)
            levels = emit.builder.sitofp(some, emit.vector(F32))
            total = emit.fma(levels, scales[half], totals[place])
            x = emit.splat(emit.load(emit.at(at, emit.times(self.lds, row)), F32, 4))
            given.append(emit.fma(x, least[half], total))
        return given

    def _int8(self) -> _Sums:
        """Levels times multiples, and all of it kept as WIDE where there is `room`."""
        emit, lanes = self.emit, 2 * LANES
        pairs = GROUP[INT8] // 2

        def group(index: Value, sums: list[Value]) -> list[Value]:
            lies_at = emit.at(self.s, emit.times(index, SCALE_BYTES[INT8]))
            stored = emit.load(lies_at, emit.vector(I8, PANEL), PANEL)
            multiples = [
                emit.builder.zext(emit.twice(stored, half * LANES, LANES), emit.vector(I16, lanes))
                for half in range(_HALVES)
            ]

            def pair(inside: Value, sums: list[Value]) -> list[Value]:
                place = emit.builder.add(emit.times(index, pairs), inside)
                (levels,) = _int8_pair(emit, self.w, place)
                weights = [emit.builder.mul(*both) for both in zip(levels, multiples, strict=True)]
                if self.kind == WIDENED:
                    self._keep(weights, place)
                a = emit.at(self.a, emit.times(place, 4))
                return _add_pairs(emit, self.rows, a, self.lda, [weights], sums)

            return emit.loop(emit.i64(pairs), sums, pair)

        return emit.loop(self.groups, self.none(I32), group)

    def _int8_group(self, index: Value, totals: _Sums) -> _Sums:
        emit, columns = self.emit, self.columns(index)
        lies_at = emit.at(self.s, emit.times(index, SCALE_BYTES[INT8]))
        multiples = [
            emit.load(emit.at(lies_at, half * LANES), emit.vector(I8), LANES)
            for half in range(_HALVES)
        ]
        multiples = [emit.builder.zext(half, emit.vector(I32)) for half in multiples]
        return [
            emit.builder.add(total, emit.builder.mul(some, multiples[place % _HALVES]))
            for place, (total, some) in enumerate(zip(totals, columns, strict=True))
        ]

    def _keep(self, weights: list[Value], pair: Value) -> None:
        emit, vector = self.emit, 4 * LANES
        for half, weight in enumerate(weights):
            to = emit.at(self.room, emit.times(pair, _HALVES * vector), half * vector)
            emit.store(weight, to, vector)

    def _wide(self) -> _Sums:
        emit, vector = self.emit, 4 * LANES

        def some(index: Value, sums: list[Value]) -> list[Value]:
            lies_at = emit.at(self.room, emit.times(index, 2 * _HALVES * vector))
            weights = [
                emit.load(emit.at(lies_at, at * vector), emit.vector(I16, 2 * LANES), vector)
                for at in range(2 * _HALVES)
            ]
            emit.fetch(emit.at(self.ahead, emit.times(index, self.ahead_step)))
            a = emit.at(self.a, emit.times(index, 8))
            pairs = [weights[:_HALVES], weights[_HALVES:]]
            return _add_pairs(emit, self.rows, a, self.lda, pairs, sums)

        return emit.loop(emit.times(self.groups, GROUP[INT8] // 4), self.none(I32), some)

    def _in_units(self, sums: _Sums) -> _Sums:
        emit, vector = self.emit, 4 * LANES
        units = [
            emit.load(emit.at(self.units, half * vector), emit.vector(F32), 4)
            for half in range(_HALVES)
        ]
        return [
            emit.builder.fmul(emit.builder.sitofp(some, emit.vector(F32)), units[place % _HALVES])
            for place, some in enumerate(sums)
        ]

    def store(self, totals: _Sums) -> None:
        """out = totals * the rows' scales + bias, or added to what is there."""
        emit = self.emit
        adds = emit.builder.icmp_signed("!=", self.add, emit.i64(0))
        for place, total in enumerate(totals):
            row, half = divmod(place, _HALVES)
            here = emit.at(self.out, emit.times(self.ldo, row), half * 4 * LANES)
            more = emit.load(emit.at(self.bias, half * 4 * LANES), emit.vector(F32), 4)
            before = emit.load(here, emit.vector(F32), 4)
            before = emit.builder.select(adds, before, emit.zeros(emit.vector(F32)))
            scale = emit.splat(emit.load(emit.at(self.scales, 4 * row), F32, 4))
            emit.store(emit.builder.fadd(emit.fma(total, scale, more), before), here, 4)


def _tile(kind: int, rows: int) -> Any:
    def write(emit: Emitter, *args: Value) -> None:
        tile = _Tile(emit, kind, rows, args)
        tile.store(tile.totals())

    return emitted(16, write)


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


_float32, _float16, _int8, _int4, _widened, _wide = (
    _chooser(kind) for kind in (FLOAT32, FLOAT16, INT8, INT4, WIDENED, WIDE)
)


@inner
def tile(kind: int, rows: int, args: tuple[int, ...]) -> None:
    """`rows` rows (1 to MOST_ROWS) times one panel.  Of `args`, addresses and strides in bytes:

    a, lda         activations, float32 or int16, and from row to row
    a_sums, lds    INT4: float32 sums of each group of a row's activations
    scales         float32[rows], what each row's totals are multiplied with
    w, s           the panel's weights, and what its groups have beside them: multiples, or float16
                   scales and least values
    units          INT8: float32[PANEL]
    room           WIDENED: where int16[groups * GROUP / 2][PANEL][2] go, the beginning of a cache
                   line; WIDE: where they are
    ahead, ahead_step   WIDE: memory that will be read next, and how far to bring it at each step
    bias           float32[PANEL]
    out, ldo       float32, where the panel's channels of each row go
    add            whether they are added to what is there
    groups         how many groups of columns there are; of INT8, SECTION at most
    """
    if kind == WIDE:
        _wide(rows, args)
    elif kind == WIDENED:
        _widened(rows, args)
    elif kind == INT8:
        _int8(rows, args)
    elif kind == INT4:
        _int4(rows, args)
    elif kind == FLOAT16:
        _float16(rows, args)
    else:
        _float32(rows, args)
