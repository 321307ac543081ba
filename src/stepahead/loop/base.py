"""When the host looks.  Knows launch, land and retire; not what a plan says.

The one loop core: it launches and collects for every loop, and keeps the host's book.  A loop is
an order of those two calls and a depth D: the most steps launched and not yet retired.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from stepahead.observe.books import Books, Stage
from stepahead.plan import Plan, Result
from stepahead.types import Outputs


class Flight(Protocol):
    """A step that the device has, or will have, in hand."""

    def land(self) -> Result:
        """Waits, asleep, for this step's results and only for them; StepFailed, RunnerDied."""
        ...


class Executor(Protocol):
    """Where steps run."""

    def launch(self, plan: Plan) -> Flight:
        """Hands the plan over; never waits for the device."""
        ...

    def close(self) -> None:
        """Ends what it started and waits until it is gone.  Idempotent."""
        ...


class Planner(Protocol):
    """Who decides; the scheduler."""

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before a flight lands."""
        ...

    def retire(self, plan: Plan, result: Result) -> Outputs:
        """Applies what a step brought."""
        ...


class LoopCore:
    """Launches and collects, in order, and never more than `depth` steps ahead."""

    def __init__(self, planner: Planner, executor: Executor, depth: int, books: Books) -> None:
        self.depth = depth
        self.books = books
        self._planner = planner
        self._executor = executor
        self._flights: deque[tuple[Plan, Flight]] = deque()

    @property
    def flights(self) -> int:
        """Steps launched and not yet retired."""
        return len(self._flights)

    def launch(self) -> bool:
        """Plans a step and hands it over; False when there is nothing to run now."""
        assert len(self._flights) < self.depth, "launched more than D steps ahead"
        books = self.books
        books.enter(Stage.PLAN)
        plan = self._planner.plan()
        if plan is None:
            return False
        books.enter(Stage.LAUNCH)
        self._flights.append((plan, self._executor.launch(plan)))
        return True

    def collect(self) -> Outputs:
        """Lands and retires the oldest flight."""
        books = self.books
        plan, flight = self._flights[0]
        books.enter(Stage.WAIT)
        result = flight.land()
        books.enter(Stage.RETIRE)
        books.busy(result.step, result.device_start_ns, result.device_end_ns)
        self._flights.popleft()
        return self._planner.retire(plan, result)

    def forget(self) -> None:
        """Drops all flights; for a runner that is lost."""
        self._flights.clear()
