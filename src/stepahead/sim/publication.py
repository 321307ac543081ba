"""Does a token wait for the next submit?  The real engine and worker around a submit of 100 ms.

Regime: the process executor; a stand-in for the runner whose launch takes `submit_ms` and whose
flights land while the next launch is under way.  Three kinds of submit: one that sleeps, one that
computes in Python without a pause, and one that computes and lets the interpreter's lock go for an
instant every millisecond.  Measured from a step's end on the device to `engine.step()` returning
its tokens; both processes read the same monotonic clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.engine import Engine
from stepahead.executor.process import ProcessExecutor
from stepahead.plan import Plan, Result
from stepahead.runner.spec import RunnerSpec
from stepahead.scheduler.stop import Vocabulary
from stepahead.types import SamplingParams

SUBMIT_MS = 100.0
FORWARD_MS = 30.0  # lands with most of the next submit still to come
KINDS = ("asleep", "busy", "slices")
LOOPS = (("serial", None), ("overlap", None), ("batch-queue", 2), ("batch-queue", 4))
_VOCAB = 128
_TOKEN = 3
_ROWS = 32
_SLICE_S = 1e-3
_WARM = 4


# --- in the worker ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmitFlight:
    """A step that ends on a device at a time known beforehand."""

    result: Result

    def ready(self) -> bool:
        """Whether it has ended."""
        return time.perf_counter_ns() >= self.result.device_end_ns

    def land(self) -> Result:
        """Sleeps until then."""
        time.sleep(max(0, self.result.device_end_ns - time.perf_counter_ns()) / 1e9)
        return self.result


class SlowSubmit:
    """A runner whose launch takes its time."""

    def __init__(
        self, submit: Callable[[float], None], submit_ms: float, forward_ms: float
    ) -> None:
        self._submit = submit
        self._submit_s = submit_ms / 1e3
        self._forward_ns = round(forward_ms * 1e6)
        self._rows = self._end_ns = 0

    def launch(self, plan: Plan) -> SubmitFlight:
        """Returns after `submit_ms`; the step runs from then on."""
        self._submit(time.perf_counter() + self._submit_s)
        if not plan.same_rows:
            self._rows = len(plan.rows)
        start_ns = max(time.perf_counter_ns(), self._end_ns)
        self._end_ns = start_ns + self._forward_ns
        count = self._rows + int(plan.chunk_table[:, 3].sum())
        tokens = np.full(count, _TOKEN, np.int32)
        return SubmitFlight(Result(plan.step, tokens, start_ns, self._end_ns))

    def close(self) -> None:
        """Nothing is held."""


def _asleep(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.perf_counter()))


def _busy(until_s: float) -> None:
    while time.perf_counter() < until_s:
        pass


def _slices(until_s: float) -> None:
    # the lock is let go for less time than a waiting thread takes to wake up, and taken again
    while time.perf_counter() < until_s:
        _busy(time.perf_counter() + _SLICE_S)
        os.stat("/")


_SUBMITS = {"asleep": _asleep, "busy": _busy, "slices": _slices}


def build_runner(spec: RunnerSpec) -> SlowSubmit:
    """The stand-in; options `kind`, `submit_ms`, `forward_ms`."""
    options = spec.options
    return SlowSubmit(_SUBMITS[options["kind"]], options["submit_ms"], options["forward_ms"])


# --- on the host ------------------------------------------------------------------------------


def latencies_ms(kind: str, loop: str, depth: int | None, steps: int) -> list[float]:
    """For each of `steps` steady steps, from its end on the device to the caller's having it."""
    return [(out_ns - ended_ns) / 1e6 for _, ended_ns, out_ns in _run(kind, loop, depth, steps)]


def launches_ms(kind: str, loop: str, depth: int | None, steps: int) -> list[float]:
    """When each of `steps` steady steps began on the device, which is when its submit was over."""
    return [began_ns / 1e6 for began_ns, _, _ in _run(kind, loop, depth, steps)]


def _run(kind: str, loop: str, depth: int | None, steps: int) -> list[tuple[int, int, int]]:
    """(began, ended on the device, was out) of each steady step, in ns."""
    engine = _engine(kind, loop, depth)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=steps + 64)
        for _ in range(_ROWS):
            engine.add([_TOKEN] * 16, params)
        out_ns: list[int] = []
        while len(out_ns) < _WARM + steps:
            if engine.step() is not None:
                out_ns.append(time.perf_counter_ns())
        events = engine.books.recent()
    finally:
        engine.close()
    began_ns, ended_ns = events.busy_start_ns.tolist(), events.busy_end_ns.tolist()
    return list(zip(began_ns, ended_ns, out_ns, strict=True))[_WARM:]


def _engine(kind: str, loop: str, depth: int | None) -> Engine:
    config = EngineConfig(
        "none", loop=loop, depth=depth, max_rows=_ROWS, num_pages=_ROWS * 16, threads=1
    )
    resolved = resolve(config, ModelFacts(_VOCAB, 1024, (), 1), bytes_available=1 << 40)
    options = {"kind": kind, "submit_ms": SUBMIT_MS, "forward_ms": FORWARD_MS}
    builder = "stepahead.sim.publication:build_runner"
    executor = ProcessExecutor(RunnerSpec("", options), builder=builder)
    return Engine(resolved, executor, Vocabulary([b"x"] * _VOCAB))


def measure(steps: int = 8, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """Median and largest latency for each loop and kind of submit."""
    cases = []
    for kind in kinds:
        for loop, depth in LOOPS:
            found = latencies_ms(kind, loop, depth, steps)
            name = loop if depth is None else f"{loop} {depth}"
            cases.append(
                {
                    "submit": kind,
                    "loop": name,
                    "median_ms": round(statistics.median(found), 2),
                    "largest_ms": round(max(found), 2),
                }
            )
    return {"bench": "publication", "submit_ms": SUBMIT_MS, "cases": cases}
