"""Drafts by the model's own layer for them (multi-token prediction, MTP).

At position i the layer takes the state of token i and the token after it, and gives a state whose
best token is a guess of the one after that.  It keeps rows of its own in the model's pages.

    sampled    t0   t1  |  a run of two at positions L, L + 1; t1, at L + 2, is not computed yet
    extend     t0   t1  |  the layer at L, L + 1, with the model's states: its rows, and d1
    chain                  d1  d2  ..   at L + 2, L + 3, .. with its own states: d2, d3, ..

*Extend* runs over all that the step has computed and that counts, prompt positions too, so that the
layer's rows are complete up to the true length.  What the *chain* writes lies behind it, and the
next step's extend begins there and writes over it.  So nothing of a slot is kept between steps.

A page from the prefix tree brings the layer's rows.  That of its last position was made with the
token that followed *there*; with another it is a little off, which costs speed at worst.  The same
is true of a chain that runs past the pages that the row has been given: those rows go to padding.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stepahead.model.batch import StepInputs
from stepahead.model.sparse import SparseSpec
from stepahead.plan import Join
from stepahead.runner.draft import Brought, Upload
from stepahead.runner.inputs import StagedStep, with_chunks
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.verify import Asked, verify_inputs


class DraftingModel(Protocol):
    """A model with such a layer; `draft` as in GlmMoeDsa."""

    sparse: SparseSpec

    def draft(
        self, hidden: Tensor, inputs: StepInputs, kv: object, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden], and the positions read, int64[T, topk]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab]."""
        ...


class _Extended(NamedTuple):
    """What extend left for m slots: hidden states [m, hidden] at their newest computed positions,
    and what was read there, int64[m, topk]."""

    states_dev: Tensor
    reads_dev: Tensor


class MtpDrafter:
    """Greedy drafts, `draft_tokens` a row.  Keeps nothing by slot."""

    uses_pages = True

    def __init__(
        self, spec: RunnerSpec, slots: SlotState, model: DraftingModel, kv: object
    ) -> None:
        self.skips = slots.length_dev.device.type == "cpu"  # what counts for nothing
        self._slots = slots
        self._model = model
        self._kv = kv
        self._drafts = spec.draft_tokens
        self._page_size = spec.page_size
        self._most = spec.max_pages * spec.page_size

    def stage(self, joins: Sequence[Join], upload: Upload) -> None:
        """As in Drafter; there is nothing to know."""

    def enter(self, staged: None) -> None:
        """As in Drafter; nothing was known."""

    def propose(self, brought: Brought) -> Tensor:
        """As in Drafter."""
        extended = self._extend(brought)
        drafts = brought.slots_dev.new_zeros((len(brought.slots_dev), self._drafts))
        if len(drafts):
            self._chain(brought, extended, drafts)
        return drafts

    def _extend(self, brought: Brought) -> _Extended:
        """Runs the layer over the positions of the step that count."""
        step, states = brought.step, brought.states_dev
        n, width = len(step.rows_dev), 1 + self._drafts
        split = n * width
        tokens = brought.tokens_dev[:split].view(n, width)
        is_open = tokens >= 0
        kept = self._kept(is_open, step)
        asked = Asked(
            tokens,
            brought.positions_dev[:split].view(n, width)[:, 0] - 1,
            step.rows_dev.unsqueeze(1) * is_open,
            is_open,
            kept,
        )
        most = int(step.bounds.max(initial=0))
        inputs = verify_inputs(asked, step.bounds, self._slots, self._page_size, most)
        if kept is not None:
            states = torch.cat([states[kept], states[split:]])
        following = torch.cat([inputs.token_ids_dev, _following(brought, split)])
        inputs = with_chunks(inputs, step, self._slots, self._page_size)
        inputs = replace(inputs, token_ids_dev=following)
        drafted, reads = self._model.draft(states, inputs, self._kv)
        newest = _newest(step, is_open, kept)
        return _Extended(drafted[newest], reads[newest])

    def _kept(self, is_open: Tensor, step: StagedStep) -> Tensor | None:
        if not self.skips:
            return None
        kept = is_open.view(-1).nonzero().squeeze(1)
        if not len(kept) and not step.chunks:
            kept = kept.new_zeros(1)  # no model is given nothing
        return kept

    def _chain(self, brought: Brought, extended: _Extended, drafts: Tensor) -> None:
        """Fills in the drafts int64[m, k]: each is the best token after those before it."""
        states, seed, first = *extended, brought.ends_dev
        seats = self._slots.seat_dev.index_select(0, brought.slots_dev)
        left = self._slots.limit_dev.index_select(0, seats) - first
        drafts[:, 0] = self._model.logits(states).argmax(1)
        bounds = _bounds(brought.step, 1 + self._drafts)
        for at in range(1, self._drafts):
            is_open = (left >= at).unsqueeze(1)  # a dead row has none left
            tokens = drafts[:, at - 1 : at]
            kept = torch.arange(len(first), device=first.device) if self.skips else None
            place = first + (at - 1)
            asked = Asked(tokens, place, seats.unsqueeze(1) * is_open, is_open, kept)
            ends = np.minimum(bounds + at, self._most)
            most = int(ends.max())
            inputs = verify_inputs(asked, ends, self._slots, self._page_size, most)
            given = _only_first(seed, is_open) if self._model.sparse.mtp_shares_index else None
            states, _ = self._model.draft(states, inputs, self._kv, given)
            drafts[:, at] = self._model.logits(states).argmax(1)


def _following(brought: Brought, split: int) -> Tensor:
    """int64[t]: the token after each of the step's prompt positions."""
    step = brought.step
    if step.following_dev is None:
        return brought.tokens_dev[split:]
    following = step.following_dev.clamp(min=0)
    if step.sampled_dev is not None:
        following[step.sampled_dev[split:] - split] = brought.tokens_dev[split:]
    return following


def _newest(step: StagedStep, is_open: Tensor, kept: Tensor | None) -> Tensor:
    """int64[m]: of each slot the newest position that counts, among those that extend ran over; of
    one without, any."""
    n, width = is_open.shape
    rows = torch.arange(n, device=is_open.device) * width
    rows += (is_open.sum(1) - 1).clamp(min=0)
    skipped = 0
    if kept is not None:
        rows = (is_open.view(-1).cumsum(0) - 1).clamp(min=0)[rows]
        skipped = n * width - len(kept)
    if step.sampled_dev is None:
        return rows
    return torch.cat([rows, step.sampled_dev[n * width :] - skipped])


def _bounds(step: StagedStep, width: int) -> np.ndarray:
    """int64[m]: the most positions that each slot has computed after the step."""
    rows = step.bounds.reshape(-1, width)[:, -1]
    ends = {slot: end for slot, _, _, end in step.chunks}
    chunks = [ends[slot] for slot in step.slots[len(rows) :].tolist()]
    return np.append(rows, np.array(chunks, np.int64))


def _only_first(seed: Tensor, is_open: Tensor) -> Tensor:
    """The seed int64[m, topk]; where a place is closed, position 0 alone, as all of the padding
    that is read."""
    only = torch.full_like(seed, -1)
    only[:, 0] = 0
    return torch.where(is_open, seed, only)
