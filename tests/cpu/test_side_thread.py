"""The copy thread against a device whose copies to the host block for as long as the forward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stepahead.device.side import Mark, SideThread
from stepahead.errors import EngineClosed

FORWARD_S, COPY_S, STEPS = 0.02, 0.012, 12


class Forward:
    """A device that runs one forward of FORWARD_S after the other."""

    def __init__(self) -> None:
        self._free_at = time.perf_counter()

    def launch(self) -> Callable[[], None]:
        """Enqueues a forward; what comes back waits for its end."""
        self._free_at = max(self._free_at, time.perf_counter()) + FORWARD_S
        over_at = self._free_at
        return lambda: time.sleep(max(0.0, over_at - time.perf_counter()))


@pytest.fixture
def thread() -> Iterator[SideThread]:
    copier = SideThread()
    yield copier
    copier.close()
    assert "stepahead-copy" not in {thread.name for thread in threading.enumerate()}


def cadence_s(launch: Callable[[int, Callable[[], None]], Callable[[], None]]) -> float:
    """Seconds a step of a loop two deep, where `launch(step, over)` gives what landing waits for;
    the least of three runs, because a busy machine only ever adds."""
    found = []
    for _ in range(3):
        device, flights = Forward(), []
        begin = time.perf_counter()
        for step in range(STEPS):
            flights.append(launch(step, device.launch()))
            if step:
                flights.pop(0)()
        flights.pop()()
        found.append((time.perf_counter() - begin) / STEPS)
    return min(found)


def test_the_cadence_is_the_forwards(thread: SideThread) -> None:
    def aside(step: int, over: Callable[[], None]) -> Callable[[], None]:
        thread.do(over)
        thread.do(lambda: time.sleep(COPY_S))
        return thread.mark().wait

    def blocking(step: int, over: Callable[[], None]) -> Callable[[], None]:
        over()
        time.sleep(COPY_S)
        return lambda: None

    assert cadence_s(aside) < FORWARD_S + 0.6 * COPY_S
    assert cadence_s(blocking) >= FORWARD_S + COPY_S


def test_jobs_run_in_order_off_the_callers_thread(thread: SideThread) -> None:
    ran: list[tuple[int, str]] = []
    for number in range(50):
        thread.do(lambda number=number: ran.append((number, threading.current_thread().name)))
    mark = thread.mark()
    mark.wait()
    assert ran == [(number, "stepahead-copy") for number in range(50)]
    assert mark.done()
    assert 0 <= time.perf_counter_ns() - mark.at_ns() < 60e9


def test_a_mark_waits_for_the_jobs_before_it_alone(thread: SideThread) -> None:
    go, later = threading.Event(), threading.Event()
    thread.do(lambda: waited(go))
    first = thread.mark()
    thread.do(lambda: waited(later))
    second = thread.mark()
    assert not first.done()
    go.set()
    first.wait()
    assert not second.done()
    later.set()
    second.wait()


def waited(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_failed_copy_raises_where_it_is_waited_for(
    thread: SideThread, kind: type[BaseException]
) -> None:
    ran: list[int] = []

    def fails() -> None:
        raise kind("copy 1 failed")

    thread.do(lambda: ran.append(0))
    before = thread.mark()
    thread.do(fails)
    thread.do(lambda: ran.append(2))
    behind = thread.mark()
    before.wait()
    for mark in (behind, thread.mark()):
        with pytest.raises(kind, match="copy 1 failed"):
            mark.wait()
        assert mark.done()
    assert ran == [0]


def test_what_begins_the_thread_may_fail_too() -> None:
    def begin() -> None:
        raise RuntimeError("no such device")

    thread = SideThread(begin)
    with pytest.raises(RuntimeError, match="no such device"):
        thread.mark().wait()
    thread.close()


def test_closing_drops_what_waits_and_lets_everybody_go() -> None:
    thread, ran, go = SideThread(), [], threading.Event()
    stuck_in(thread, go)
    marks = []
    for number in range(200):
        thread.do(lambda number=number: ran.append(number))
        marks.append(thread.mark())
    threading.Timer(0.05, go.set).start()
    begin = time.perf_counter()
    thread.close(timeout_s=30)
    assert time.perf_counter() - begin < 10
    assert_let_go(marks)
    assert ran == []


def test_closing_does_not_wait_for_a_copy_that_never_ends() -> None:
    thread, forever = SideThread(), threading.Event()
    stuck_in(thread, forever)
    marks = [thread.mark() for _ in range(100)]
    heard: list[BaseException] = []
    consumer = threading.Thread(target=lambda: heard.append(raised(marks[50])), daemon=True)
    consumer.start()
    begin = time.perf_counter()
    thread.close(timeout_s=0.05)
    assert time.perf_counter() - begin < 10
    consumer.join(10)
    assert isinstance(heard[0], EngineClosed)
    assert_let_go([*marks, thread.mark()])
    thread.close(timeout_s=0.05)
    forever.set()


def stuck_in(thread: SideThread, event: threading.Event) -> None:
    """A job that has begun and ends with the event."""
    begun = threading.Event()
    thread.do(lambda: (begun.set(), waited(event))[1])
    assert begun.wait(30)


def assert_let_go(marks: list[Mark]) -> None:
    for mark in marks:
        assert mark.done()
        assert isinstance(raised(mark), EngineClosed)


def raised(mark: Mark) -> BaseException:
    try:
        mark.wait()
    except EngineClosed as error:
        return error
    raise AssertionError("the mark passed as if all were well")


def test_an_earlier_failure_is_not_hidden_by_closing() -> None:
    thread = SideThread()

    def fails() -> None:
        raise ValueError("copy failed")

    thread.do(fails)
    first = thread.mark()
    with pytest.raises(ValueError, match="copy failed"):
        first.wait()
    thread.close()
    with pytest.raises(ValueError, match="copy failed"):
        thread.mark().wait()
