"""Products of activations and packed matrices, shared out among a team's threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepahead.kernels import tile as tiles
from stepahead.kernels.jit import inlined, inner
from stepahead.kernels.team import take, threads_of
from stepahead.kernels.tile import (
    GROUP,
    INT8,
    MOST_ROWS,
    PANEL,
    ROOM_BYTES,
    SECTION,
    WIDE,
    WIDENED,
    tile,
)

# What kernels are told of a matrix: int64[FIELDS].  The bias is a panel longer than the matrix, by
# zeros; activations are rounded to whole numbers up to MOST_X.
FORMAT, PANELS, GROUPS, WEIGHTS, SCALES, BIAS, MOST_X = range(7)
FIELDS = 7
# What they are told of activations, and of memory of ROOM_BYTES for each thread.
X, X_STRIDE, X_SUMS, SUMS_STRIDE, X_SCALES, ROOM = range(6)

# Of activations that go together: more would not stay in the second cache.
_ROWS, _INT8_ROWS = 48, 96
_PANELS = 4  # of one piece of work at most
_INT8_COLUMNS = GROUP[INT8]
# A step of WIDE: bytes of INT8, and steps of a group.
_WIDE_STEP, _WIDE_STEPS = 4 * PANEL, _INT8_COLUMNS // 4
# Pieces that a thread should have: the others wait for the last one.  With few rows memory is the
# bound, which is read best in long pieces.
_PIECES = 8
_GROUP_BYTES, _SCALE_BYTES, _UNIT_BYTES = (
    np.array([sizes[kind] for kind in range(4)])
    for sizes in (tiles.GROUP_BYTES, tiles.SCALE_BYTES, tiles.UNIT_BYTES)
)


@dataclass(frozen=True)
class Layout:
    """The place of a matrix of `channels` x `columns` in memory, in one of tile.py's formats."""

    kind: int
    channels: int
    columns: int

    @property
    def panels(self) -> int:
        return -(-self.channels // PANEL)

    @property
    def groups(self) -> int:
        return -(-self.columns // GROUP[self.kind])

    @property
    def weight_bytes(self) -> int:
        return self.panels * self.groups * tiles.GROUP_BYTES[self.kind]

    @property
    def scale_bytes(self) -> int:
        groups = self.groups * tiles.SCALE_BYTES[self.kind]
        return self.panels * (groups + tiles.UNIT_BYTES[self.kind])


@inner
def place_of(kind: int, groups: int, panel: int, group: int) -> tuple[int, int, int]:
    """Where a panel's group has its weights, and what is beside them, and where the panel's units
    are: bytes from the beginning of the weights and, twice, of the scales."""
    weights = (panel * groups + group) * _GROUP_BYTES[kind]
    scales = panel * (groups * _SCALE_BYTES[kind] + _UNIT_BYTES[kind])
    return weights, scales + group * _SCALE_BYTES[kind], scales + groups * _SCALE_BYTES[kind]


@inlined
def _multiply_panel(
    x: np.ndarray,
    slot: int,
    rows: int,
    matrix: np.ndarray,
    panel: int,
    room: int,
    out: int,
    out_stride: int,
    add: int,
) -> None:
    """A panel times `rows` rows of activations, section by section; `room` for one, or 0."""
    kind, groups = matrix[FORMAT], matrix[GROUPS]
    section = min(SECTION, groups) if kind == INT8 else groups
    tiles = -(-rows // MOST_ROWS)
    # a panel of one row is read in a quarter of a microsecond: no division without need
    each = rows // tiles if tiles > 1 else rows
    more = rows - each * tiles  # tiles that have a row more
    step = _WIDE_STEP // (tiles - 1) if room else 0
    begin = 0
    while begin < groups:
        count = min(section, groups - begin)
        weights, scales, units = place_of(kind, groups, panel, begin)
        weights, scales = matrix[WEIGHTS] + weights, matrix[SCALES] + scales
        # Weights of what comes next are on their way while rows are multiplied: a little at a time,
        # for a burst would hold up the rows.
        ahead = weights + count * _GROUP_BYTES[kind]
        row = 0
        for turn in range(tiles):
            format = kind
            if room:
                format = WIDE if turn else WIDENED
            some = each + (turn < more)
            tile(
                format,
                some,
                (
                    x[X] + (slot + row) * x[X_STRIDE] + begin * _INT8_COLUMNS * 2,
                    x[X_STRIDE],
                    x[X_SUMS] + (slot + row) * x[SUMS_STRIDE],
                    x[SUMS_STRIDE],
                    x[X_SCALES] + (slot + row) * 4,
                    weights,
                    scales,
                    matrix[SCALES] + units,
                    room,
                    ahead,
                    step,
                    matrix[BIAS] + (matrix[PANELS] if begin else panel) * PANEL * 4,
                    out + row * out_stride + panel * PANEL * 4,
                    out_stride,
                    1 if begin else add,
                    count,
                ),
            )
            row += some
            if turn:
                ahead += count * _WIDE_STEPS * step
        begin += count


@inner
def multiply(
    team: int,
    rank: int,
    x: np.ndarray,
    slot: int,
    count: int,
    matrix: np.ndarray,
    out: int,
    out_stride: int,
    add: int,
) -> None:
    """out = x W^T + b, or added to `out`; strides in bytes.  `count` rows, the first of which lies
    at `slot` of the activations; all threads call it."""
    panels = matrix[PANELS]
    # few rows are done before a panel would be written out
    wide = matrix[FORMAT] == INT8 and count > 2 * MOST_ROWS
    room = x[ROOM] + rank * ROOM_BYTES if wide else 0
    blocks = -(-count // (_INT8_ROWS if matrix[FORMAT] == INT8 else _ROWS))
    at_once = _PANELS
    if count > MOST_ROWS:
        at_once = min(max(panels * blocks // (threads_of(team) * _PIECES), 1), _PANELS)
    pieces = -(-panels // at_once)
    while True:
        piece = take(team)
        if piece >= blocks * pieces:
            return
        block, part = piece % blocks, piece // blocks
        first, end = count * block // blocks, count * (block + 1) // blocks
        to = out + first * out_stride
        for panel in range(part * at_once, min((part + 1) * at_once, panels)):
            _multiply_panel(
                *(x, slot + first, end - first, matrix, panel, room, to, out_stride, add)
            )
