"""The runner in a process of its own: the host plans and retires while the worker computes.

Hands plans over and takes results back in order.  Knows no models and not what a plan says.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from weakref import WeakMethod

from stepahead.errors import EngineClosed, EngineError, RunnerDied
from stepahead.executor.channel import Kind, open_channel
from stepahead.executor.child import END_S, Child
from stepahead.executor.failures import decode_build_failure, decode_step_failure
from stepahead.observe.stages import Enter, Stage
from stepahead.plan import (
    Control,
    Plan,
    Result,
    decode_result,
    encode_control,
    encode_plan,
)
from stepahead.runner.spec import RunnerSpec

# What a channel raises: the worker is gone, or another thread has closed the channel.
_GONE = (EOFError, OSError, ValueError)
# looked up once: members of an enumeration are slow to find
_LAUNCH, _DECODE = Stage.LAUNCH, Stage.DECODE
_GRACE_S = 1.0  # a worker that is not in a forward needs half of it, most for unloading torch
# The most that `close` takes, whatever the worker is at: a forward without an end, a copy that
# never lands, a device that is gone.  No flight is waited for.
CLOSE_S = _GRACE_S + END_S


class ProcessFlight:
    """A step in the worker's hands."""

    __slots__ = ("_executor", "result", "step")

    def __init__(self, executor: ProcessExecutor, step: int) -> None:
        self._executor = executor
        self.step = step
        self.result: Result | None = None

    def land(self) -> Result:
        """Waits, asleep, for this step's results; StepFailed, RunnerDied, EngineClosed."""
        result = self.result or self._executor.receive(self)
        if result.error:
            raise decode_step_failure(result.error)
        return result


class ProcessExecutor:
    """One worker process.  `launch` and `land` are for one thread; `close` is for any, and ends
    a wait of that one."""

    def __init__(
        self,
        spec: RunnerSpec,
        start_timeout_s: float = 600.0,
        builder: str = "stepahead.runner.build:build_runner",
    ) -> None:
        """Starts the worker and waits until its runner stands.

        `builder` is the "module:function" that makes a runner of the spec, in the worker.  What it
        raises is raised here: ModelError, ConfigError and their kin as they are, all else as
        EngineError; RunnerDied when the worker did not live to say.
        """
        self._channel, fds = open_channel()
        self._flights: deque[ProcessFlight] = deque()
        self._enter: Enter = int  # tells nobody
        self._closed = False
        self._closing = threading.Lock()  # taken by the first to close, for good
        self._owner = os.getpid()
        try:
            self._child = Child(fds, WeakMethod(self._channel.hang_up))
        except BaseException:
            self._channel.close()
            raise
        try:
            self._await_runner(spec, builder, start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self._child.pid

    def tell_stages(self, enter: Enter) -> None:
        """As in `TellsStages`."""
        self._enter = enter

    def launch(self, plan: Plan) -> ProcessFlight:
        """Hands the plan over, whatever the worker is busy with; RunnerDied, EngineClosed."""
        self._check_owner()
        data = encode_plan(plan)
        self._enter(_LAUNCH)
        try:
            self._channel.send(Kind.PLAN, data)
        except _GONE:
            raise self._death() from None
        flight = ProcessFlight(self, plan.step)
        self._flights.append(flight)
        return flight

    def receive(self, flight: ProcessFlight) -> Result:
        """Takes results in, which come in the order of launch, until that of `flight` is there."""
        self._check_owner()
        while flight.result is None:
            frame = self._next_frame()[1]
            self._enter(_DECODE)
            result = decode_result(frame)
            oldest = self._flights.popleft()
            assert oldest.step == result.step, "the worker answered out of order"
            oldest.result = result
        return flight.result

    def _check_owner(self) -> None:
        # the channel is the parent's: what a forked child sends or takes there, the parent lacks
        if os.getpid() != self._owner:
            raise EngineClosed(
                f"the engine is that of process {self._owner}, and this is a fork of it; "
                "start a new one here"
            )

    def close(self) -> None:
        """Asks the worker to leave, ends it if it won't, and leaves nothing of it, in CLOSE_S.

        Idempotent: whoever comes second, from a signal's handler maybe, returns at once.
        """
        if not self._closing.acquire(blocking=False):
            return
        self._closed = True
        if os.getpid() != self._owner:
            return  # a forked child's copy: the worker is its parent's, and lives on
        try:
            self._channel.send(Kind.CONTROL, encode_control(Control("shutdown")))
        except OSError:
            pass  # gone already
        finally:
            self._child.stop(_GRACE_S)
            self._channel.hang_up()  # nothing is left to wait for, whatever is still unsent
            self._channel.close()

    def _await_runner(self, spec: RunnerSpec, builder: str, timeout_s: float) -> None:
        # pickle and not msgpack: the worker must see the very options an inline runner would
        start = pickle.dumps((builder, spec))
        try:
            self._channel.send(Kind.START, start)
        except _GONE:
            raise self._death() from None
        if not self._channel.wait(timeout_s):
            raise EngineError(
                f"the runner was not built within {timeout_s:g} s; "
                "give start_timeout_s more, or look on stderr for what it waits for"
            )
        kind, payload = self._next_frame()
        if kind == Kind.BUILD_FAILED:
            raise decode_build_failure(payload)

    def _next_frame(self) -> tuple[int, bytes]:
        try:
            return self._channel.receive()
        except _GONE:
            raise self._death() from None

    def _death(self) -> EngineError:
        if self._closed:
            return EngineClosed("the engine was closed; start a new one")
        self._child.stop(_GRACE_S)  # it may have closed its pipes before it is gone
        return RunnerDied(
            f"the runner's process {self.pid} {self._child.end()}; start the engine again"
        )
