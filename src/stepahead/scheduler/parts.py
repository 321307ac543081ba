"""A step whose results come in two parts: each is retired as if it had been a step of its own.

The rows of the other part stay as they were launched.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from stepahead.plan import LATE, Result
from stepahead.scheduler.heard import Launched
from stepahead.scheduler.table import row_set
from stepahead.types import HiddenRows, LogprobRows

Rows = TypeVar("Rows", HiddenRows, LogprobRows)


def split(launched: Launched, result: Result) -> tuple[Launched, Launched, Result]:
    """Who is in this part, who is not, and the part as a result of its own.

    `launched` is the flight as it was launched, for either part.  Chunks that sample nobody come
    with the first.
    """
    last = result.part == "last"
    there = result.tokens != LATE
    rows, chunks = launched.rows, launched.chunks
    positions = rows.count * result.width
    row_there = there[:positions].reshape(rows.count, result.width)[:, 0]
    sampling = chunks[:, 3] > 0
    chunk_there = ~sampling if not last else np.zeros(len(chunks), np.bool_)
    chunk_there[sampling] = there[positions:]
    mine, rest = _of(launched, row_there, chunk_there), _of(launched, ~row_there, ~chunk_there)
    each = np.append(row_there, there[positions:])
    place = np.cumsum(each) - 1
    position = (np.cumsum(there) - 1).astype(np.int32)
    ended = result.ended_table
    renumbered = msgspec.structs.replace(
        result,
        tokens=result.tokens[there],
        logprobs=_renumbered(result.logprobs, position),
        hidden=_renumbered(result.hidden, position),
        ended=tuple(np.stack([place[ended[:, 0]], ended[:, 1]], 1).reshape(-1).tolist()),
        failed=tuple(
            msgspec.structs.replace(failure, row=int(place[failure.row]))
            for failure in result.failed
        ),
    )
    return mine, rest, renumbered


def _of(launched: Launched, rows_there: np.ndarray, chunks_there: np.ndarray) -> Launched:
    rows = launched.rows
    chunks = launched.chunks[chunks_there]
    kept = row_set(rows.slots[rows_there], rows.rids[rows_there])
    slots = {*kept.slots.tolist(), *chunks[:, 0].tolist()}
    generations = launched.generations
    if len(generations):
        generations = generations[np.append(rows_there, chunks_there)]
    ending = tuple(slot for slot in launched.ending if slot in slots)
    return Launched(kept, chunks, ending, generations, whole=launched)


def _renumbered(values: Rows | None, position: np.ndarray) -> Rows | None:
    return None if values is None else msgspec.structs.replace(values, rows=position[values.rows])
