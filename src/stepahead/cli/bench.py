"""`stepahead bench`: a model's throughput and latency with each loop, or a part of the engine.

Regime: all prompts at once, random token ids, greedy, every answer of the same length.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from cyclopts import App
from rich.console import Console

from stepahead.cli.options import EngineFlags, Quiet, given, open_model
from stepahead.cli.tables import Summary, summary_table
from stepahead.errors import ConfigError
from stepahead.llm.figures import RunTally
from stepahead.llm.offline import LLM
from stepahead.types import SamplingParams

_LOOPS = ("serial", "overlap")

app = App(name="bench", help="Measure a model with each loop, or a part of the engine.")
app.command("stepahead.sim.host_cost:main", name="host", help="What a step costs the host.")
app.command("stepahead.sim.overlap:main", name="overlap", help="What the overlap loop hides.")
app.command(
    "stepahead.sim.overhead:main", name="engine", help="The whole engine around a near-free model."
)


@app.default
def bench(
    model: str,
    /,
    *,
    num_prompts: int = 64,
    input_len: int = 128,
    output_len: int = 64,
    quiet: Quiet = False,
    engine: EngineFlags = None,
) -> None:
    """Measure a model: throughput, latencies and both books, for each loop (or the one of --loop).

    The last line on stdout is JSON.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, or `toy`.
    num_prompts
        Prompts, all asked at once.
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer.
    """
    load = Load(num_prompts, input_len, output_len)
    options = given(engine)
    loop = options.pop("loop", None)
    runs: dict[str, Summary] = {}
    for name in _LOOPS if loop is None else (loop,):
        with open_model(model, engine, None, quiet, loop=name) as llm:
            runs[name] = measure(llm, load)
    title = f"{num_prompts} prompts of {input_len} tokens, {output_len} out"
    if not quiet:
        Console(stderr=True).print(summary_table(title, runs))
    print(json.dumps(_line(model, load, runs)))


@dataclass(frozen=True)
class Load:
    """What is asked; ConfigError unless all are at least 1."""

    num_prompts: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; give at least 1")


def measure(llm: LLM, load: Load) -> Summary:
    """Answers the load once, after a short one that is not counted."""
    random = np.random.default_rng(llm.resolved.config.seed)
    warm_up = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(_prompts(llm, 2, load.input_len, random), warm_up, use_tqdm=False)
    prompts = _prompts(llm, load.num_prompts, load.input_len, random)
    params = SamplingParams(temperature=0.0, max_tokens=load.output_len, ignore_eos=True)
    mark, began_s, tally = llm.engine.books.mark(), time.monotonic(), RunTally()
    for output in llm.generate(prompts, params):
        tally.add(output)
    return Summary(tally, time.monotonic() - began_s, llm.engine.books.summary(mark))


def _prompts(llm: LLM, count: int, length: int, random: np.random.Generator) -> list[list[int]]:
    facts = llm.resolved.facts
    avoid = [*llm.tokenizer.special_ids, *facts.eos_ids]
    plain = np.setdiff1d(np.arange(facts.vocab_size), avoid)
    return random.choice(plain, (count, length)).tolist()


def _line(model: str, load: Load, runs: dict[str, Summary]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "bench": "offline",
        "model": model,
        "prompts": load.num_prompts,
        "input_len": load.input_len,
        "output_len": load.output_len,
    }
    return line | {name: run.figures.rounded() for name, run in runs.items()}
