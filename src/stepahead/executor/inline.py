"""The runner in this thread: for tests and debugging, and inside the worker of `process`.

Turns what a model raises into StepFailed, for that step and all later ones.  Knows no processes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from stepahead.errors import EngineClosed, StepFailed
from stepahead.executor.failures import ANSWERED, step_failed
from stepahead.plan import Plan, Result

if TYPE_CHECKING:
    from stepahead.runner.flight import RunnerFlight
    from stepahead.runner.runner import Runner

_LOG = logging.getLogger("stepahead")


class InlineFlight:
    """A step in the hands of this process's runner."""

    def __init__(self, executor: InlineExecutor, step: int, flight: RunnerFlight | None) -> None:
        self._executor = executor
        self._step = step
        self._flight = flight  # None: not launched, for a failure of this step or one before

    def ready(self) -> bool:
        """Whether `land` would return, or raise, at once."""
        if self._flight is None or self._executor.failure_at(self._step):
            return True
        try:
            return self._flight.ready()
        except ANSWERED as error:  # asking a device about an event is how its late errors surface
            self._executor.fail(self._step, error)
            return True

    def land(self) -> Result:
        """Waits, asleep, for this step's results; StepFailed if it or a step before it failed,
        EngineClosed after `close`, which has taken the device away."""
        if self._flight is not None and not self._executor.failure_at(self._step):
            with self._executor.at_work:
                try:
                    return self._flight.land()
                except ANSWERED as error:
                    self._executor.fail(self._step, error)
        failure = self._executor.failure_at(self._step)
        assert failure is not None, "a step that was not launched has no failure"
        raise failure


class _AtWork:
    """Calls inside the runner, of any thread; `end` is called once, when none is left.

    The device must not be taken away under a call, and who closes must not wait for one that may
    never come back.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end
        self._calls = 0
        self._ending = False
        self._lock = threading.RLock()  # a signal's handler may close in here

    def __enter__(self) -> None:
        with self._lock:
            if self._ending:
                raise EngineClosed(
                    "a step was launched or landed after close(); start a new engine"
                )
            self._calls += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._calls -= 1
            self._settle()

    def finish(self) -> None:
        """Ends now, or when the last call is through."""
        with self._lock:
            self._ending = True
            self._settle()

    def _settle(self) -> None:
        if self._ending and not self._calls and self._end is not None:
            end, self._end = self._end, None
            end()


class InlineExecutor:
    """Launches in the caller's thread.  What the runner raises there is raised when the step lands:
    steps launched before it still count.  `close` is for any thread; it waits for no call."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # stand-ins have neither
        self.notes: tuple[str, ...] = getattr(runner, "notes", ())
        self._launching = getattr(runner, "launching", contextlib.nullcontext)
        self._failing = threading.Lock()
        self._failed: tuple[int, StepFailed] | None = None  # the first step that failed, and why
        self.at_work = _AtWork(self._close_runner)

    def now_ns(self) -> int:
        """The clock of the times in results."""
        return self._runner.now_ns()

    def launching(self) -> contextlib.AbstractContextManager[object]:
        """Around all launches of a thread that does nothing else; they are shorter within."""
        return self._launching()

    def launch(self, plan: Plan) -> InlineFlight:
        """Returns when the runner's `launch` does; EngineClosed after `close`."""
        flight = None
        with self.at_work:
            if not self.failure_at(plan.step):
                try:
                    flight = self._runner.launch(plan)
                except ANSWERED as error:
                    self.fail(plan.step, error)
        return InlineFlight(self, plan.step, flight)

    def finish(self) -> None:
        """Gives the device the rows of the newest step that wait for masks, once these are there.
        What is raised meanwhile is raised when the step lands."""
        with self.at_work, contextlib.suppress(*ANSWERED):
            self._runner.finish()

    def failure_at(self, step: int) -> StepFailed | None:
        """Why `step` can't count: it, or a step before it, failed."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] <= step else None

    def fail(self, step: int, error: BaseException) -> None:
        """`step` raised `error`: neither it nor any later step counts.  Of several that fail in
        different threads at once the first one stays."""
        known = isinstance(error, StepFailed)  # a stage before this one has failed
        failure = error if known else step_failed(step, error)
        with self._failing:
            if not self.failure_at(step):
                self._failed = (step, failure)

    def close(self) -> None:
        """Closes the runner, when no call is inside it.  Idempotent, and raises nothing."""
        self.at_work.finish()

    def _close_runner(self) -> None:
        try:
            self._runner.close()
        except ANSWERED:  # a device that has failed may fail again; who closes is done with it
            _LOG.warning("the runner could not be closed; what it held may be lost", exc_info=True)
