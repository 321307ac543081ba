"""How a step is run: stage the plan, run the model, sample, stash, copy out.

Three streams, and two edges a step: forward waits schedule, copy waits forward.  The host never
waits here; it waits in a flight's `land`, for that flight only.  Knows no users and no queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, Event, HostArray, Stream
from stepahead.model.batch import StepInputs
from stepahead.plan import Plan, PromptRows, Result
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.inputs import StagedStep, advance, build_inputs, chunk_rows, chunk_tokens
from stepahead.runner.logprobs import LogprobDownload, LogprobTensors, describe
from stepahead.runner.relay.slot import SlotRelay
from stepahead.runner.sampler import RowParams, SampleGroup, build_group, sample
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec


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
    logprobs: list[LogprobTensors] = field(default_factory=list)
    prompts: list[list[LogprobTensors]] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0


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
        self._relay = SlotRelay(spec.num_slots, spec.check)
        self._counts = PenaltyCounts(vocab_size)
        self._wishes: dict[int, RowParams] = {}
        self._prompts: dict[int, np.ndarray] = {}
        self._rows = np.zeros(0, np.int64)
        self._rows_dev = torch.zeros(0, dtype=torch.int64)
        self._group: SampleGroup | None = None  # of the decode rows alone, while they stay
        self._decode_len = 0
        self._step = 0
        self._staged: list[str] = []  # names of what this step has uploaded

    def close(self) -> None:
        """Drops what the device has not run."""
        self._device.close()

    # --- launch -----------------------------------------------------------------------------

    def launch(self, plan: Plan) -> RunnerFlight:
        """Queues the step on the device's three streams."""
        device = self._device
        self._step = plan.step
        self._staged = []
        pages, starts = self._take_changes(plan)
        step = self._stage(plan)
        group = self._sample_group(plan)
        scores = self._prompt_scores(plan, step)
        staged = device.record(Stream.SCHEDULE)
        device.wait(Stream.FORWARD, staged)
        box = StepBox(prompts=[[] for _ in scores])

        def forward() -> None:
            with torch.inference_mode():
                self._forward(step, pages, starts, group, scores, box)

        results = f"results {plan.step}"
        shared = ("slots", "relay", "kv", "counts")
        device.enqueue(Stream.FORWARD, forward, (*self._staged, *shared), (*shared, results))
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
        device = self._device

        def sampled() -> Tensor:
            assert box.tokens_dev is not None, "copied out before the forward ran"
            return box.tokens_dev

        tokens = device.download(sampled, name)
        rows = group.logprob_rows
        logprobs = LogprobDownload(device, box.logprobs, rows, name) if len(rows) else None
        prompts = tuple(
            (score, LogprobDownload(device, found, np.arange(score.count, dtype=np.int32), name))
            for score, found in zip(scores, box.prompts, strict=True)
        )
        return RunnerFlight(plan.step, device.record(Stream.COPY), box, tokens, logprobs, prompts)

    def _upload(self, array: np.ndarray) -> Tensor:
        # fresh memory each time: a buffer used again would be overwritten while a step reads it
        name = f"staging {self._step}.{len(self._staged)}"
        self._staged.append(name)
        return self._device.upload(array, name)

    def _take_changes(self, plan: Plan) -> tuple[Tensor | None, list[tuple[int, Tensor, Tensor]]]:
        for slot in plan.leaves.tolist():
            self._counts.give(slot)
            self._wishes.pop(slot, None)
            self._prompts.pop(slot, None)
        starts: list[tuple[int, Tensor, Tensor]] = []
        for join in plan.joins:
            self._prompts[join.slot] = join.tokens
            self._wishes[join.slot] = RowParams(
                join.slot, join.params, join.seed, join.choice, join.prompt_len
            )
            if join.params.penalised:
                row = self._counts.take(join.slot)
                tokens_dev = self._upload(join.tokens)
                split = join.prompt_len
                starts.append((row, tokens_dev[:split], tokens_dev[split:]))
        pages = self._slots.page_changes(plan)
        return None if pages is None else self._upload(pages), starts

    def _stage(self, plan: Plan) -> StagedStep:
        computed = self._slots.computed
        if plan.same_rows:
            self._decode_len += 1
        else:
            self._rows = plan.rows.astype(np.int64)
            self._rows_dev = self._upload(self._rows)
            self._decode_len = int(computed[self._rows].max()) + 1 if len(self._rows) else 0
        rows, rows_dev, decode_len = self._rows, self._rows_dev, self._decode_len
        computed[rows] += 1
        tokens = None if plan.tokens is None else self._upload(plan.tokens)
        if not len(plan.chunks):
            return StagedStep(rows_dev, tokens, None, None, (), None, rows_dev, decode_len)
        chunk_table = plan.chunk_table
        chunks = chunk_rows(plan, len(rows))
        prompt = self._upload(chunk_tokens(plan, self._prompts))
        owners, lengths = chunk_table[:, 0], chunk_table[:, 1] + chunk_table[:, 2]
        computed[owners] = lengths
        chunk_ends = self._upload(np.stack([owners, lengths]))
        ends = [first + count - 1 for _, first, count, _ in chunks]
        sampling = chunk_table[:, 3] > 0
        sampled = np.concatenate([np.arange(len(rows)), np.array(ends, np.int64)[sampling]])
        slots = np.concatenate([rows, chunk_table[sampling, 0]])
        both = self._upload(np.stack([sampled, slots]))
        return StagedStep(
            rows_dev, tokens, prompt, chunk_ends, chunks, both[0], both[1], decode_len
        )

    def _sample_group(self, plan: Plan) -> SampleGroup:
        sampling = [slot for slot, _, _, samples in plan.chunk_table.tolist() if samples]
        if not plan.same_rows:
            self._group = None
        if not sampling and self._group is not None:
            return self._group
        rows = [self._wishes[slot] for slot in (*self._rows.tolist(), *sampling)]
        group = build_group(rows, self._counts, self._spec.eos_ids, self._upload)
        if not sampling:
            self._group = group
        return group

    def _prompt_scores(self, plan: Plan, step: StagedStep) -> tuple[PromptScore, ...]:
        scores = []
        for slot, first, count, end in step.chunks:
            wish = self._wishes[slot]
            width = wish.params.prompt_logprobs
            last = min(end, wish.prompt_len - 1)
            start = end - count + 1
            if width is not None and last >= start:
                targets = self._upload(self._prompts[slot][start : last + 1])
                scores.append(PromptScore(slot, start, first, last + 1 - start, width, targets))
        return tuple(scores)

    # --- on the device ----------------------------------------------------------------------

    def _forward(
        self,
        step: StagedStep,
        pages: Tensor | None,
        starts: list[tuple[int, Tensor, Tensor]],
        group: SampleGroup,
        scores: tuple[PromptScore, ...],
        box: StepBox,
    ) -> None:
        box.start_ns = self._device.now_ns()
        if pages is not None:
            self._slots.apply(pages)
        for row, prompt_dev, outputs_dev in starts:
            self._counts.start(row, prompt_dev, outputs_dev)
        inputs = build_inputs(step, self._slots, self._relay, self._spec.page_size)
        hidden = self._model(inputs, self._kv)
        advance(step, self._slots)
        for score, found in zip(scores, box.prompts, strict=True):
            logits = self._model.logits(hidden[score.first : score.first + score.count])
            found.append(describe(logits, score.targets_dev, score.width))
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
            box.logprobs.append(describe(raw, tokens[wanted], group.logprob_width))
        self._relay.stash(step.slots_dev, tokens)
        return tokens
