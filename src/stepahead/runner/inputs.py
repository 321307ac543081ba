"""From a plan to the model's inputs.  The host stages what changed; the device derives the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepahead.model.batch import ChunkRow, StepInputs
from stepahead.plan import Join, Plan
from stepahead.runner.relay import Relay
from stepahead.runner.slots import SlotState


@dataclass(frozen=True)
class StagedStep:
    """A plan's inputs on the device.

    `rows_dev` int64[n] decode slots, `rows` the same on the host; `route`: where the relay finds
    their input tokens.
    `bounds` int64 numpy[n]: the rows' contexts as the host predicts them, this step's token
    included: exact for the living, more for the dead.  Under drafts there are `width` of them for
    each row, upper bounds.
    `slots` int64 numpy[r]: the slots that are sampled for; `slots_dev`: the same on the device.
    `sampled_dev` int64[r]: which of the step's tokens they are sampled after, None for all of them.
    `chunks`: (slot, first token among the step's, count, context length) of each chunk.
    `chunk_tokens_dev` int64[3, t]: token, slot, position of each prompt position of the step.
    `chunk_ends_dev` int64[2, c]: slot and context length of each chunk.  None without chunks.
    `following_dev` int64[t]: the token after each prompt position, -1 where the host knows none.
    None without drafts, or chunks.
    """

    rows_dev: Tensor
    rows: np.ndarray
    route: Any
    bounds: np.ndarray
    slots: np.ndarray
    slots_dev: Tensor
    sampled_dev: Tensor | None = None
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    chunk_tokens_dev: Tensor | None = None
    chunk_ends_dev: Tensor | None = None
    following_dev: Tensor | None = None

    @property
    def most(self) -> int:
        """The longest context of any of its positions, as the host predicts it."""
        ends = [end for _, _, _, end in self.chunks]
        return max(int(self.bounds.max(initial=0)), max(ends, default=0))


def chunk_tokens(plan: Plan, joins: dict[int, Join]) -> np.ndarray:
    """int64[3, t]: token, slot and position of every prompt position the plan computes."""
    table = plan.chunk_table
    out = np.empty((3, int(table[:, 2].sum())), np.int64)
    first = 0
    for slot, start, count, _ in table.tolist():
        end = first + count
        out[0, first:end] = joins[slot].tokens[start : start + count]
        out[1, first:end] = slot
        out[2, first:end] = np.arange(start, start + count)
        first = end
    return out


def following_tokens(plan: Plan, joins: dict[int, Join]) -> np.ndarray:
    """int64[t]: the token after each prompt position that the plan computes, -1 for none."""
    parts = []
    for slot, start, count, _ in plan.chunk_table.tolist():
        known = joins[slot].tokens[start + 1 : start + count + 1]
        parts.append(np.append(known, np.full(count - len(known), -1)))
    return np.concatenate(parts, dtype=np.int64)


def chunk_rows(plan: Plan, num_rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """(slot, first token, count, context length) of each chunk; decode rows come before them."""
    rows = []
    first = num_rows
    for slot, start, count, _ in plan.chunk_table.tolist():
        rows.append((slot, first, count, start + count))
        first += count
    return tuple(rows)


def build_inputs(step: StagedStep, slots: SlotState, relay: Relay, page_size: int) -> StepInputs:
    """Runs on the forward stream: resolves tokens, positions and cells from the slots' state."""
    ids, bounds = relay.resolve(step.route), step.bounds
    most = int(bounds.max()) if len(bounds) else 0
    inputs = decode_inputs(step.rows_dev, ids, bounds, slots, page_size, most)
    return with_chunks(inputs, step, slots, page_size)


def with_chunks(
    inputs: StepInputs, step: StagedStep, slots: SlotState, page_size: int
) -> StepInputs:
    """The step's decode rows and, behind them, its prompt positions, wherever those begin now."""
    if step.chunk_tokens_dev is None:
        return inputs
    token, owner, position = step.chunk_tokens_dev
    cells = cells_of(slots, owner, position, page_size)
    # fewer decode positions may be computed than the host knows of
    moved = inputs.n_decode - (step.chunks[0][1] if step.chunks else 0)
    chunks = tuple(
        ChunkRow(first + moved, count, end, slots.pages_dev[slot, : -(-end // page_size)])
        for slot, first, count, end in step.chunks
    )
    return replace(
        inputs,
        token_ids_dev=torch.cat([inputs.token_ids_dev, token]),
        positions_dev=torch.cat([inputs.positions_dev, position]),
        cells_dev=torch.cat([inputs.cells_dev, cells]),
        chunks=chunks,
    )


def decode_inputs(
    rows: Tensor,
    ids: Tensor,
    bounds: np.ndarray,
    slots: SlotState,
    page_size: int,
    most: int,
) -> StepInputs:
    """A step of decode rows alone: slots and tokens int64[n], contexts up to `most`.

    A dead row sits in slot 0: it writes to the padding page, and reads one cell.
    """
    seats = slots.seat_dev.index_select(0, rows)
    positions = slots.length_dev.index_select(0, seats)
    return seated_inputs(seats, positions, ids, bounds, slots, page_size, most)


def seated_inputs(
    seats: Tensor,
    positions: Tensor,
    ids: Tensor,
    bounds: np.ndarray,
    slots: SlotState,
    page_size: int,
    most: int,
) -> StepInputs:
    """Decode rows alone: tokens at these positions of these slots' pages, int64[n] each."""
    return StepInputs(
        token_ids_dev=ids,
        positions_dev=positions,
        cells_dev=cells_of(slots, seats, positions, page_size),
        n_decode=len(seats),
        decode_pages_dev=slots.pages_dev[:, : -(-most // page_size)].index_select(0, seats),
        decode_lens_dev=positions + 1,
        decode_bounds=bounds,
        max_decode_len=most,
        chunks=(),
    )


def cells_of(slots: SlotState, owner: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where the positions int64[t] of slots int64[t] have their keys and values."""
    pages = slots.pages_dev[owner, positions // page_size]
    return pages * page_size + positions % page_size


def advance(step: StagedStep, slots: SlotState) -> None:
    """Runs on the forward stream, after the model: the slots are that much longer."""
    rows = step.rows_dev
    slots.length_dev.index_add_(0, rows, torch.ones_like(rows))
    advance_chunks(step, slots)


def advance_chunks(step: StagedStep, slots: SlotState) -> None:
    """The same for the slots of the step's chunks alone."""
    if step.chunk_ends_dev is not None:
        slots.length_dev[step.chunk_ends_dev[0]] = step.chunk_ends_dev[1]
