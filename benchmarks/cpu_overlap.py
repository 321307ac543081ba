"""Does the host stay out of the model's way, where both have the same few cores?

Regime: a real model (SmolLM2-135M if nothing is said), the runner in a process of its own, both
processes held to the same cores, as many as the runner has threads (2).  An engine for each loop
lives through all turns; loops, and 1 and 32 rows, take turns.  In a turn all rows decode greedily,
past their prefill; its figure is the mean of its steady steps, and what is told is the median of
the turns' figures, with the lowest and highest.

    step          ms from the end of a step in the runner to the end of the next one, by the books
    forward       ms of these that the runner was busy: samplers included, as what comes behind a
                  forward is the CPU's as well
    idle          ms that it stood still between steps, by cause; `host` the work of ours that fell
                  into it
    of forward    the step, divided by the forward of the same turn.  Goal under overlap: 1.03
    of serial's   the step, divided by the forward under the serial loop in the same round, in which
                  nobody else works: what overlap's own work takes from the forward's cores shows
                  here

Prints a table for each precision and, last, one JSON line.

    python benchmarks/cpu_overlap.py [--precisions float32 int8] [--runs 7] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peer_figures import Spread
from peer_jobs import MODELS, ROOT, Text, model_of, our_precisions
from peers import MODEL
from rich.console import Console
from rich.table import Table

from stepahead.assemble import ModelParts, assemble, model_parts
from stepahead.config import EngineConfig
from stepahead.engine import Engine
from stepahead.observe.books import StepBooks
from stepahead.types import SamplingParams

LOOPS = ("serial", "overlap")
ROWS = (1, 32)
PROMPT = 64
WARM = 8  # outputs of each row, before anything counts
GOAL = 1.03


@dataclass(frozen=True)
class Turn:
    """ms a step; `idle_ms` by cause, where there was any."""

    step_ms: float
    forward_ms: float
    exposed_ms: float
    idle_ms: dict[str, float]

    @property
    def of_forward(self) -> float:
        return self.step_ms / self.forward_ms


Turns = dict[tuple[str, int], list[Turn]]  # by loop and rows, one a round


def hold_to(cores: int) -> list[int]:
    """Holds this process, and all that it starts, to as many cores; which ones."""
    if not hasattr(os, "sched_setaffinity"):  # not on this system
        return []
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, chosen)
    return chosen


def turn(engine: Engine, prompts: list[list[int]], steps: int) -> Turn:
    """Steady steps of as many rows as there are prompts, and then nobody is left."""
    rows = len(prompts)
    params = SamplingParams(temperature=0.0, max_tokens=WARM + steps + WARM, ignore_eos=True)
    rids = [engine.add(ids, params)[0] for ids in prompts]
    came(engine, WARM * rows)
    before = engine.books.summary().steps
    came(engine, steps * rows)
    after = engine.books.summary().steps
    for rid in rids:
        engine.abort(rid)
    while engine.has_work:
        engine.step()
    # now all have landed, so that each one's window is known to its end
    books, total = engine.books.per_step(), engine.books.summary().steps
    first, end = (len(books.step) - total + count for count in (before, after))
    return of_windows(books, slice(first, end))


def of_windows(books: StepBooks, steady: slice) -> Turn:
    """Means of some steps' windows."""

    def mean_ms(each_ns: np.ndarray) -> float:
        return float(each_ns[steady].mean()) / 1e6

    idle_ms = {cause: mean_ms(each_ns) for cause, each_ns in books.idle_ns.items()}
    return Turn(
        mean_ms(books.wall_ns),
        mean_ms(books.busy_ns),
        mean_ms(books.exposed_ns),
        {cause: value for cause, value in idle_ms.items() if value},
    )


def came(engine: Engine, tokens: int) -> None:
    """Steps until so many tokens have come out."""
    count = 0
    while count < tokens:
        outputs = engine.step()
        count += 0 if outputs is None else len(outputs.rids)


def build(parts: ModelParts, config: EngineConfig) -> Engine:
    return assemble(config, parts).engine


def alternate(
    model: str, options: dict[str, Any], prompts: list[list[int]], runs: int, steps: int
) -> Turns:
    """All turns of one precision."""
    found: Turns = {}
    with ExitStack() as opened:
        engines = {}
        for loop in LOOPS:
            config = EngineConfig(
                model,
                loop=loop,
                executor="process",
                max_rows=max(ROWS),
                max_model_len=PROMPT + 2 * WARM + steps,
                prefix_cache=False,
                **options,
            )
            engines[loop] = build(model_parts(config), config)
            opened.callback(engines[loop].close)
        for number in range(runs + 1):  # a first one warms up
            for loop, engine in engines.items():
                for rows in ROWS:
                    one = turn(engine, prompts[:rows], steps)
                    if number:
                        found.setdefault((loop, rows), []).append(one)
    return found


def summary(found: Turns) -> list[dict[str, Any]]:
    """Loop by loop and rows by rows: [median, lowest, highest] of each figure."""
    cases = []
    for (loop, rows), turns in found.items():
        serial = found["serial", rows]
        pairs = zip(turns, serial, strict=True)
        figures = {
            "step_ms": [one.step_ms for one in turns],
            "forward_ms": [one.forward_ms for one in turns],
            "idle_ms": [sum(one.idle_ms.values()) for one in turns],
            "host_exposed_ms": [one.exposed_ms for one in turns],
            "of_forward": [one.of_forward for one in turns],
            "of_serial_forward": [one.step_ms / other.forward_ms for one, other in pairs],
        }
        causes = sorted({cause for one in turns for cause in one.idle_ms})
        idle = {
            cause: Spread.of([one.idle_ms.get(cause, 0.0) for one in turns]) for cause in causes
        }
        cases.append(
            {
                "loop": loop,
                "rows": rows,
                **{name: listed(Spread.of(values)) for name, values in figures.items()},
                "idle_by_cause_ms": {cause: listed(one)[0] for cause, one in idle.items()},
            }
        )
    return cases


def listed(one: Spread) -> list[float]:
    return [round(value, 4) for value in (one.median, one.low, one.high)]


def table(precision: str, cases: list[dict[str, Any]]) -> Table:
    """For people."""
    names = ("step_ms", "forward_ms", "idle_ms", "host_exposed_ms")
    ratios = ("of_forward", "of_serial_forward")
    heads = ("step", "forward", "idle", "host in it", "of forward", "of serial's", "idle by cause")
    shown = Table("loop", "rows", *heads, title=f"{precision}, ms a step; goal {GOAL} of forward")
    for case in cases:
        cells = [str(Spread(*case[name])) for name in names]
        cells += ["{:.3f} ({:.3f}-{:.3f})".format(*case[name]) for name in ratios]
        causes = case["idle_by_cause_ms"].items()
        cells.append(", ".join(f"{cause} {value:.2f}" for cause, value in causes if value >= 0.005))
        shown.add_row(case["loop"], str(case["rows"]), *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=next(iter(MODELS)), help=MODEL)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="of Gemma")
    parser.add_argument("--precisions", nargs="*", default=["float32", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    model = model_of(given.model, given.folder.resolve())
    cores = hold_to(given.threads)
    text = Text.of(model)
    prompts = [text.begin + text.ids[16 * at : 16 * at + PROMPT - 1] for at in range(max(ROWS))]
    found: dict[str, list[dict[str, Any]]] = {}
    for precision in given.precisions:
        options = our_precisions()[precision] | {"threads": given.threads}
        turns = alternate(str(model), options, prompts, given.runs, given.steps)
        found[precision] = summary(turns)
        Console(width=None if sys.stdout.isatty() else 200).print(
            table(precision, found[precision])
        )
    line = {"bench": "cpu_overlap", "model": model.name, "threads": given.threads, "cores": cores}
    print(json.dumps(line | {"goal": GOAL, "runs": given.runs, "precisions": found}))


if __name__ == "__main__":
    main()
