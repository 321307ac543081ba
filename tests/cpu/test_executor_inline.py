"""The inline executor: the runner in this thread, its errors by the house's names."""

from __future__ import annotations

import numpy as np
import pytest
from executor_fakes import FakeRunner, answer

from stepahead.errors import EngineClosed, StepFailed
from stepahead.executor.inline import InlineExecutor
from stepahead.plan import NO_INTS, Plan


class CountsCloses(FakeRunner):
    closes = 0

    def close(self) -> None:
        self.closes += 1


def plan_of(step: int) -> Plan:
    return Plan(step, NO_INTS, True)


def test_flights_land() -> None:
    executor = InlineExecutor(FakeRunner({}, [0.01]))
    flights = [executor.launch(plan_of(step)) for step in (1, 2)]
    assert not flights[1].ready()
    for flight, step in zip(flights, (1, 2), strict=True):
        result = flight.land()
        assert result.step == step
        assert np.array_equal(result.tokens, answer(plan_of(step)))
    assert flights[1].ready()


@pytest.mark.parametrize(
    ("doing", "cause"),
    [("raise no luck", RuntimeError), ("memory", MemoryError), ("exit 1", SystemExit)],
)
def test_what_launch_raises_is_raised_at_landing(doing: str, cause: type[BaseException]) -> None:
    """Steps launched before still count, as they do when the runner is another process's."""
    executor = InlineExecutor(FakeRunner({2: doing}, [0.0]))
    flights = [executor.launch(plan_of(step)) for step in (1, 2, 3)]
    assert flights[0].land().step == 1
    for flight in flights[1:]:
        assert flight.ready()
        with pytest.raises(StepFailed, match=f"model raised in step 2: {cause.__name__}") as caught:
            flight.land()
        assert type(caught.value.__cause__) is cause


def test_an_error_found_late_fails_the_steps_behind_it() -> None:
    runner = FakeRunner({2: "late"}, [0.0])
    executor = InlineExecutor(runner)
    flights = [executor.launch(plan_of(step)) for step in (1, 2, 3)]
    flights[0].land()
    for flight in [*flights[1:], executor.launch(plan_of(4))]:
        with pytest.raises(
            StepFailed, match="model raised in step 2: RuntimeError: found out late"
        ):
            flight.land()


def test_of_two_failures_the_earlier_step_is_named() -> None:
    executor = InlineExecutor(FakeRunner({1: "late", 2: "raise second"}, [0.0]))
    flights = [executor.launch(plan_of(step)) for step in (1, 2)]
    for flight in flights:
        with pytest.raises(StepFailed, match="in step 1: RuntimeError: found out late"):
            flight.land()


def test_an_error_of_ready_itself_is_the_steps() -> None:
    runner = FakeRunner({}, [0.0])
    executor = InlineExecutor(runner)
    flight = executor.launch(plan_of(1))

    def broken() -> bool:
        raise RuntimeError("an event of a lost device")

    flight._flight.ready = broken  # what CUDA does after an illegal access
    assert flight.ready()
    with pytest.raises(StepFailed, match="in step 1: RuntimeError: an event of a lost device"):
        flight.land()


def test_ctrl_c_is_not_the_models_error() -> None:
    executor = InlineExecutor(FakeRunner({1: "kill SIGINT"}, [0.0]))
    with pytest.raises(KeyboardInterrupt):
        executor.launch(plan_of(1))
    assert executor.launch(plan_of(2)).land().step == 2


def test_close_once_and_for_all() -> None:
    runner = CountsCloses({}, [0.0])
    executor = InlineExecutor(runner)
    executor.close()
    executor.close()
    assert runner.closes == 1
    with pytest.raises(EngineClosed):
        executor.launch(plan_of(1))
