"""The engine's ends: failures, closing, refusals.  On paper, without torch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from closed_form import Toy
from engines import Tap, Variant, paper, resolved, toy_engine
from listener import ENDLESS, LOOPS, OPTIONS, Listener
from stepahead import assemble
from stepahead.config import config_from
from stepahead.engine import Engine
from stepahead.errors import EngineClosed, EngineError, InvalidParameter, PoolFull, StepFailed
from stepahead.plan import Plan, Result
from stepahead.types import Finish, SamplingParams


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
    engine.close()
    engine.close()
    assert falling.closed == 1


@pytest.fixture(scope="module")
def right() -> dict[int, list[int]]:
    """What the serial loop tells everyone when nothing ends early."""
    listener = Listener(toy_engine(OPTIONS, Variant("serial", "paper")))
    listener.listen()
    assert {end.reason for end in listener.ends.values()} == {"length"}
    return listener.tokens


def on_paper(loop: str, depth: int) -> tuple[Variant, Any]:
    """A variant, and an executor for it."""
    variant = Variant(loop, "paper", depth=depth)
    return variant, paper(resolved(OPTIONS, variant), Toy(64, 64))


@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_closing_between_steps_ends_everyone_once(
    loop: str, depth: int, right: dict[int, list[int]]
) -> None:
    """Whatever is in the air: nothing, chunks of a prompt, D-1 steps of decoding."""
    flights = set()
    for steps in range(12):
        variant, inner = on_paper(loop, depth)
        closing = Closing(inner, never)
        listener = Listener(toy_engine(OPTIONS, variant, executor=closing))
        engine = listener.engine
        for _ in range(steps):
            listener.step()
        flights.add(engine._core.flights)
        settled = [settled_of(engine, prompt) for prompt in listener.prompts.values()]
        engine.close()
        engine.close()
        assert closing.closed == 1
        listener.listen()
        listener.check("abort", right)
        for prompt, known in zip(listener.prompts.values(), settled, strict=True):
            assert cached(engine, prompt) <= known, "a page that was never written can be found"
    assert flights == {0, (depth or (1 if loop == "serial" else 2)) - 1}


def settled_of(engine: Engine, prompt: list[int]) -> int:
    """Positions of a prompt whose KV is known to be written."""
    found = [entry for entry in engine.scheduler.life.entries if entry]
    slots = [e.slot for e in found if e.request.prompt.tolist() == prompt]
    running = max((engine.scheduler.table.settled(slot) for slot in slots), default=0)
    return max(running, cached(engine, prompt))


def cached(engine: Engine, prompt: list[int]) -> int:
    """Positions of a prompt that the prefix tree gives."""
    return 4 * len(engine.scheduler.store.match(np.array([*prompt, 0], np.int32)))


def never(step: int) -> bool:
    """No step is the one."""
    return False


class Closing:
    """An executor; at a landing that is `due`, `then` is called before the flight comes down."""

    def __init__(self, inner: Any, due: Any, then: Any = None) -> None:
        self.inner, self.due, self.then, self.closed = inner, due, then, 0

    def launch(self, plan: Plan) -> Any:
        """A flight that asks whether its landing is due."""
        return ClosingFlight(self, plan.step, self.inner.launch(plan))

    def close(self) -> None:
        """Counts."""
        self.closed += 1


class ClosingFlight:
    """A step of Closing."""

    def __init__(self, owner: Closing, step: int, inner: Any) -> None:
        self.owner, self.step, self.inner = owner, step, inner

    def land(self) -> Result:
        """Lands."""
        if self.owner.due(self.step):
            self.owner.then()
        return self.inner.land()


@pytest.mark.parametrize("comes", ["back", "closed"])
@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_closing_in_the_middle_of_a_step(
    loop: str, depth: int, comes: str, right: dict[int, list[int]]
) -> None:
    """From a signal's handler: the step goes on, with its results (an inline runner) or without
    them (a worker that is gone), and what is in its hands is not pulled from under it."""
    flights = {closed_at(due, loop, depth, comes, right) for due in range(8)}
    assert max(flights) == (depth or (1 if loop == "serial" else 2))


def closed_at(due: int, loop: str, depth: int, comes: str, right: dict[int, list[int]]) -> int:
    """Closes where step `due` lands; how many flights were in the air then."""
    flights = 0

    def close() -> None:
        nonlocal flights
        flights = engine._core.flights
        engine.close()
        assert engine.scheduler.in_flight, "the step's flights were dropped under it"
        if comes == "closed":
            raise EngineClosed("the engine was closed")

    variant, inner = on_paper(loop, depth)
    closing = Closing(inner, due.__eq__, close)
    listener = Listener(toy_engine(OPTIONS, variant, executor=closing))
    engine = listener.engine
    listener.listen()
    listener.check("abort", right)
    assert engine.failure is None
    assert closing.closed == 1
    return flights


def test_closing_at_any_moment_by_another_thread(right: dict[int, list[int]]) -> None:
    """Each end is told once by the stepping thread, wherever the other one strikes."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for delay in range(150):
            listener = Listener(toy_engine(OPTIONS, Variant("overlap", "paper")))
            stepping = threading.Thread(target=listener.listen)
            stepping.start()
            time.sleep(delay * 1e-4)
            listener.engine.close()
            stepping.join(30)
            assert not stepping.is_alive()
            assert listener.error is None, listener.error
            assert set(listener.ends) == set(listener.prompts)
            listener.check_at_rest()
    finally:
        sys.setswitchinterval(switch_s)


def test_has_work_while_another_thread_ends_the_requests() -> None:
    """Between the scheduler's hands and the messages to tell they are nowhere."""
    listener = Listener(toy_engine(OPTIONS, Variant("overlap", "paper")))
    engine, asked = listener.engine, []
    drop = engine.scheduler.drop_all

    def watched(reason: Any, error: str = "") -> list[Finish]:
        finishes = drop(reason, error)
        asked.append(engine.has_work)
        return finishes

    engine.scheduler.drop_all = watched  # type: ignore[method-assign]
    engine.close()
    assert asked == [True]
    listener.listen()
    assert set(listener.ends) == set(listener.prompts)


def test_an_engine_is_not_for_two_threads() -> None:
    seen: list[BaseException] = []

    def call() -> None:
        calls: list[Callable[[], Any]] = [
            listener.engine.step,
            lambda: listener.engine.add([2], ENDLESS),
            lambda: listener.engine.abort(0),
        ]
        for one in calls:
            with pytest.raises(EngineError, match="while another call was at work") as caught:
                one()
            seen.append(caught.value)

    def in_another_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    variant, inner = on_paper("overlap", 0)
    closing = Closing(inner, (3).__eq__, in_another_thread)
    listener = Listener(toy_engine(OPTIONS, variant, executor=closing))
    listener.listen()
    assert listener.error is None
    assert len(seen) == 3
    assert {end.reason for end in listener.ends.values()} == {"length"}


@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_a_failed_device_and_then_a_close_is_one_end(
    loop: str, depth: int, right: dict[int, list[int]]
) -> None:
    variant, inner = on_paper(loop, depth)

    def fail() -> None:
        raise StepFailed("the device is gone")

    closing = Closing(inner, (6).__eq__, fail)
    listener = Listener(toy_engine(OPTIONS, variant, executor=closing))
    engine = listener.engine
    while engine.failure is None:
        before = engine.step()
        if before is not None:
            listener.hear(before)
    engine.close()
    listener.check("error", right)
    assert {end.error for end in listener.ends.values()} == {"the device is gone"}


def test_ends_that_were_not_told_before_a_close_are_told_after_it() -> None:
    listener = Listener(toy_engine(OPTIONS, Variant("overlap", "paper")))
    listener.engine.abort(0)
    listener.engine.close()
    listener.listen()
    assert set(listener.ends) == set(listener.prompts)
    with pytest.raises(EngineClosed, match="closed"):
        listener.engine.add([2], ENDLESS)
    listener.engine.abort(1)  # it has ended: nothing to do


def test_a_fault_in_the_books_does_not_keep_the_executor() -> None:
    """As after an interrupt in the middle of a step, which leaves the scheduler half done."""

    def fault(reason: str, error: str = "") -> list[Finish]:
        raise AssertionError("pins are not the flights that name a slot")

    variant, inner = on_paper("overlap", 0)
    closing = Closing(inner, never)
    listener = Listener(toy_engine(OPTIONS, variant, executor=closing))
    listener.step()
    listener.engine.scheduler.drop_all = fault  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="pins"):
        listener.engine.close()
    assert closing.closed == 1


@pytest.mark.parametrize("fault", [MemoryError, KeyboardInterrupt])
def test_an_engine_that_can_not_be_built_leaves_no_executor(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker had been started and was nobody's: it lived until its channel was collected."""
    falling = Falling(None)

    def unbuilt(*_: object) -> Engine:
        raise fault

    monkeypatch.setattr(
        assemble, "_executor", lambda kind, spec, worker: (falling, time.perf_counter_ns)
    )
    monkeypatch.setattr(assemble, "Engine", unbuilt)
    with pytest.raises(fault):
        assemble.build_engine(config_from("toy", {"threads": 1}))
    assert falling.closed == 1


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
    [
        ({"stop_token_ids": [64]}, "stop_token_ids"),
        ({"logit_bias": {64: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 64]}, "allowed_token_ids"),
        ({"bad_word_ids": [[3], [4, 64]]}, "bad_word_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_field(fields: Any, param: str) -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 24}
    engine = toy_engine(options, Variant("overlap", "paper"))
    with pytest.raises(InvalidParameter, match="token 64") as caught:
        engine.add([2, 3], SamplingParams(**fields))
    assert caught.value.param == param
    assert not engine.has_work


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5], "bad_word_ids": [[5]]},
        {"allowed_token_ids": [5, 6], "bad_word_ids": [[5, 5], [2, 6]]},
        {"allowed_token_ids": [1, 9], "min_tokens": 2, "stop_token_ids": [9]},
        {"bad_word_ids": [[token] for token in range(64)]},
    ],
)
def test_a_request_that_could_be_left_without_a_token_is_refused(fields: Any) -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 24}
    engine = toy_engine(options, Variant("overlap", "paper"))
    with pytest.raises(InvalidParameter, match="no token is left") as caught:
        engine.add([2, 3], SamplingParams(**fields))
    assert caught.value.param in fields
    assert not engine.has_work


def test_words_that_nobody_has_spelt_are_refused() -> None:
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 24}
    engine = toy_engine(options, Variant("overlap", "paper"))
    with pytest.raises(InvalidParameter, match="spelt in tokens") as caught:
        engine.add([2, 3], SamplingParams(bad_words=["word"]))
    assert caught.value.param == "bad_words"
    engine.add([2, 3], SamplingParams(bad_words=[]))


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
