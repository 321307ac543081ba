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
from stepahead.observe.stages import Enter, Stage
from stepahead.plan import Plan, Result
from stepahead.sync import Cause, Held


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


Spans = tuple[tuple[Cause, int], ...]


def _nothing(size: StepSize) -> Spans:
    return ()


@dataclass(frozen=True)
class Timing:
    """What a step costs, and whom.

    forward_ns   the device, from the step's first operation to its last
    launch_ns    the host's own thread: handing the plan over
    submit_ns    the runner's thread, before the device can begin; it submits one step at a time
    handover_ns  nobody: from the flight's end until the host has the result and is awake
    encode_ns    the host's own thread, before `launch_ns`
    decode_ns    the host's own thread, once it has the result
    held         the runner's thread, before `submit_ns`: what holds it up, and for how long
    arrive       the device, after `submit_ns`: what keeps the step from beginning, and for how long
    """

    forward_ns: Callable[[StepSize], int]
    launch_ns: int = 0
    submit_ns: int = 0
    handover_ns: int = 0
    encode_ns: int = 0
    decode_ns: int = 0
    held: Callable[[StepSize], Spans] = _nothing
    arrive: Callable[[StepSize], Spans] = _nothing


@dataclass(frozen=True)
class VirtualFlight:
    """A step that the device runs from `start_ns` to `end_ns`."""

    inner: Flight
    executor: VirtualExecutor
    start_ns: int
    end_ns: int
    received_ns: int
    submitted_ns: int
    held: tuple[Held, ...]

    def land(self) -> Result:
        """Moves the clock to when the result is there, unless it is later already."""
        self.executor.hand_back(self.end_ns)
        return replace(
            self.inner.land(),
            device_start_ns=self.start_ns,
            device_end_ns=self.end_ns,
            received_ns=self.received_ns,
            submitted_ns=self.submitted_ns,
            held=self.held,
        )


class VirtualExecutor:
    """Runs steps in order, one at a time, on a device that takes the time it is told."""

    def __init__(self, inner: Executor, clock: VirtualClock, timing: Timing) -> None:
        """`inner` gives the results; its flights must land at once."""
        self._inner = inner
        self._clock = clock
        self._timing = timing
        self._rows = 0
        self._submitted_ns = self._end_ns = 0
        self._enter: Enter = int  # tells nobody

    def tell_stages(self, enter: Enter) -> None:
        """As in `TellsStages`."""
        self._enter = enter

    def launch(self, plan: Plan) -> VirtualFlight:
        """Books the device's next free time; the clock moves by `encode_ns` and `launch_ns`."""
        clock, timing, size = self._clock, self._timing, self._size(plan)
        clock.work(timing.encode_ns)
        self._enter(Stage.LAUNCH)
        clock.work(timing.launch_ns)
        received_ns = max(self._submitted_ns, clock.now_ns())
        held = _spans(received_ns, timing.held(size))
        self._submitted_ns = (held[-1].end_ns if held else received_ns) + timing.submit_ns
        arriving = _spans(max(self._submitted_ns, self._end_ns), timing.arrive(size))
        start_ns = arriving[-1].end_ns if arriving else max(self._submitted_ns, self._end_ns)
        self._end_ns = start_ns + timing.forward_ns(size)
        return VirtualFlight(
            self._inner.launch(plan),
            self,
            start_ns,
            self._end_ns,
            received_ns,
            self._submitted_ns,
            held + arriving,
        )

    def hand_back(self, end_ns: int) -> None:
        """The host waits for what ended then, and takes it in."""
        self._clock.wait_until(end_ns + self._timing.handover_ns)
        if self._timing.decode_ns:
            self._enter(Stage.DECODE)
            self._clock.work(self._timing.decode_ns)

    def _size(self, plan: Plan) -> StepSize:
        if not plan.same_rows:
            self._rows = len(plan.rows)
        return StepSize(plan.step, self._rows, int(plan.chunk_table[:, 2].sum()))

    def close(self) -> None:
        """Closes the executor inside."""
        self._inner.close()


def _spans(from_ns: int, spans: Spans) -> tuple[Held, ...]:
    """One after the other."""
    held: list[Held] = []
    for cause, ns in spans:
        held.append(Held(cause, from_ns, from_ns + ns))
        from_ns += ns
    return tuple(held)
