"""The runner in this thread: for tests and debugging, and inside the worker of `process`.

Turns what a model raises into StepFailed, for that step and all later ones.  Knows no processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepahead.errors import EngineClosed, StepFailed
from stepahead.executor.failures import ANSWERED, step_failed
from stepahead.plan import Plan, Result

if TYPE_CHECKING:
    from stepahead.runner.runner import Runner, RunnerFlight


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
        """Waits, asleep, for this step's results; StepFailed if it or a step before it failed."""
        if self._flight is not None and not self._executor.failure_at(self._step):
            try:
                return self._flight.land()
            except ANSWERED as error:
                self._executor.fail(self._step, error)
        failure = self._executor.failure_at(self._step)
        assert failure is not None, "a step that was not launched has no failure"
        raise failure


class InlineExecutor:
    """Launches in the caller's thread.  What the runner raises there is raised when the step lands:
    steps launched before it still count."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._failed: tuple[int, StepFailed] | None = None  # the first step that failed, and why
        self._closed = False

    def launch(self, plan: Plan) -> InlineFlight:
        """Returns when the runner's `launch` does; EngineClosed after `close`."""
        if self._closed:
            raise EngineClosed("a plan was launched after close(); start a new engine")
        flight = None
        if not self.failure_at(plan.step):
            try:
                flight = self._runner.launch(plan)
            except ANSWERED as error:
                self.fail(plan.step, error)
        return InlineFlight(self, plan.step, flight)

    def failure_at(self, step: int) -> StepFailed | None:
        """Why `step` can't count: it, or a step before it, failed."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] <= step else None

    def fail(self, step: int, error: BaseException) -> None:
        """`step` raised `error`: neither it nor any later step counts."""
        if not self.failure_at(step):
            self._failed = (step, step_failed(step, error))

    def close(self) -> None:
        """Closes the runner.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._runner.close()
