"""stepahead beside llama.cpp, vLLM and transformers on the CPU: one model, one workload, in turns.

    python benchmarks/peers.py --setup      # once: a virtual environment for each, under .peers/
    python benchmarks/peers.py              # or --quick
    python benchmarks/peers.py --model gemma

Regime: one model file (SmolLM2-135M in Q4_1 if nothing is said; `gemma` is Gemma 3 270M in Q4_K_M),
whose values each engine has in each of its precisions, and llama.cpp as they stand in the file; 32
prompts of 128 tokens cut from a fixed text, 128 new tokens each, greedy, behind ends of sequence
too; batch 1 and batch 32; 2 threads for each engine; no prefix cache.  All engines are built first
and stay, each in a process of its own; a round asks one after the other, the next round in reverse,
and figures are medians of rounds, with the lowest and highest.  Ratios are made within a round.
Sampling, and handing tokens out, count; tokenizing does not.

    step           ms from one token of every row to the next, of steps that had no prompt in them
    decode         tokens a second in these steps, batch 32
    prefill        4,096 prompt tokens until the last of the 32 prompts has its only new token
    first token    ms from the arrival of all 32 prompts, in the run of 128 new tokens: of the
                   prompt in the middle, and of the last one
    memory         resident, all processes of the engine, behind the run at batch 32
    start          s from an empty process to a first token
    perplexity     on the fixed text;  top-1: share of its positions at which the most likely token
                   is that of our float32, of those where that one's margin exceeds 0.1

Ours is the offline engine under the overlap loop with its runner in a process of its own, in each
precision that runs on kernels of its own, and in bfloat16 if --only names it.  llama.cpp computes
whole prompts before it decodes, 512 tokens a call, and keeps KV in 16 bits in every precision.
vLLM has its own defaults.  transformers is `generate` with one rectangular batch.  A peer that is
not installed, or fails, is named with the reason; the others go on.  Ctrl-C and SIGTERM end the
engines, too.  `idle_share` in the JSON is the most that an engine took of a core while another was
asked.

Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peer_figures import (
    OURS,
    Figure,
    Ratio,
    Spread,
    Turn,
    Turns,
    agreement,
    perplexity,
    ratios,
    spreads,
)
from peer_jobs import (
    FULL,
    MODELS,
    QUICK,
    ROOT,
    Size,
    Text,
    folder_trouble,
    jobs,
    model_of,
    needs_folder,
    refusal,
)
from peer_process import (
    PEERS,
    Job,
    PeerFailed,
    Worker,
    close_all,
    end_on_sigterm,
    python_of,
    set_up,
)
from rich.console import Console
from rich.table import Table

REFERENCE = f"{OURS} float32"
WARM = 8  # tokens of each prompt, and new ones, that warm the decode step up; the text does prompts
MODEL = f"one of {', '.join(MODELS)}, a .gguf file, or a Hugging Face folder"
SETUP = "install these peers, or all, each into an environment of its own, and measure nothing"
FIGURES: dict[str, tuple[str, Figure]] = {
    "step_ms_1": ("step, 1 row", lambda one: one.step_ms_1),
    "step_ms_32": ("step, 32", lambda one: one.step_ms_many),
    "decode_tok_s_b32": ("decode tok/s", lambda one: one.decode_tok_s),
    "prefill_tok_s": ("prefill tok/s", lambda one: one.prefill_tok_s),
    "first_token_ms_median": ("first token", lambda one: one.first_ms_median),
    "first_token_ms_last": ("the last", lambda one: one.first_ms_last),
    "memory_mb": ("memory, MB", lambda one: one.memory_mb),
}


@dataclass(frozen=True)
class Run:
    """What one run of the benchmark found."""

    size: Size
    turns: Turns
    scores: dict[str, dict[str, list[Any]]]
    starts_s: dict[str, float]
    idle_shares: dict[str, float]
    versions: dict[str, str]
    not_run: dict[str, str]


# --- measuring ----------------------------------------------------------------------------------


class Field:
    """The engines that run; one that fails is out of all that follows."""

    def __init__(self, folder: Path, text: Text, size: Size) -> None:
        self._folder, self._size = folder, size
        self._chunks, self._prompts = text.chunks(), text.prompts(size)
        self._workers: dict[str, Worker] = {}
        self._turns: Turns = {}
        self._scores: dict[str, dict[str, list[Any]]] = {}
        self._starts_s: dict[str, float] = {}
        self._not_run: dict[str, str] = {}

    def leave_out(self, job: Job, reason: str) -> None:
        """An engine that can't even be started."""
        self._not_run[job.name] = reason

    def start(self, job: Job) -> None:
        """Builds an engine, has it score the text, and warms its decode step up."""
        told(f"starting {job.name}")
        python = Path(sys.executable) if job.engine == OURS else python_of(self._folder, job.engine)
        began_s = time.monotonic()
        try:
            worker = Worker(job, python, self._folder / f"{job.name}.log")
            self._workers[job.name] = worker
            ask_run(worker, self._prompts[:1], 1)
            self._starts_s[job.name] = time.monotonic() - began_s
            self._scores[job.name] = worker.ask({"score": self._chunks})
            ask_run(worker, [ids[:WARM] for ids in self._prompts], WARM)
            self._turns[job.name] = []
        except PeerFailed as failure:
            self._fail(job.name, failure)

    def round(self, number: int) -> None:
        """Asks each engine once; every second round in reverse."""
        names = list(self._workers)
        for name in reversed(names) if number % 2 else names:
            told(f"round {number + 1} of {self._size.rounds}: {name}")
            try:
                self._turns[name].append(self._turn(self._workers[name]))
            except (PeerFailed, ValueError) as failure:
                self._fail(name, failure)

    def _turn(self, worker: Worker) -> Turn:
        alone = ask_run(worker, self._prompts[:1], self._size.new_tokens)
        many = ask_run(worker, self._prompts, self._size.new_tokens)
        memory_mb = worker.memory_mb()
        prefill = ask_run(worker, self._prompts, 1)
        return Turn.of(alone, many, prefill, self._prompts, memory_mb)

    def _fail(self, name: str, failure: Exception) -> None:
        self._not_run[name] = str(failure)
        told(f"{name}: {failure}")
        for kept in (self._turns, self._scores, self._starts_s):
            kept.pop(name, None)
        if worker := self._workers.pop(name, None):
            worker.close()

    def found(self) -> Run:
        workers = self._workers
        return Run(
            self._size,
            self._turns,
            self._scores,
            self._starts_s,
            {name: worker.idle_share for name, worker in workers.items()},
            {name.rpartition(" ")[0]: worker.version for name, worker in workers.items()},
            self._not_run,
        )

    def close(self) -> None:
        close_all(list(self._workers.values()))


def ask_run(worker: Worker, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    """The events of a run."""
    question = {"run": {"prompts": prompts, "new_tokens": new_tokens}}
    return worker.ask(question)["events"]


def told(words: str) -> None:
    """Where the run is, for who waits."""
    print(words, file=sys.stderr, flush=True)


def measure(model: Path, folder: Path, size: Size, threads: int, only: list[str]) -> Run:
    """All rounds of all engines whose names hold one of `only`, if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = jobs(model, folder, size, threads, only)
    field = Field(folder, Text.of(model), size)
    trouble = folder_trouble(model, folder, wanted)
    try:
        for job in wanted:
            reason = refusal(job, model, folder) or (trouble if needs_folder(job) else None)
            field.leave_out(job, reason) if reason else field.start(job)
        for number in range(size.rounds):
            field.round(number)
        return field.found()
    finally:
        field.close()


# --- telling ------------------------------------------------------------------------------------


def quality(run: Run) -> dict[str, dict[str, float | None]]:
    """Of each engine; agreement is None without our float32."""
    reference = run.scores.get(REFERENCE)
    return {
        name: {
            "perplexity": round(perplexity(score), 3),
            "top1": None if reference is None else round(agreement(score, reference), 4),
        }
        for name, score in run.scores.items()
    }


def tables(run: Run) -> list[Table]:
    """For people."""
    of_each = [(title, spreads(run.turns, figure)) for title, figure in FIGURES.values()]
    titles = [title for title, _ in of_each]
    size = run.size
    rows = Table(
        *("engine", *titles, "start, s", "perplexity", "top-1"),
        title=f"{size.rows} prompts of {size.prompt_tokens} + {size.new_tokens} tokens; medians of "
        f"{size.rounds} rounds (lowest-highest), ms where nothing else is said",
    )
    for name, values in quality(run).items():
        cells = [str(found[name]) for _, found in of_each]
        top1 = "-" if values["top1"] is None else f"{values['top1']:.2%}"
        rows.add_row(name, *cells, f"{run.starts_s[name]:.1f}", f"{values['perplexity']}", top1)
    for name, reason in run.not_run.items():
        rows.add_row(name, reason, *[""] * (len(titles) + 2))
    compared = Table("ratio", "ours", "theirs", "ours / theirs", title="within a round")
    for name, one in ratios(run.turns).items():
        cells = ("-", "-", "-") if one is None else (one.ours, one.theirs, str(one.spread))
        compared.add_row(name.removeprefix("ratio_"), *cells)
    return [rows, compared]


def as_json(run: Run, model: Path, threads: int) -> dict[str, Any]:
    """The last line."""
    found = {key: spreads(run.turns, figure) for key, (_, figure) in FIGURES.items()}

    def medians(key: str) -> dict[str, float]:
        return {name: short(one.median) for name, one in found[key].items()}

    alone, many = medians("step_ms_1"), medians("step_ms_32")
    first, last = medians("first_token_ms_median"), medians("first_token_ms_last")
    compared = ratios(run.turns)
    steps = {bits: compared.pop(f"ratio_step_b1_vs_llamacpp {bits}") for bits in ("8bit", "4bit")}
    return {
        "bench": "peers",
        "workload": {"model": model.name, "threads": threads, **asdict(run.size)},
        "step_ms": {name: {"1": alone[name], "32": many[name]} for name in alone},
        "decode_tok_s_b32": medians("decode_tok_s_b32"),
        "prefill_tok_s": medians("prefill_tok_s"),
        "first_token_ms": {name: {"median": first[name], "last": last[name]} for name in first},
        "memory_mb": medians("memory_mb"),
        "start_s": {name: round(value, 2) for name, value in run.starts_s.items()},
        "quality": quality(run),
        **{name: in_json(one) for name, one in compared.items()},
        "ratio_step_b1_vs_llamacpp": {bits: in_json(one) for bits, one in steps.items()},
        "compared": {
            name: {"ours": one.ours, "theirs": one.theirs, "range": bounds(one.spread)}
            for name, one in ratios(run.turns).items()
            if one is not None
        },
        "spread": {
            key: {name: bounds(one) for name, one in values.items()}
            for key, values in found.items()
        },
        "idle_share": {name: round(value, 3) for name, value in run.idle_shares.items()},
        "versions": run.versions,
        "not_run": run.not_run,
    }


def short(value: float) -> float:
    """To four digits, as small as it may be."""
    return float(f"{value:.4g}")


def in_json(one: Ratio | None) -> float | None:
    return None if one is None else short(one.spread.median)


def bounds(one: Spread) -> list[float]:
    return [short(one.low), short(one.high)]


def set_up_all(folder: Path, names: list[str]) -> int:
    """Installs each; how many could not be."""
    failed = 0
    for name in names or list(PEERS):
        told(f"installing {', '.join(PEERS[name].packages)} into {folder / name} (minutes)")
        reason = set_up(folder, name)
        failed += reason is not None
        told(f"{name}: {reason or 'installed'}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setup", nargs="*", metavar="PEER", choices=PEERS, help=SETUP)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="of the environments")
    parser.add_argument("--model", default="smollm2", help=MODEL)
    parser.add_argument("--quick", action="store_true", help="3 rounds, 32 new tokens")
    parser.add_argument("--rounds", type=int, help="other than 7, or 3 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="engines whose names hold a word")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.setup is not None:
        return min(1, set_up_all(folder, given.setup))
    model = model_of(given.model, folder)
    end_on_sigterm()
    size = QUICK if given.quick else FULL
    size = replace(size, rounds=given.rounds or size.rounds)
    run = measure(model, folder, size, given.threads, given.only)
    for table in tables(run):
        Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(json.dumps(as_json(run, model, given.threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
