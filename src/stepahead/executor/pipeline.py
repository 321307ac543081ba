"""The runners of a model's stages, each in a process of its own, as one executor.

The host sends each plan to all stages and takes results from the last; what the stages hand to each
other goes through links of theirs.  When one stage dies all end, and the error names it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakMethod

from stepahead.errors import RunnerDied, StepaheadError
from stepahead.executor.child import stop_all
from stepahead.executor.ends import LOST, close_ends, open_links
from stepahead.executor.process import BUILDER, GRACE_S, START_S, ProcessExecutor, ProcessFlight
from stepahead.observe.stages import Enter, Stage
from stepahead.plan import Plan, Result, encode_plan
from stepahead.runner.spec import RunnerSpec


class PipelineFlight:
    """A step in the stages' hands."""

    def __init__(self, flight: ProcessFlight, blame: Callable[[RunnerDied], RunnerDied]) -> None:
        self._flight = flight
        self._blame = blame

    def land(self) -> Result:
        """Waits, asleep, for this step's results; StepFailed, RunnerDied, EngineClosed."""
        try:
            return self._flight.land()
        except RunnerDied as error:
            raise self._blame(error) from None


class PipelineExecutor:
    """A worker process for each stage.  `launch` and `land` are for one thread; `close` is for any,
    and ends a wait of that one."""

    def __init__(
        self,
        spec: RunnerSpec,
        start_timeout_s: float = START_S,
        builder: str = BUILDER,
    ) -> None:
        """Starts all workers and waits until their runners stand; as ProcessExecutor, and what is
        raised names the stage."""
        self._owner = os.getpid()
        self._closing = threading.Lock()  # taken by the first to close, for good
        self._enter: Enter = int  # tells nobody
        self._stages: list[ProcessExecutor] = []
        try:
            self._start(spec, builder)
            self._await_runners(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: RunnerSpec, builder: str) -> None:
        ends = open_links(spec)
        tell = WeakMethod(self._hang_up)
        try:
            for stage in range(spec.stages):
                one = replace(spec, stage=stage)
                mine = ends.pop(0)
                self._stages.append(ProcessExecutor(one, builder=builder, ends=mine, on_end=tell))
        finally:
            close_ends(ends)

    def _await_runners(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for number, stage in enumerate(self._stages):
            try:
                stage.await_runner(max(0.0, deadline_s - time.monotonic()))
            except RunnerDied as error:  # maybe because another could not be built, and has left
                raise self._build_failure() or self._blame(error) from None
            except StepaheadError as error:
                raise self._named(number, error) from None

    def _build_failure(self) -> StepaheadError | None:
        for number, stage in enumerate(self._stages):
            if (error := stage.build_failure()) is not None:
                return self._named(number, error)
        return None

    def _named(self, stage: int, error: StepaheadError) -> StepaheadError:
        error.args = (f"{stage_name(stage, len(self._stages))}: {error}",)
        return error

    def _hang_up(self) -> None:
        # a stage that is stuck would not notice that another is gone: the host must
        for stage in self._stages:
            stage.hang_up()

    @property
    def pids(self) -> tuple[int, ...]:
        """The stages' processes."""
        return tuple(stage.pid for stage in self._stages)

    def tell_stages(self, enter: Enter) -> None:
        """As in `TellsStages`."""
        self._enter = enter
        self._stages[-1].tell_stages(enter)

    def launch(self, plan: Plan) -> PipelineFlight:
        """Hands the plan to each stage, whatever they are busy with; RunnerDied, EngineClosed."""
        data = encode_plan(plan)
        self._enter(Stage.LAUNCH)
        try:
            for stage in self._stages:
                stage.send(data)
        except RunnerDied as error:
            raise self._blame(error) from None
        return PipelineFlight(self._stages[-1].flight(plan.step), self._blame)

    def _blame(self, error: RunnerDied) -> RunnerDied:
        """The death of the stage that was the first to go; `error` was noticed at another, maybe.

        Those that have lost a neighbour leave by themselves; those that are stuck are stopped.
        """
        deadline_s = time.monotonic() + GRACE_S
        culprit = self._culprit()
        while culprit is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
            culprit = self._culprit()
        stop_all([stage.child for stage in self._stages], GRACE_S)
        if culprit is None:
            return error
        name = stage_name(culprit, len(self._stages))
        return RunnerDied(f"{name}: {self._stages[culprit].death()}")

    def _culprit(self) -> int | None:
        for number, stage in enumerate(self._stages):
            if stage.child.wait(0) and stage.child.code != LOST:
                return number
        return None

    def close(self) -> None:
        """Asks all workers to leave, ends those that won't, and leaves nothing of them, in CLOSE_S
        of `executor.process`.

        Idempotent: whoever comes second, from a signal's handler maybe, returns at once.
        """
        if not self._closing.acquire(blocking=False):
            return
        try:
            if os.getpid() == self._owner:
                for stage in self._stages:
                    stage.leave()
                stop_all([stage.child for stage in self._stages], GRACE_S)
        finally:
            for stage in self._stages:
                stage.close()


def stage_name(stage: int, stages: int) -> str:
    """As errors tell it."""
    return f"stage {stage + 1} of {stages}"
