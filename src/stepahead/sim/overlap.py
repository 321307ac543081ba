"""Does overlap hide the host?  The real engine around a device that is busy for F ms a step.

Regime: the process executor, 32 rows decoding, greedy.  Only the model is replaced, by one that
sleeps, so that the cores are the host's as beside an accelerator.  Retirement is given H ms of
extra work (it keeps its core busy).  F is not what was asked for but the device's measured busy
time.  Serial should take F + H a step, overlap max(F, H).  TPOT is the mean over the steady steps
of a run; the figure is the median of seven runs, serial and overlap alternating.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from stepahead.assemble import ModelParts, assemble
from stepahead.config import EngineConfig, ModelFacts
from stepahead.engine import Engine
from stepahead.plan import Plan, Result
from stepahead.scheduler.scheduler import Scheduler
from stepahead.text.texts import ToyTexts
from stepahead.types import Outputs, SamplingParams

CASES = ((30.0, 7.0), (10.0, 6.0))  # (forward ms, host ms), as in the article
ROWS = 32
WARM = 5


@dataclass(frozen=True)
class Run:
    """Milliseconds a step, and of them the device's busy time."""

    tpot_ms: float
    busy_ms: float


def sleeping_engine(
    loop: str, forward_ms: float, host_ms: float, rows: int = ROWS, depth: int | None = None
) -> Engine:
    """An engine whose device sleeps and whose retirement works `host_ms` more."""
    config = EngineConfig(
        "sleep",
        loop=loop,
        depth=depth,
        max_rows=rows,
        max_step_tokens=4096,
        num_pages=rows * 64,
        threads=1,
    )
    facts = ModelFacts(vocab_size=128, max_len=1024, eos_ids=(), kv_bytes_per_token=1)
    options = {"forward_ms": forward_ms}
    parts = ModelParts(facts, ToyTexts(128), "stepahead.sim.sleep:SleepModel", options)
    engine = assemble(config, parts).engine
    slow_down(engine, host_ms)
    return engine


def slow_down(engine: Engine, host_ms: float) -> None:
    """From now on a retirement takes `host_ms`, whatever it took before."""
    scheduler = engine.scheduler

    def slow(plan: Plan, result: Result) -> Outputs:
        until = time.perf_counter() + host_ms / 1e3
        outputs = Scheduler.retire(scheduler, plan, result)
        while time.perf_counter() < until:
            pass
        return outputs

    # reaches in, so that no engine carries a hook that only a benchmark needs
    scheduler.retire = slow  # type: ignore[method-assign]


def start(engine: Engine, steps: int) -> None:
    """Rows that decode for `steps` steps and more, past their prefill."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2 * WARM)
    for row in range(engine.resolved.config.max_rows):
        engine.add([3 + row % 8] * 16, params)
    for _ in range(WARM):
        engine.step()


def run(loop: str, forward_ms: float, host_ms: float, steps: int) -> Run:
    """One engine's life."""
    engine = sleeping_engine(loop, forward_ms, host_ms)
    try:
        start(engine, steps)
        before = engine.books.summary()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        elapsed_ms = (time.perf_counter() - began) * 1e3
        busy_ns = engine.books.summary().busy_ns - before.busy_ns
        return Run(elapsed_ms / steps, busy_ns / 1e6 / steps)
    finally:
        engine.close()


def measure(runs: int = 7, steps: int = 40) -> dict[str, Any]:
    """Medians of alternating runs, case by case."""
    cases = []
    for forward_ms, host_ms in CASES:
        found: dict[str, list[Run]] = {"serial": [], "overlap": []}
        for _ in range(runs):
            for loop, values in found.items():
                values.append(run(loop, forward_ms, host_ms, steps))
        serial, overlap = (
            statistics.median(r.tpot_ms for r in found[loop]) for loop in ("serial", "overlap")
        )
        busy = statistics.median(r.busy_ms for values in found.values() for r in values)
        spread = sorted(r.tpot_ms for r in found["overlap"])
        cases.append(
            {
                "F_ms": round(busy, 3),
                "H_ms": host_ms,
                "serial_ms": round(serial, 3),
                "overlap_ms": round(overlap, 3),
                "overlap_ms_lowest": round(spread[0], 3),
                "overlap_ms_highest": round(spread[-1], 3),
            }
        )
    return {"bench": "overlap", "cases": cases}


def table(found: dict[str, Any]) -> Table:
    """What `measure` found, for people."""
    rows = Table("F", "H", "serial", "of F+H", "overlap", "of max(F, H)", title="TPOT, ms")
    for case in found["cases"]:
        f, h, serial, overlap = (case[k] for k in ("F_ms", "H_ms", "serial_ms", "overlap_ms"))
        share, hidden = f"{serial / (f + h):.3f}", f"{overlap / max(f, h):.3f}"
        rows.add_row(f"{f:.2f}", f"{h:.2f}", f"{serial:.2f}", share, f"{overlap:.2f}", hidden)
    return rows
