"""Tokens are out when they land: no submit, however slow, stands between.  In a real worker."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from stepahead.executor.process import ProcessExecutor
from stepahead.plan import Plan, Result
from stepahead.runner.spec import RunnerSpec
from stepahead.sim import publication

SUBMIT_MS, FORWARD_MS = 100.0, 30.0


@pytest.mark.parametrize(
    ("kind", "loop", "depth"),
    [
        ("asleep", "overlap", None),
        ("busy", "overlap", None),
        ("slices", "overlap", None),
        ("slices", "batch-queue", 4),
    ],
)
def test_tokens_are_out_before_the_next_submit_is_over(
    kind: str, loop: str, depth: int | None
) -> None:
    # A step lands with 70 ms of the next submit still to come.  On a busy machine a landing takes
    # milliseconds; the benchmark says how long it takes on a quiet one.
    found = publication.latencies_ms(kind, loop, depth, steps=6)
    assert statistics.median(found) < SUBMIT_MS / 2


def test_the_next_submit_does_not_wait_for_the_landing_either() -> None:
    launches = publication.launches_ms("asleep", "overlap", None, steps=6)
    assert statistics.median(np.diff(launches)) < SUBMIT_MS + FORWARD_MS / 2


@dataclass(frozen=True)
class Told:
    """A flight that tells how often a waiting thread asks for the interpreter's lock, in ns."""

    step: int

    def ready(self) -> bool:
        return True

    def land(self) -> Result:
        return Result(self.step, np.array([sys.getswitchinterval() * 1e9], np.int32))


class Telling:
    def launch(self, plan: Plan) -> Told:
        return Told(plan.step)

    def close(self) -> None:
        pass


def build_telling(_: RunnerSpec) -> Telling:
    return Telling()


def test_the_output_thread_asks_for_the_interpreter_lock_at_once() -> None:
    # With Python's default of 5 ms a submit that computes keeps results back for that long; and one
    # that lets the lock go more often, and takes it right back, for as long as it lasts, because a
    # thread that is woken for nothing starts to wait anew.
    executor = ProcessExecutor(RunnerSpec(""), builder="test_publication:build_telling")
    try:
        flight = executor.launch(Plan(0, np.zeros(0, np.int32), False))
        assert flight.land().tokens[0] <= 10_000
    finally:
        executor.close()
