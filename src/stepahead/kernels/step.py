"""A decoder's layers for one step, as one kernel: no Python between one product and the next.

Every thread of a team runs `layers`; each part of a layer ends when all have met.
"""

from __future__ import annotations

import numpy as np

from stepahead.kernels.attend import attend, first_seen
from stepahead.kernels.gemm import FIELDS, FORMAT, GROUPS, MOST_X, multiply
from stepahead.kernels.jit import entry, inner
from stepahead.kernels.memory import int64s
from stepahead.kernels.rows import add_normed, gate, norm, prepare, rotate, store_finite
from stepahead.kernels.team import meet, take, threads_of

# What `layers` is told, int64[..]: addresses, counts, and strides in bytes.
# A step:
(COUNT, X_AT, CELLS, POSITIONS, SCRATCH, SCRATCH_BYTES, LAST_NORM) = range(7)
# the first rows, each of which reads a row of a page table and has its length in an array; and the
# others, for each of which an array has the address of its pages and one its length
(DECODED, PAGES, PAGES_BYTES, LENGTHS, TABLES, OTHER_LENGTHS) = range(7, 13)
# the layer that it begins with, and the one that it ends in, with keys and values
(FIRST, KEYS_OF, STEP_FIELDS) = range(13, 16)
# Memory between the parts of a layer, and how far its rows are apart:
(QKV, QKV_BYTES, SEEN, SEEN_BYTES, GATED, GATED_BYTES, ADDED, ADDED_BYTES) = range(8)
(INPUTS, INPUTS_BYTES, SUMS, SUMS_BYTES, INPUT_SCALES, WIDE_ROOM) = range(8, 14)
(X_BYTES, BUFFER_FIELDS) = range(14, 16)
# A model:
(LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, ACTIVATION, WINDOW) = range(8)
# positions of a page, bytes of a number in one, and cosines and sines by position
(PAGE_SIZE, KV_SIZE, TURNS, WINDOW_TURNS, MODEL_FIELDS) = range(8, 13)
# A layer: norms (0 where there is none), pools, whether it sees a window only, and matrices
(NORM, AFTER, MLP_NORM, MLP_AFTER, Q_NORM, K_NORM, KEYS, VALUES, WINDOWED, MATRICES) = range(10)
_QKV, _O, _GATE_UP, _DOWN = range(4)
_MATRICES = 4
_MANY_ROWS = 4
_PIECES = 4  # of work for a thread, at least
ROWS = 4  # of a chunk that read their pages together, at most
MOST_SCORES = 1 << 15  # of all heads of rows that are attended to at once
LAYER_FIELDS = MATRICES + _MATRICES * FIELDS


@inner
def _inputs(buffers: np.ndarray) -> np.ndarray:
    """Activations as gemm.py wants them described."""
    return buffers[INPUTS : WIDE_ROOM + 1]


@inner
def _prepare(slot: int, x: int, count: int, matrix: np.ndarray, buffers: np.ndarray) -> None:
    out = buffers[INPUTS] + slot * buffers[INPUTS_BYTES]
    sums = buffers[SUMS] + slot * buffers[SUMS_BYTES]
    scale = buffers[INPUT_SCALES] + slot * 4
    prepare(matrix[FORMAT], matrix[MOST_X], x, count, matrix[GROUPS], out, sums, scale)


@inner
def _row_for(
    part: int,
    row: int,
    own: int,
    layer: np.ndarray,
    eps: float,
    model: np.ndarray,
    buffers: np.ndarray,
    x: int,
) -> tuple[int, int]:
    """What a row brings to a matrix: where its numbers are, and how many; `own` has room."""
    if part == _O:
        return buffers[SEEN] + row * buffers[SEEN_BYTES], model[HEADS] * model[HEAD_DIM]
    if part == _DOWN:
        gates = buffers[GATED] + row * buffers[GATED_BYTES]
        gate(model[ACTIVATION], gates, gates + model[MLP] * 4, own, model[MLP])
        return own, model[MLP]
    weight = layer[NORM if part == _QKV else MLP_NORM]
    norm(x + row * buffers[X_BYTES], weight, eps, own, model[HIDDEN])
    return own, model[HIDDEN]


@inner
def _prepared(
    team: int,
    rank: int,
    part: int,
    matrix: np.ndarray,
    layer: np.ndarray,
    eps: float,
    model: np.ndarray,
    step: np.ndarray,
    buffers: np.ndarray,
) -> None:
    """All rows as inputs of a matrix.  A single row each thread prepares for itself, at its own
    slot, and waits for nobody."""
    own = step[SCRATCH] + rank * step[SCRATCH_BYTES]
    # one place where a row is prepared: compiled twice, its bits could hang on what is beside it
    alone = step[COUNT] == 1
    row = 0 if alone else take(team)
    while row < step[COUNT]:
        x, count = _row_for(part, row, own, layer, eps, model, buffers, step[X_AT])
        _prepare(rank if alone else row, x, count, matrix, buffers)
        row = 1 if alone else take(team)
    if not alone:
        meet(team)


@inner
def _placed(
    team: int,
    layer: np.ndarray,
    eps: float,
    model: np.ndarray,
    step: np.ndarray,
    buffers: np.ndarray,
) -> None:
    """Queries and keys normed and turned, keys and values written to the pools."""
    head_dim, heads, kv_heads = model[HEAD_DIM], model[HEADS], model[KV_HEADS]
    head_bytes, cell_floats = head_dim * 4, model[KV_HEADS] * model[HEAD_DIM]
    turns = model[WINDOW_TURNS] if layer[WINDOWED] else model[TURNS]
    positions = int64s(step[POSITIONS], step[COUNT])
    cells = int64s(step[CELLS], step[COUNT])
    while True:
        row = take(team)
        if row >= step[COUNT]:
            break
        q = buffers[QKV] + row * buffers[QKV_BYTES]
        k = q + heads * head_bytes
        if layer[Q_NORM]:
            for head in range(heads + kv_heads):
                at = q + head * head_bytes
                norm(at, layer[Q_NORM] if head < heads else layer[K_NORM], eps, at, head_dim)
        rotate(q, turns + positions[row] * head_bytes, head_dim, heads + kv_heads)
        cell = cells[row] * cell_floats * model[KV_SIZE]
        v = k + cell_floats * 4
        store_finite(model[KV_SIZE], k, layer[KEYS] + cell, cell_floats)
        store_finite(model[KV_SIZE], v, layer[VALUES] + cell, cell_floats)
    meet(team)


@inner
def _reads(row: int, step: np.ndarray) -> tuple[int, int]:
    """Where a row's pages are named, and how many positions it sees."""
    if row < step[DECODED]:
        length = int64s(step[LENGTHS], step[DECODED])[row]
        return step[PAGES] + row * step[PAGES_BYTES], length
    other, others = row - step[DECODED], step[COUNT] - step[DECODED]
    return int64s(step[TABLES], others)[other], int64s(step[OTHER_LENGTHS], others)[other]


@inner
def _rows_at_once(count: int, threads: int) -> int:
    """Of so many rows of chunks, those that read their pages together: few enough for all threads
    to have work until the end."""
    return min(max(count // (threads * _PIECES), 1), ROWS)


@inner
def _following(row: int, last: int, step: np.ndarray) -> int:
    """How many rows from `row` on, up to `last`, are a chunk's: each sees what the one before it
    sees, and a position more."""
    table, end = _reads(row, step)
    count = 1
    while row + count < last and _reads(row + count, step) == (table, end + count):
        count += 1
    return count


@inner
def _attend_rows(
    row: int,
    rows: int,
    head: int,
    together: int,
    own: int,
    layer: np.ndarray,
    scale: float,
    model: np.ndarray,
    step: np.ndarray,
    buffers: np.ndarray,
) -> None:
    """Rows that follow each other, from one of their heads on; all heads at once where the first
    head finds room for their scores, and then nothing for the other ones."""
    head_dim, kv_heads, size = model[HEAD_DIM], model[KV_HEADS], model[KV_SIZE]
    group = model[HEADS] // kv_heads
    table, end = _reads(row, step)
    window = model[WINDOW] if layer[WINDOWED] else 0
    seen, groups = end + rows - 1 - first_seen(end, window), 1
    if together == group and rows * seen * model[HEADS] <= MOST_SCORES:
        # short rows in one go: their keys lie side by side, and memory is read as it lies
        if head:
            return
        groups = kv_heads
    shared, pool = head * head_dim * 4, head // group * head_dim * size
    attend(
        size,
        rows,
        buffers[QKV] + row * buffers[QKV_BYTES] + shared,
        buffers[QKV_BYTES],
        groups,
        together,
        head_dim,
        layer[KEYS] + pool,
        layer[VALUES] + pool,
        kv_heads * head_dim * size,
        model[PAGE_SIZE],
        table,
        window,
        end,
        scale,
        own,
        buffers[SEEN] + row * buffers[SEEN_BYTES] + shared,
        buffers[SEEN_BYTES],
    )


@inner
def _attended(
    team: int,
    rank: int,
    layer: np.ndarray,
    scale: float,
    model: np.ndarray,
    step: np.ndarray,
    buffers: np.ndarray,
) -> None:
    # heads of queries that go together read their keys once; few rows leave threads without work
    together = model[HEADS] // model[KV_HEADS] if step[COUNT] >= _MANY_ROWS else 1
    pieces, decoded = model[HEADS] // together, step[DECODED]
    at_once = _rows_at_once(step[COUNT] - decoded, threads_of(team))
    own = step[SCRATCH] + rank * step[SCRATCH_BYTES]
    while True:
        piece = take(team)
        row, head = piece // pieces, piece % pieces * together
        last = row + 1
        if row >= decoded:
            row = decoded + (row - decoded) * at_once
            last = min(row + at_once, step[COUNT])
        if row >= step[COUNT]:
            break
        while row < last:
            rows = _following(row, last, step)
            _attend_rows(row, rows, head, together, own, layer, scale, model, step, buffers)
            row += rows
    meet(team)


@inner
def _added(
    team: int, after: int, eps: float, model: np.ndarray, step: np.ndarray, buffers: np.ndarray
) -> None:
    """x += a product, normed."""
    while True:
        row = take(team)
        if row >= step[COUNT]:
            break
        made = buffers[ADDED] + row * buffers[ADDED_BYTES]
        add_normed(made, after, eps, step[X_AT] + row * buffers[X_BYTES], model[HIDDEN])
    meet(team)


@inner
def _normed(
    team: int, eps: float, model: np.ndarray, step: np.ndarray, buffers: np.ndarray
) -> None:
    """x, normed where it is."""
    while True:
        row = take(team)
        if row >= step[COUNT]:
            break
        x = step[X_AT] + row * buffers[X_BYTES]
        norm(x, step[LAST_NORM], eps, x, model[HIDDEN])
    meet(team)


@inner
def _made(part: int, after: int, step: np.ndarray, buffers: np.ndarray) -> tuple[int, int, int]:
    """Where a matrix's product goes, how far its rows are apart, and whether it is added there."""
    if part == _QKV:
        return buffers[QKV], buffers[QKV_BYTES], 0
    if part == _GATE_UP:
        return buffers[GATED], buffers[GATED_BYTES], 0
    if after:
        return buffers[ADDED], buffers[ADDED_BYTES], 0
    return step[X_AT], buffers[X_BYTES], 1


@inner
def _after(part: int, layer: np.ndarray) -> int:
    """The norm of a matrix's product before it is added to x; 0 where there is none."""
    if part == _O:
        return layer[AFTER]
    return layer[MLP_AFTER] if part == _DOWN else 0


@entry("void(int64, int64, int64[::1], int64[:, ::1], int64[::1], int64[::1], float64, float64)")
def layers(
    rank: int,
    team: int,
    model: np.ndarray,
    matrices: np.ndarray,
    buffers: np.ndarray,
    step: np.ndarray,
    eps: float,
    scale: float,
) -> None:
    """Every layer from FIRST on, and the norm behind the last one where the step names it: x is
    read and written, keys and values go to the pools.  In layer KEYS_OF, if there is one of this
    number, nothing else is done, and nothing behind it.

    `model`, `buffers` and `step` as the names above say; `matrices` int64[layers, LAYER_FIELDS].
    eps is the norms', scale what scores are multiplied with.
    """
    slot = rank if step[COUNT] == 1 else 0
    # one place for all products: each place where one is written is compiled anew
    for product in range(step[FIRST] * _MATRICES, model[LAYERS] * _MATRICES):
        layer, part = matrices[product // _MATRICES], product % _MATRICES
        begin = MATRICES + part * FIELDS
        matrix = layer[begin : begin + FIELDS]
        if part == _O:
            _placed(team, layer, eps, model, step, buffers)
            if product // _MATRICES == step[KEYS_OF]:
                break
            _attended(team, rank, layer, scale, model, step, buffers)
        _prepared(team, rank, part, matrix, layer, eps, model, step, buffers)
        after = _after(part, layer)
        out, stride, add = _made(part, after, step, buffers)
        multiply(team, rank, _inputs(buffers), slot, step[COUNT], matrix, out, stride, add)
        meet(team)
        if after:
            _added(team, after, eps, model, step, buffers)
    if step[LAST_NORM]:
        _normed(team, eps, model, step, buffers)


@entry("void(int64, int64, int64, int64, int64, int64, int64[::1], int64[::1], int64, int64)")
def linear(
    rank: int,
    team: int,
    x: int,
    x_stride: int,
    count: int,
    columns: int,
    matrix: np.ndarray,
    buffers: np.ndarray,
    out: int,
    out_stride: int,
) -> None:
    """out = x W^T + b alone: float32 rows, strides in bytes; out's in whole panels."""
    alone = count == 1
    row = 0 if alone else take(team)
    while row < count:
        _prepare(rank if alone else row, x + row * x_stride, columns, matrix, buffers)
        row = 1 if alone else take(team)
    if not alone:
        meet(team)
    slot = rank if alone else 0
    multiply(team, rank, _inputs(buffers), slot, count, matrix, out, out_stride, 0)
    meet(team)
