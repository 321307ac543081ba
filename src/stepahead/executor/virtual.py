"""Steps on a virtual clock: forwards, submits and hand-overs are numbers, and nobody waits.

What a step gives comes from another executor, which answers at once; this one says when.  No
torch, no threads, no chance: the same plans take the same time, to the nanosecond.  Knows how
large a plan is, not what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from stepahead.loop.base import Executor, Flight
from stepahead.plan import Plan, Result


class VirtualClock:
    """The host's time.  Only work and waiting move it, so between two calls it stands still."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since it was made."""
        return self._now_ns

    def work(self, ns: int) -> None:
        """The host is busy for this long."""
        assert ns >= 0, f"{ns} ns of work would turn the clock back"
        self._now_ns += ns

    def wait_until(self, at_ns: int) -> None:
        """The host sleeps until then; not at all if that is past."""
        self._now_ns = max(self._now_ns, at_ns)


@dataclass(frozen=True)
class StepSize:
    """How large a plan is: its decode rows, and the prompt positions of its chunks."""

    step: int
    rows: int
    chunk_tokens: int


@dataclass(frozen=True)
class Timing:
    """What a step costs, and whom.

    forward_ns   the device, from the step's first operation to its last
    launch_ns    the host's own thread: handing the plan over
    submit_ns    the runner's thread, before the device can begin; it submits one step at a time
    handover_ns  nobody: from the flight's end until the host has the result and is awake
    """

    forward_ns: Callable[[StepSize], int]
    launch_ns: int = 0
    submit_ns: int = 0
    handover_ns: int = 0


@dataclass(frozen=True)
class VirtualFlight:
    """A step that the device runs from `start_ns` to `end_ns`."""

    inner: Flight
    clock: VirtualClock
    start_ns: int
    end_ns: int
    arrives_ns: int

    def land(self) -> Result:
        """Moves the clock to when the result is there, unless it is later already."""
        self.clock.wait_until(self.arrives_ns)
        return replace(self.inner.land(), device_start_ns=self.start_ns, device_end_ns=self.end_ns)


class VirtualExecutor:
    """Runs steps in order, one at a time, on a device that takes the time it is told."""

    def __init__(self, inner: Executor, clock: VirtualClock, timing: Timing) -> None:
        """`inner` gives the results; its flights must land at once."""
        self._inner = inner
        self._clock = clock
        self._timing = timing
        self._rows = 0
        self._submitted_ns = self._end_ns = 0

    def launch(self, plan: Plan) -> VirtualFlight:
        """Books the device's next free time; the clock moves by `launch_ns` and no more."""
        clock, timing = self._clock, self._timing
        clock.work(timing.launch_ns)
        self._submitted_ns = max(self._submitted_ns, clock.now_ns()) + timing.submit_ns
        start_ns = max(self._submitted_ns, self._end_ns)
        self._end_ns = start_ns + timing.forward_ns(self._size(plan))
        arrives_ns = self._end_ns + timing.handover_ns
        return VirtualFlight(self._inner.launch(plan), clock, start_ns, self._end_ns, arrives_ns)

    def _size(self, plan: Plan) -> StepSize:
        if not plan.same_rows:
            self._rows = len(plan.rows)
        return StepSize(plan.step, self._rows, int(plan.chunk_table[:, 2].sum()))

    def close(self) -> None:
        """Closes the executor inside."""
        self._inner.close()
