"""When the host looks.  Knows launch, land and retire; not what a plan says.

The one loop core: it launches and collects for every loop, keeps the host's book and counts every
pull back to serial work.  A loop is an order of those two calls and a depth D: the most steps
launched and not yet retired.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from stepahead.observe.books import Stage
from stepahead.observe.observer import Observer
from stepahead.observe.steps import Launched
from stepahead.plan import Plan, Result
from stepahead.sync import SyncReason
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

    def hold(self) -> SyncReason | None:
        """Why the oldest flight should land before the next step is planned, if it should.

        None where nothing is in the air: what is put off would be put off for ever.
        """
        ...

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before a flight lands."""
        ...

    def retire(self, plan: Plan, result: Result) -> Outputs:
        """Applies what a step brought."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether any request needs a step that is not launched yet."""
        ...


class LoopCore:
    """Launches and collects, in order, and never more than `depth` steps ahead.

    The observer's `syncs` count what a landed step says of itself, and the landings that came
    before a launch because the planner held it (its reason) or had nothing to run while some
    request still needed steps (DRAIN; the last steps of a run are none).  Their rows are those of
    the step landed for it, as many as it sampled.
    """

    def __init__(
        self, planner: Planner, executor: Executor, depth: int, observer: Observer
    ) -> None:
        self.depth = depth
        self.observer = observer
        self._planner = planner
        self._executor = executor
        self._flights: deque[tuple[Plan, Flight, Launched]] = deque()
        self._held: SyncReason | None = None  # why the next landing comes before a launch

    @property
    def flights(self) -> int:
        """Steps launched and not yet retired."""
        return len(self._flights)

    def launch(self) -> bool:
        """Plans a step and hands it over; False when there is nothing to run now."""
        assert len(self._flights) < self.depth, "launched more than D steps ahead"
        books, flights = self.observer.books, self._flights
        plan_ns = books.enter(Stage.PLAN)
        held = self._planner.hold()
        plan = self._planner.plan() if held is None else None
        if plan is None:
            self._held = held or (SyncReason.DRAIN if self._planner.has_more else None)
            return False
        launched = Launched(plan_ns, books.enter(Stage.LAUNCH), len(flights) + 1)
        flights.append((plan, self._executor.launch(plan), launched))
        return True

    def collect(self) -> Outputs:
        """Lands and retires the oldest flight."""
        books = self.observer.books
        plan, flight, launched = self._flights[0]
        books.enter(Stage.WAIT)
        result = flight.land()
        land_ns = books.enter(Stage.RETIRE)
        books.busy(result.step, result.device_start_ns, result.device_end_ns)
        self.observer.steps.add(plan, result, launched, land_ns)
        self._flights.popleft()
        self._count(result)
        return self._planner.retire(plan, result)

    def _count(self, result: Result) -> None:
        if self._held is not None:
            self.observer.syncs.add(self._held, len(result.tokens))
            self._held = None
        for sync in result.syncs:
            self.observer.syncs.add(sync.reason, sync.rows)

    def forget(self) -> None:
        """Drops all flights; for a runner that is lost."""
        self._flights.clear()
        self._held = None
