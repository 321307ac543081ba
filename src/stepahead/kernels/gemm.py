"""Products of activations and packed matrices, shared out among a team's threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepahead.kernels.jit import inner
from stepahead.kernels.team import take
from stepahead.kernels.tile import FLOAT16, FLOAT32, GROUP, INT4, INT8, MOST_ROWS, PANEL, tile

# What kernels are told of a matrix: int64[FIELDS].
FORMAT, PANELS, GROUPS, WEIGHTS, SCALES, BIAS = range(6)
FIELDS = 6
# What they are told of activations.
X, X_STRIDE, X_SUMS, SUMS_STRIDE, X_SCALES = range(5)

_ROWS = 48  # of activations that go together: more would not stay in the second cache
_PANELS = 4  # of one piece of work
_SCALE_BYTES = {FLOAT32: 0, FLOAT16: 0, INT8: 2 * PANEL, INT4: 4 * PANEL}
_WEIGHT_BYTES = {FLOAT32: 4 * PANEL, FLOAT16: 2 * PANEL, INT8: PANEL, INT4: PANEL // 2}
_GROUP_BYTES = np.array([GROUP[kind] * _WEIGHT_BYTES[kind] for kind in range(4)])
_GROUP_SCALES = np.array([_SCALE_BYTES[kind] for kind in range(4)])


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
        return self.panels * self.groups * int(_GROUP_BYTES[self.kind])

    @property
    def scale_bytes(self) -> int:
        return self.panels * self.groups * int(_GROUP_SCALES[self.kind])


@inner
def multiply(
    team: int,
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
    kind, groups = matrix[FORMAT], matrix[GROUPS]
    blocks = -(-count // _ROWS)
    pieces = -(-matrix[PANELS] // _PANELS)
    while True:
        piece = take(team)
        if piece >= blocks * pieces:
            return
        block, part = piece % blocks, piece // blocks
        first, end = count * block // blocks, count * (block + 1) // blocks
        for panel in range(part * _PANELS, min((part + 1) * _PANELS, matrix[PANELS])):
            weights = matrix[WEIGHTS] + panel * groups * _GROUP_BYTES[kind]
            scales = matrix[SCALES] + panel * groups * _GROUP_SCALES[kind]
            bias = matrix[BIAS] + panel * PANEL * 4
            tiles = -(-(end - first) // MOST_ROWS)
            for turn in range(tiles):
                row = first + (end - first) * turn // tiles
                rows = first + (end - first) * (turn + 1) // tiles - row
                tile(
                    kind,
                    rows,
                    (
                        x[X] + (slot + row) * x[X_STRIDE],
                        x[X_STRIDE],
                        x[X_SUMS] + (slot + row) * x[SUMS_STRIDE],
                        x[SUMS_STRIDE],
                        x[X_SCALES] + (slot + row) * 4,
                        weights,
                        scales,
                        bias,
                        out + row * out_stride + panel * PANEL * 4,
                        out_stride,
                        add,
                        groups,
                    ),
                )
