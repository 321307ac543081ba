"""The worker's loop: it runs plans, leaves when told to, and takes nothing else for either."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from executor_fakes import FakeRunner, answer

from stepahead.executor.channel import Channel, Kind, open_channel
from stepahead.executor.inline import InlineExecutor
from stepahead.executor.worker import Worker
from stepahead.plan import (
    NO_INTS,
    Control,
    Plan,
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
