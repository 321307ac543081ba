"""What this machine allows: the shortest that a decode step can take, and how long ours takes.

Regime: the shapes of one model (SmolLM2-135M if nothing is said), weights of every layer in memory
of their own, so that a step reads all of them as the real one does; 2 threads; medians of rounds,
in which all that is measured takes turns, with the lowest and highest.

    copy, read      GB a second: a block of 256 MB copied (bytes read and written), and added up
    linear layers   ms for all matrix products of a step, head included, at 1, 32 and 128 rows, by
                    each kernel that torch has here; a kernel that it has not is named
    GEMM rate       the best of these, 512 rows included, in 10^9 operations a second
    bytes           that a step must move: its weights once, keys and values of 192 positions a row,
                    the logits written and read
    operations      that it must do: 2 a weight and row, 4 a number of the keys and row
    floor           the longer of bytes at the read rate and operations at the GEMM rate
    step            ours, as peers.py measures it: the offline engine, 128 prompt tokens a row

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
from peer_figures import OURS, Spread, decode_steps_s
from peer_process import Job, Worker
from peers import ROOT, TEXT, Size, ask_run, default_model, our_precisions, prompts_of, told
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from stepahead.model.spec import ModelSpec, read_spec
from stepahead.text import Tokenizer

ROWS = (1, 32, 128)
RATE_ROWS = 512
CONTEXT = 192  # in the middle of 128 prompt tokens and 128 new ones
BLOCK_BYTES = 256 << 20
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
Product = Callable[[Tensor], Tensor]


# --- kernels ------------------------------------------------------------------------------------


def plain_float32(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def packed_float32(weight: Tensor) -> Product:
    return _packed(weight)


def plain_bfloat16(weight: Tensor) -> Product:
    narrow = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), narrow)


def packed_bfloat16(weight: Tensor) -> Product:
    product = _packed(weight.bfloat16())
    return lambda x: product(x.bfloat16())


def _packed(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def onednn_int8(weight: Tensor) -> Product:
    """Activations in int8 too; making them so is not counted."""
    scales = weight.abs().amax(1) / 127
    narrow = (weight / scales[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(narrow, None)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    shared = (packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda x: torch.ops.onednn.qlinear_pointwise(x.to(torch.int8), 0.02, 0, *shared)


def int8_weights_only(weight: Tensor) -> Product:
    scales = weight.abs().amax(1) / 127
    narrow = (weight / scales[:, None]).round().to(torch.int8)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, narrow, scales)


KERNELS: dict[str, tuple[str, Callable[[Tensor], Product]]] = {
    "F.linear float32": ("float32", plain_float32),
    "oneDNN float32": ("float32", packed_float32),
    "F.linear bfloat16": ("bfloat16", plain_bfloat16),
    "oneDNN bfloat16": ("bfloat16", packed_bfloat16),
    "oneDNN int8": ("int8", onednn_int8),
    "int8 weights only": ("int8", int8_weights_only),
}


@dataclass(frozen=True)
class Layers:
    """All products of a step with one kernel."""

    kernel: str
    precision: str
    products: list[tuple[int, Product]]  # with their columns

    def run(self, inputs: dict[int, Tensor]) -> None:
        for columns, product in self.products:
            product(inputs[columns])


def shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(rows, columns) of every matrix, in the order of a step."""
    q, kv = (heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    return layer * spec.num_layers + [(spec.vocab_size, hidden)]


def build(kernel: str, sizes: list[tuple[int, int]]) -> Layers:
    """Weights and products; RuntimeError and the like where torch can't."""
    precision, make = KERNELS[kernel]
    products = [(columns, make(torch.randn(rows, columns))) for rows, columns in sizes]
    layers = Layers(kernel, precision, products)
    layers.run({columns: torch.randn(2, columns) for _, columns in sizes})
    return layers


# --- measuring ----------------------------------------------------------------------------------


def timed_s(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def memory_rates(rounds: int) -> dict[str, Spread]:
    """GB a second."""
    block = torch.ones(BLOCK_BYTES // 4)
    target = torch.empty_like(block)
    target.copy_(block)
    copies, reads = [], []
    for _ in range(rounds):
        copies.append(2 * BLOCK_BYTES / timed_s(lambda: target.copy_(block)) / 1e9)
        reads.append(BLOCK_BYTES / timed_s(block.sum) / 1e9)
    return {"copy": Spread.of(copies), "read": Spread.of(reads)}


def linear_layers(
    spec: ModelSpec, rounds: int
) -> tuple[dict[str, dict[int, Spread]], dict[str, str]]:
    """ms of all products by kernel and rows, and why some kernels are not there."""
    sizes = shapes(spec)
    built: list[Layers] = []
    absent: dict[str, str] = {}
    for kernel in KERNELS:
        try:
            built.append(build(kernel, sizes))
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            absent[kernel] = str(error).strip().splitlines()[0][:200]
    times_ms: dict[str, dict[int, list[float]]] = {
        layers.kernel: {rows: [] for rows in (*ROWS, RATE_ROWS)} for layers in built
    }
    for _ in range(rounds):
        for rows in (*ROWS, RATE_ROWS):
            inputs = {columns: torch.randn(rows, columns) for _, columns in sizes}
            for layers in built:
                took_s = timed_s(lambda layers=layers, inputs=inputs: layers.run(inputs))
                times_ms[layers.kernel][rows].append(took_s * 1e3)
    spreads = {
        kernel: {rows: Spread.of(values) for rows, values in by_rows.items()}
        for kernel, by_rows in times_ms.items()
    }
    return spreads, absent


def our_steps_ms(model: Path, folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Of each precision that is in the table, by rows."""
    ids = Tokenizer.load(model).encode(TEXT.read_text("utf-8"))
    found: dict[str, dict[int, Spread]] = {}
    for name, options in our_precisions().items():
        if name not in WEIGHT_BYTES:
            continue
        told(f"{OURS} {name}")
        job = Job(OURS, str(model), name, options, threads, max(ROWS), 192, str(folder))
        worker = Worker(job, Path(sys.executable), folder / f"floor {name}.log")
        try:
            found[name] = {rows: step_ms(worker, ids, rows, rounds) for rows in ROWS}
        finally:
            worker.close()
    return found


def step_ms(worker: Worker, ids: list[int], rows: int, rounds: int) -> Spread:
    """Of runs one after the other, each the median of its steps."""
    prompts = prompts_of(ids, Size(rounds, rows, prompt_tokens=128, new_tokens=24))
    runs = [ask_run(worker, prompts, 24) for _ in range(rounds)]
    return Spread.of([statistics.median(decode_steps_s(run, rows)) * 1e3 for run in runs])


# --- floors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What a step must move and do."""

    mb: float
    gflop: float

    @classmethod
    def of(cls, spec: ModelSpec, precision: str, rows: int) -> Need:
        weights = sum(height * width for height, width in shapes(spec))
        kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * CONTEXT
        kv_bytes = 2 if precision == "bfloat16" else 4
        logits = 2 * 4 * spec.vocab_size
        moved = weights * WEIGHT_BYTES[precision] + rows * (kv * kv_bytes + logits)
        keys = spec.num_layers * spec.num_heads * spec.head_dim * CONTEXT
        return cls(moved / 1e6, rows * (2 * weights + 4 * keys) / 1e9)


@dataclass(frozen=True)
class Floor:
    """One line of the table; ms."""

    precision: str
    rows: int
    need: Need
    moving: float
    computing: float
    kernel: str
    linear: Spread
    step: Spread | None

    @property
    def least(self) -> float:
        return max(self.moving, self.computing)


def gemm_rates(spec: ModelSpec, linear: dict[str, dict[int, Spread]]) -> dict[str, float]:
    """10^9 operations a second, the best of each precision."""
    operations = 2 * sum(height * width for height, width in shapes(spec))
    found: dict[str, float] = {}
    for kernel, by_rows in linear.items():
        precision = KERNELS[kernel][0]
        rate = max(operations * rows / one.median / 1e6 for rows, one in by_rows.items())
        found[precision] = max(found.get(precision, 0.0), rate)
    return found


def floors(
    spec: ModelSpec,
    read_gb_s: float,
    linear: dict[str, dict[int, Spread]],
    steps: dict[str, dict[int, Spread]],
) -> list[Floor]:
    """For every precision that has a kernel."""
    rates = gemm_rates(spec, linear)
    found = []
    for precision, rate in rates.items():
        kernels = [kernel for kernel in linear if KERNELS[kernel][0] == precision]
        for rows in ROWS:
            need = Need.of(spec, precision, rows)
            kernel = min(kernels, key=lambda one, rows=rows: linear[one][rows].median)
            found.append(
                Floor(
                    *(precision, rows, need, need.mb / read_gb_s, need.gflop / rate * 1e3, kernel),
                    linear[kernel][rows],
                    steps.get(precision, {}).get(rows),
                )
            )
    return found


# --- telling ------------------------------------------------------------------------------------


def tables(
    memory: dict[str, Spread],
    linear: dict[str, dict[int, Spread]],
    absent: dict[str, str],
    lines: list[Floor],
) -> list[Table]:
    """For people."""
    title = ", ".join(f"{name} {one} GB/s" for name, one in memory.items())
    kernels = Table("ms, all layers", *(f"{rows} rows" for rows in (*ROWS, RATE_ROWS)), title=title)
    for kernel, by_rows in linear.items():
        kernels.add_row(kernel, *map(str, by_rows.values()))
    for kernel, reason in absent.items():
        kernels.add_row(kernel, reason)
    heads = ("precision", "rows", "MB", "ms", "GFLOP", "ms", "floor", "linear layers", "by", "step")
    steps = Table(*heads, "step / floor", "step / linear", title="what a decode step needs")
    for line in lines:
        parts = [f"{line.need.mb:.0f}", f"{line.moving:.1f}", f"{line.need.gflop:.2f}"]
        parts += [f"{line.computing:.1f}", f"{line.least:.1f}", str(line.linear), line.kernel]
        if line.step is not None:
            middle = line.step.median
            parts += [str(line.step), f"{middle / line.least:.2f}"]
            parts.append(f"{middle / line.linear.median:.2f}")
        steps.add_row(line.precision, str(line.rows), *parts)
    return [kernels, steps]


def as_json(
    memory: dict[str, Spread],
    linear: dict[str, dict[int, Spread]],
    absent: dict[str, str],
    lines: list[Floor],
) -> dict[str, Any]:
    """The last line."""
    return {
        "bench": "cpu_floor",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory_gb_s": {name: round(one.median, 2) for name, one in memory.items()},
        "linear_ms": {
            kernel: {str(rows): round(one.median, 2) for rows, one in by_rows.items()}
            for kernel, by_rows in linear.items()
        },
        "absent": absent,
        "floor": [
            {
                "precision": line.precision,
                "rows": line.rows,
                "mb": round(line.need.mb, 1),
                "gflop": round(line.need.gflop, 3),
                "moving_ms": round(line.moving, 2),
                "computing_ms": round(line.computing, 2),
                "floor_ms": round(line.least, 2),
                "linear_ms": round(line.linear.median, 2),
                "step_ms": None if line.step is None else round(line.step.median, 2),
            }
            for line in lines
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a .gguf file, or a Hugging Face folder")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="for logs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = (given.model or default_model()).resolve()
    torch.set_num_threads(given.threads)
    spec = read_spec(model)
    if spec.sparse is not None:
        raise SystemExit(f"{model}: only plain models; its experts are not all read in a step")
    with torch.inference_mode():
        memory = memory_rates(given.rounds)
        linear, absent = linear_layers(spec, given.rounds)
    steps = our_steps_ms(model, folder, given.threads, given.rounds)
    lines = floors(spec, memory["read"].median, linear, steps)
    for table in tables(memory, linear, absent, lines):
        Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(json.dumps(as_json(memory, linear, absent, lines)))


if __name__ == "__main__":
    main()
