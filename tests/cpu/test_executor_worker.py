"""The worker's loop: it runs plans, leaves when told to, and takes nothing else for either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from executor_fakes import FakeFlight, FakeRunner, answer

from stepahead.executor.channel import Channel, Kind, open_channel
from stepahead.executor.inline import InlineExecutor
from stepahead.executor.worker import Worker
from stepahead.plan import (
    NO_INTS,
    Control,
    Plan,
    Result,
    decode_result,
    encode_control,
    encode_plan,
)
from stepahead.sync import Cause

PLAN = Plan(1, NO_INTS, True)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The host's, which has sent a plan, and the worker's."""
    host, fds = open_channel()
    worker = Channel(*fds)
    host.send(Kind.PLAN, encode_plan(PLAN))
    yield host, worker
    for end in (host, worker):
        end.hang_up()
        end.close()


def work(channel: Channel) -> None:
    Worker(channel, InlineExecutor(FakeRunner({}, []))).run()


def test_it_runs_plans_until_it_is_told_to_leave(ends: tuple[Channel, Channel]) -> None:
    host, worker = ends
    host.send(Kind.CONTROL, encode_control(Control("shutdown")))
    work(worker)
    kind, payload = host.receive()
    assert kind == Kind.RESULT
    assert np.array_equal(decode_result(payload).tokens, answer(PLAN))


@pytest.mark.parametrize(
    ("kind", "payload", "error", "words"),
    [
        (Kind.CONTROL, msgspec.msgpack.encode(["pause"]), msgspec.ValidationError, "pause"),
        (Kind.CONTROL, b"", msgspec.DecodeError, "truncated"),
        (Kind.START, b"", AssertionError, "kind 0"),
    ],
)
def test_what_it_does_not_know_is_no_shutdown(
    ends: tuple[Channel, Channel], kind: Kind, payload: bytes, error: type[Exception], words: str
) -> None:
    host, worker = ends
    host.send(kind, payload)
    with pytest.raises(error, match=words):
        work(worker)


def test_a_collection_is_told_with_the_next_step(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, worker = ends
    monkeypatch.setattr("stepahead.executor.worker.due", lambda spare_ns, took_ns: 0)
    host.send(Kind.PLAN, encode_plan(PLAN))
    host.send(Kind.CONTROL, encode_control(Control("shutdown")))
    work(worker)
    first, second = (decode_result(host.receive()[1]) for _ in range(2))
    assert first.held == ()
    (held,) = second.held
    assert held.cause is Cause.GARBAGE_COLLECTION
    assert held.start_ns < held.end_ns


def test_a_plan_that_is_there_goes_before_a_collection_that_can_wait(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker = ends
    spare: list[int] = []

    def due(spare_ns: int, took_ns: list[int]) -> int | None:
        spare.append(spare_ns)
        return 0 if spare_ns else None

    monkeypatch.setattr("stepahead.executor.worker.due", due)
    one = Worker(worker, InlineExecutor(FakeRunner({}, [])))
    one._tidy()
    assert one._held == ()  # the fixture's plan is there
    assert spare[1] == 0
    worker.receive()
    one._tidy()
    assert len(one._held) == 1


@dataclass
class UnheardFlight(FakeFlight):
    """A step that is there, but whose matchers take their time to hear of it."""

    landed: threading.Event | None = None
    may_wait = True

    def land(self) -> Result:
        assert self.landed is not None
        self.landed.set()
        return super().land()


class UnheardRunner(FakeRunner):
    """Its forwards last until the step before has landed; step `fails` comes to none."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__({}, [])
        self._fails = fails
        self._before: threading.Event | None = None

    def tell_begun(self, begun: Callable[[], None]) -> None:
        self._begun = begun

    def launch(self, plan: Plan) -> FakeFlight:
        if plan.step == self._fails:
            raise RuntimeError("no forward today")
        self._begun()
        assert self._before is None or self._before.wait(60)
        self._before = threading.Event()
        return UnheardFlight(plan, 0.0, landed=self._before)


@pytest.mark.parametrize("fails", [0, 2, 3])
def test_what_matchers_have_yet_to_hear_is_told_while_the_next_forward_runs(
    ends: tuple[Channel, Channel], fails: int
) -> None:
    """In order, also where the next launch fails before its forward."""
    host, worker = ends
    for step in (2, 3):
        host.send(Kind.PLAN, encode_plan(msgspec.structs.replace(PLAN, step=step)))
    host.send(Kind.CONTROL, encode_control(Control("shutdown")))
    Worker(worker, InlineExecutor(UnheardRunner(fails))).run()
    results = []
    while host.wait(0):
        results.append(decode_result(host.receive()[1]))
    assert [result.step for result in results] == [1, 2, 3]
    failed = [bool(fails) and step >= fails for step in (1, 2, 3)]
    assert [bool(result.error) for result in results] == failed


def test_an_answer_that_was_kept_back_is_told_before_it_leaves(
    ends: tuple[Channel, Channel],
) -> None:
    host, worker = ends
    host.send(Kind.CONTROL, encode_control(Control("shutdown")))
    Worker(worker, InlineExecutor(UnheardRunner())).run()
    assert host.wait(0)
    assert decode_result(host.receive()[1]).step == 1


def test_a_plan_that_is_not_there_keeps_no_answer_back(ends: tuple[Channel, Channel]) -> None:
    host, worker = ends
    one = Worker(worker, InlineExecutor(UnheardRunner()))
    plan = one._next_plan()
    assert plan is not None
    one._step(plan)
    assert host.wait(0)
    assert decode_result(host.receive()[1]).step == 1


def test_a_stage_keeps_no_answer_back(ends: tuple[Channel, Channel]) -> None:
    """Its next forward begins when the stage before has ended its own, whenever that is."""
    host, worker = ends
    host.send(Kind.PLAN, encode_plan(msgspec.structs.replace(PLAN, step=2)))
    stage = SimpleNamespace(is_last=True)
    one = Worker(worker, InlineExecutor(UnheardRunner()), cast("Any", stage))
    plan = one._next_plan()
    assert plan is not None
    one._step(plan)
    assert host.wait(0)
    assert decode_result(host.receive()[1]).step == 1
