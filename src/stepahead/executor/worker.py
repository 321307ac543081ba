"""The worker's side of `process`: receives plans, runs them, sends each result when it lands.

The main thread receives by itself: a reader thread between the pipe and the runner was measured to
cost 1 to 50 µs a step (benchmarks/transport.py), and a plan that is large waits on the host's side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import sys
import threading
import time
import traceback
from functools import partial
from importlib import import_module

from msgspec.structs import replace

from stepahead.errors import StepFailed
from stepahead.executor.aside import Aside
from stepahead.executor.channel import Channel, Kind
from stepahead.executor.child import die_with_parent
from stepahead.executor.ends import StageEnds, leave_with_neighbour
from stepahead.executor.failures import (
    ANSWERED,
    RelayedFailure,
    encode_build_failure,
    encode_step_failure,
)
from stepahead.executor.inline import InlineExecutor, InlineFlight
from stepahead.observe.garbage import Pauses, due
from stepahead.plan import NO_INTS, Part, Plan, Result, decode_control, decode_plan, encode_result
from stepahead.runner.spec import RunnerSpec
from stepahead.sync import Cause, Held

# How long the output thread asks for the interpreter's lock before the main thread must let it go,
# s. Python's 5 ms would keep a landed result back while a submit computes; and where that lets the
# lock go more often, only to take it again, each time is a new wait, up to the end of the submit.
_SWITCH_S = 2e-6
_TURN_NS = 1_000_000  # the host's turn, as far as a collection may count on it


def main(read_fd: int, write_fd: int) -> None:
    """The whole life of a worker whose end of the channel is these two."""
    faulthandler.enable()
    sys.setswitchinterval(_SWITCH_S)
    die_with_parent()
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)  # else a process started here would keep the channel open
    channel = Channel(read_fd, write_fd)
    threading.Thread(target=_leave_with_host, args=(channel,), daemon=True).start()
    try:
        worker = _build(channel)
        if worker is not None:
            gc.freeze()  # the model: no collection looks at it again
            gc.disable()  # the worker says when
            worker.run()
        channel.close()
    except BaseException as error:
        if not isinstance(error, EOFError | BrokenPipeError):  # the host is gone
            traceback.print_exc()
        os._exit(1)  # at once: a model's own threads could keep a dead worker alive


def _leave_with_host(channel: Channel) -> None:
    channel.wait_for_end()
    os._exit(1)  # the main thread may be in a long forward


def _build(channel: Channel) -> Worker | None:
    kind, payload = channel.receive()
    while kind == Kind.IMPORT:
        _load(payload.decode().split())
        kind, payload = channel.receive()
    builder, spec, ends = pickle.loads(payload)
    module, name = builder.split(":")
    stage = None if ends is None else _Stage(spec, ends)
    links = () if stage is None else (stage.links,)
    try:
        runner = getattr(import_module(module), name)(spec, *links)
    except ANSWERED as error:
        channel.send(Kind.BUILD_FAILED, encode_build_failure(error))
        return None
    executor = InlineExecutor(runner)
    channel.send(Kind.READY, "\n".join(executor.notes).encode())
    return Worker(channel, executor, stage)


def _load(modules: list[str]) -> None:
    """Imports what the runner will need, while the host still reads what it is to be."""
    gc.disable()  # all that modules make stays: to look for garbage in it took a fifth of the time
    for module in modules:
        with contextlib.suppress(Exception):  # whoever builds the runner meets it again
            import_module(module)
    gc.freeze()
    gc.enable()


class _Stage:
    """What a worker is that has one of several stages: where it stands, and its links."""

    def __init__(self, spec: RunnerSpec, ends: StageEnds) -> None:
        from stepahead.executor.links import stage_links  # torch comes with it

        threading.Thread(target=leave_with_neighbour, args=(ends,), daemon=True).start()
        self.links = stage_links(ends)
        self._name = f"stage {spec.stage + 1} of {spec.stages}"

    @property
    def is_last(self) -> bool:
        """Whether it has results; others say at most that a step has failed, to the next."""
        return self.links.states_out is None

    def named(self, failure: StepFailed) -> str:
        """The failure as text, with the name of the stage where it happened."""
        text = encode_step_failure(failure)
        return text if isinstance(failure, RelayedFailure) else f"{self._name}: {text}"


class Worker:
    """Runs plans in order until it is told to stop."""

    def __init__(
        self, channel: Channel, executor: InlineExecutor, stage: _Stage | None = None
    ) -> None:
        """`stage`: which of several, None for a model in one piece."""
        self._stage = stage
        self._channel = channel
        self._executor = executor
        self._output = Aside("stepahead-output")
        self._last_ns = Pauses().last_ns
        self._held: tuple[Held, ...] = ()  # what held it up since the last step

    def run(self) -> None:
        """Returns after a shutdown; EOFError or BrokenPipeError when the host goes without one."""
        with self._executor.launching():
            while (plan := self._next_plan()) is not None:
                self._step(plan)
                self._tidy()
        self._output.close()  # the device is not taken away under a flight
        self._executor.close()

    def _next_plan(self) -> Plan | None:
        kind, payload = self._channel.receive()
        if kind == Kind.PLAN:
            return decode_plan(payload)
        assert kind == Kind.CONTROL, f"a frame of kind {kind} came where plans do"
        decode_control(payload)  # a shutdown: there is no other, and the decoder refuses any
        return None

    def _step(self, plan: Plan) -> None:
        flight = self._executor.launch(plan)
        held, self._held = self._held, ()
        while self._output.idle and flight.ready():
            if self._answer(plan.step, flight, held) != "first":
                return
            self._executor.finish()
        self._output.put(partial(self._answer_or_die, plan.step, flight, held))
        self._executor.finish()

    def _tidy(self) -> None:
        """Collects garbage while it is the host's turn; when long due, whoever's turn it is."""
        generation = due(_TURN_NS, self._last_ns)
        if generation is not None and self._channel.wait(0):  # the next plan is there
            generation = due(0, self._last_ns)
        if generation is None:
            return
        began_ns = time.perf_counter_ns()
        gc.collect(generation)
        ended_ns = time.perf_counter_ns()
        self._last_ns[generation] = ended_ns - began_ns
        self._held = (Held(Cause.GARBAGE_COLLECTION, began_ns, ended_ns),)

    def _answer(self, step: int, flight: InlineFlight, held: tuple[Held, ...]) -> Part:
        """Lands what is next of the step, and sends it; which part that was."""
        stage = self._stage
        try:
            result = flight.land()
            if held and result.part != "first":
                result = replace(result, held=held + result.held)
        except StepFailed as failure:
            text = encode_step_failure(failure) if stage is None else stage.named(failure)
            result = Result(step, NO_INTS, error=text)
        if stage is None or stage.is_last:
            self._channel.send(Kind.RESULT, encode_result(result))
        elif result.error:
            assert stage.links.states_out is not None
            stage.links.states_out.fail(step, result.error)
        return result.part

    def _answer_or_die(self, step: int, flight: InlineFlight, held: tuple[Held, ...]) -> None:
        try:
            while self._answer(step, flight, held) == "first":
                pass
        except BaseException:  # a thread that ends in silence would leave the host waiting
            traceback.print_exc()
            os._exit(1)
