"""Are all stages busy?  The real engine around a model that is cut into S stages, each of which
sleeps for F ms a step.

Regime: a worker process for each stage, 24 rows decoding, greedy, batch-queue.  Only the model is
replaced, by parts that sleep, so that the cores are the host's as beside accelerators.  Retirement
is given H ms of extra work.  A step takes S x F from one end to the other; with every stage busy
one ends each F ms, so the ideal is 1 / max(F, H) steps a second, whatever S.  A queue of D steps
can't do more than D / (S x F + H): with D = S the first stage waits for the host's turn, with
D = S + 1 its next step is there already.  Steps a second are the mean over the steady steps of a
run; the figure is the median of the runs, in which the cases alternate.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.table import Table

from stepahead.assemble import ModelParts, assemble
from stepahead.config import EngineConfig, ModelFacts
from stepahead.engine import Engine
from stepahead.sim.overlap import slow_down
from stepahead.text.texts import ToyTexts
from stepahead.types import SamplingParams

STAGE_MS, HOST_MS = 20.0, 6.0
ROWS = 24
WARM = 10
CASES = tuple((stages, depth) for stages in (1, 2, 3) for depth in sorted({1, stages, stages + 1}))


def sleeping_stages(stages: int, depth: int, stage_ms: float, host_ms: float) -> Engine:
    """An engine whose stages sleep and whose retirement works `host_ms` more."""
    config = EngineConfig(
        "sleep",
        loop="serial" if depth == 1 else "batch-queue",
        depth=depth,
        pipeline_stages=stages,
        max_rows=ROWS,
        max_step_tokens=512,
        num_pages=ROWS * 64,
        threads=1,
    )
    facts = ModelFacts(128, 1024, (), 1, num_layers=stages, state_bytes=4)
    whole, part = (f"stepahead.sim.sleep:{name}" for name in ("SleepModel", "SleepPart"))
    options = {"forward_ms" if stages == 1 else "stage_ms": stage_ms}
    engine = assemble(config, ModelParts(facts, ToyTexts(128), whole, options, part)).engine
    slow_down(engine, host_ms)
    return engine


def run(
    stages: int, depth: int, steps: int, stage_ms: float = STAGE_MS, host_ms: float = HOST_MS
) -> float:
    """Steps a second of one engine's life."""
    engine = sleeping_stages(stages, depth, stage_ms, host_ms)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=steps + 4 * WARM)
        for row in range(ROWS):
            engine.add([3 + row % 8] * 16, params)
        counters = engine.scheduler.life.counters
        while counters.steps < WARM + ROWS:
            engine.step()
        before, began = counters.steps, time.perf_counter()
        while counters.steps < before + steps:
            engine.step()
        return steps / (time.perf_counter() - began)
    finally:
        engine.close()


def measure(runs: int = 5, steps: int = 60) -> dict[str, Any]:
    """Medians of alternating runs, case by case."""
    found: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    for _ in range(runs):
        for (stages, depth), values in found.items():
            values.append(run(stages, depth, steps))
    cases = [
        {
            "stages": stages,
            "depth": depth,
            "steps_per_s": round(statistics.median(values), 2),
            "lowest": round(min(values), 2),
            "highest": round(max(values), 2),
            "bound_per_s": round(bound(stages, depth), 2),
        }
        for (stages, depth), values in found.items()
    ]
    return {"bench": "pipeline", "F_ms": STAGE_MS, "H_ms": HOST_MS, "rows": ROWS, "cases": cases}


def bound(stages: int, depth: int) -> float:
    """Steps a second that nothing could exceed."""
    return 1e3 / max(STAGE_MS, HOST_MS, (stages * STAGE_MS + HOST_MS) / depth)


def table(found: dict[str, Any]) -> Table:
    """What `measure` found, for people."""
    title = f"steps a second, F = {found['F_ms']:g} ms a stage, H = {found['H_ms']:g} ms"
    rows = Table("stages", "depth", "steps/s", "bound", "of it", title=title)
    for case in found["cases"]:
        rate, most = case["steps_per_s"], case["bound_per_s"]
        share = f"{rate / most:.3f}"
        rows.add_row(str(case["stages"]), str(case["depth"]), f"{rate:.1f}", f"{most:.1f}", share)
    return rows
