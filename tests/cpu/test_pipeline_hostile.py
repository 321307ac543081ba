"""Stages beside each other on the hostile device: a device each, one host, every edge checked.

The toy's parts keep some bits of each cell, so a page, token, length or slot that is wrong on any
stage changes the answer; and what one stage leaves for another lies in memory whose reads and
writes the vector clocks see.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace as replace_params

from closed_form import complete
from engines import Variant, resolved, runner_spec, toy_engine, toy_of
from harness import Client, check, differences, exactly, play
from matrix import CELLS
from stages import stage_devices, stages_runner
from stepahead.device.hostile import HostileModes
from stepahead.executor.inline import InlineExecutor
from stepahead.model.batch import StepInputs
from stepahead.model.toy import ToyKV
from stepahead.parallel.pipeline import ToyPart
from stepahead.runner.spec import RunnerSpec
from stepahead.sync import SyncReason
from stepahead.types import SamplingParams
from workloads import Ask, Workload

if TYPE_CHECKING:
    from torch import Tensor

SHARDS = 6
TRACES = 30  # a shard
LOOPS = [
    *(("batch-queue", 0), ("serial", 0), ("batch-queue", 0), ("overlap", 0)),
    *(("batch-queue", 6), ("batch-queue", 2), ("batch-queue", 8)),
]


def staged(number: int, fail_at: int = 0) -> Variant:
    """The variant of a trace: stages and loops go round at their own pace."""
    loop, depth = LOOPS[number % len(LOOPS)]
    cell = CELLS[number % len(CELLS)].variant(number)
    stages = 2 + number % 2
    return replace(cell, loop=loop, depth=depth, model="toy", stages=stages, fail_at=fail_at)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_over_stages_every_client_hears_the_same_on_the_hostile_device(shard: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(shard * TRACES, (shard + 1) * TRACES):
        make = CELLS[number % len(CELLS)].make
        counts += check(number, [staged(number)], make, play)[1]
    met = ("aborts", "slot_reuses", "prefix_hits", "overshoot_rows", "chunks that go on")
    assert [name for name in met if not counts[name]] == []


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_over_stages_the_answers_are_the_toys_closed_form(stages: int) -> None:
    options = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": 9}
    options |= {"num_pages": 150, "max_step_tokens": 9}
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=3)
    asks = tuple(Ask(i, (2 + i, *range(3, 3 + i)), params) for i in range(9))
    variant = Variant("batch-queue", "hostile", 11, min(8, stages + 1), stages=stages)
    told = Client(toy_engine(options, variant), Workload(0, options, asks)).play().told
    for index, ask in enumerate(asks):
        right = complete(toy_of(options), list(ask.prompt), ask.params, 3)
        sure = right.sure
        assert told[index, 0].tokens[:sure] == right.tokens[:sure]
        assert sure


@pytest.mark.parametrize("shard", range(3))
def test_over_stages_a_failure_of_any_operation_ends_everyone_once(shard: int) -> None:
    failed = 0
    for number in range(shard * 8, (shard + 1) * 8):
        work = CELLS[number % len(CELLS)].make(number)
        variant = staged(number, fail_at=1 + (number * 37) % 60)
        run = play(work, variant)
        failed += run.counts["failures"]
        right = play(work)
        right.told = {who: right.told[who] for who in run.told}  # the others were never asked
        lines = differences(right, run, exactly)
        assert not lines, f"{variant}: {lines}"
    assert failed


def test_over_stages_a_steady_step_waits_for_nothing_and_sends_nothing() -> None:
    options = {"vocab_size": 64, "max_model_len": 256, "page_size": 64, "max_rows": 6}
    options |= {"num_pages": 60, "max_step_tokens": 64}
    variant = Variant("batch-queue", "hostile", 5, stages=2)
    engine = toy_engine(options, variant)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for row in range(6):
        engine.add([2 + row, 3], params)
    for _ in range(12):
        engine.step()
    runners = engine._core._executor._executor._runner.runners
    counts = runners[0]._device.counts  # shared by both
    before, waits = sum(c.copies for c in counts.uploads.values()), dict(counts.syncs)
    for _ in range(20):
        engine.step()
    assert sum(c.copies for c in counts.uploads.values()) == before > 0
    assert dict(counts.syncs) == waits == {}
    assert engine.syncs.steps(SyncReason.PIPELINE) <= 1  # after the prompts, which came in one step
    engine.close()


class Spy(ToyPart):
    """Counts the decode rows that write to the padding page."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.padded = 0

    def __call__(self, inputs: StepInputs, kv: ToyKV) -> Tensor:
        """Looks, then computes."""
        self.padded += int((inputs.cells_dev[: inputs.n_decode] == 0).sum())
        return super().__call__(inputs, kv)


@pytest.mark.parametrize(("stages", "depth", "wasted"), [(2, 3, 1), (2, 5, 2), (3, 4, 1)])
def test_over_stages_a_dead_row_writes_nothing_on_any_stage(
    stages: int, depth: int, wasted: int
) -> None:
    options = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": stages}
    options |= {"num_pages": 60}
    prompt = [9, 4, 33]
    endless = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    stop = complete(toy_of(options), prompt, endless, 0).tokens[9]
    variant = Variant("batch-queue", depth=depth, stages=stages)
    spies: list[Spy] = []

    def spy(one: RunnerSpec) -> Spy:
        spies.append(Spy(stage=one.stage, stages=stages, **one.options))
        return spies[-1]

    spec = runner_spec(resolved(options, variant))
    runner = stages_runner(spec, stage_devices(spec, False, HostileModes()), spy)
    engine = toy_engine(options, variant, executor=InlineExecutor(runner))
    engine.add(prompt, replace_params(endless, stop_token_ids=[stop]))
    for row in range(1, stages):  # so that the queue is full
        engine.add([20 + row, 3], endless)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.life.counters.overshoot_rows == wasted
    assert [one.padded for one in spies] == [wasted] * stages
    engine.close()
