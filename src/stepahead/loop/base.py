"""When the host looks.  Knows launch, land and retire; not what a plan says.

The one loop core: it launches and collects for every loop, keeps the host's book and counts every
pull back to serial work.  A loop is an order of those two calls and a depth D: the most steps
launched and not yet retired.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

from stepahead.observe.observer import Observer
from stepahead.observe.stages import Enter, Stage
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


@runtime_checkable
class TellsStages(Protocol):
    """An executor that works in stages of its own on the host's thread."""

    def tell_stages(self, enter: Enter) -> None:
        """From now on `enter` hears of stages within a launch or a landing as they begin.

        A launch is called in ENCODE and goes on to LAUNCH; a landing, called in WAIT, to DECODE.
        """
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


# looked up once: members of an enumeration are slow to find
_PLAN, _WAIT, _RETIRE = Stage.PLAN, Stage.WAIT, Stage.RETIRE
_TIDY_EVERY = 8  # steps


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
        self._enter, self._handing = observer.books.enter, Stage.LAUNCH
        if isinstance(executor, TellsStages):
            executor.tell_stages(self._enter)
            self._handing = Stage.ENCODE
        # with when it was planned and handed over, and how many were in the air then
        self._flights: deque[tuple[Plan, Flight, int, int, int]] = deque()
        self._waited_ns = 0  # for the last flight that landed
        # of the oldest flight, tokens whose part has landed before the rest; None if there is none
        self._told: int | None = None
        self._held: SyncReason | None = None  # why the next landing comes before a launch

    @property
    def flights(self) -> int:
        """Steps launched and not yet retired."""
        return len(self._flights)

    @property
    def half_landed(self) -> bool:
        """Whether a part of the oldest flight has landed, and the rest must before any launch."""
        return self._told is not None

    def launch(self) -> bool:
        """Plans a step and hands it over; False when there is nothing to run now."""
        assert len(self._flights) < self.depth, "launched more than D steps ahead"
        assert self._told is None, "launched before the rest of a step has landed"
        enter, flights = self._enter, self._flights
        plan_ns = enter(_PLAN)
        held = self._planner.hold()
        plan = self._planner.plan() if held is None else None
        if plan is None:
            self._held = held or (SyncReason.DRAIN if self._planner.has_more else None)
            return False
        launch_ns = enter(self._handing)
        flight = self._executor.launch(plan)
        flights.append((plan, flight, plan_ns, launch_ns, len(flights) + 1))
        return True

    def collect(self) -> Outputs:
        """Lands and retires the oldest flight, or the first part of it: then the rest is next."""
        observer = self.observer
        books = observer.books
        plan, flight, plan_ns, launch_ns, flights = self._flights[0]
        began_ns = books.rest(_WAIT)
        if not plan.step % _TIDY_EVERY:
            observer.garbage.tidy(self._waited_ns)
        result = flight.land()
        land_ns = self._enter(_RETIRE)
        self._waited_ns = land_ns - began_ns
        if result.part == "first":
            self._told = result.samples
            return self._planner.retire(plan, result)
        books.busy(
            result.step,
            result.device_start_ns,
            result.device_end_ns,
            launch_ns,
            result.received_ns,
            result.submitted_ns,
            result.held,
        )
        more, self._told = self._told or 0, None
        observer.steps.add(plan, result, plan_ns, launch_ns, flights, land_ns, self._held, more)
        self._flights.popleft()
        self._count(result)
        return self._planner.retire(plan, result)

    def _count(self, result: Result) -> None:
        if self._held is not None:
            self.observer.syncs.add(self._held, result.samples)
            self._held = None
        for sync in result.syncs:
            self.observer.syncs.add(sync.reason, sync.rows)

    def forget(self) -> None:
        """Drops all flights; for a runner that is lost."""
        self._flights.clear()
        self._held = self._told = None
