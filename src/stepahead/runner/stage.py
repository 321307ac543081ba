"""From a plan to what a step needs on the device: the host's half of the runner.

Stages what changed, and remembers what stays: the decode rows and their wishes lie on the device
for as long as they are the same.  Enqueues nothing but the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, Staging
from stepahead.plan import Join, Plan
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.draft import Drafter, Rejections
from stepahead.runner.hidden import PromptPool
from stepahead.runner.history import TokenHistory
from stepahead.runner.hooks import HookWishes
from stepahead.runner.inputs import StagedStep, chunk_rows, chunk_tokens, following_tokens
from stepahead.runner.keep import KeepAlive
from stepahead.runner.processor import Loaded
from stepahead.runner.relay import Relay
from stepahead.runner.sampler import SampleGroup
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.wishes import Wishes


@dataclass(frozen=True)
class StagedChanges:
    """What a plan changes in the slots before its step runs.

    `joined_dev` int64[j]: slots with new owners, None if there are none.  `pages_dev` int64[2, k]:
    page-table entries as `SlotState.apply` takes them, None if none change.  `counts`: (row of
    counts, prompt int64[..], outputs int64[..]) of each new owner with penalties.  `histories`:
    (row of the history, tokens int64[..]) of each new owner whose tokens are remembered.  Under
    drafts `limits_dev` int64[j] are those of the new owners, and `entering` what the drafter
    staged.
    """

    joined_dev: Tensor | None
    pages_dev: Tensor | None
    counts: tuple[tuple[int, Tensor, Tensor], ...]
    histories: tuple[tuple[int, Tensor], ...]
    limits_dev: Tensor | None = None
    entering: Any = None


_NO_CHANGES = StagedChanges(None, None, (), ())


@dataclass(frozen=True)
class PromptScore:
    """A chunk whose prompt tokens want log-probabilities: its tokens first..first+count of the
    step predict `targets_dev` int64[count], which stand at positions `start`.. of its slot."""

    slot: int
    start: int
    first: int
    count: int
    width: int
    targets_dev: Tensor


@dataclass(frozen=True)
class SampledPart:
    """Positions of a step that are sampled together, and what their rows ask.

    `at` int64 numpy[m]: which of the step's sampled positions, and on the device; None for all.
    The rows in `group` are counted among these.
    """

    group: SampleGroup
    at: np.ndarray | None = None
    at_dev: Tensor | None = None

    @cached_property
    def takes_largest(self) -> bool:
        """Whether it is all of a step's rows, and each takes its largest logit and brings no more
        than that."""
        group = self.group
        extras = (group.logprob_rows_dev, group.hidden_rows_dev)
        return self.at_dev is None and group.plain and extras == (None, None)

    @property
    def empty(self) -> bool:
        """Whether there are none."""
        return self.at is not None and not len(self.at)

    def pick(self, values: Tensor) -> Tensor:
        """Of [r, ..] values, those of this part; a copy, where it is not all."""
        return values if self.at_dev is None else values.index_select(0, self.at_dev)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """`rows` int32[k] of `group` as positions of the step, int32[k]."""
        return rows if self.at is None else self.at[rows].astype(np.int32)


@dataclass(frozen=True)
class LateRows:
    """Rows that are sampled when their masks are there, m of them; the others don't wait.

    `rows` int64[m]: which of the step's rows (those that decode, then the chunks that sample);
    `slots`, `generations` int64[m]: whose they are; `widths` int64[m]: positions of each in `part`.
    """

    part: SampledPart
    rows: np.ndarray
    rows_dev: Tensor
    slots: np.ndarray
    generations: np.ndarray
    widths: np.ndarray


@dataclass(frozen=True)
class Staged:
    """A plan on its way to the device; `blocks` are the names of the memory it lies in.

    `first` is sampled at once, `late` with its masks, if there are such rows.
    `positions`: how many are sampled.  `sent`: it brought something, so that there was a copy.
    """

    step: int
    changes: StagedChanges
    inputs: StagedStep
    first: SampledPart
    late: LateRows | None
    positions: int
    scores: tuple[PromptScore, ...]
    pools: tuple[PromptPool, ...]
    blocks: tuple[str, ...]
    sent: bool


class _Block:
    """A step's staging block, and how many arrays have gone in."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.count = 0

    def add(self, array: np.ndarray) -> Tensor:
        self.count += 1
        return self.staging.add(array)


class _Standing:
    """What was staged in one step and is read by those after it; its block is held until then."""

    def __init__(self, keep: KeepAlive) -> None:
        self._keep = keep
        self.names: tuple[str, ...] = ()  # of its block; none where nothing was staged

    def replace(self, *names: str) -> None:
        """It lies in another block from now on."""
        self._keep.hold(*names)
        self._keep.drop(*self.names)
        self.names = names


class _Turn:
    """The decode rows of a plan, as they lie on the device for those of its turn that repeat it."""

    def __init__(self, device: Device, keep: KeepAlive) -> None:
        self.rows = np.zeros(0, np.int64)
        self.rows_dev = torch.zeros(0, dtype=torch.int64, device=device.place)
        self.rows_block = _Standing(keep)
        # of the decode rows alone, while they stay
        self.parts: tuple[SampledPart, LateRows | None] | None = None
        self.group_block = _Standing(keep)


def _is_steady(plan: Plan) -> bool:
    """Whether it brings nothing but tokens."""
    differences = (plan.chunks, plan.joins, plan.grants, plan.leaves)
    return plan.same_rows and not any(map(len, differences))


class Stager:
    """Takes plans in their order.  Knows slots, rows and wishes as of the newest one."""

    def __init__(
        self,
        device: Device,
        spec: RunnerSpec,
        slots: SlotState,
        relay: Relay,
        counts: PenaltyCounts,
        keep: KeepAlive,
        eos_dev: Tensor | None,
        drafter: Drafter | None = None,
        late: np.ndarray | None = None,
        loaded: Loaded | None = None,
    ) -> None:
        """`late` bool[num_slots]: whose rows wait for masks, as of the plan that is staged;
        `loaded`: the logits processor."""
        self._late = np.zeros(spec.num_slots, np.bool_) if late is None else late
        self._device = device
        self._width = spec.width
        self._most = spec.max_pages * spec.page_size
        self._drafter = drafter
        self.rejections = Rejections(spec.width)
        self._check = spec.check
        self._slots = slots
        self._relay = relay
        self._counts = counts
        self._keep = keep
        self._scores = spec.stage == spec.stages - 1  # the last stage has logits, and counts tokens
        self.history = TokenHistory(self._most, device.place)
        self._hooks = self._hook_wishes(spec, loaded) if self._scores else None
        self._wishes = Wishes(spec.num_slots, spec.eos_ids, eos_dev, self._hooks)
        self._joins: dict[int, Join] = {}  # of the slots in use
        self._generations: dict[int, int] = {}  # of each slot's newest owner, in check mode
        # the same rows are those of S plans before, where there are S stages
        self._turns = [_Turn(device, keep) for _ in range(spec.stages)]

    def _hook_wishes(self, spec: RunnerSpec, loaded: Loaded | None) -> HookWishes:
        vocab_size = self._counts.vocab_size
        return HookWishes(spec.num_slots, vocab_size, self.history, loaded)

    def decodes(self, plan: Plan) -> bool:
        """Whether the plan, not yet staged, has decode rows."""
        turn = self._turns[plan.step % len(self._turns)]
        return len(turn.rows if plan.same_rows else plan.rows) > 0

    def stage(self, plan: Plan) -> Staged:
        """Adds what the plan brings to the step's staging block, and sends it."""
        block = _Block(self._device.stage(plan.step))
        self.rejections.settle(self._slots.computed)
        turn = self._turns[plan.step % len(self._turns)]
        if turn.parts is not None and _is_steady(plan):
            return self._stage_steady(plan, turn, turn.parts, block)
        changes = self._stage_changes(plan, block)
        self._stage_rows(plan, turn, block)
        first, late = self._parts(plan, turn, block)
        inputs = self._stage_inputs(plan, turn, block)
        scores = self._prompt_scores(inputs, block) if self._scores else ()
        pools = self._prompt_pools(inputs) if self._scores else ()
        return self._sent(plan.step, changes, inputs, (first, late), scores, pools, turn, block)

    def _stage_steady(
        self,
        plan: Plan,
        turn: _Turn,
        parts: tuple[SampledPart, LateRows | None],
        block: _Block,
    ) -> Staged:
        """As `stage`, where the step before of its turn differs by a position of each row."""
        rows, rows_dev = turn.rows, turn.rows_dev
        self._slots.computed[rows] += self._width
        route = self._relay.route(rows, rows_dev, rows, plan.tokens, block.add)
        inputs = StagedStep(rows_dev, rows, route, self._bounds(rows), rows, rows_dev)
        return self._sent(plan.step, _NO_CHANGES, inputs, parts, (), (), turn, block)

    def _sent(
        self,
        step: int,
        changes: StagedChanges,
        inputs: StagedStep,
        parts: tuple[SampledPart, LateRows | None],
        scores: tuple[PromptScore, ...],
        pools: tuple[PromptPool, ...],
        turn: _Turn,
        block: _Block,
    ) -> Staged:
        blocks = {*turn.rows_block.names, *turn.group_block.names}
        if block.count:
            block.staging.send()
            blocks.add(block.staging.name)
        names, sent = tuple(sorted(blocks)), block.count > 0
        positions = len(inputs.slots) + len(turn.rows) * (self._width - 1)
        return Staged(step, changes, inputs, *parts, positions, scores, pools, names, sent)

    def _stage_changes(self, plan: Plan, block: _Block) -> StagedChanges:
        for slot in plan.leaves.tolist():
            self._counts.give(slot)
            if self._hooks is not None:
                self._hooks.leave(slot)
            self._joins.pop(slot, None)
        counts = []
        histories: list[tuple[int, Tensor]] = []
        for join in plan.joins:
            if self._check:
                self._check_join(join)
            self._joins[join.slot] = join
            counted = self._scores and join.params.penalised
            row = self._counts.take(join.slot) if counted else None
            self._wishes.enter(join, row)
            if row is not None:
                tokens_dev = block.add(join.tokens)
                split = join.prompt_len
                counts.append((row, tokens_dev[:split], tokens_dev[split:]))
            place = None if self._hooks is None else self._hooks.enter(join)
            if place is not None:
                histories.append((place, block.add(join.tokens)))
        joined = np.array([join.slot for join in plan.joins], np.int64)
        pages = self._slots.page_changes(plan)
        limits = entering = None
        if self._drafter is not None and plan.joins:
            limits = block.add(np.array([join.limit for join in plan.joins], np.int64))
            entering = self._drafter.stage(plan.joins, block.add)
        return StagedChanges(
            block.add(joined) if len(joined) else None,
            None if pages is None else block.add(pages),
            tuple(counts),
            tuple(histories),
            limits,
            entering,
        )

    def _check_join(self, join: Join) -> None:
        slot, generation = join.slot, join.generation
        newest = self._generations.get(slot, -1)
        assert slot not in self._joins, f"slot {slot} was joined before its owner left"
        assert generation > newest, f"slot {slot}: generation {generation} joined after {newest}"
        self._generations[slot] = generation

    def _stage_rows(self, plan: Plan, turn: _Turn, block: _Block) -> None:
        if not plan.same_rows:
            turn.rows = plan.rows.astype(np.int64)
            turn.rows_dev = block.add(turn.rows)
            turn.rows_block.replace(block.staging.name)
        self._slots.computed[turn.rows] += self._width

    def _parts(self, plan: Plan, turn: _Turn, block: _Block) -> tuple[SampledPart, LateRows | None]:
        table = plan.chunk_table
        sampling = table[table[:, 3] > 0, 0]
        if not plan.same_rows:
            turn.parts = None
        if turn.parts is not None and not len(sampling):
            return turn.parts
        before = block.count
        parts = self._split(turn.rows, sampling, block)
        if not len(sampling):
            turn.parts = parts
            if block.count > before:
                turn.group_block.replace(block.staging.name)
            else:  # nothing of it lies on the device
                turn.group_block.replace()
        return parts

    def _split(
        self, rows: np.ndarray, sampling: np.ndarray, block: _Block
    ) -> tuple[SampledPart, LateRows | None]:
        """Those sampled at once, and those sampled late, of slots int64[n] that decode and
        int64[s] whose chunks sample."""
        owners = np.concatenate([rows, sampling])
        widths = np.repeat([self._width, 1], [len(rows), len(sampling)])
        late = self._late[owners]
        slots = owners if self._width == 1 else np.repeat(owners, widths)
        if not late.any():
            return SampledPart(self._wishes.group(slots, block.add)), None
        each = np.repeat(late, widths)
        whole = late.all()  # logits of all rows are not copied
        part = (
            SampledPart(self._wishes.group(slots, block.add))
            if whole
            else self._part(slots, each.nonzero()[0], block)
        )
        places = late.nonzero()[0]
        whose = owners[places]
        generations = np.array([self._joins[slot].generation for slot in whose.tolist()])
        rest = self._part(slots, (~each).nonzero()[0], block)
        late_rows = LateRows(part, places, block.add(places), whose, generations, widths[places])
        return rest, late_rows

    def _part(self, slots: np.ndarray, at: np.ndarray, block: _Block) -> SampledPart:
        return SampledPart(self._wishes.group(slots[at], block.add), at, block.add(at))

    def _stage_inputs(self, plan: Plan, turn: _Turn, block: _Block) -> StagedStep:
        rows, rows_dev = turn.rows, turn.rows_dev
        bounds = self._bounds(rows)
        if not len(plan.chunks):
            route = self._relay.route(rows, rows_dev, rows, plan.tokens, block.add)
            return StagedStep(rows_dev, rows, route, bounds, slots=rows, slots_dev=rows_dev)
        table = plan.chunk_table
        positions = len(rows) * self._width
        chunks = chunk_rows(plan, positions)
        owners, lengths = table[:, 0], table[:, 1] + table[:, 2]
        self._slots.computed[owners] = lengths
        sampling = table[:, 3] > 0
        last = np.array([first + count - 1 for _, first, count, _ in chunks])
        sampled = np.concatenate([np.arange(positions), last[sampling]])
        slots = np.concatenate([rows, owners[sampling]])
        following_dev = None
        if self._width == 1:
            sampled_dev, slots_dev = block.add(np.stack([sampled, slots]))
        else:
            sampled_dev, slots_dev = block.add(sampled), block.add(slots)
            following_dev = block.add(following_tokens(plan, self._joins))
        return StagedStep(
            rows_dev,
            rows,
            self._relay.route(rows, rows_dev, slots, plan.tokens, block.add),
            bounds,
            slots=slots,
            slots_dev=slots_dev,
            sampled_dev=sampled_dev,
            chunks=chunks,
            chunk_tokens_dev=block.add(chunk_tokens(plan, self._joins)),
            chunk_ends_dev=block.add(np.stack([owners, lengths])),
            following_dev=following_dev,
        )

    def _bounds(self, rows: np.ndarray) -> np.ndarray:
        """Of the contexts of the rows' positions, int64[n * width]."""
        bounds = self._slots.computed[rows]
        if self._width == 1:
            return bounds
        each = bounds[:, None] + np.arange(1 - self._width, 1)
        return np.minimum(each, self._most).reshape(-1)

    def _prompt_scores(self, step: StagedStep, block: _Block) -> tuple[PromptScore, ...]:
        scores = []
        for slot, first, count, end in step.chunks:
            join = self._joins[slot]
            width = join.params.prompt_logprobs
            last = min(end, join.prompt_len - 1)
            start = end - count + 1
            if width is not None and last >= start:
                targets = block.add(join.tokens[start : last + 1])
                scores.append(PromptScore(slot, start, first, last + 1 - start, width, targets))
        return tuple(scores)

    def _prompt_pools(self, step: StagedStep) -> tuple[PromptPool, ...]:
        pools = []
        for slot, first, count, end in step.chunks:
            join = self._joins[slot]
            if join.params.pooling == "mean":
                pools.append(PromptPool(slot, end - count, first, count))
            elif join.params.pooling == "last" and end == join.prompt_len:
                pools.append(PromptPool(slot, end - 1, first + count - 1, 1))
        return tuple(pools)
