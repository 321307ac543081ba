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
    params = SamplingParams(temperature=0.8, max_tokens=7, logprobs=2, prompt_logprobs=1)
    pages = ints(1, 2, 3, 4, 5)
    join = Join(1, 1, PROMPT, len(PROMPT), 0, pages, params, 11, 0)
    return [
        Plan(1, NO_INTS, False, chunks=ints(1, 0, 6, 0), joins=(join,)),
        Plan(2, NO_INTS, True, chunks=ints(1, 6, 4, 1)),
        Plan(3, ints(1), False),
        *(Plan(step, ints(1), True) for step in range(4, 8)),
    ]


def spec(device: str) -> RunnerSpec:
    return RunnerSpec(
        "stepahead.model.toy:ToyModel",
        {"vocab_size": 300, "max_len": 64},
        device=device,
        num_slots=3,
        num_pages=8,
        page_size=PAGE_SIZE,
        max_pages=16,
        check=True,
    )


def run(executor: InlineExecutor | ProcessExecutor, depth: int) -> list[Result]:
    results, flights = [], []
    for plan in plans():
        flights.append(executor.launch(plan))
        if len(flights) == depth:
            results.append(flights.pop(0).land())
    return [*results, *(flight.land() for flight in flights)]


def numbers(value: object) -> object:
    """All that a result says, times aside, as plain values."""
    if isinstance(value, Result):
        return (value.step, *map(numbers, (value.tokens, value.logprobs, value.prompt_logprobs)))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, tuple):
        return [numbers(item) for item in value]
    fields = getattr(value, "__struct_fields__", None)
    return value if fields is None else [numbers(getattr(value, name)) for name in fields]


# The hostile device runs its operations in whichever thread waits, and takes one thread at a time:
# two steps ahead, the worker's output thread would land one while another is launched.
@pytest.mark.parametrize(("device", "depth"), [("cpu", 2), ("hostile", 1)])
def test_a_request_gets_the_same_in_both(device: str, depth: int) -> None:
    inline = InlineExecutor(build_runner(spec(device)))
    process = ProcessExecutor(spec(device), 60.0)
    try:
        expected, found = run(inline, depth), run(process, depth)
    finally:
        inline.close()
        process.close()
    assert [len(result.tokens) for result in expected] == [0, 1, 1, 1, 1, 1, 1]
    assert expected[2].has_logprobs
    assert expected[0].prompt_logprobs
    assert [numbers(result) for result in found] == [numbers(result) for result in expected]
    assert found[3].device_end_ns > found[3].device_start_ns > 0


def test_a_failure_reads_the_same_in_both() -> None:
    """A slot beyond the runner's last."""
    inline, process = InlineExecutor(build_runner(spec("cpu"))), ProcessExecutor(spec("cpu"), 60.0)
    try:
        words = []
        for executor in (inline, process):
            with pytest.raises(StepFailed, match="model raised in step 5: IndexError") as caught:
                executor.launch(Plan(5, ints(77), False)).land()
            words.append(str(caught.value))
    finally:
        inline.close()
        process.close()
    assert words[0] == words[1]
