"""A thread that stands for the copy stream where copies to the host block whoever asks for them.

Under confidential computing, and with memory that is not pinned, such a copy returns when it has
run, which is after the forward it waits for: the host could not run ahead.  Here it is this thread
that waits: for the forward's event, on the host, then for the copy.  Jobs run in the order given.

After a job has failed the later ones do not run, and every mark behind it raises that error: what
a step would copy out after a failed one does not count anyway.

Knows no device: a job is a function.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

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


class CopyThread:
    """One daemon thread.  Jobs and marks come from one thread of the host."""

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        """`begin` runs first, in the thread."""
        self._work: queue.SimpleQueue[Callable[[], None] | Mark | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stepahead-copy", daemon=True)
        self.do(begin)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Runs `job` after the jobs before it."""
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
        while (item := self._work.get()) is not None:
            self._step(item)

    def _step(self, item: Callable[[], None] | Mark | None) -> None:
        if isinstance(item, Mark):
            item.settle(self._failure)
        elif item is not None and self._failure is None:
            try:
                item()
            except BaseException as error:  # also SystemExit: the thread's end would be silence
                self._failure = error
