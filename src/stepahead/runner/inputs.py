"""From a plan to the model's inputs.  The host stages what changed; the device derives the rest."""

from __future__ import annotations

from dataclasses import dataclass
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

    `rows_dev` int64[n] decode slots; `route`: where the relay finds their input tokens.
    `max_decode_len`: the longest decode row's context, this step's token included; 0 without rows.
    `slots_dev` int64[r]: the slots that are sampled for.
    `sampled_dev` int64[r]: which of the step's tokens they are sampled after, None for all of them.
    `chunks`: (slot, first token among the step's, count, context length) of each chunk.
    `chunk_tokens_dev` int64[3, t]: token, slot, position of each prompt position of the step.
    `chunk_ends_dev` int64[2, c]: slot and context length of each chunk.  None without chunks.
    """

    rows_dev: Tensor
    route: Any
    max_decode_len: int
    slots_dev: Tensor
    sampled_dev: Tensor | None = None
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    chunk_tokens_dev: Tensor | None = None
    chunk_ends_dev: Tensor | None = None


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
    rows = step.rows_dev
    n_decode = len(rows)
    lengths = slots.length_dev[rows]
    ids = relay.resolve(step.route)
    owner, positions = rows, lengths
    if step.chunk_tokens_dev is not None:
        token, slot, position = step.chunk_tokens_dev
        ids, owner = torch.cat([ids, token]), torch.cat([rows, slot])
        positions = torch.cat([lengths, position])
    pages = slots.pages_dev[owner, positions // page_size]
    width = -(-step.max_decode_len // page_size)
    return StepInputs(
        token_ids_dev=ids,
        positions_dev=positions,
        cells_dev=pages * page_size + positions % page_size,
        n_decode=n_decode,
        decode_pages_dev=slots.pages_dev[rows, :width],
        decode_lens_dev=lengths + 1,
        max_decode_len=step.max_decode_len,
        chunks=tuple(
            ChunkRow(first, count, end, slots.pages_dev[slot, : -(-end // page_size)])
            for slot, first, count, end in step.chunks
        ),
    )


def advance(step: StagedStep, slots: SlotState) -> None:
    """Runs on the forward stream, after the model: the slots are that much longer."""
    slots.length_dev[step.rows_dev] += 1
    if step.chunk_ends_dev is not None:
        slots.length_dev[step.chunk_ends_dev[0]] = step.chunk_ends_dev[1]
