"""The books against devices: the hostile one, whose faults have exact costs, and real ones."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from engines import Variant, resolved, runner_spec, toy_engine
from stepahead.assemble import assemble, toy_parts
from stepahead.config import EngineConfig
from stepahead.device.base import Stream
from stepahead.device.hostile import HostileDevice, HostileModes
from stepahead.device.staging import RingStaging
from stepahead.device.timing import Timing
from stepahead.engine import Engine
from stepahead.executor.inline import InlineExecutor
from stepahead.model.toy import ToyModel
from stepahead.observe.books import StepBooks
from stepahead.observe.stages import WORK, Stage
from stepahead.runner.runner import Runner
from stepahead.sync import SyncReason
from stepahead.types import SamplingParams

OPTIONS: dict[str, Any] = {
    "vocab_size": 64,
    "max_model_len": 256,
    "page_size": 4,
    "max_rows": 8,
    "max_step_tokens": 64,
    "num_pages": 256,
}
ROWS, STEPS, WARM = 4, 60, 6
MODEL, SAMPLER, WRITE, COPY = 50_000, 10_000, 3_000, 500
SERIAL, OVERLAP = Variant("serial", "hostile"), Variant("overlap", "hostile")
QUEUE = Variant("batch-queue", "hostile", depth=3)
AT = 30


def operation_ns(stream: Stream, writes: tuple[str, ...]) -> int:
    if stream is Stream.SCHEDULE:
        return WRITE
    return MODEL if any(name.startswith("states") for name in writes) else SAMPLER


# calls take no time, so that what is idle is idle for the device's own reasons
TIMING = Timing(0, operation_ns, lambda nbytes: COPY)


class Lengths(ToyModel):
    """A model that wants exact lengths on the host."""

    host_lengths = True


class ShortOfStaging(HostileDevice):
    """Staging memory is still in use when one step needs it."""

    def stage(self, step: int) -> RingStaging:
        if step == AT:
            self.sync(self.record(Stream.COPY), SyncReason.STAGING)
        return super().stage(step)


def steady(
    variant: Variant,
    kind: type[HostileDevice] = HostileDevice,
    modes: HostileModes | None = None,
    model: type[ToyModel] = ToyModel,
) -> Engine:
    """An engine whose rows have decoded for STEPS steps, on the device's own clock."""
    spec = runner_spec(resolved(OPTIONS, variant))
    device = kind(7, spec.depth, modes or HostileModes(), TIMING)
    runner = Runner(model(**spec.options), device, spec, 64)
    engine = toy_engine(OPTIONS, variant, executor=InlineExecutor(runner))
    asked = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for first in range(ROWS):
        engine.add([2 + first, 3, 4], asked)
    while engine.observer.steps.count < STEPS:
        engine.step()
    return engine


def idle(engine: Engine) -> list[dict[str, int]]:
    """By cause, before each step after the first ones."""
    steps = engine.books.per_step()
    assert_balanced(steps)
    found = [
        {cause: int(ns[at]) for cause, ns in steps.idle_ns.items() if ns[at]}
        for at in range(len(steps.step))
    ]
    return found[WARM:]


def assert_balanced(steps: StepBooks) -> None:
    wall_ns = steps.wall_ns
    assert np.array_equal(steps.hidden_ns + steps.exposed_ns + steps.waiting_ns, wall_ns)
    assert np.array_equal(steps.busy_ns + sum(steps.idle_ns.values()), wall_ns)


@pytest.mark.parametrize("variant", [OVERLAP, QUEUE], ids=str)
def test_a_fine_fence_costs_the_device_nothing(variant: Variant) -> None:
    assert all(each == {} for each in idle(steady(variant)))


@pytest.mark.parametrize("loop", [OVERLAP, QUEUE], ids=str)
def test_a_coarse_fence_is_named_in_the_steps_that_bring_pages(loop: Variant) -> None:
    variant = Variant(loop.loop, "hostile", depth=loop.depth, fence="coarse")
    found = idle(steady(variant))
    assert {tuple(each.items()) for each in found} == {(), (("fence", WRITE),)}
    assert 2 <= sum(map(bool, found)) <= len(found) // 3


def test_in_the_serial_loop_nothing_is_fenced_and_all_waiting_is_for_copies() -> None:
    found = idle(steady(Variant("serial", "hostile", fence="coarse")))
    # results home, tokens there, and now and then pages
    assert {tuple(each.items()) for each in found} == {
        (("copy", 2 * COPY),),
        (("copy", 2 * COPY + WRITE),),
    }


@pytest.mark.parametrize("variant", [OVERLAP, QUEUE], ids=str)
def test_copies_that_block_are_named(variant: Variant) -> None:
    found = idle(steady(variant, modes=HostileModes(blocking_copies=True)))
    assert {tuple(each) for each in found} == {("copy",)}
    assert min(each["copy"] for each in found) == COPY


def test_staging_that_is_still_read_is_a_copy() -> None:
    engine = steady(OVERLAP, ShortOfStaging)
    found = idle(engine)
    assert found[AT - WARM] == {"copy": COPY}
    assert sum(map(bool, found)) == 1
    assert engine.syncs.steps(SyncReason.STAGING) == 1


def test_lengths_that_the_host_waits_for_are_copies() -> None:
    found = idle(steady(OVERLAP, model=Lengths))
    assert {tuple(each) for each in found} == {("copy",)}


def test_an_engine_on_a_device_in_line_keeps_its_books_on_the_devices_clock() -> None:
    config = EngineConfig("toy", executor="inline", device="hostile", threads=1, max_rows=4)
    engine = assemble(config, toy_parts()).engine
    try:
        engine.add([3, 4, 5], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        while engine.has_work:
            engine.step()
        summary = engine.books.summary()
        assert summary.steps == engine.observer.steps.count
        assert 0 < summary.busy_ns < summary.wall_ns < 10**8  # some microseconds a step
        assert_balanced(engine.books.per_step())
    finally:
        engine.close()


@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
def test_real_books_balance_and_every_stage_and_post_is_told(loop: str) -> None:
    parts = toy_parts()
    config = EngineConfig("toy", loop=loop, executor="process", threads=1, max_rows=8)
    engine = assemble(config, parts).engine
    try:
        for _ in range(8):
            engine.add([3, 4, 5], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
        engine.step()
        before_ns, mark, began_ns = (
            time.perf_counter_ns(),
            engine.books.mark(),
            time.perf_counter_ns(),
        )
        while engine.has_work:
            engine.step()
        ended_ns, books, after_ns = (
            time.perf_counter_ns(),
            engine.books.summary(mark),
            time.perf_counter_ns(),
        )
        steps, per_step = engine.observer.steps.recent(), engine.books.per_step()
    finally:
        engine.close()
    assert books.hidden_ns + books.exposed_ns + books.waiting_ns == books.wall_ns
    assert books.busy_ns + sum(books.idle_ns.values()) == books.wall_ns
    assert ended_ns - began_ns <= books.wall_ns <= after_ns - before_ns
    assert_balanced(per_step)
    told = {stage for stage, ns in books.host_ns.items() if ns}
    assert told >= {*WORK, Stage.WAIT} - {Stage.MASK, Stage.MAIL, Stage.GC}
    for before, after in (
        (steps.plan_ns, steps.launch_ns),
        (steps.launch_ns, steps.received_ns),
        (steps.received_ns, steps.start_ns),
        (steps.start_ns, steps.end_ns),
        (steps.received_ns, steps.submitted_ns),
        (steps.end_ns, steps.land_ns),
    ):
        assert (before <= after).all()
