"""Matrices into the order in which tile.py reads them, rounded where the format says so; and single
channels back out of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepahead.kernels.gemm import place_of
from stepahead.kernels.jit import entry, inner
from stepahead.kernels.memory import bytes_at, floats, from_half, int16s, int64s, to_half
from stepahead.kernels.rows import GROUP_OF, UNIT
from stepahead.kernels.team import meet, take
from stepahead.kernels.tile import FLOAT16, FLOAT32, GROUP, INT4, INT8, MULTIPLES, PANEL, SECTION

Number = Any  # in numpy's words or in numba's

_MOST_INT8, _MOST_INT4 = 127, 15
_INT8_COLUMNS = GROUP[INT8]
_LEAST_UNIT = np.float32(
    1e-35
)  # of weights that are next to nothing; 1 / (127 units) must be finite
_TRIALS, _TRIAL_LEVELS = 9, 0.25  # of the levels that a group's numbers are spread over, from 14 on
_AS_GOOD_AS_WHOLE = 1e-4  # too little to move a level: a quotient's own rounding
_AS_GOOD_AS_EQUAL = 1e-2  # of a group's distance, in steps squared: float16's own rounding


@inner
def _copy_float(kind: int, w: np.ndarray, out: int, channel: int, size: int) -> None:
    if kind == FLOAT32:
        given = floats(out, size * PANEL)
        for at in range(size):
            given[channel + at * PANEL] = w[at]
    else:
        halves = int16s(out, size * PANEL)
        for at in range(size):
            halves[channel + at * PANEL] = to_half(np.float32(w[at]))


@inner
def _largest(w: np.ndarray, size: int) -> Number:
    most = np.float32(0)
    for at in range(size):
        most = max(most, abs(w[at]))
    return most


@inner
def _round_int8(
    w: np.ndarray, size: int, unit: Number, multiples: np.ndarray, out: np.ndarray, channel: int
) -> Number:
    """Levels of the least multiple of `unit` that reaches the group's largest number; and the sum
    of all of them without their signs, in units."""
    per_level = np.float32(1) / (unit * np.float32(_MOST_INT8)) if unit > 0 else np.float32(0)
    multiple = np.int64(np.ceil(_largest(w, size) * per_level - np.float32(_AS_GOOD_AS_WHOLE)))
    multiple = min(max(multiple, 1), MULTIPLES)
    multiples[channel] = multiple
    step = unit * np.float32(multiple)
    total = 0
    for at in range(size):
        level = np.rint(w[at] / step) if step > 0 else np.float32(0)
        level = min(max(level, np.float32(-_MOST_INT8)), np.float32(_MOST_INT8))
        out[(at // 2) * 2 * PANEL + 2 * channel + at % 2] = np.uint8(np.int64(level) & 255)
        total += np.int64(abs(level)) * multiple
    return total


@inner
def _int4(value: Number, per_step: Number, low: Number) -> Number:
    """The nearest of 16 levels."""
    level = np.rint((value - low) * per_step)
    return min(max(level, np.float32(0)), np.float32(_MOST_INT4))


@inner
def _distance(w: np.ndarray, size: int, step: Number, low: Number) -> Number:
    """How far rounded numbers are from `w`, squared; step and low as float16 has them."""
    step = from_half(to_half(step * np.float32(UNIT))) / np.float32(UNIT)
    low = from_half(to_half(low * np.float32(UNIT))) / np.float32(UNIT)
    per_step = np.float32(1) / step if step > 0 else np.float32(0)
    total = np.float32(0)
    for at in range(size):
        apart = _int4(w[at], per_step, low) * step + low - w[at]
        total += apart * apart
    return total


@inner
def _fitted(w: np.ndarray, size: int, per_step: Number, low: Number) -> tuple[Number, Number]:
    """The step and the least value that bring levels rounded by these two nearest to `w`."""
    levels, squares = np.float32(0), np.float32(0)
    numbers, products = np.float32(0), np.float32(0)
    for at in range(size):
        level = _int4(w[at], per_step, low)
        levels, squares = levels + level, squares + level * level
        numbers, products = numbers + w[at], products + level * w[at]
    count = np.float32(size)
    spread = count * squares - levels * levels
    if spread <= 0:
        return np.float32(0), low
    step = (count * products - numbers * levels) / spread
    return step, (squares * numbers - levels * products) / spread


@inner
def _int4_steps(w: np.ndarray, size: int) -> tuple[Number, Number]:
    """Step and least value of a group: from its least number to its largest, as weights have it
    that were rounded so before, or what some trials find to be nearer."""
    low, high = w[0], w[0]
    for at in range(size):
        low, high = min(low, w[at]), max(high, w[at])
    best_low, best_step = low, (high - low) / np.float32(_MOST_INT4)
    nearest = _distance(w, size, best_step, best_low)
    if nearest <= np.float32(_AS_GOOD_AS_EQUAL) * best_step * best_step:
        return best_step, best_low
    for trial in range(_TRIALS):
        levels = np.float32(_MOST_INT4 - 1 + trial * _TRIAL_LEVELS)
        step, least = _fitted(w, size, levels / (high - low), low)
        if step > 0:
            apart = _distance(w, size, step, least)
            if apart < nearest:
                nearest, best_step, best_low = apart, step, least
    return best_step, best_low


@inner
def _round_int4(w: np.ndarray, size: int, scale: np.ndarray, out: np.ndarray, channel: int) -> None:
    step, low = _int4_steps(w, size)
    scale[channel] = to_half(step * np.float32(UNIT))
    scale[PANEL + channel] = to_half(low * np.float32(UNIT))
    step = from_half(scale[channel]) / np.float32(UNIT)
    low = from_half(scale[PANEL + channel]) / np.float32(UNIT)
    per_step = np.float32(1) / step if step > 0 else np.float32(0)
    for at in range(size):
        bits = np.int64(_int4(w[at], per_step, low))
        place = (at // 4) * 2 * PANEL + 2 * channel + at % 2
        out[place] |= np.uint8(bits << 4 if at % 4 >= 2 else bits)


@inner
def _pack_int8(
    row: np.ndarray,
    columns: int,
    panel: int,
    channel: int,
    groups: int,
    out: int,
    scales: int,
) -> int:
    """One channel; and the largest sum of a section's levels without their signs, in its unit."""
    unit = _largest(row, columns) / np.float32(_MOST_INT8 * MULTIPLES)
    unit = unit if unit > _LEAST_UNIT else np.float32(0)
    floats(scales + place_of(INT8, groups, panel, 0)[2], PANEL)[channel] = unit
    most, section = 0, 0
    for group in range(groups):
        section = section if group % SECTION else 0
        here = row[group * _INT8_COLUMNS : min((group + 1) * _INT8_COLUMNS, columns)]
        at, beside, _ = place_of(INT8, groups, panel, group)
        stored = bytes_at(out + at, _INT8_COLUMNS * PANEL)
        multiples = bytes_at(scales + beside, PANEL)
        section += _round_int8(here, len(here), unit, multiples, stored, channel)
        most = max(most, section)
    return most


@entry("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def pack(
    rank: int,
    team: int,
    kind: int,
    weight: int,
    channels: int,
    columns: int,
    groups: int,
    out: int,
    scales: int,
    sums: int,
) -> None:
    """float32[channels, columns] into `out` and `scales`, all zero before.

    Of INT8, int64[panels] at `sums` becomes the largest sum of levels without their signs that a
    section of one of the panel's channels has, in the channel's unit: by it activations are kept
    so small that sums of products fit int32.
    """
    size = GROUP_OF[kind]
    while True:
        panel = take(team)
        if panel * PANEL >= channels:
            break
        for channel in range(min(PANEL, channels - panel * PANEL)):
            row = floats(weight + (panel * PANEL + channel) * columns * 4, columns)
            if kind == INT8:
                most = _pack_int8(row, columns, panel, channel, groups, out, scales)
                largest = int64s(sums, panel + 1)
                largest[panel] = max(largest[panel], most)
                continue
            for group in range(groups):
                here = row[group * size : min((group + 1) * size, columns)]
                at, beside, _ = place_of(kind, groups, panel, group)
                if kind == INT4:
                    stored = bytes_at(out + at, size * PANEL // 2)
                    scale = int16s(scales + beside, 2 * PANEL)
                    _round_int4(here, len(here), scale, stored, channel)
                else:
                    _copy_float(kind, here, out + at, channel, len(here))
    meet(team)


@inner
def _int8_value(at: int, multiples: int, units: int, column: int, channel: int) -> np.float32:
    stored = bytes_at(at, (column + 2) * PANEL)
    level = np.int8(stored[(column // 2) * 2 * PANEL + 2 * channel + column % 2])
    step = floats(units, PANEL)[channel] * np.float32(bytes_at(multiples, PANEL)[channel])
    return np.float32(level) * step


@inner
def _int4_value(at: int, scales: int, column: int, channel: int) -> np.float32:
    scale = from_half(int16s(scales, PANEL)[channel]) / np.float32(UNIT)
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
    total: int,
    count: int,
    columns: int,
    groups: int,
    weights: int,
    scales: int,
    out: int,
) -> None:
    """Of a packed matrix of `total` channels, those named by int64[count] at `channels`, as
    float32[count, columns]; NaN for one that is not there."""
    size = GROUP_OF[kind]
    while True:
        row = take(team)
        if row >= count:
            break
        wanted = int64s(channels, count)[row]
        given = floats(out + row * columns * 4, columns)
        there = 0 <= wanted < total
        for column in range(columns):
            if not there:
                given[column] = np.nan
                continue
            at, beside, units = place_of(kind, groups, wanted // PANEL, column // size)
            at, beside, units = weights + at, scales + beside, scales + units
            channel, inside = wanted % PANEL, column % size
            if kind == FLOAT32:
                given[column] = floats(at, size * PANEL)[inside * PANEL + channel]
            elif kind == FLOAT16:
                given[column] = from_half(int16s(at, size * PANEL)[inside * PANEL + channel])
            elif kind == INT8:
                given[column] = _int8_value(at, beside, units, inside, channel)
            else:
                given[column] = _int4_value(at, beside, inside, channel)
    meet(team)
