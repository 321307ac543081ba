"""The real runner gives the same, in this thread and in another process."""

from __future__ import annotations

import numpy as np
import pytest

from stepahead.errors import StepFailed
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


def test_a_request_and_a_failure_are_the_same_in_both() -> None:
    inline, process = InlineExecutor(build_runner(spec())), ProcessExecutor(spec())
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
