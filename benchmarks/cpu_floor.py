"""What this machine allows: the shortest that a decode step can take, and how long ours takes.

Regime: the shapes of one model (SmolLM2-135M if nothing is said), weights of every layer in memory
of their own, so that a step reads all of them as the real one does; 2 threads; medians of rounds,
in which all that is measured takes turns, with the lowest and highest.

    rates        copy and read: GB a second of a block of 256 MB copied (bytes read and written),
                 and added up, by one thread and by all; float32 multiply-add and int16 pairs: 10^9
                 operations a second of that instruction alone, on registers.  No kernel of ours is
                 faster: float32 and float16 weights are multiplied by the one, int8 and int4 by
                 the other
    products     ms for all matrix products of a step, head included, at 1, 32, 128 and 512 rows,
                 by each kernel of ours, and of torch's in float32 and int8; one that it does not
                 have is named
    GEMM rate    of these, 10^9 operations a second where it is best
    MB, GFLOP    what a step must move: matrices as they are stored, once, and the logits written
                 and read; keys and values of 192 positions a row.  And do: 2 operations a weight
                 and row, 4 a number of the keys, row and head
    floor        of matrices, the longer of bytes at the read rate and operations at their
                 instruction's; of attention the same in float32; both added up
    ours         matrices and attention alone, and the step as peers.py measures it: the offline
                 engine, 128 prompt tokens a row.  What the parts do not explain is left over

Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_kernels import (
    CONTEXT,
    INSTRUCTIONS,
    KERNELS,
    OURS_BY_PRECISION,
    Attention,
    Products,
    inputs_of,
    instructions,
    matrices,
    stored_bytes,
)
from peer_figures import OURS, Spread, decode_steps_s
from peer_jobs import MODELS, ROOT, Size, Text, model_of, our_precisions
from peer_process import Job, Worker, end_on_sigterm
from peers import MODEL, ask_run, told
from rich.console import Console
from rich.table import Table

from stepahead.kernels.team import Team
from stepahead.model.spec import ModelSpec, read_spec

ROWS = (1, 32, 128)
RATE_ROWS = 512
BLOCK_BYTES = 256 << 20
PROMPT, NEW = 128, 64  # tokens: the first rows must not end before the last prompt is computed
TURNS = 5_000_000  # of an instruction's loop: some tenths of a second
INSTRUCTION = dict(
    zip(OURS_BY_PRECISION, ["float32 multiply-add"] * 2 + ["int16 pairs"] * 2, strict=True)
)
By = dict[str, dict[int, Spread]]  # ms, by what and by rows


# --- measuring ----------------------------------------------------------------------------------


def timed_s(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def memory_rates(threads: int, rounds: int) -> dict[str, Spread]:
    """GB a second, by what and by how many threads."""
    block = torch.ones(BLOCK_BYTES // 4)
    target = torch.empty_like(block)
    target.copy_(block)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            copied_s, read_s = timed_s(lambda: target.copy_(block)), timed_s(block.sum)
            found.setdefault(f"copy, {count}", []).append(2 * BLOCK_BYTES / copied_s / 1e9)
            found.setdefault(f"read, {count}", []).append(BLOCK_BYTES / read_s / 1e9)
    torch.set_num_threads(threads)
    return {name: Spread.of(values) for name, values in found.items()}


def instruction_rates(threads: int, rounds: int) -> dict[str, Spread]:
    """10^9 operations a second, by instruction and by how many threads."""
    teams = {count: Team(count) for count in sorted({1, threads})}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in INSTRUCTIONS:
            for count, team in teams.items():
                began_s = time.perf_counter()
                operations = instructions(kind, team, TURNS)
                rate = operations / (time.perf_counter() - began_s) / 1e9
                found.setdefault(f"{kind}, {count}", []).append(rate)
    return {name: Spread.of(values) for name, values in found.items()}


def product_times(spec: ModelSpec, team: Team, rounds: int) -> tuple[By, dict[str, str]]:
    """ms of all products by kernel and rows, and why some kernels are not there."""
    built: dict[str, Products] = {}
    absent: dict[str, str] = {}
    for kernel in KERNELS:
        try:
            built[kernel] = Products.of(kernel, spec, team)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            absent[kernel] = str(error).strip().splitlines()[0][:200]
    times_ms: dict[str, dict[int, list[float]]] = {kernel: {} for kernel in built}
    for _ in range(rounds):
        for rows in (*ROWS, RATE_ROWS):
            inputs = inputs_of(spec, rows)
            for kernel, products in built.items():
                took_s = timed_s(lambda products=products, inputs=inputs: products.run(inputs))
                times_ms[kernel].setdefault(rows, []).append(took_s * 1e3)
    return {
        kernel: {rows: Spread.of(values) for rows, values in by_rows.items()}
        for kernel, by_rows in times_ms.items()
    }, absent


def attention_times(spec: ModelSpec, team: Team, rounds: int) -> dict[int, Spread]:
    """ms of ours in all layers, by rows."""
    made = {rows: Attention(spec, rows, team) for rows in ROWS}
    times_ms: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows, attention in made.items():
            times_ms[rows].append(timed_s(attention.ours) * 1e3)
    return {rows: Spread.of(values) for rows, values in times_ms.items()}


def our_steps_ms(model: Path, folder: Path, threads: int, rounds: int) -> By:
    """Of each precision that is in the table, by rows."""
    text = Text.of(model)
    found: By = {}
    for name in OURS_BY_PRECISION:
        told(f"{OURS} {name}")
        options = our_precisions()[name]
        job = Job(OURS, str(model), name, options, threads, max(ROWS), PROMPT + NEW, str(folder))
        worker = Worker(job, Path(sys.executable), folder / f"floor {name}.log")
        try:
            found[name] = {rows: step_ms(worker, text, rows, rounds) for rows in ROWS}
        finally:
            worker.close()
    return found


def step_ms(worker: Worker, text: Text, rows: int, rounds: int) -> Spread:
    """Of runs one after the other, each the median of its steps."""
    size = Size(rounds, rows, PROMPT, NEW)
    runs = [ask_run(worker, text.prompts(size), NEW) for _ in range(rounds)]
    return Spread.of([statistics.median(decode_steps_s(run, rows)) * 1e3 for run in runs])


# --- floors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a part of a step must move and do, and how long that takes at least, in ms."""

    mb: float
    gflop: float
    moving_ms: float
    computing_ms: float

    @classmethod
    def of(cls, moved: float, operations: float, gb_s: float, gflop_s: float) -> Part:
        mb, gflop = moved / 1e6, operations / 1e9
        return cls(mb, gflop, mb / gb_s, gflop / gflop_s * 1e3)

    @property
    def least_ms(self) -> float:
        return max(self.moving_ms, self.computing_ms)


@dataclass(frozen=True)
class Floor:
    """One line of the table: what it takes at least, and what it takes us."""

    precision: str
    rows: int
    matrices: Part
    attention: Part
    products_ms: Spread
    attention_ms: Spread
    step_ms: Spread | None

    @property
    def least_ms(self) -> float:
        return self.matrices.least_ms + self.attention.least_ms


@dataclass(frozen=True)
class Found:
    """All that was measured."""

    threads: int
    memory: dict[str, Spread]
    rates: dict[str, Spread]
    products: By
    absent: dict[str, str]
    attention: dict[int, Spread]
    steps: By

    def gemm_rates(self, spec: ModelSpec) -> dict[str, float]:
        """10^9 operations a second of each kernel, at the number of rows where it is best."""
        operations = 2 * weights_of(spec)
        return {
            kernel: max(operations * rows / one.median / 1e6 for rows, one in by_rows.items())
            for kernel, by_rows in self.products.items()
        }


def weights_of(spec: ModelSpec) -> int:
    """Numbers in all matrices."""
    return sum(rows * columns for rows, columns, _ in matrices(spec))


def floors(spec: ModelSpec, found: Found) -> list[Floor]:
    """For every precision and number of rows."""
    read_gb_s = found.memory[f"read, {found.threads}"].median
    rates = {kind: found.rates[f"{kind}, {found.threads}"].median for kind in INSTRUCTIONS}
    seen = sum(
        min(CONTEXT, spec.sliding_window or CONTEXT) if spec.sees_window(layer) else CONTEXT
        for layer in range(spec.num_layers)
    )
    cells = seen * spec.head_dim
    lines = []
    for precision, quantization in OURS_BY_PRECISION.items():
        stored = stored_bytes(spec, quantization)
        for rows in ROWS:
            moved = stored + rows * 2 * 4 * spec.vocab_size
            operations = rows * 2 * weights_of(spec)
            kv_bytes = rows * 2 * 4 * spec.num_kv_heads * cells
            scored = rows * 4 * spec.num_heads * cells
            lines.append(
                Floor(
                    precision,
                    rows,
                    Part.of(moved, operations, read_gb_s, rates[INSTRUCTION[precision]]),
                    Part.of(kv_bytes, scored, read_gb_s, rates["float32 multiply-add"]),
                    found.products[f"ours {precision}"][rows],
                    found.attention[rows],
                    found.steps.get(precision, {}).get(rows),
                )
            )
    return lines


# --- telling ------------------------------------------------------------------------------------


def tables(spec: ModelSpec, found: Found, lines: list[Floor]) -> list[Table]:
    """For people."""
    rates = Table("rate", "", title="what the machine does; the number behind it is of threads")
    for unit, values in (("GB/s", found.memory), ("10^9/s", found.rates)):
        for name, one in values.items():
            rates.add_row(name, f"{one} {unit}")
    titles = [f"{rows} rows" for rows in (*ROWS, RATE_ROWS)]
    kernels = Table("all products, ms", *titles, "10^9/s")
    gemm = found.gemm_rates(spec)
    for kernel, by_rows in found.products.items():
        kernels.add_row(kernel, *map(str, by_rows.values()), f"{gemm[kernel]:.0f}")
    for kernel, reason in found.absent.items():
        kernels.add_row(kernel, reason)
    parts = ("MB", "ms", "GFLOP", "ms", "ours")
    heads = ("precision", "rows", *parts, *parts, "floor", "step", "step / floor", "left over")
    title = "what a decode step needs: matrices, then attention"
    steps = Table(*heads, title=title)
    for line in lines:
        steps.add_row(line.precision, str(line.rows), *cells_of(line))
    return [rates, kernels, steps]


def cells_of(line: Floor) -> list[str]:
    cells = []
    for part, ours in ((line.matrices, line.products_ms), (line.attention, line.attention_ms)):
        cells += [f"{part.mb:.0f}", f"{part.moving_ms:.1f}", f"{part.gflop:.2f}"]
        cells += [f"{part.computing_ms:.1f}", str(ours)]
    cells.append(f"{line.least_ms:.1f}")
    if line.step_ms is not None:
        step = line.step_ms.median
        left = step - line.products_ms.median - line.attention_ms.median
        cells += [str(line.step_ms), f"{step / line.least_ms:.2f}", f"{left:.1f}"]
    return cells


def as_json(spec: ModelSpec, found: Found, lines: list[Floor]) -> dict[str, Any]:
    """The last line."""
    return {
        "bench": "cpu_floor",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": found.threads,
        "memory_gb_s": {name: round(one.median, 2) for name, one in found.memory.items()},
        "instructions_g_s": {name: round(one.median, 1) for name, one in found.rates.items()},
        "gemm_g_s": {name: round(rate, 1) for name, rate in found.gemm_rates(spec).items()},
        "products_ms": {
            kernel: {str(rows): round(one.median, 2) for rows, one in by_rows.items()}
            for kernel, by_rows in found.products.items()
        },
        "absent": found.absent,
        "floor": [
            {
                "precision": line.precision,
                "rows": line.rows,
                "matrices": part_in_json(line.matrices, line.products_ms),
                "attention": part_in_json(line.attention, line.attention_ms),
                "floor_ms": round(line.least_ms, 2),
                "step_ms": None if line.step_ms is None else round(line.step_ms.median, 2),
            }
            for line in lines
        ],
    }


def part_in_json(part: Part, ours: Spread) -> dict[str, float]:
    return {
        "mb": round(part.mb, 1),
        "gflop": round(part.gflop, 3),
        "moving_ms": round(part.moving_ms, 2),
        "computing_ms": round(part.computing_ms, 2),
        "ours_ms": round(ours.median, 2),
    }


def measure(spec: ModelSpec, threads: int, rounds: int, steps: Callable[[], By] = dict) -> Found:
    """`steps` measures ours, when nothing else is in memory any more."""
    team = Team(threads)
    torch.set_num_threads(threads)
    with torch.inference_mode():
        memory, rates = memory_rates(threads, rounds), instruction_rates(threads, rounds)
        products, absent = product_times(spec, team, rounds)
        attention = attention_times(spec, team, rounds)
    return Found(threads, memory, rates, products, absent, attention, steps())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=next(iter(MODELS)), help=MODEL)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="for logs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(given.model, folder)
    spec = read_spec(model)
    if spec.sparse is not None:
        raise SystemExit(f"{model}: only plain models; its experts are not all read in a step")
    end_on_sigterm()
    found = measure(
        spec,
        given.threads,
        given.rounds,
        lambda: our_steps_ms(model, folder, given.threads, given.rounds),
    )
    lines = floors(spec, found)
    for table in tables(spec, found, lines):
        Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(json.dumps(as_json(spec, found, lines)))


if __name__ == "__main__":
    main()
