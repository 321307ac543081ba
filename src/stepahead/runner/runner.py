"""How a step is run: stage the plan, run the model, sample, stash, copy out.

Three streams, and two edges a step: forward waits schedule, copy waits forward.  The host never
waits here; it waits in a flight's `land`, for that flight only.  Knows no users and no queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, Event, HostArray, Stream
from stepahead.model.batch import StepInputs
from stepahead.plan import Join, Plan, PromptRows, Result
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.inputs import StagedStep, advance, build_inputs, chunk_rows, chunk_tokens
from stepahead.runner.logprobs import (
    LogprobDownload,
    LogprobTensors,
    describe,
    describe_hidden,
)
from stepahead.runner.relay import Relay
from stepahead.runner.relay.row import RowRelay
from stepahead.runner.relay.slot import SlotRelay
from stepahead.runner.sampler import SampleGroup, sample
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.wishes import Wishes

T = TypeVar("T")


class Model(Protocol):
    """A decoder over paged KV memory."""

    def new_kv(self, num_pages: int, page_size: int) -> Any:
        """Memory for the KV cells of `num_pages` pages."""
        ...

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens; writes their KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab]."""
        ...


@dataclass(frozen=True)
class StagedChanges:
    """What a plan changes in the slots before its step runs.

    `joined_dev` int64[j]: slots with new owners, None if there are none.  `pages_dev` int64[2, k]:
    page-table entries as `SlotState.apply` takes them, None if none change.  `counts`: (row of
    counts, prompt int64[..], outputs int64[..]) of each new owner with penalties.
    """

    joined_dev: Tensor | None
    pages_dev: Tensor | None
    counts: tuple[tuple[int, Tensor, Tensor], ...]


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


@dataclass
class StepBox:
    """What a step's operations leave for each other on the device; filled on the forward stream."""

    tokens_dev: Tensor | None = None
    logprobs: LogprobTensors | None = None
    prompts: list[LogprobTensors] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0


def _made(value: T | None) -> T:
    assert value is not None, "copied out before the forward ran"
    return value


@dataclass(frozen=True)
class RunnerFlight:
    """A step in the device's hands."""

    step: int
    event: Event
    box: StepBox
    tokens: HostArray
    logprobs: LogprobDownload | None
    prompts: tuple[tuple[PromptScore, LogprobDownload], ...]

    def ready(self) -> bool:
        """Whether `land` would return at once."""
        return self.event.done()

    def land(self) -> Result:
        """Waits for this step's results; raises what the device raised."""
        self.event.wait()
        return Result(
            self.step,
            self.tokens.read().astype(np.int32),
            self.box.start_ns,
            self.box.end_ns,
            self.logprobs.read() if self.logprobs else None,
            tuple(PromptRows(s.slot, s.start, download.read()) for s, download in self.prompts),
        )


class Runner:
    """Runs plans in order.  `launch` returns as soon as the device has the step in its queues."""

    def __init__(self, model: Model, device: Device, spec: RunnerSpec, vocab_size: int) -> None:
        self._model = model
        self._device = device
        self._spec = spec
        self._kv = model.new_kv(spec.num_pages, spec.page_size)
        self._slots = SlotState(spec.num_slots, spec.max_pages)
        self._relay = build_relay(spec)
        self._counts = PenaltyCounts(vocab_size)
        self._wishes = Wishes(spec.num_slots, spec.eos_ids)
        self._joins: dict[int, Join] = {}  # of the slots in use
        self._generations: dict[int, int] = {}  # of each slot's newest owner, in check mode
        self._rows = np.zeros(0, np.int64)
        self._rows_dev = torch.zeros(0, dtype=torch.int64)
        self._rows_reads: list[str] = []
        self._group: SampleGroup | None = None  # of the decode rows alone, while they stay
        self._group_reads: list[str] = []
        self._decode_len = 0
        self._step = 0
        self._reads: list[str] = []  # uploads that this step reads

    def close(self) -> None:
        """Drops what the device has not run."""
        self._device.close()

    # --- launch -----------------------------------------------------------------------------

    def launch(self, plan: Plan) -> RunnerFlight:
        """Queues the step on the device's three streams."""
        device = self._device
        self._step = plan.step
        self._reads = []
        changes = self._stage_changes(plan)
        step = self._stage(plan)
        group = self._sample_group(plan)
        scores = self._prompt_scores(plan, step)
        staged = device.record(Stream.SCHEDULE)
        device.wait(Stream.FORWARD, staged)
        box = StepBox()

        def forward() -> None:
            with torch.inference_mode():
                self._forward(changes, step, group, scores, box)

        results = f"results {plan.step}"
        shared = ("slots", "relay", "kv", "counts")
        device.enqueue(Stream.FORWARD, forward, (*self._reads, *shared), (*shared, results))
        device.wait(Stream.COPY, device.record(Stream.FORWARD))
        return self._copy_out(plan, group, scores, box, results)

    def _copy_out(
        self,
        plan: Plan,
        group: SampleGroup,
        scores: tuple[PromptScore, ...],
        box: StepBox,
        name: str,
    ) -> RunnerFlight:
        device, rows = self._device, group.logprob_rows
        tokens = device.download(lambda: _made(box.tokens_dev), name)
        logprobs = None
        if len(rows):
            logprobs = LogprobDownload(device, lambda: _made(box.logprobs), rows, name)
        prompts = []
        for i, score in enumerate(scores):
            every = np.arange(score.count, dtype=np.int32)
            download = LogprobDownload(device, lambda i=i: box.prompts[i], every, name)
            prompts.append((score, download))
        event = device.record(Stream.COPY)
        return RunnerFlight(plan.step, event, box, tokens, logprobs, tuple(prompts))

    def _upload(self, array: np.ndarray) -> Tensor:
        # fresh memory each time: a buffer used again would be overwritten while a step reads it
        name = f"staging {self._step}.{len(self._reads)}"
        self._reads.append(name)
        return self._device.upload(array, name)

    def _stage_changes(self, plan: Plan) -> StagedChanges:
        for slot in plan.leaves.tolist():
            self._counts.give(slot)
            self._joins.pop(slot, None)
        counts = []
        for join in plan.joins:
            if self._spec.check:
                self._check_join(join)
            self._joins[join.slot] = join
            row = self._counts.take(join.slot) if join.params.penalised else None
            self._wishes.enter(join, row)
            if row is not None:
                tokens_dev = self._upload(join.tokens)
                split = join.prompt_len
                counts.append((row, tokens_dev[:split], tokens_dev[split:]))
        joined = np.array([join.slot for join in plan.joins], np.int64)
        pages = self._slots.page_changes(plan)
        return StagedChanges(
            self._upload(joined) if len(joined) else None,
            None if pages is None else self._upload(pages),
            tuple(counts),
        )

    def _check_join(self, join: Join) -> None:
        slot, generation = join.slot, join.generation
        newest = self._generations.get(slot, -1)
        assert slot not in self._joins, f"slot {slot} was joined before its owner left"
        assert generation > newest, f"slot {slot}: generation {generation} joined after {newest}"
        self._generations[slot] = generation

    def _stage(self, plan: Plan) -> StagedStep:
        self._stage_rows(plan)
        rows, rows_dev, decode_len = self._rows, self._rows_dev, self._decode_len
        if not len(plan.chunks):
            route = self._relay.route(rows, rows_dev, rows, plan.tokens, self._upload)
            return StagedStep(rows_dev, route, decode_len, slots_dev=rows_dev)
        table = plan.chunk_table
        chunks = chunk_rows(plan, len(rows))
        owners, lengths = table[:, 0], table[:, 1] + table[:, 2]
        self._slots.computed[owners] = lengths
        sampling = table[:, 3] > 0
        last = np.array([first + count - 1 for _, first, count, _ in chunks])
        sampled = np.concatenate([np.arange(len(rows)), last[sampling]])
        slots = np.concatenate([rows, owners[sampling]])
        both_dev = self._upload(np.stack([sampled, slots]))
        return StagedStep(
            rows_dev,
            self._relay.route(rows, rows_dev, slots, plan.tokens, self._upload),
            decode_len,
            slots_dev=both_dev[1],
            sampled_dev=both_dev[0],
            chunks=chunks,
            chunk_tokens_dev=self._upload(chunk_tokens(plan, self._joins)),
            chunk_ends_dev=self._upload(np.stack([owners, lengths])),
        )

    def _stage_rows(self, plan: Plan) -> None:
        computed = self._slots.computed
        if plan.same_rows:
            self._reads += self._rows_reads
            self._decode_len += len(self._rows) > 0
        else:
            self._rows = plan.rows.astype(np.int64)
            self._rows_dev = self._upload(self._rows)
            self._rows_reads = self._reads[-1:]
            self._decode_len = int(computed[self._rows].max()) + 1 if len(self._rows) else 0
        computed[self._rows] += 1

    def _sample_group(self, plan: Plan) -> SampleGroup:
        table = plan.chunk_table
        sampling = table[table[:, 3] > 0, 0]
        if not plan.same_rows:
            self._group = None
        if self._group is not None and not len(sampling):
            self._reads += self._group_reads
            return self._group
        before = len(self._reads)
        group = self._wishes.group(np.concatenate([self._rows, sampling]), self._upload)
        if not len(sampling):
            self._group, self._group_reads = group, self._reads[before:]
        return group

    def _prompt_scores(self, plan: Plan, step: StagedStep) -> tuple[PromptScore, ...]:
        scores = []
        for slot, first, count, end in step.chunks:
            join = self._joins[slot]
            width = join.params.prompt_logprobs
            last = min(end, join.prompt_len - 1)
            start = end - count + 1
            if width is not None and last >= start:
                targets = self._upload(join.tokens[start : last + 1])
                scores.append(PromptScore(slot, start, first, last + 1 - start, width, targets))
        return tuple(scores)

    # --- on the device ----------------------------------------------------------------------

    def _forward(
        self,
        changes: StagedChanges,
        step: StagedStep,
        group: SampleGroup,
        scores: tuple[PromptScore, ...],
        box: StepBox,
    ) -> None:
        box.start_ns = self._device.now_ns()
        if changes.pages_dev is not None:
            self._slots.apply(changes.joined_dev, changes.pages_dev)
        for row, prompt_dev, outputs_dev in changes.counts:
            self._counts.start(row, prompt_dev, outputs_dev)
        inputs = build_inputs(step, self._slots, self._relay, self._spec.page_size)
        hidden = self._model(inputs, self._kv)
        advance(step, self._slots)
        for score in scores:
            rows = hidden[score.first : score.first + score.count]
            targets = score.targets_dev
            box.prompts.append(describe_hidden(self._model.logits, rows, targets, score.width))
        box.tokens_dev = self._sample(step, hidden, group, box)
        box.end_ns = self._device.now_ns()

    def _sample(self, step: StagedStep, hidden: Tensor, group: SampleGroup, box: StepBox) -> Tensor:
        if not len(step.slots_dev):
            return step.slots_dev
        logits = self._model.logits(
            hidden if step.sampled_dev is None else hidden[step.sampled_dev]
        )
        wanted = group.logprob_rows_dev
        # a copy: sampling changes logits in place
        raw = None if wanted is None else logits[wanted]
        positions = self._slots.length_dev[step.slots_dev]
        tokens = sample(logits, group, positions, self._counts)
        if wanted is not None and raw is not None:
            box.logprobs = describe(raw, tokens[wanted], group.logprob_width)
        self._relay.stash(step.slots_dev, tokens)
        return tokens


def build_relay(spec: RunnerSpec) -> Relay:
    """The relay that the spec names."""
    if spec.relay == "row":
        return RowRelay(spec.num_slots, spec.depth, spec.check)
    return SlotRelay(spec.num_slots, spec.check)
