"""A row for each landed step: what it was, kept as long as said, whoever reads and when."""

from __future__ import annotations

import numpy as np
import pytest

from stepahead.observe.steps import REASONS, Kind, StepLog
from stepahead.plan import Plan, Result
from stepahead.sync import Sync, SyncReason


def add(log: StepLog, step: int, rows: int = 2, chunks: tuple[int, ...] = ()) -> None:
    plan = Plan(step, np.arange(rows, dtype=np.int32), False, chunks=np.array(chunks, np.int32))
    syncs = (Sync(SyncReason.STAGING, 1), Sync(SyncReason.DRAIN, 1)) if step == 3 else ()
    result = Result(
        step, np.zeros(rows, np.int32), 30, 40, syncs=syncs, received_ns=20, submitted_ns=25
    )
    log.add(plan, result, 10, 15, 2, 50)


def test_a_row_says_what_the_step_was_and_when_it_passed_each_post() -> None:
    log = StepLog()
    add(log, 3)
    add(log, 4, 0, (1, 0, 7, 0, 2, 5, 6, 1))
    add(log, 5, 4, (1, 7, 3, 1))
    steps = log.recent()
    assert steps.step.tolist() == [3, 4, 5]
    assert steps.kind.tolist() == [Kind.DECODE, Kind.PREFILL, Kind.MIXED]
    assert steps.rows.tolist() == [2, 0, 4]
    assert steps.chunk_tokens.tolist() == [0, 13, 3]
    assert steps.samples.tolist() == [2, 0, 4]
    assert steps.reason.tolist() == [REASONS.index(SyncReason.STAGING), -1, -1]
    posts = (steps.plan_ns, steps.launch_ns, steps.received_ns, steps.submitted_ns)
    assert [post.tolist() for post in posts] == [[10] * 3, [15] * 3, [20] * 3, [25] * 3]
    ends = (steps.start_ns, steps.end_ns, steps.land_ns, steps.flights)
    assert [end.tolist() for end in ends] == [[30] * 3, [40] * 3, [50] * 3, [2] * 3]
    assert log.recent(2).step.tolist() == [4, 5]
    assert len(StepLog().recent()) == 0


@pytest.mark.parametrize("every", [1, 7, 50, 1000])
def test_the_last_are_kept_however_often_somebody_reads(every: int) -> None:
    log = StepLog(keep=40)
    for step in range(333):
        add(log, step)
        if step % every == 0:
            assert log.recent().step[-1] == step
    assert log.recent().step.tolist() == list(range(293, 333))
    assert log.recent(5).step.tolist() == list(range(328, 333))
    assert log.count == 333
    assert len(log._newest) <= 50 * 14


@pytest.mark.parametrize("every", [1, 13, 100])
def test_steps_that_landed_after_a_moment_are_those_of_all_that_did(every: int) -> None:
    log = StepLog(keep=40)
    plan = Plan(0, np.arange(2, dtype=np.int32), False, chunks=np.zeros(0, np.int32))
    for step in range(170):
        log.add(plan, Result(step, np.zeros(2, np.int32), 1, 2), 0, 0, 1, step // 2)
        if step % every == 0:
            kept = [max(0, n // 2) for n in range(max(0, step - 39), step + 1)]
            for at_ns in (-1, step // 2 - 5, step // 2, step):
                wanted = [ns for ns in kept if ns > at_ns]
                assert log.landed_after(at_ns).land_ns.tolist() == wanted


def test_what_was_read_stays_as_it_was() -> None:
    log = StepLog(keep=8)
    for step in range(8):
        add(log, step)
    read, after = log.recent(), log.landed_after(0)
    for step in range(8, 40):
        add(log, step)
        log.recent()
    assert read.step.tolist() == after.step.tolist() == list(range(8))
