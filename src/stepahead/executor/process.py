"""The runner in a process of its own: the host plans and retires while the worker computes.

Hands plans over and takes results back in order.  Knows no models and not what a plan says.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakMethod

from stepahead.errors import EngineClosed, EngineError, RunnerDied, StepaheadError
from stepahead.executor.channel import Kind, open_channel
from stepahead.executor.child import END_S, Child
from stepahead.executor.ends import StageEnds
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
GRACE_S = 1.0  # a worker that is not in a forward needs half of it, most for unloading torch
# The most that `close` takes, whatever the worker is at: a forward without an end, a copy that
# never lands, a device that is gone.  No flight is waited for.
CLOSE_S = GRACE_S + END_S
START_S = 600.0
BUILDER = "stepahead.runner.build:build_runner"


class ProcessFlight:
    """A step in the worker's hands."""

    __slots__ = ("_executor", "parts", "step")

    def __init__(self, executor: ProcessExecutor, step: int) -> None:
        self._executor = executor
        self.step = step
        self.parts: deque[Result] = deque()  # that have come, and nobody has landed

    def land(self) -> Result:
        """Waits, asleep, for this step's results, or their next part; StepFailed, RunnerDied,
        EngineClosed."""
        if not self.parts:
            self._executor.receive(self)
        result = self.parts[0]
        if result.part == "first":
            self.parts.popleft()
        if result.error:
            raise decode_step_failure(result.error)
        return result


class StartedWorker:
    """A worker's process that has not heard yet what it is to run, and loads modules meanwhile.

    A ProcessExecutor takes it over; else `close` ends it.
    """

    def __init__(
        self,
        modules: tuple[str, ...] = (),
        more_fds: tuple[int, ...] = (),
        on_end: WeakMethod[Callable[[], None]] | None = None,
    ) -> None:
        """Starts it and waits for nothing; OSError when nothing can start.

        `modules` are those that its runner will need: what is wrong with one is told by whoever
        builds the runner.  `more_fds` and `on_end` as in `Child`.
        """
        self._on_end = on_end
        self.channel, fds = open_channel()
        try:
            self.child = Child(fds, WeakMethod(self._ended), more_fds)
        except BaseException:
            self.channel.close()
            raise
        if modules:
            with contextlib.suppress(*_GONE):  # whoever tells it what to run is told so
                self.channel.send(Kind.IMPORT, " ".join(modules).encode())

    def _ended(self) -> None:
        self.channel.hang_up()
        if self._on_end is not None and (tell := self._on_end()) is not None:
            tell()

    def close(self) -> None:
        """Ends it without a word, for it would not hear while it loads.  Idempotent."""
        self.child.stop(0.0)
        self.channel.hang_up()
        self.channel.close()


class ProcessExecutor:
    """One worker process.  `launch` and `land` are for one thread; `close` is for any, and ends
    a wait of that one."""

    def __init__(
        self,
        spec: RunnerSpec,
        start_timeout_s: float = START_S,
        builder: str = BUILDER,
        *,
        ends: StageEnds | None = None,
        on_end: WeakMethod[Callable[[], None]] | None = None,
        worker: StartedWorker | None = None,
    ) -> None:
        """Starts the worker, if none is given that was, and waits until its runner stands.

        `builder` is the "module:function" that makes a runner of the spec, in the worker.  What it
        raises is raised here: ModelError, ConfigError and their kin as they are, all else as
        EngineError; RunnerDied when the worker did not live to say.

        One of several stages is linked with others by its `ends`, which it takes over, tells
        `on_end` when its process has ended, and is waited for by `await_runner`.
        """
        self._flights: deque[ProcessFlight] = deque()
        self._enter: Enter = int  # tells nobody
        self.notes: tuple[str, ...] = ()  # what the runner found out as it loaded the model
        self._closed = False
        self._closing = threading.Lock()  # taken by the first to close, for good
        self._owner = os.getpid()
        if worker is None:
            worker = StartedWorker((), () if ends is None else ends.fds, on_end)
        self._worker = worker  # held: its end is told through it
        self._channel, self.child = worker.channel, worker.child
        try:
            self._send_start(spec, builder, ends)
            if ends is None:
                self.await_runner(start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self.child.pid

    def tell_stages(self, enter: Enter) -> None:
        """As in `TellsStages`."""
        self._enter = enter

    def launch(self, plan: Plan) -> ProcessFlight:
        """Hands the plan over, whatever the worker is busy with; RunnerDied, EngineClosed."""
        self._check_owner()
        data = encode_plan(plan)
        self._enter(_LAUNCH)
        self.send(data)
        return self.flight(plan.step)

    def send(self, data: bytes) -> None:
        """Hands an encoded plan over."""
        try:
            self._channel.send(Kind.PLAN, data)
        except _GONE:
            raise self.death() from None

    def flight(self, step: int) -> ProcessFlight:
        """The step whose plan was just handed over; its result will be received."""
        flight = ProcessFlight(self, step)
        self._flights.append(flight)
        return flight

    def receive(self, flight: ProcessFlight) -> None:
        """Takes results in, which come in the order of launch, until one of `flight` is there."""
        self._check_owner()
        while not flight.parts:
            frame = self._next_frame()[1]
            self._enter(_DECODE)
            result = decode_result(frame)
            oldest = self._flights[0]
            assert oldest.step == result.step, "the worker answered out of order"
            oldest.parts.append(result)
            if result.part != "first":
                self._flights.popleft()

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
            self.leave()
        finally:
            self.child.stop(GRACE_S)
            self.hang_up()  # nothing is left to wait for, whatever is still unsent
            self._channel.close()

    def leave(self) -> None:
        """Asks the worker to leave, and waits for nothing: the first half of `close`."""
        self._closed = True
        with contextlib.suppress(OSError):  # gone already
            self._channel.send(Kind.CONTROL, encode_control(Control("shutdown")))

    def hang_up(self) -> None:
        """Ends every wait for the worker; what it has sent before still counts."""
        self._channel.hang_up()

    def _send_start(self, spec: RunnerSpec, builder: str, ends: StageEnds | None) -> None:
        # pickle and not msgpack: the worker must see the very options an inline runner would
        try:
            self._channel.send(Kind.START, pickle.dumps((builder, spec, ends)))
        except _GONE:
            raise self.death() from None

    def await_runner(self, timeout_s: float) -> None:
        """Waits until the worker's runner stands."""
        if not self._channel.wait(timeout_s):
            raise EngineError(
                f"the runner was not built within {timeout_s:.3g} s; "
                "give start_timeout_s more, or look on stderr for what it waits for"
            )
        kind, payload = self._next_frame()
        if kind == Kind.BUILD_FAILED:
            raise decode_build_failure(payload)
        self.notes = tuple(payload.decode().splitlines())

    def build_failure(self) -> StepaheadError | None:
        """Why the runner could not be built, if the worker has said so by now."""
        try:
            kind, payload = self._channel.receive() if self._channel.wait(0) else (Kind.READY, b"")
        except _GONE:
            return None
        return decode_build_failure(payload) if kind == Kind.BUILD_FAILED else None

    def _next_frame(self) -> tuple[int, bytes]:
        try:
            return self._channel.receive()
        except _GONE:
            raise self.death() from None

    def death(self) -> EngineError:
        """How the worker ended, or that the engine was closed; stops it if it is there still."""
        if self._closed:
            return EngineClosed("the engine was closed; start a new one")
        self.child.stop(GRACE_S)  # it may have closed its pipes before it is gone
        return RunnerDied(
            f"the runner's process {self.pid} {self.child.end()}; start the engine again"
        )
