"""The real runner gives the same, in this thread, in another process, and beside a thread there."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from offline_makers import TOY_OPTIONS
from stepahead import LLM
from stepahead.errors import NotEnoughMemory, StepFailed
from stepahead.executor.failures import step_failed
from stepahead.executor.inline import InlineExecutor
from stepahead.executor.process import ProcessExecutor
from stepahead.plan import NO_INTS, Join, Plan, Result
from stepahead.runner.build import build_runner
from stepahead.runner.spec import RunnerSpec
from stepahead.types import SamplingParams

PAGE_SIZE = 4
PROMPT = np.arange(3, 13, dtype=np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plans() -> list[Plan]:
    """One request: ten prompt tokens in two chunks, then six tokens one by one."""
    params = SamplingParams(
        temperature=0.8, max_tokens=7, logprobs=2, prompt_logprobs=1, return_hidden_states=True
    )
    pages = ints(1, 2, 3, 4, 5)
    join = Join(1, 1, PROMPT, len(PROMPT), 0, pages, params, 11, 0)
    return [
        Plan(1, NO_INTS, False, chunks=ints(1, 0, 6, 0), joins=(join,)),
        Plan(2, NO_INTS, True, chunks=ints(1, 6, 4, 1)),
        Plan(3, ints(1), False),
        *(Plan(step, ints(1), True) for step in range(4, 8)),
    ]


def spec() -> RunnerSpec:
    return RunnerSpec(
        "stepahead.model.toy:ToyModel",
        {"vocab_size": 300, "max_len": 64},
        num_slots=3,
        num_pages=8,
        page_size=PAGE_SIZE,
        max_pages=16,
        check=True,
    )


def run(executor: InlineExecutor | ProcessExecutor) -> list[Result]:
    """The results of all plans, each launched before the one before it lands."""
    results, flights = [], []
    for plan in plans():
        flights.append(executor.launch(plan))
        if len(flights) == 2:
            results.append(flights.pop(0).land())
    return [*results, *(flight.land() for flight in flights)]


def numbers(value: object) -> object:
    """All that a result says, times aside, as plain values."""
    if isinstance(value, Result):
        columns = (value.tokens, value.logprobs, value.prompt_logprobs, value.hidden, value.syncs)
        return (value.step, *map(numbers, columns))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, tuple):
        return [numbers(item) for item in value]
    fields = getattr(value, "__struct_fields__", None)
    return value if fields is None else [numbers(getattr(value, name)) for name in fields]


def words_of_a_failure(executor: InlineExecutor | ProcessExecutor) -> str:
    """About a slot beyond the runner's last."""
    with pytest.raises(StepFailed, match="model raised in step 8: IndexError") as caught:
        executor.launch(Plan(8, ints(77), False)).land()
    return str(caught.value)


@pytest.mark.parametrize("beside", [False, True])
def test_a_request_and_a_failure_are_the_same_in_both(beside: bool) -> None:
    """Beside a thread also where the model is long enough for that."""
    long = replace(spec(), beside=True, factory="slow_toy:SlowToy")
    inline = InlineExecutor(build_runner(spec()))
    process = ProcessExecutor(long if beside else spec())
    try:
        expected, found = run(inline), run(process)
        assert words_of_a_failure(process) == words_of_a_failure(inline)
    finally:
        inline.close()
        process.close()
    assert [len(result.tokens) for result in expected] == [0, 1, 1, 1, 1, 1, 1]
    assert [result.hidden is not None for result in expected] == [False] + [True] * 6
    assert expected[2].logprobs is not None
    assert expected[0].prompt_logprobs
    assert [numbers(result) for result in found] == [numbers(result) for result in expected]
    assert found[3].device_end_ns > found[3].device_start_ns > 0
    if beside:  # the others' last operations are queued when the model has run
        assert any(0 < result.submitted_ns < result.device_end_ns for result in found)


@pytest.mark.parametrize(
    ("loop", "executor", "beside"),
    [("overlap", "process", True), ("batch-queue", "process", True), ("serial", "process", False)],
)
def test_where_a_loop_runs_ahead_the_worker_has_a_thread_for_forwards(
    loop: str, executor: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunnerSpec] = []

    class Noted:
        def __init__(self, spec: RunnerSpec, **more: object) -> None:
            asked.append(spec)
            raise NotEnoughMemory("enough seen")

    monkeypatch.setattr("stepahead.executor.process.ProcessExecutor", Noted)
    with pytest.raises(NotEnoughMemory, match="enough seen"):
        LLM("toy", **(TOY_OPTIONS | {"loop": loop, "executor": executor}))
    assert [one.beside for one in asked] == [beside]


def test_of_two_failures_at_once_the_first_step_s_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are made for the later one while the earlier one comes in between."""
    executor = InlineExecutor(build_runner(spec()))
    words, begun = step_failed, threading.Event()

    def slow(step: int, error: BaseException) -> StepFailed:
        if step == 2:
            begun.set()
            other.join(60)
        return words(step, error)

    monkeypatch.setattr("stepahead.executor.inline.step_failed", slow)
    error = RuntimeError("no such page")
    other = threading.Thread(target=lambda: (begun.wait(60), executor.fail(1, error)))
    other.start()
    executor.fail(2, error)
    assert executor.failure_at(1) is not None
    assert executor.failure_at(0) is None
    executor.close()
