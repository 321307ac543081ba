"""What the books cost, and whether they tell the truth about known times.

*Known times*: the process executor around a device that sleeps F a step (as in `overlap`, 32 rows
decoding), first as it is and then with a retirement that keeps its core busy for H.  What that adds
to the medians of hidden and exposed is H: to exposed in the serial loop, to hidden in the others,
for F > H, and nothing to the other one.

*Cost*: the host's share of a steady decode step without a device, as in `host_cost`, of an engine
with its recorder and of one with something in its place that does nothing, turn by turn; thread CPU
time.  The difference is all of it: the books with their folding, the row of each step, the
collector's turn.  An event, and the row of a step, are also timed alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.table import Table

from stepahead.engine import Engine
from stepahead.observe.books import Books
from stepahead.observe.stages import Stage
from stepahead.observe.steps import StepLog
from stepahead.plan import Plan, Result
from stepahead.sim.host_cost import PreparedExecutor, decoding, step, timed
from stepahead.sim.overlap import sleeping_engine, slow_down, start

FORWARD_MS, HOST_MS = 40.0, 20.0
ROWS = (1, 32, 256)
STAGES = (  # of a step in the overlap loop, in order
    *(Stage.PLAN, Stage.ENCODE, Stage.LAUNCH),
    *(Stage.WAIT, Stage.DECODE, Stage.RETIRE, Stage.DELIVER),
)


# --- known times ------------------------------------------------------------------------------


def known_times(loop: str, forward_ms: float, host_ms: float, steps: int) -> dict[str, float | str]:
    """What the books say that H has added, ms a step, and their wall clock against another one."""
    engine = sleeping_engine(loop, forward_ms, 0.0)
    try:
        start(engine, 2 * steps)
        began_ns, mark = time.perf_counter_ns(), engine.books.mark()
        _run(engine, steps)
        slow_down(engine, host_ms)
        _run(engine, steps)
        wall_ns = time.perf_counter_ns() - began_ns
        books, each = engine.books.summary(mark), engine.books.per_step()
    finally:
        engine.close()
    found = {}
    for name, ns in (("hidden", each.hidden_ns), ("exposed", each.exposed_ns)):
        without, slowed = ns[-2 * steps : -steps], ns[-steps:]
        found[name] = float(np.median(slowed) - np.median(without)) / 1e6
    return {
        "loop": loop,
        "F_ms": forward_ms,
        "H_ms": host_ms,
        "hidden_ms": found["hidden"],
        "exposed_ms": found["exposed"],
        "of_H": found["exposed" if loop == "serial" else "hidden"] / host_ms,
        "balance": books.wall_ns / wall_ns,
    }


# --- cost -------------------------------------------------------------------------------------


def _nothing(*given: object) -> int:
    return 0


def turn_off(engine: Engine) -> None:
    """From now on nothing is taken down.  Reaches in: the engine has no such switch."""
    observer, executor = engine.observer, engine._executor
    nothing = SimpleNamespace(enter=_nothing, rest=_nothing, busy=_nothing)
    observer.books = nothing  # type: ignore[assignment]
    engine._core._enter = _nothing
    observer.steps = SimpleNamespace(add=_nothing)  # type: ignore[assignment]
    observer.garbage.tidy = _nothing  # type: ignore[method-assign, assignment]
    assert isinstance(executor, PreparedExecutor)
    executor.tell_stages(_nothing)


def cost(rows: int, turns: int, steps: int) -> dict[str, float]:
    """What the recorder takes a step: medians over `turns` turns of `steps` steps.

    Both engines stand side by side, so that whatever else the machine does falls on both alike.
    """
    pair = [decoding(rows, turns * steps // 4 + 16) for _ in range(2)]
    turn_off(pair[1][0])
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for (engine, executor), found in zip(pair, took, strict=True):
            found.append(timed(executor, lambda engine=engine: _run(engine, steps)) / steps)
    more_us = statistics.median(a - b for a, b in zip(*took, strict=True))
    bare_us = statistics.median(took[1])
    return {
        "rows": rows,
        "step_us": round(statistics.median(took[0]), 2),
        "bare_us": round(bare_us, 2),
        "recorder_us": round(more_us, 2),
        "event_ns": round(more_us * 1e3 / (len(STAGES) + 1)),
        "share_pct": round(100 * more_us / bare_us, 1),
    }


def _run(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        step(engine)


def alone_ns(steps: int = 20_000) -> dict[str, float]:
    """An event, a landed step and a row, each with its folding, in ns."""
    plan = Plan(5, np.arange(32, dtype=np.int32), True)
    result = Result(5, np.arange(32, dtype=np.int32), 1, 2)
    log = StepLog()
    clock_ns = _each_ns(time.perf_counter_ns, steps)
    return {
        "clock_ns": clock_ns,
        "event_ns": _each_ns(_events(Books(batch=1 << 40)), steps) / len(STAGES),
        "event_folded_ns": _each_ns(_events(Books()), steps) / len(STAGES),
        "row_ns": _each_ns(lambda: log.add(plan, result, 5, 6, 2, 7), steps),
    }


def _events(books: Books) -> Callable[[], None]:
    """A step's events and its landing."""
    calls = [(books.rest if stage is Stage.WAIT else books.enter, stage) for stage in STAGES]

    def events() -> None:
        at_ns = 0
        for enter, stage in calls:
            at_ns = enter(stage)
        books.busy(0, at_ns - 1000, at_ns - 500, at_ns - 2000, at_ns - 1500, at_ns - 1200)

    return events


def _each_ns(work: Callable[[], object], times: int, runs: int = 7) -> float:
    took: list[float] = []
    for _ in range(runs):
        began_ns = time.thread_time_ns()
        for _ in range(times):
            work()
        took.append((time.thread_time_ns() - began_ns) / times)
    return statistics.median(took)


def measure(turns: int = 41, steps: int = 40, known_steps: int = 60) -> dict[str, Any]:
    """Medians of alternating turns, and of steps."""
    known = [known_times(*case, known_steps) for case in _CASES]
    costs = [cost(rows, turns, steps) for rows in ROWS]
    alone = {name: round(value) for name, value in alone_ns().items()}
    return {"bench": "books", "known": known, "cost": costs, "alone": alone}


_CASES = [(loop, FORWARD_MS, HOST_MS) for loop in ("serial", "overlap", "batch-queue")]


def tables(found: dict[str, Any]) -> list[Table]:
    """What `measure` found, for people."""
    known = Table(
        *("loop", "F", "H", "hidden", "exposed", "of H", "of wall"),
        title="known times, ms a step",
    )
    for case in found["known"]:
        times = ("F_ms", "H_ms", "hidden_ms", "exposed_ms")
        shown = [f"{case[key]:.2f}" for key in times]
        known.add_row(case["loop"], *shown, f"{case['of_H']:.3f}", f"{case['balance']:.4f}")
    cost = Table(
        *("rows", "bare step", "recorder", "an event", "share"),
        title="what the recorder costs, thread CPU",
    )
    for case in found["cost"]:
        cost.add_row(
            str(case["rows"]),
            f"{case['bare_us']} us",
            f"{case['recorder_us']} us",
            f"{case['event_ns']} ns",
            f"{case['share_pct']} %",
        )
    alone = Table("alone", "ns")
    for name, value in found["alone"].items():
        alone.add_row(name.removesuffix("_ns").replace("_", ", "), str(value))
    return [known, cost, alone]
