"""What a step costs the host: planning, encoding, decoding the result, retiring, output frames.

Regime: steady decode, no device.  The executor is a stand-in that encodes each plan and answers
with the bytes of a prepared result, so exactly the host's share of a step runs, books included.
Overlap order (D = 2).  The prefix cache is on; prompts are of staggered lengths, so page turns are
spread evenly over the steps, and the mean over the measured steps has all page work in it.  Times
are CPU times of the one thread.

A plan: `plan()` alone, in the steps of the same run that decode the same rows and grant nothing.
*chained*, as the engine does it: such a plan repeats the last one.  *anew*: each is made anew, and
the columns move with every step.

Waves: 256 requests of 128-token prompts, half of them sharing their first 64 tokens, arrive at
once (from `add` until their first tokens are out), and finish at once (the one retirement in
which all end by length).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.engine import Engine
from stepahead.observe.stages import Enter, Stage
from stepahead.plan import Plan, Result, decode_result, encode_plan, encode_result
from stepahead.scheduler.scheduler import Scheduler
from stepahead.scheduler.stop import Vocabulary
from stepahead.scheduler.table import NOBODY
from stepahead.types import Outputs, SamplingParams
from stepahead.wire import encode

VOCAB = 49_152
EOS = 2
_LAUNCH, _DECODE = Stage.LAUNCH, Stage.DECODE
ROWS = (1, 32, 256, 1024)
GOALS_US = {"256": "60 us", "1024": "120 us"}


class PreparedFlight:
    """A flight whose result lies there as bytes."""

    def __init__(self, data: bytes, enter: Enter) -> None:
        self._data = data
        self._enter = enter

    def land(self) -> Result:
        """Decodes it."""
        self._enter(_DECODE)
        return decode_result(self._data)


class PreparedExecutor:
    """Encodes plans and answers with prepared tokens.  Preparing is not the host's work: its CPU
    time is taken out of the measurement."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self.bytes_sent = 0
        self._enter: Enter = int  # tells nobody
        self._rows = 0
        self._tokens = np.random.default_rng(0).integers(3, VOCAB, 4096).astype(np.int32)

    def tell_stages(self, enter: Enter) -> None:
        """As in `TellsStages`."""
        self._enter = enter

    def launch(self, plan: Plan) -> PreparedFlight:
        """The plan goes out as bytes."""
        self.bytes_sent += len(encode_plan(plan))
        self._enter(_LAUNCH)
        began = time.thread_time_ns()
        if not plan.same_rows:
            self._rows = len(plan.rows)
        count = self._rows + int(plan.chunk_table[:, 3].sum())
        data = encode_result(Result(plan.step, self._tokens[:count], 1, 2))
        self.spent_ns += time.thread_time_ns() - began
        return PreparedFlight(data, self._enter)

    def close(self) -> None:
        """Nothing runs."""


def build(rows: int, max_step_tokens: int = 1 << 16) -> tuple[Engine, PreparedExecutor]:
    """An engine without a device."""
    facts = ModelFacts(VOCAB, 8192, (EOS,), 1)
    config = EngineConfig(
        "none",
        executor="inline",
        max_rows=rows,
        max_step_tokens=max_step_tokens,
        num_pages=rows * 128 + 64,
        threads=1,
    )
    executor = PreparedExecutor()
    resolved = resolve(config, facts, bytes_available=1 << 40)
    return Engine(resolved, executor, Vocabulary([b"x"] * VOCAB)), executor


def prompts(count: int, length: int, shared: int, seed: int = 0) -> list[np.ndarray]:
    """`count` random prompts; every second begins with the same `shared` tokens."""
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB, shared)
    rows = [rng.integers(3, VOCAB, length) for _ in range(count)]
    for row in rows[::2]:
        row[:shared] = head
    return rows


def step(engine: Engine) -> Outputs | None:
    """One step, its outputs encoded as they would be sent."""
    outputs = engine.step()
    if outputs is not None:
        encode(outputs)
    return outputs


def timed(executor: PreparedExecutor, work: Callable[[], None]) -> float:
    """Thread-CPU microseconds of `work` without the stand-in's own."""
    before, began = executor.spent_ns, time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began - (executor.spent_ns - before)) / 1e3


def decoding(rows: int, steps: int) -> tuple[Engine, PreparedExecutor]:
    """An engine whose rows are past their prompts and decode for `steps` steps and more."""
    engine, executor = build(rows)
    params = SamplingParams(temperature=0.0, max_tokens=4 * steps)
    rng = np.random.default_rng(1)
    for row in range(rows):
        engine.add(rng.integers(3, VOCAB, 64 + row % 16), params)
    for _ in range(20):
        step(engine)
    return engine, executor


def steady_us(rows: int, steps: int = 640) -> float:
    """Mean thread-CPU microseconds of a steady decode step."""
    engine, executor = decoding(rows, steps)

    def run() -> None:
        for _ in range(steps):
            step(engine)

    return timed(executor, run) / steps


def plan_us(rows: int, chained: bool, steps: int = 320) -> float:
    """Median thread-CPU microseconds of planning what was planned before."""
    engine, _ = decoding(rows, steps)
    scheduler = engine.scheduler
    if not chained:
        _unchain(scheduler)
    plan = scheduler.plan
    spent_us: list[float] = []

    def timed_plan() -> Plan | None:
        began = time.thread_time_ns()
        planned = plan()
        took_ns = time.thread_time_ns() - began
        if planned is not None and planned.same_rows and not len(planned.grants):
            spent_us.append((took_ns - clock_ns) / 1e3)
        return planned

    clock_ns = _clock_ns()
    # reaches in, so that no engine carries a hook that only a benchmark needs
    scheduler.plan = timed_plan  # type: ignore[method-assign]
    for _ in range(steps):
        step(engine)
    return statistics.median(spent_us)


def _unchain(scheduler: Scheduler) -> None:
    """No plan is a repeat, no rows stand.  Reaches in: the engine has no use for such a switch."""
    scheduler._repeats = lambda again: False  # type: ignore[method-assign]
    scheduler.table.stand(NOBODY)
    scheduler.table.stand = lambda rows: None  # type: ignore[method-assign]


def _clock_ns(samples: int = 1001) -> float:
    """What reading the clock twice takes by the clock itself."""
    took = []
    for _ in range(samples):
        began = time.thread_time_ns()
        took.append(time.thread_time_ns() - began)
    return statistics.median(took)


def arrive_ms(count: int = 256) -> float:
    """A wave of arrivals: `add` to first tokens, the shared prefix being in the cache."""
    engine, executor = build(count)
    wave = prompts(count, 128, 64)
    engine.add(wave[0][:65], SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_work:
        step(engine)
    params = SamplingParams(temperature=0.0, max_tokens=64)

    def run() -> None:
        for prompt in wave:
            engine.add(prompt, params)
        told = 0
        while told < count:
            outputs = step(engine)
            told += len(outputs.first) if outputs else 0

    return timed(executor, run) / 1e3


def finish_ms(count: int = 256) -> float:
    """A wave of finishes: the step in which all end, with all their pages going to the tree."""
    engine, executor = build(count)
    for prompt in prompts(count, 128, 64):
        engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=64))
    last: deque[float] = deque(maxlen=1)

    def run() -> None:
        step(engine)

    while engine.has_work:
        last.append(timed(executor, run))
    return last[0] / 1e3


def measure(repeats: int = 5) -> dict[str, Any]:
    """Medians of `repeats` alternating runs."""
    runs: dict[int, list[float]] = {rows: [] for rows in ROWS}
    plans: dict[tuple[str, int], list[float]] = {}
    waves: dict[str, list[float]] = {"finish": [], "arrive": []}
    for _ in range(repeats):
        for rows in ROWS:
            runs[rows].append(steady_us(rows))
            for how in ("chained", "anew"):
                plans.setdefault((how, rows), []).append(plan_us(rows, how == "chained"))
        waves["finish"].append(finish_ms())
        waves["arrive"].append(arrive_ms())
    us = {rows: statistics.median(values) for rows, values in runs.items()}
    slope = (us[1024] - us[32]) / (1024 - 32)
    return {
        "bench": "host_cost",
        "us_per_step": {str(rows): round(value, 1) for rows, value in us.items()},
        "slope_us_per_row": round(slope, 4),
        "plan_us": {
            how: {str(rows): round(statistics.median(plans[how, rows]), 2) for rows in ROWS}
            for how in ("chained", "anew")
        },
        "wave_256_finish_ms": round(statistics.median(waves["finish"]), 2),
        "wave_256_arrive_ms": round(statistics.median(waves["arrive"]), 2),
    }


def table(found: dict[str, Any]) -> Table:
    """What `measure` found, for people."""
    lines = Table("", "measured", "goal", title="host cost of a steady decode step, thread CPU")
    per_step = found["us_per_step"]
    for rows, value in per_step.items():
        lines.add_row(f"{rows} rows", f"{value} us", GOALS_US.get(rows, ""))
    lines.add_row("each row more", f"{found['slope_us_per_row']} us", "0.08 us")
    for rows, value in found["plan_us"]["chained"].items():
        anew = found["plan_us"]["anew"][rows]
        lines.add_row(f"plan() alone, {rows} rows", f"{value} us, {anew} us anew", "flat")
    for wave in ("arrive", "finish"):
        lines.add_row(f"256 {wave} at once", f"{found[f'wave_256_{wave}_ms']} ms", "5 ms")
    return lines
