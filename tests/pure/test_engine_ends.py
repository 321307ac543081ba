"""The engine's ends: failures, closing, refusals.  On paper, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from closed_form import Toy
from harness import Tap, Variant, paper, resolved, toy_engine
from stepahead.engine import Engine
from stepahead.errors import EngineClosed, InvalidParameter, PoolFull, StepFailed
from stepahead.plan import Plan, Result
from stepahead.types import Finish, SamplingParams
from workloads import Workload


class Falling:
    """An executor whose step 3 fails."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.closed = inner, 0

    def launch(self, plan: Plan) -> Any:
        """A flight that raises where it should land."""
        flight = self.inner.launch(plan)
        return Crashed() if plan.step == 3 else flight

    def close(self) -> None:
        """Counts."""
        self.closed += 1


class Crashed:
    """A flight that never arrives."""

    def land(self) -> Result:
        """Raises."""
        raise StepFailed("the model raised: ouch")


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_a_failed_step_ends_everyone_with_its_words(loop: str) -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "max_rows": 2}
    variant = Variant(loop, "paper")
    settled = resolved(options | {"num_pages": 20}, variant)
    falling = Falling(paper(settled, Toy(64, 32)))
    engine = toy_engine(options | {"num_pages": 20}, variant, executor=falling)
    for first in range(2, 6):
        engine.add([first, 3, 4], SamplingParams(max_tokens=9, temperature=0.0))
    ends: list[Finish] = []
    while engine.has_work:
        ends += outputs.finishes if (outputs := engine.step()) else ()
    assert sorted(finish.rid for finish in ends) == [0, 1, 2, 3]
    assert {finish.error for finish in ends if finish.reason == "error"} == {
        "the model raised: ouch"
    }
    assert isinstance(engine.failure, StepFailed)
    with pytest.raises(EngineClosed, match="the model raised: ouch"):
        engine.add([2], SamplingParams())
    assert engine.close() == engine.close() == []
    assert falling.closed == 1


def closing_engine(work: Workload) -> tuple[Engine, list[int]]:
    """An engine some steps into a workload of endless answers."""
    engine = toy_engine(work.options, Variant("overlap", "paper"))
    rids = []
    for first in range(2, 7):
        rids += engine.add([first, 3, 4], SamplingParams(max_tokens=20, ignore_eos=True, n=2))
    return engine, rids


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_closing_ends_everyone_once(steps: int) -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "max_rows": 3}
    engine, rids = closing_engine(Workload(0, options | {"num_pages": 24}, ()))
    for _ in range(steps):
        engine.step()
    engine.abort(rids[0])
    finishes = engine.close()
    assert sorted(finish.rid for finish in finishes) == rids
    assert {finish.reason for finish in finishes} == {"abort"}
    assert engine.close() == []
    with pytest.raises(EngineClosed, match="closed"):
        engine.step()
    with pytest.raises(EngineClosed, match="closed"):
        engine.add([2], SamplingParams())


def test_a_refused_choice_takes_its_siblings_with_it() -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "max_rows": 3}
    engine = toy_engine(options | {"num_pages": 24}, Variant("overlap", "paper"))
    with pytest.raises(PoolFull):
        engine.add([2, 3], SamplingParams(n=4), wait=False)
    assert not engine.has_work
    engine.scheduler.check_at_rest()
    assert len(engine.add([2, 3], SamplingParams(n=3), wait=False)) == 3
    while engine.has_work:
        engine.step()
    engine.scheduler.check_at_rest()


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stop_token_ids": [64]}, "stop_token_ids"), ({"logit_bias": {64: 1.0}}, "logit_bias")],
)
def test_ids_outside_the_vocabulary_are_refused_by_field(fields: Any, param: str) -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 24}
    engine = toy_engine(options, Variant("overlap", "paper"))
    with pytest.raises(InvalidParameter, match="token 64") as caught:
        engine.add([2, 3], SamplingParams(**fields))
    assert caught.value.param == param
    assert not engine.has_work


def test_an_abort_of_nobody_is_no_news() -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 24}
    engine = toy_engine(options, Variant("overlap", "paper"))
    engine.abort(99)
    assert not engine.has_work
    assert engine.step() is None


def test_the_tap_hands_on_what_it_shows() -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 24}
    settled = resolved(options, Variant(device="paper"))
    shown: list[Plan] = []
    tap = Tap(paper(settled, Toy(64, 32)), shown.append)
    plan = Plan(0, np.zeros(0, np.int32), same_rows=True)
    assert len(tap.launch(plan).land().tokens) == 0
    assert shown == [plan]


def test_a_refusal_changes_nobody_elses_noise() -> None:
    # the noise of a request without a seed once depended on how many had been refused before it
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "max_rows": 2, "num_pages": 9}

    def seeds(refusals: int) -> list[int]:
        engine = toy_engine(options, Variant("serial", "paper"))
        engine.add([2, 3], SamplingParams())
        for _ in range(refusals):
            with pytest.raises(PoolFull):
                engine.add([2, 3], SamplingParams(n=3), wait=False)
        engine.add([4, 5], SamplingParams(n=2))
        return [entry.request.seed for entry in engine.scheduler._entries.values()]

    assert seeds(0) == seeds(3)
    assert len(set(seeds(0))) == 2  # two prompts; choices of one share it and differ by number
