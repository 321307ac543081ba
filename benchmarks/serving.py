"""What HTTP adds to the engine: a crowd of clients, steps beside the offline run, tokens a second.

Three parts, each with `stepahead serve` as its users start it and benchmarks/load_client.py as its
clients (raw sockets in a process of its own; how busy it was is told, so that it is not what was
measured).  All answers are greedy streams of completions, one event a token.

    crowd   256 streams on SmolLM2 for 60 s: some are read to the end, some slowly, some left in the
            middle, some aborted by name; whoever is over is followed by another.  Afterwards all
            must have ended, and /state must say that every row and page came back.  Memory is that
            of the three processes after a first crowd and after the second.  Figures: gaps between
            two events of a stream against the median step of the same time.  Goal: p99 at most
            3 x the median step.
    steps   256 streams on SmolLM2 that all decode, and the same prompts in an offline engine:
            median time from a step's end to the next, of runs in turn.  Goal: served at most
            1.05 x offline.
    http    64 and 256 streams around a device that sleeps 1 ms a step (load_server.py; its runner
            still takes its share of the cores); the clients look at their sockets every 2 ms.
            Tokens a second through HTTP, and what a token costs each process in CPU time.  Goal:
            20,000 tokens a second.

Medians of runs, and the lowest and highest; ratios pair runs that followed each other.  On a busy
machine times grow and ratios spread; CPU per token grows less.  `--quick` is shorter, with three
runs.  Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from load_client import Load
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROWS = 256
SMOLLM2_VOCAB = 49_000
SLEEP_VOCAB = 512
PAGES = 2048  # enough for all rows, and few enough that a first crowd has touched each
NAP_S = 0.002  # of clients that could have a token each millisecond
PROCESSES = ("front", "engine", "runner")
FATES = ["read", "read", "slow", "leave", "abort"]
GOALS = {"gap": 3.0, "step": 1.05, "tokens_per_s": 20_000}


@dataclasses.dataclass(frozen=True)
class Size:
    """How long it all takes."""

    runs: int
    crowd_s: float
    steps: int
    http_s: float


FULL = Size(runs=7, crowd_s=60.0, steps=16, http_s=5.0)
QUICK = Size(runs=3, crowd_s=12.0, steps=6, http_s=3.0)


class Served:
    """A server in processes of its own."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", "0", "--max-rows", str(ROWS)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if " at http://" in line:
                break
        else:
            raise SystemExit(said)
        self.host, _, port = line.partition("http://")[2].partition("/")[0].partition(":")
        self.port = int(port)
        family = psutil.Process(self.process.pid)
        children = sorted(family.children(recursive=True), key=lambda one: one.create_time())
        self.family = [family, *children]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def get(self, path: str) -> bytes:
        """A page; 503 is what a server says that has been in one step for more than 5 s."""
        for _ in range(20):
            try:
                url = f"http://{self.host}:{self.port}{path}"
                with urllib.request.urlopen(url, timeout=60) as found:
                    return found.read()
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
        raise SystemExit(f"{path} is not answered: the machine has no time for steps")

    def state(self) -> dict[str, Any]:
        """What the engine says of itself."""
        return json.loads(self.get("/state"))

    def rss_mb(self) -> list[float]:
        """Memory of front, engine and runner."""
        return [round(process.memory_info().rss / 1e6, 1) for process in self.family]

    def drive(self, **load: Any) -> dict[str, Any]:
        """What the clients of a load heard."""
        asked = Load(self.host, self.port, pids=[one.pid for one in self.family], **load)
        done = subprocess.run(
            [sys.executable, str(HERE / "load_client.py")],
            input=json.dumps(dataclasses.asdict(asked)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    def step_ms(self, heard: dict[str, Any], only_full: bool) -> float:
        """Median step of the time that the clients measured."""
        from_s, to_s = heard["from_s"], heard["from_s"] + heard["wall_s"]
        last_s = time.perf_counter() - from_s + 5.0
        return median_step_ms(self.get(f"/trace?last={last_s:.3f}s"), only_full, from_s, to_s)


def median_step_ms(
    trace: bytes, only_full: bool, from_s: float = 0.0, to_s: float = np.inf
) -> float:
    """Median time from a step's end to the next, of a trace's steps that ended in this time, or of
    those alone that decode every row."""
    from stepahead.observe.steps import Kind
    from stepahead.trace.read import parse, recorded

    found = recorded(parse(trace, "the trace"), "the trace").snapshot
    ends_ns = dict(zip(found.events.step.tolist(), found.events.busy_end_ns.tolist(), strict=True))
    full = (found.steps.kind == Kind.DECODE) & (found.steps.rows == ROWS)
    chosen = found.steps.step[full] if only_full else found.steps.step
    took_ns = [
        ends_ns[step] - ends_ns[step - 1]
        for step in chosen.tolist()
        if step - 1 in ends_ns and from_s <= ends_ns.get(step, -1) / 1e9 <= to_s
    ]
    return float(np.median(took_ns)) / 1e6


# --- crowd --------------------------------------------------------------------------------------


def crowd(size: Size) -> dict[str, Any]:
    """One server for all runs; each must end in balance."""
    with Served("-m", "stepahead", "serve", "--num-pages", str(PAGES)) as server:
        runs = [_crowd(server, size.crowd_s, seed) for seed in range(size.runs)]
    return {
        "streams": ROWS,
        "seconds": size.crowd_s,
        "ends": {fate: sum(run["ends"][fate] for run in runs) for fate in dict.fromkeys(FATES)},
        "stuck": sum(run["stuck"] for run in runs),
        "wrong": [words for run in runs for words in run["wrong"]],
        "balanced": all(run["balanced"] for run in runs),
        "rss_mb": {
            name: [run["rss_mb"][place] for run in runs] for place, name in enumerate(PROCESSES)
        },
        "descriptors": [run["descriptors"] for run in runs],
        "step_ms": spread([run["step_ms"] for run in runs]),
        "gap_p50_ms": spread([run["gap_p50_ms"] for run in runs]),
        "gap_p99_of_step": spread([run["gap_p99_ms"] / run["step_ms"] for run in runs]),
    }


def _crowd(server: Served, seconds: float, seed: int) -> dict[str, Any]:
    heard = server.drive(
        streams=ROWS,
        output=(4, 24),
        prompt=(4, 24),
        vocabulary=SMOLLM2_VOCAB,
        seconds=seconds,
        warm_s=seconds / 4,
        fates=FATES,
        cut=False,
        slow_bytes=200,
        patience_s=600.0,  # a busy machine may need seconds for a step
        seed=seed,
    )
    at_rest = wait_for_rest(server)
    step_ms = server.step_ms(heard, only_full=False)
    descriptors = [process.num_fds() for process in server.family]
    more = {"rss_mb": server.rss_mb(), "step_ms": step_ms, "descriptors": descriptors}
    return heard | more | {"balanced": at_rest}


def wait_for_rest(server: Served, patience_s: float = 30.0) -> bool:
    """Whether every row and page came back."""
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s:
        found = server.state()
        load = found["load"]
        free = load["pages_free"] + load["pages_evictable"] == load["pages_total"]
        if free and not (load["rows_running"] or load["requests_waiting"] or found["flights"]):
            return True
        time.sleep(0.2)
    return False


# --- steps --------------------------------------------------------------------------------------


def steps(size: Size) -> dict[str, Any]:
    """A server and an offline engine, in turn; whoever is not asked sleeps."""
    flags = ("--num-pages", str(PAGES))
    with Served("-m", "stepahead", "serve", *flags) as server, Offline() as offline:
        pairs: list[tuple[float, float]] = []
        for _ in range(size.runs):
            alone = offline.step_ms(size.steps)
            # all must have come before it counts
            pairs.append((_served_step(server, (size.steps + 20) * alone / 1e3), alone))
    return {
        "rows": ROWS,
        "served_ms": spread([served for served, _ in pairs]),
        "offline_ms": spread([alone for _, alone in pairs]),
        "served_of_offline": spread([served / alone for served, alone in pairs]),
    }


def _served_step(server: Served, seconds: float) -> float:
    heard = server.drive(
        streams=ROWS,
        output=(1000, 1000),
        prompt=(8, 8),
        vocabulary=SMOLLM2_VOCAB,
        seconds=seconds,
        warm_s=seconds / 2,
        fates=["read"],
        cut=True,
    )
    found = server.step_ms(heard, only_full=True)
    wait_for_rest(server)
    return found


class Offline:
    """The engine without a server, with the server's options."""

    def __init__(self) -> None:
        from stepahead.assemble import build_engine
        from stepahead.cli.options import packaged_model
        from stepahead.config import config_from

        options = {"max_rows": ROWS, "num_pages": PAGES}
        self.engine = build_engine(config_from(str(packaged_model()), options)).engine

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def step_ms(self, count: int) -> float:
        """Median of some steps that decode every row."""
        from stepahead.observe.perfetto import chrome_trace
        from stepahead.types import SamplingParams

        began = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        rids = [
            rid
            for row in range(ROWS)
            for rid in self.engine.add([2 + row, *range(100, 107)], params)
        ]
        while len(getattr(self.engine.step(), "rids", ())) < ROWS:
            pass
        for _ in range(count):
            self.engine.step()
        for rid in rids:
            self.engine.abort(rid)
        while self.engine.has_work:
            self.engine.step()
        snapshot = self.engine.observer.snapshot()
        return median_step_ms(chrome_trace(snapshot, time.monotonic() - began), only_full=True)


# --- http ---------------------------------------------------------------------------------------


def http(size: Size) -> dict[str, Any]:
    """Around a sleeping device, for each number of streams."""
    found: dict[str, Any] = {}
    with Served(str(HERE / "load_server.py"), "--threads", "1") as server:
        for streams in (64, ROWS):
            runs = [_http(server, streams, size.http_s) for _ in range(size.runs)]
            found[str(streams)] = {name: spread([run[name] for run in runs]) for name in runs[0]}
    return found


def _http(server: Served, streams: int, seconds: float) -> dict[str, float]:
    heard = server.drive(
        streams=streams,
        output=(100_000, 100_000),
        prompt=(8, 8),
        vocabulary=SLEEP_VOCAB,
        seconds=seconds + 1.0,
        warm_s=1.0,
        fates=["read"],
        cut=True,
        nap_s=NAP_S,
    )
    tokens = heard["events"]
    if heard["wrong"] or not tokens:
        raise SystemExit(f"the clients were answered wrongly: {heard['wrong'] or 'nothing came'}")
    wait_for_rest(server)
    cpu = {
        f"{name}_us": used / tokens * 1e6
        for name, used in zip(PROCESSES, heard["cpu_s"], strict=True)
    }
    return {
        "tokens_per_s": tokens / heard["wall_s"],
        **cpu,
        "client_us": heard["own_cpu_s"] / tokens * 1e6,
        "client_busy": heard["own_cpu_s"] / heard["wall_s"],
        "front_busy": heard["cpu_s"][0] / heard["wall_s"],
        "send_us_per_step": send_us(streams),
    }


def send_us(rows: int, count: int = 2000) -> float:
    """CPU time of the engine's thread to encode and send what a step brought, to who reads it."""
    from stepahead.executor.channel import Channel, Kind
    from stepahead.serve.messages import Step
    from stepahead.types import Outputs
    from stepahead.wire import encode

    step = Step(Outputs(1, np.arange(rows, dtype=np.int64), np.arange(rows, dtype=np.int32)))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        assert reader.stdin is not None
        channel = Channel(os.open(os.devnull, os.O_RDONLY), os.dup(reader.stdin.fileno()))
        began = time.thread_time()
        for _ in range(count):
            channel.send(Kind.MESSAGE, encode(step))
        used_s = time.thread_time() - began
        channel.close()
    return used_s / count * 1e6


# --- figures ------------------------------------------------------------------------------------


def spread(values: list[float]) -> list[float]:
    """Median, lowest, highest."""
    return [round(one, 3) for one in (statistics.median(values), min(values), max(values))]


def told(values: list[float], digits: int = 2) -> str:
    """A spread for people."""
    middle, low, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


def crowd_table(found: dict[str, Any]) -> Table:
    """Of `crowd`."""
    title = f"{found['streams']} streams, {found['seconds']:g} s, SmolLM2"
    table = Table("crowd", "found", "goal", title=title)
    ends = ", ".join(f"{count:,} {fate}" for fate, count in found["ends"].items())
    table.add_row("streams that ended as they should", ends, "")
    table.add_row("stuck, wrong", f"{found['stuck']}, {len(found['wrong'])}", "0, 0")
    table.add_row("every row and page came back", "yes" if found["balanced"] else "NO", "yes")
    for name, values in found["rss_mb"].items():
        table.add_row(f"MB of the {name} after each run", ", ".join(map(str, values)), "level")
    table.add_row("median step, ms", told(found["step_ms"]), "")
    goal = f"{GOALS['gap']:g}"
    table.add_row("p99 gap of a stream / median step", told(found["gap_p99_of_step"]), goal)
    return table


def steps_table(found: dict[str, Any]) -> Table:
    """Of `steps`."""
    table = Table("a step of 256 rows", "found", "goal", title="SmolLM2, served and offline")
    table.add_row("served, ms", told(found["served_ms"]), "")
    table.add_row("offline, ms", told(found["offline_ms"]), "")
    ratio = told(found["served_of_offline"], 3)
    table.add_row("served / offline", ratio, f"{GOALS['step']:g}")
    return table


_HTTP_LINES = {
    "tokens_per_s": ("tokens/s through HTTP", 0),
    "front_us": ("front, µs of CPU a token", 1),
    "engine_us": ("engine, µs of CPU a token", 1),
    "runner_us": ("runner, µs of CPU a token", 1),
    "client_us": ("client, µs of CPU a token", 1),
    "front_busy": ("front, share of a core", 2),
    "client_busy": ("client, share of a core", 2),
    "send_us_per_step": ("engine, µs of CPU to send a step's tokens", 1),
}


def http_table(found: dict[str, Any]) -> Table:
    """Of `http`."""
    title = f"a device of 1 ms a step; goal {GOALS['tokens_per_s']:,} tokens/s"
    table = Table("", *(f"{streams} streams" for streams in found), title=title)
    for name, (words, digits) in _HTTP_LINES.items():
        table.add_row(words, *(told(one[name], digits) for one in found.values()))
    return table


PARTS: dict[str, tuple[Callable[[Size], dict[str, Any]], Callable[[dict[str, Any]], Table]]] = {
    "crowd": (crowd, crowd_table),
    "steps": (steps, steps_table),
    "http": (http, http_table),
}


def main() -> None:
    """The parts that were named, or all."""
    reader = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    reader.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    reader.add_argument("--quick", action="store_true", help="shorter, and three runs")
    asked = reader.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        reader.error(f"{sorted(unknown)[0]} is no part; choose of {', '.join(PARTS)}")
    size = QUICK if asked.quick else FULL
    result: dict[str, Any] = {"bench": "serving", "quick": asked.quick}
    for part in asked.parts or PARTS:
        measure, table = PARTS[part]
        result[part] = measure(size)
        Console().print(table(result[part]))
    result["load_average"] = os.getloadavg()[0]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
