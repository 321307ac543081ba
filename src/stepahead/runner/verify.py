"""A step under drafts: the model samples every position, and the drafts that it has sampled count.

A decode row has `width` positions: its last token, and drafts.  Each position's token is sampled
with the noise of its own place, as if the ones before it had come one by one.  So what a row
brings is what plain decoding would have brought: the run of right drafts, and the token after it.

    inputs    last  d1  d2  d3          lie at the row's length and behind it
    sampled    t0   t1  t2  t3
    run        t0   t1                  where d1 = t0 and d2 is not t1

What was written for a wrong draft lies behind the row's new length, and the next step, which begins
there, writes over it before anybody reads it.  Only the device knows how far a row has come.

**Open positions.**  A position is closed where it has no draft, where it lies behind the row's
limit, or where the row is dead: it sits in slot 0 then, writes to the padding page, reads one cell,
and nothing of it counts.  On the CPU, where looking at them costs nothing, closed positions are not
computed at all; what they would have left is zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.model.batch import StepInputs
from stepahead.runner.draft import NONE, Brought, Drafter
from stepahead.runner.inputs import StagedStep, seated_inputs, with_chunks
from stepahead.runner.relay import Relay
from stepahead.runner.slots import SlotState


@dataclass(frozen=True)
class Asked:
    """The positions of n decode rows, `width` each.

    tokens_dev  int64[n, width]: the last token, and drafts, NONE where there is none
    first_dev   int64[n], where the first of them stands
    seats_dev   int64[n, width], the slots whose pages they go by; 0 where they are closed
    open_dev    bool[n, width]
    kept_dev    int64[t], which of them are computed, None for all
    """

    tokens_dev: Tensor
    first_dev: Tensor
    seats_dev: Tensor
    open_dev: Tensor
    kept_dev: Tensor | None = None

    @property
    def positions_dev(self) -> Tensor:
        """int64[n, width], closed ones as if they were open."""
        width = self.tokens_dev.shape[1]
        return self.first_dev.unsqueeze(1) + torch.arange(width, device=self.first_dev.device)


def ask(rows_dev: Tensor, tokens_dev: Tensor, slots: SlotState) -> Asked:
    """The positions of slots int64[n] with these int64[n, width] tokens, on the forward stream."""
    seats = slots.seat_dev.index_select(0, rows_dev)
    first = slots.length_dev.index_select(0, seats)
    left = slots.limit_dev.index_select(0, seats) - first
    width = tokens_dev.shape[1]
    is_open = torch.arange(width, device=first.device) < left.unsqueeze(1)
    is_open[:, 1:] &= (tokens_dev[:, 1:] == NONE).cumsum(1) == 0
    return Asked(tokens_dev, first, seats.unsqueeze(1) * is_open, is_open)


def verify_inputs(
    asked: Asked, bounds: np.ndarray, slots: SlotState, page_size: int, most: int
) -> StepInputs:
    """What the model is given for them, contexts up to `most`: a decode row for each position."""
    seats = asked.seats_dev.view(-1)
    positions = (asked.positions_dev * asked.open_dev).view(-1)
    tokens = (asked.tokens_dev * asked.open_dev).view(-1)
    if (kept := asked.kept_dev) is not None:
        seats, positions, tokens = seats[kept], positions[kept], tokens[kept]
        bounds = (positions + 1).numpy()  # on the CPU they are known
        most = int(bounds.max(initial=0))
    return seated_inputs(seats, positions, tokens, bounds, slots, page_size, most)


@dataclass(frozen=True)
class Run:
    """What came of n rows: `tokens_dev` int64[n, width] are the new ones, then -1 for each draft
    that was wrong, and -2 where there was none; `counts_dev` int64[n] how many are new, 0 for the
    dead; `newest_dev` int64[n]; `ended_dev` bool[n]: the newest ends the row."""

    tokens_dev: Tensor
    counts_dev: Tensor
    newest_dev: Tensor
    ended_dev: Tensor


def cut(asked: Asked, rows_dev: Tensor, counts_dev: Tensor) -> Asked:
    """The same, but that of rows int64[m] only the first int64[m] drafts are there."""
    places = torch.arange(asked.open_dev.shape[1], device=rows_dev.device)
    is_open = asked.open_dev.clone()
    is_open[rows_dev] &= places <= counts_dev.unsqueeze(1)
    return replace(asked, open_dev=is_open)


def accept(asked: Asked, sampled_dev: Tensor, ends_dev: Tensor) -> Run:
    """The runs of rows that sampled int64[n, width], where bool[n, width] says which of these would
    end them."""
    right = asked.open_dev.clone()
    right[:, 1:] &= (asked.tokens_dev[:, 1:] == sampled_dev[:, :-1]) & ~ends_dev[:, :-1]
    run = right.cumprod(1).to(torch.bool)
    counts = run.sum(1)
    newest = sampled_dev.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    tokens = torch.where(run, sampled_dev, asked.open_dev.to(torch.int64) - 2)
    return Run(tokens, counts, newest, (run & ends_dev).any(1))


@dataclass(frozen=True)
class Answers:
    """What was sampled, `tokens_dev` int64[r], to stand at `positions_dev` int64[r]; what of,
    `states_dev` as in `Brought`; and which of them end their rows, `over_dev` bool[r], None for
    none."""

    tokens_dev: Tensor
    positions_dev: Tensor
    states_dev: Tensor
    over_dev: Tensor | None


class Verifier:
    """Asks the model, and takes in what it said.  All of it runs on the forward stream."""

    def __init__(self, slots: SlotState, relay: Relay, drafter: Drafter, page_size: int) -> None:
        self.skips = slots.length_dev.device.type == "cpu"  # elsewhere the host would have to wait
        self._slots = slots
        self._relay = relay
        self._drafter = drafter
        self._page_size = page_size

    def enter(self, joined_dev: Tensor, limits_dev: Tensor, staged: Any) -> None:
        """Slots int64[j] have new owners, with these limits int64[j]."""
        self._slots.limit_dev.index_copy_(0, joined_dev, limits_dev)
        self._drafter.enter(staged)

    def ask(self, step: StagedStep, captured: bool = False) -> Asked:
        """The positions of the step's decode rows; a `captured` step has all of them."""
        asked = ask(step.rows_dev, self._relay.resolve(step.route), self._slots)
        if captured or not self.skips:
            return asked
        kept = asked.open_dev.view(-1).nonzero().squeeze(1)
        if not len(kept) and not step.chunks and len(step.rows):
            kept = kept.new_zeros(1)  # no model is given nothing
        return replace(asked, kept_dev=kept)

    def inputs(self, step: StagedStep, asked: Asked) -> StepInputs:
        """What the model is given."""
        bounds = step.bounds
        most = int(bounds.max(initial=0))
        inputs = verify_inputs(asked, bounds, self._slots, self._page_size, most)
        return with_chunks(inputs, step, self._slots, self._page_size)

    def spread(self, asked: Asked, values: Tensor) -> Tensor:
        """[t, ..] of the positions that were computed, and what comes behind those of the decode
        rows: for all of them."""
        kept = asked.kept_dev
        if kept is None:
            return values
        positions = asked.open_dev.numel()
        behind = values[len(kept) :]
        whole = values.new_zeros((positions + len(behind), *values.shape[1:]))
        whole[kept], whole[positions:] = values[: len(kept)], behind
        return whole

    def computed(self, asked: Asked, values: Tensor) -> Tensor:
        """The inverse of `spread`."""
        if asked.kept_dev is None:
            return values
        return torch.cat([values[asked.kept_dev], values[asked.open_dev.numel() :]])

    def positions(self, step: StagedStep, asked: Asked) -> Tensor:
        """int64[r]: where each token will stand that is sampled, once the chunks' slots are
        advanced."""
        alone = step.slots_dev[len(step.rows_dev) :]
        ends = self._slots.length_dev.index_select(0, alone)
        return torch.cat([asked.positions_dev.view(-1) + 1, ends])

    def before(self, asked: Asked, positions: int) -> Tensor:
        """int64[r, k]: the drafts that stand between what is known and each of the `positions`
        that are sampled, r of them."""
        n, width = asked.tokens_dev.shape
        drafts = asked.tokens_dev[:, None, 1:].expand(n, width, width - 1)
        reached = torch.ones((width, width - 1), device=drafts.device).tril(-1) > 0
        before = drafts.masked_fill(~reached, NONE).reshape(n * width, width - 1)
        return F.pad(before, (0, 0, 0, positions - n * width), value=NONE)

    def nothing(self, step: StagedStep, states_dev: Tensor) -> None:
        """The step has sampled nobody; the drafter hears of its prompt positions all the same."""
        none = step.slots_dev
        self._drafter.propose(Brought(none, none, none, none, none, step, states_dev))

    def runs(self, asked: Asked, answers: Answers) -> tuple[Run, Tensor]:
        """What came of the rows, and the result's tokens int64[r]; nothing is changed."""
        n, width = asked.tokens_dev.shape
        split = n * width
        tokens, over = answers.tokens_dev, answers.over_dev
        ends = torch.zeros_like(tokens, dtype=torch.bool) if over is None else over
        run = accept(asked, tokens[:split].view(n, width), ends[:split].view(n, width))
        return run, torch.cat([run.tokens_dev.view(-1), tokens[split:]])

    def take(self, step: StagedStep, asked: Asked, answers: Answers) -> tuple[Tensor, Tensor]:
        """The result's tokens int64[r], and each slot's drafts int64[m, k] of the next step.  Rows
        grow by their runs, those that end are buried, and the next step finds each slot's newest
        token with drafts in the relay."""
        slots, slots_dev, rows_dev = self._slots, step.slots_dev, step.rows_dev
        n, width = asked.tokens_dev.shape
        split = n * width
        tokens, positions, over = answers.tokens_dev, answers.positions_dev, answers.over_dev
        run, result = self.runs(asked, answers)
        slots.length_dev.index_add_(0, rows_dev, run.counts_dev)
        if over is not None:
            slots.bury(slots_dev, torch.cat([run.ended_dev, over[split:]]))
        brought = Brought(
            slots_dev,
            slots.length_dev.index_select(0, slots_dev),
            torch.cat([rows_dev.repeat_interleave(width), slots_dev[n:]]),
            positions,
            result,
            step,
            answers.states_dev,
        )
        newest = torch.cat([run.newest_dev, tokens[split:]])
        drafts = self._drafter.propose(brought)
        self._relay.stash(slots_dev, torch.cat([newest.unsqueeze(1), drafts], 1))
        return result, drafts
