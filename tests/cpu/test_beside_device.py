"""The CPU beside the thread that launches: one queue, a thread, and who is woken when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepahead.device.base import Event, Stream, Work
from stepahead.device.beside import LONG_NS, BesideDevice
from stepahead.errors import EngineClosed
from stepahead.sync import SyncReason

PATIENCE_S = 60


def beside() -> BesideDevice:
    """One that has seen a long model."""
    device = BesideDevice()
    model(device, LONG_NS)
    device.stage(1)
    return device


def model(device: BesideDevice, took_ns: int) -> None:
    """One that takes at least so long, as the device is told of it."""

    def run() -> None:
        device.long_next()
        time.sleep(took_ns / 1e9)

    device.stage(0)
    device.enqueue(Stream.FORWARD, run)
    device.record(Stream.FORWARD).wait()


@pytest.fixture
def device() -> Iterator[BesideDevice]:
    made = beside()
    yield made
    made.close()


class Gate:
    """An operation that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(PATIENCE_S)


class Waiter(threading.Thread):
    """Somebody who sleeps for an event."""

    def __init__(self, event: Event) -> None:
        super().__init__(daemon=True)
        self.event = event
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.event.wait()
        except BaseException as error:
            self.raised = error

    def through(self, within_s: float = PATIENCE_S) -> bool:
        """Whether it was woken."""
        self.join(within_s)
        return not self.is_alive()


def passed(event: Event) -> bool:
    """Whether it does within a while, looked at and not slept for."""
    until_s = time.monotonic() + PATIENCE_S
    while not event.done() and time.monotonic() < until_s:
        time.sleep(1e-3)
    return event.done()


def test_who_launches_goes_on_while_an_operation_runs(device: BesideDevice) -> None:
    gate = Gate()
    device.enqueue(Stream.FORWARD, gate)
    event = device.record(Stream.FORWARD)
    assert gate.begun.wait(PATIENCE_S)
    assert not event.done()
    gate.open.set()
    event.wait()
    assert event.done()


@given(st.lists(st.sampled_from([*Stream, "record", "download", "wait"]), max_size=30))
def test_all_streams_are_one_queue_in_the_order_of_the_program(what: list[Stream | str]) -> None:
    """That is an order that every edge allows; a download has what there was at its place."""
    device = beside()
    ran = torch.zeros(1, dtype=torch.int64)

    def count() -> None:
        ran.add_(1)

    try:
        expected, events, downloads = 0, list[tuple[Event, int]](), []
        for item in what:
            if isinstance(item, Stream):
                device.enqueue(item, count)
                expected += 1
            elif item == "record":
                events.append((device.record(Stream.SCHEDULE), expected))
            elif item == "wait" and events:
                device.wait(Stream.FORWARD, events[-1][0])
            else:
                array = device.download(ran.clone, "ran")
                downloads.append((array, device.record(Stream.COPY), expected))
        for event, least in events:
            event.wait()
            assert int(ran) >= least
        for array, event, count_then in downloads:
            event.wait()
            assert array.read().tolist() == [count_then]
        times = [event.at_ns() for event, _ in events]
        assert times == sorted(times)
        device.record(Stream.FORWARD).wait()
        assert int(ran) == expected
    finally:
        device.close()


def test_who_sleeps_is_woken_when_something_long_is_next(device: BesideDevice) -> None:
    """And no sooner, as long as there is work: it would take the interpreter from what comes."""
    short, long = Gate(), Gate()
    event = device.record(Stream.FORWARD)
    event.wait()  # nothing behind it: woken at once
    held = Gate()
    device.enqueue(Stream.FORWARD, held)
    assert held.begun.wait(PATIENCE_S)
    event = device.record(Stream.FORWARD)
    device.enqueue(Stream.FORWARD, short)
    device.enqueue(Stream.FORWARD, device.long_next)
    device.enqueue(Stream.FORWARD, long)
    waiter = Waiter(event)
    held.open.set()
    assert passed(event)
    assert short.begun.wait(PATIENCE_S)
    assert not waiter.through(within_s=0.05)
    short.open.set()
    assert long.begun.wait(PATIENCE_S)
    assert waiter.through()
    long.open.set()


def test_who_sleeps_is_woken_when_there_is_no_more_work(device: BesideDevice) -> None:
    gate = Gate()
    device.enqueue(Stream.FORWARD, gate)
    waiters = [Waiter(device.record(stream)) for stream in Stream]
    waiters += [Waiter(waiters[0].event)]  # two of one event
    gate.open.set()
    assert all(waiter.through() for waiter in waiters)


def test_what_an_operation_raises_is_raised_behind_it_and_nothing_runs_after_it(
    device: BesideDevice,
) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("no such page")

    device.enqueue(Stream.FORWARD, lambda: ran.append("before"))
    before = device.record(Stream.FORWARD)
    device.enqueue(Stream.FORWARD, fail)
    event = device.record(Stream.COPY)
    device.enqueue(Stream.SCHEDULE, lambda: ran.append("after"))
    before.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such page"):
            event.wait()
    with pytest.raises(RuntimeError, match="no such page"):
        device.record(Stream.FORWARD).wait()
    assert ran == ["before"]
    assert event.done()


def test_a_wait_of_the_host_is_told_with_its_times(device: BesideDevice) -> None:
    gate = Gate()
    device.enqueue(Stream.FORWARD, gate)
    event = device.record(Stream.FORWARD)
    threading.Timer(0.02, gate.open.set).start()
    device.sync(event, SyncReason.HOST_LENGTHS)
    (waited,) = device.waited()
    assert waited.reason is SyncReason.HOST_LENGTHS
    assert waited.start_ns < event.at_ns() <= waited.end_ns
    assert device.waited() == ()


def test_a_graph_is_its_parts_with_an_event_between_them(device: BesideDevice) -> None:
    ran, gate = list[str](), Gate()
    graph = device.capture(lambda: ran.append("first"), gate)
    assert graph is not None
    between = graph.launch(Work(lambda: None), Work(lambda: None))
    assert gate.begun.wait(PATIENCE_S)
    assert between.done()
    assert ran == ["first"]
    gate.open.set()


def test_closing_lets_go_who_sleeps_and_drops_what_has_not_begun() -> None:
    device = beside()
    gate, ran = Gate(), list[int]()
    device.enqueue(Stream.FORWARD, gate)
    assert gate.begun.wait(PATIENCE_S)
    device.enqueue(Stream.FORWARD, lambda: ran.append(1))
    waiter = Waiter(device.record(Stream.FORWARD))
    device.close()
    device.close()
    assert waiter.through()
    late = Waiter(device.record(Stream.FORWARD))
    assert late.through()
    for one in (waiter, late):
        assert isinstance(one.raised, EngineClosed)
    gate.open.set()
    assert ran == []


def test_a_closed_device_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    device = beside()
    device.record(Stream.FORWARD).wait()
    device.close()
    assert set(threading.enumerate()) <= before


def test_operations_are_in_inference_mode(device: BesideDevice) -> None:
    seen: list[bool] = []
    device.enqueue(Stream.FORWARD, lambda: seen.append(torch.is_inference_mode_enabled()))
    device.record(Stream.FORWARD).wait()
    assert seen == [True]


def test_the_thread_is_for_long_models() -> None:
    """And a step that leaves it begins when that has done its work."""
    device, here = BesideDevice(), threading.get_ident()
    ran: list[int] = []

    def note() -> None:
        ran.append(threading.get_ident())

    try:
        for took_ns in (0, LONG_NS, 0):
            model(device, took_ns)
            device.stage(1)
            device.enqueue(Stream.FORWARD, note)
            device.record(Stream.FORWARD).wait()
        assert [ident == here for ident in ran] == [True, False, True]
        model(device, LONG_NS)
        device.stage(2)
        device.enqueue(Stream.FORWARD, device.long_next)
        device.record(Stream.FORWARD).wait()  # a short one
        device.enqueue(Stream.FORWARD, lambda: time.sleep(0.02))
        device.enqueue(Stream.FORWARD, note)
        device.stage(3)
        device.enqueue(Stream.FORWARD, note)
        assert [ident == here for ident in ran[3:]] == [False, True]
    finally:
        device.close()


def test_where_it_runs_at_once_what_is_raised_is_raised_there() -> None:
    device = BesideDevice()

    def fail() -> None:
        raise RuntimeError("no such page")

    with pytest.raises(RuntimeError, match="no such page"):
        device.enqueue(Stream.FORWARD, fail)
    array = device.download(lambda: torch.ones(1), "ones")
    assert device.record(Stream.COPY).done()
    assert array.read().tolist() == [1.0]
    device.close()
