"""Work of the host beside the thread that launches: in a thread, or when somebody waits for it.

A copy to the host may block whoever asks for it until it has run, which is after the forward it
waits for: under confidential computing, and with memory that is not pinned.  The host could not run
ahead.  So a thread stands for the copy stream there, and it is this thread that waits.  Matchers of
grammars stand where the tokens of the step before have landed; another thread waits for those.

Jobs run in the order given.  After a job has failed the later ones do not run, and every mark
behind it raises that error.

Knows no device: a job is a function.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from stepahead.device.base import Event
from stepahead.errors import EngineClosed


class Mark:
    """A point in the thread's work; an `Event` of the device.  Passed whether what came before it
    succeeded or failed: `wait` tells."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: BaseException | None = None
        self._at_ns = 0

    def done(self) -> bool:
        """Whether it has passed, by success or failure; never blocks."""
        return self._passed.is_set()

    def wait(self) -> None:
        """Sleeps until it has passed; raises what a job before it raised."""
        self._passed.wait()
        if self._error is not None:
            raise self._error

    def at_ns(self) -> int:
        """When it passed."""
        return self._at_ns

    def settle(self, error: BaseException | None) -> None:
        """It has passed now; `error` is what went wrong before it."""
        self._error = error
        self._at_ns = time.perf_counter_ns()
        self._passed.set()


class SideThread:
    """One daemon thread.  Jobs and marks come from one thread of the host at a time."""

    def __init__(
        self,
        begin: Callable[[], None] = lambda: None,
        name: str = "stepahead-copy",
        pause_s: float = 0.0,
    ) -> None:
        """`begin` runs first, in the thread of that name.  `pause_s`: how long it sleeps on when it
        is woken, so that it doesn't fight for the interpreter with who has woken it."""
        self._pause_s = pause_s
        self._work: queue.SimpleQueue[Callable[[], None] | Mark | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.do(begin)
        self._thread.start()

    def do(self, job: Callable[[], None], after: Event | None = None) -> None:
        """Runs `job` after the jobs before it, and after the event."""
        if after is not None:
            self._work.put(after.wait)
        self._work.put(job)

    def mark(self) -> Mark:
        """Passes when the jobs so far have run, or can't any more."""
        mark = Mark()
        self._work.put(mark)
        if self._closed:  # asked after the put: closing in between would leave it behind
            mark.settle(self._failure)
        return mark

    def close(self, timeout_s: float = 1.0) -> None:
        """Drops the jobs that have not begun, and waits for the one that has, but not for long.

        Nobody is left waiting: marks that have not passed raise EngineClosed.  Idempotent.
        """
        if self._failure is None:
            self._failure = EngineClosed("the device was closed before this step was copied out")
        self._closed = True
        self._work.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return
        # it is stuck in a job: those who wait behind it are let go from here
        with contextlib.suppress(queue.Empty):
            while True:
                self._step(self._work.get_nowait())
        self._work.put(None)  # for when it comes free

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._step(item)

    def _next(self) -> Callable[[], None] | Mark | None:
        if self._pause_s and self._work.empty():
            item = self._work.get()
            time.sleep(self._pause_s)
            return item
        return self._work.get()

    def _step(self, item: Callable[[], None] | Mark | None) -> None:
        if isinstance(item, Mark):
            item.settle(self._failure)
        elif item is not None and self._failure is None:
            try:
                item()
            except BaseException as error:  # also SystemExit: the thread's end would be silence
                self._failure = error


class LaterMark:
    """A point in a `Later`."""

    def __init__(self, later: Later, place: int) -> None:
        self._later = later
        self._place = place

    def done(self) -> bool:
        """Whether it has passed, once what can be done now has been."""
        return self._later.has_done(self._place)

    def wait(self) -> None:
        """Does what is left before it; raises what that raises."""
        self._later.do_until(self._place)


class Later:
    """As SideThread, for a device that is for one thread: jobs are done by whoever asks for them,
    those whose events have passed, or waits, all of them."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], None], Event | None]] = deque()
        self._given = self._done = 0

    def do(self, job: Callable[[], None], after: Event | None = None) -> None:
        """Does `job` after the jobs before it, and after the event."""
        self._given += 1
        self._jobs.append((job, after))

    def mark(self) -> LaterMark:
        """Passes when the jobs so far are done."""
        return LaterMark(self, self._given)

    def close(self) -> None:
        """Drops the jobs that are not done."""
        self._jobs.clear()

    def has_done(self, place: int) -> bool:
        """Whether the first `place` jobs are done."""
        while self._done < place and self._can_go_on():
            self._do_one()
        return self._done >= place

    def do_until(self, place: int) -> None:
        """Does the first `place` jobs, as far as they are not done."""
        while self._done < place:
            self._do_one()

    def _can_go_on(self) -> bool:
        after = self._jobs[0][1]
        return after is None or after.done()

    def _do_one(self) -> None:
        job, after = self._jobs[0]
        if after is not None:
            after.wait()
        self._jobs.popleft()
        self._done += 1
        job()
