"""Jobs done in order, out of the way of the thread that gives them.  Knows no job's meaning."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Aside:
    """A thread that does jobs one by one; started by the first, so unused it costs nothing.

    One thread at a time puts.  `idle` lets it do the next job itself, in order, without a hop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Two counters with one writer each; a single one would need a lock.
        self._given = 0
        self._done = 0

    @property
    def idle(self) -> bool:
        """Whether every job given so far is done."""
        return self._given == self._done

    def put(self, job: Job) -> None:
        """Gives a job to the thread.  What it raises ends the thread: a job keeps its errors."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._given += 1
        self._jobs.put(job)

    def close(self) -> None:
        """Waits until all jobs are done, and ends the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._done += 1
