"""Matrices into the order in which tile.py reads them, rounded where the format says so; and single
channels back out of it."""

from __future__ import annotations

import numpy as np

from stepahead.kernels.jit import entry, inner
from stepahead.kernels.memory import bytes_at, floats, from_half, int16s, int64s, to_half
from stepahead.kernels.rows import GROUP_OF, UNIT
from stepahead.kernels.team import meet, take
from stepahead.kernels.tile import FLOAT16, FLOAT32, INT4, INT8, PANEL

_MOST_INT8, _MOST_INT4 = 127, 15


@inner
def _copy_float(kind: int, w: np.ndarray, out: int, channel: int, column: int, size: int) -> None:
    place = column * PANEL + channel
    if kind == FLOAT32:
        given = floats(out, (column + size) * PANEL)
        for at in range(size):
            given[place + at * PANEL] = w[at]
    else:
        halves = int16s(out, (column + size) * PANEL)
        for at in range(size):
            halves[place + at * PANEL] = to_half(np.float32(w[at]))


@inner
def _round_int8(w: np.ndarray, size: int, scale: np.ndarray, out: np.ndarray, channel: int) -> None:
    most = np.float32(0)
    for at in range(size):
        most = max(most, abs(w[at]))
    half = to_half(np.float32(most * np.float32(UNIT / _MOST_INT8)))
    scale[channel] = half
    step = from_half(half) / np.float32(UNIT)
    for at in range(size):
        level = np.rint(w[at] / step) if step > 0 else np.float32(0)
        level = min(max(level, np.float32(-_MOST_INT8)), np.float32(_MOST_INT8))
        out[(at // 2) * 2 * PANEL + 2 * channel + at % 2] = np.uint8(np.int64(level) & 255)


@inner
def _round_int4(w: np.ndarray, size: int, scale: np.ndarray, out: np.ndarray, channel: int) -> None:
    low, high = w[0], w[0]
    for at in range(size):
        low, high = min(low, w[at]), max(high, w[at])
    half_step = to_half(np.float32((high - low) * np.float32(UNIT / _MOST_INT4)))
    half_low = to_half(np.float32(low * np.float32(UNIT)))
    scale[channel], scale[PANEL + channel] = half_step, half_low
    step = from_half(half_step) / np.float32(UNIT)
    low = from_half(half_low) / np.float32(UNIT)
    for at in range(size):
        level = np.rint((w[at] - low) / step) if step > 0 else np.float32(0)
        bits = np.int64(min(max(level, np.float32(0)), np.float32(_MOST_INT4)))
        place = (at // 4) * 2 * PANEL + 2 * channel + at % 2
        out[place] |= np.uint8(bits << 4 if at % 4 >= 2 else bits)


@entry("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def pack(
    rank: int,
    team: int,
    kind: int,
    weight: int,
    channels: int,
    columns: int,
    groups: int,
    out: int,
    out_bytes: int,
    scales: int,
    scale_bytes: int,
) -> None:
    """float32[channels, columns] into `out` and `scales`, all zero before; bytes are of a group."""
    size = GROUP_OF[kind]
    while True:
        panel = take(team)
        if panel * PANEL >= channels:
            break
        for channel in range(min(PANEL, channels - panel * PANEL)):
            row = floats(weight + (panel * PANEL + channel) * columns * 4, columns)
            for group in range(groups):
                here = row[group * size : min((group + 1) * size, columns)]
                place = panel * groups + group
                at = out + place * out_bytes
                if kind >= INT8:
                    stored = bytes_at(at, out_bytes)
                    scale = int16s(scales + place * scale_bytes, scale_bytes // 2)
                    if kind == INT8:
                        _round_int8(here, len(here), scale, stored, channel)
                    else:
                        _round_int4(here, len(here), scale, stored, channel)
                else:
                    _copy_float(kind, here, at, channel, 0, len(here))
    meet(team)


@inner
def _level(kind: int, at: int, scales: int, column: int, channel: int) -> np.float32:
    """A weight of an integer format: its group at `at`, its place in it `column`."""
    scale = from_half(int16s(scales, PANEL)[channel]) / np.float32(UNIT)
    if kind == INT8:
        stored = bytes_at(at, (column + 2) * PANEL)
        level = stored[(column // 2) * 2 * PANEL + 2 * channel + column % 2]
        return np.float32(np.int8(level)) * scale
    stored = bytes_at(at, (column // 4 + 1) * 2 * PANEL)
    pair = stored[(column // 4) * 2 * PANEL + 2 * channel + column % 2]
    bits = pair >> 4 if column % 4 >= 2 else pair & 15
    least = from_half(int16s(scales + 2 * PANEL, PANEL)[channel]) / np.float32(UNIT)
    return np.float32(bits) * scale + least


@entry("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def unpack(
    rank: int,
    team: int,
    kind: int,
    channels: int,
    count: int,
    columns: int,
    groups: int,
    weights: int,
    group_bytes: int,
    scales: int,
    out: int,
) -> None:
    """Of a packed matrix, the channels int64[count] at `channels` as float32[count, columns]."""
    size = GROUP_OF[kind]
    scale_bytes = 4 * PANEL if kind == INT4 else 2 * PANEL
    while True:
        row = take(team)
        if row >= count:
            break
        wanted = int64s(channels, count)[row]
        given = floats(out + row * columns * 4, columns)
        for column in range(columns):
            place = wanted // PANEL * groups + column // size
            at, channel, inner_column = weights + place * group_bytes, wanted % PANEL, column % size
            if kind == FLOAT32:
                given[column] = floats(at, size * PANEL)[inner_column * PANEL + channel]
            elif kind == FLOAT16:
                half = int16s(at, size * PANEL)[inner_column * PANEL + channel]
                given[column] = from_half(half)
            else:
                its = scales + place * scale_bytes
                given[column] = _level(kind, at, its, inner_column, channel)
    meet(team)
