"""The four classes of host work in a decode step, timed one by one.

Regime: steady greedy decode with the real runner in this thread, on the CPU device and around a
model that computes nothing, prompts of staggered lengths so that page turns are spread over the
steps.  Thread CPU time, the mean over the steps; what the clock itself takes is taken out.  What
the device would do is timed apart from the host's part, and called so.

    stage      a plan's arrays are built and copied in                   runner
    submit     the rest of a launch: operations are queued               runner
    relay      input tokens resolved, sampled ones stashed, ends marked  device (here: the CPU)
    read back  downloads started and read, the result encoded, decoded   runner, then host
    retire     tokens appended, stop rules, pages, outputs               host
    plan       rows, pages, lengths; the plan encoded and decoded        host, then runner
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from stepahead.assemble import ModelParts, runner_spec
from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.engine import Engine
from stepahead.plan import Plan, Result, decode_plan, decode_result, encode_plan, encode_result
from stepahead.runner.build import build_runner
from stepahead.runner.flight import RunnerFlight
from stepahead.runner.runner import Runner
from stepahead.scheduler.stop import Vocabulary
from stepahead.text.texts import ToyTexts
from stepahead.types import SamplingParams

T = TypeVar("T")

CLASSES = ("stage", "submit", "relay", "read back", "retire", "plan")
ROWS = (1, 32, 256)
LOOPS = ("serial", "overlap", "batch-queue")
_VOCAB = 128
_WARM = 24


class Stopwatch:
    """Thread CPU time by name, summed over calls; `read_ns` is what a reading takes."""

    def __init__(self) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._read_ns = self._reading_ns()

    def _reading_ns(self, samples: int = 1001) -> int:
        took = []
        for _ in range(samples):
            began_ns = time.thread_time_ns()
            took.append(time.thread_time_ns() - began_ns)
        return sorted(took)[samples // 2]

    def timed(self, name: str, call: Callable[..., T]) -> Callable[..., T]:
        """`call`, its time counted under `name`."""

        def wrapper(*args: Any) -> T:
            began_ns = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                self.spent_ns[name] += time.thread_time_ns() - began_ns - self._read_ns

        return wrapper


@dataclass(frozen=True)
class TimedFlight:
    """A flight whose result takes the way over a wire, on the clock."""

    inner: RunnerFlight
    over: Callable[[RunnerFlight], Result]

    def land(self) -> Result:
        """As the flight inside."""
        return self.over(self.inner)


class TimedExecutor:
    """The runner in this thread; plans and results are encoded and decoded as between processes."""

    def __init__(self, runner: Runner, watch: Stopwatch) -> None:
        self._runner = runner
        self._send = watch.timed("plan", _sent)
        self._launch = watch.timed("launch", runner.launch)
        self._land = watch.timed("read back", _over_the_wire)

    def launch(self, plan: Plan) -> TimedFlight:
        """Launches at once."""
        return TimedFlight(self._launch(self._send(plan)), self._land)

    def close(self) -> None:
        """Closes the runner."""
        self._runner.close()


def _sent(plan: Plan) -> Plan:
    return decode_plan(encode_plan(plan))


def _over_the_wire(flight: RunnerFlight) -> Result:
    return decode_result(encode_result(flight.land()))


def watch_runner(runner: Runner, watch: Stopwatch) -> None:
    """Times the parts of a launch.  Reaches in, so that no runner carries a hook for it."""
    parts = (
        (runner._stager, "stage", "stage"),
        (runner, "_copy_out", "read back start"),
        (runner, "_run_model", "device"),
        (runner._sampling, "first", "device"),
        (runner._relay, "resolve", "relay"),
        (runner._relay, "stash", "relay"),
        (runner._slots, "bury", "relay"),
    )
    for owner, method, name in parts:
        setattr(owner, method, watch.timed(name, getattr(owner, method)))


def engine_of(loop: str, rows: int, watch: Stopwatch) -> Engine:
    """An engine whose every part is timed."""
    config = EngineConfig(
        "sleep",
        loop=loop,
        executor="inline",
        max_rows=rows,
        max_step_tokens=1 << 14,
        num_pages=rows * 32,
        threads=1,
    )
    resolved = resolve(config, ModelFacts(_VOCAB, 1024, (1,), 1), bytes_available=1 << 40)
    options = {"forward_ms": 0.0, "vocab_size": _VOCAB}
    parts = ModelParts(resolved.facts, ToyTexts(_VOCAB), "stepahead.sim.sleep:SleepModel", options)
    runner = build_runner(runner_spec(resolved, parts))
    watch_runner(runner, watch)
    engine = Engine(resolved, TimedExecutor(runner, watch), Vocabulary([b"x"] * _VOCAB))
    scheduler = engine.scheduler
    # reaches in, so that no engine carries a hook that only a benchmark needs
    scheduler.plan = watch.timed("plan", scheduler.plan)  # type: ignore[method-assign]
    scheduler.retire = watch.timed("retire", scheduler.retire)  # type: ignore[method-assign]
    return engine


def classes_us(loop: str, rows: int, steps: int = 320) -> dict[str, float]:
    """Microseconds a steady step by class."""
    watch = Stopwatch()
    engine = engine_of(loop, rows, watch)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=steps + 2 * _WARM)
        for row in range(rows):
            engine.add([3] * (64 + row % 16), params)
        for _ in range(_WARM):
            engine.step()
        watch.spent_ns.clear()
        for _ in range(steps):
            engine.step()
    finally:
        engine.close()
    spent_ns = watch.spent_ns
    inside = ("stage", "read back start", "device")
    spent_ns["submit"] = spent_ns["launch"] - sum(spent_ns[name] for name in inside)
    spent_ns["read back"] += spent_ns["read back start"]
    return {name: spent_ns[name] / steps / 1e3 for name in CLASSES}


def measure(
    rows: tuple[int, ...] = ROWS, repeats: int = 3, steps: int = 320
) -> list[dict[str, Any]]:
    """Medians of alternating runs, by loop and rows."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(repeats):
        for loop in LOOPS:
            for count in rows:
                found.setdefault((loop, count), []).append(classes_us(loop, count, steps))
    return [
        {"loop": loop, "rows": count}
        | {name: float(np.median([run[name] for run in runs])) for name in CLASSES}
        for (loop, count), runs in found.items()
    ]
