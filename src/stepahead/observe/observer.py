"""All that is taken down of an engine, and the one way for another thread to read it.

The engine's thread writes without a lock of its own: whoever reads asks, and is answered between
two steps, by the engine's thread while it steps and by the asking one while it rests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from stepahead.errors import EngineError
from stepahead.observe.books import Books, Events
from stepahead.observe.garbage import Garbage
from stepahead.observe.requests import RequestEvents, RequestLog
from stepahead.observe.steps import StepLog, Steps
from stepahead.sync import SyncCounts

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What was taken down up to `at_ns`, on the observer's clock.

    about     what engine it is: version, model, loop, depth and the like, by name
    events    the raw lanes of host and device
    steps     landed steps
    requests  events of requests
    syncs     pulls back to serial work by reason: {"steps": n, "rows": m}
    wall_ns   the same moment as `at_ns` since 1970; 0 where nobody asked
    pauses    for garbage collection: {"count": n, "total_ns": t, "longest_ns": l}
    """

    about: dict[str, str | int]
    at_ns: int
    events: Events
    steps: Steps
    requests: RequestEvents
    syncs: dict[str, dict[str, int]]
    wall_ns: int = 0
    pauses: dict[str, int] = field(default_factory=dict)


_LOOK_S = 0.005  # how often who asks looks whether the engine rests


class _Ask(Generic[T]):
    """A question and, when `done`, its answer or the error it raised."""

    def __init__(self, question: Callable[[], T]) -> None:
        self.done = threading.Event()
        self._question = question
        self._answers: list[T] = []
        self._error: Exception | None = None

    def settle(self) -> None:
        try:
            self._answers.append(self._question())
        except Exception as error:  # of who asked: the engine goes on
            self._error = error
        self.done.set()

    def answer(self) -> T:
        if self._error is not None:
            raise self._error
        return self._answers[0]


class Observer:
    """Books, steps, requests and pulls back of one engine, on one clock.

    `working` is held by the engine while it changes any of it, and released between steps.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        about: dict[str, str | int] | None = None,
    ) -> None:
        self.about = about or {}
        self.clock_ns = clock_ns
        self.books = Books(clock_ns)
        self.steps = StepLog()
        self.requests = RequestLog(clock_ns)
        self.syncs = SyncCounts()
        self.working = threading.RLock()  # a signal's handler may close the engine in a step
        self.garbage = Garbage(self.books, self.working)
        self._asks: deque[_Ask[Any]] = deque()

    def ask(self, question: Callable[[], T], timeout_s: float = 60.0) -> T:
        """What `question` returns when it is called between two steps; for any thread.

        It must be short, such as a copy: the engine waits for it.  EngineError if the engine is in
        one step for longer than `timeout_s`.
        """
        ask = _Ask(question)
        self._asks.append(ask)
        end_s = time.monotonic() + timeout_s
        while not ask.done.wait(_LOOK_S):
            if self.working.acquire(blocking=False):
                try:
                    self.answer()
                finally:
                    self.working.release()
            elif time.monotonic() > end_s:
                with suppress(ValueError):  # it is being answered after all
                    self._asks.remove(ask)  # or one who asks again and again finds a longer step
                raise EngineError(
                    f"the engine has been in one step for {timeout_s:g} s, so nothing can be read "
                    "of it; ask again, or look whether its device is stuck"
                )
        return ask.answer()

    def snapshot(self) -> Snapshot:
        """A copy of all that is kept; for the engine's thread, or as a question to `ask`."""
        events, steps, requests = self.books.recent(), self.steps.recent(), self.requests.recent()
        syncs = self.syncs.as_dict()
        wall_ns = time.time_ns()
        pauses = self.garbage.pauses.as_dict()
        return Snapshot(
            self.about, events.until_ns, events, steps, requests, syncs, wall_ns, pauses
        )

    def answer(self) -> None:
        """Answers whoever asks; only while holding `working`."""
        while self._asks:
            self._asks.popleft().settle()
