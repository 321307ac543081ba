"""`stepahead bench`: a model's throughput and latency with each loop, or a part of the engine.

Regime: all prompts at once, random token ids, greedy, every answer of the same length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App
from rich.console import Console
from rich.table import Table

from stepahead.cli.options import EngineFlags, Quiet, given, open_model, packaged_model
from stepahead.cli.tables import Summary, show_probes, summary_table
from stepahead.config import CHOICES
from stepahead.errors import ConfigError
from stepahead.llm.figures import RunTally
from stepahead.llm.offline import LLM
from stepahead.llm.prompts import read_chat
from stepahead.types import SamplingParams

_LOOPS = CHOICES["loop"]

app = App(name="bench")


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
    """Throughput, latencies and both books of a model, for each loop or the one of --loop.

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
            runs[name] = measure_model(llm, load)
    if not quiet:
        print(f"{num_prompts} prompts of {input_len} tokens, {output_len} out")
        console = Console()
        console.print(summary_table(runs))
        show_probes(console, {name: run.probes for name, run in runs.items()})
    print(json.dumps(_line(model, load, runs)))


@app.command
def host() -> None:
    """What a step costs the host, by rows."""
    from stepahead.sim.host_cost import measure, table

    _show(measure(), table)


@app.command
def overlap() -> None:
    """What the overlap loop hides, in front of a device that sleeps."""
    from stepahead.sim.overlap import measure, table

    _show(measure(), table)


@app.command(name="engine")
def engine_overhead() -> None:
    """The whole engine around a model that costs next to nothing."""
    from stepahead.sim.overhead import measure, table

    _show(measure(), table)


@app.command
def spec(
    model: Path | None = None,
    /,
    *,
    rounds: int = 7,
    output_len: int = 96,
    quiet: Quiet = False,
    engine: EngineFlags = None,
) -> None:
    """What drafts bring where answers say again what the prompt has said: a summary, edited code.

    Parameters
    ----------
    model
        A Hugging Face folder or a .gguf file of a chat model; SmolLM2 if none is named.
    rounds
        How often each workload is answered, without drafts and with them in turn.
    output_len
        Tokens of an answer.
    """
    from stepahead.cli.bench_spec import measure_spec, spec_table
    from stepahead.cli.spec_prompts import SPEC_PROMPTS

    if rounds < 1 or output_len < 2:
        raise ConfigError(f"rounds={rounds}, output_len={output_len}; give at least 1 and 2")
    name, options = str(model or packaged_model()), {"draft": "ngram"} | given(engine)
    if options["draft"] == "none":
        raise ConfigError("draft=none; bench spec compares drafts with none, give draft=ngram")
    bare = {name: value for name, value in options.items() if name not in ("draft", "draft_tokens")}
    with LLM(name, **bare) as plain, LLM(name, **options) as drafted:
        workloads = {
            what: [_chat_ids(drafted, text) for text in texts]
            for what, texts in SPEC_PROMPTS.items()
        }
        found = measure_spec(plain, drafted, workloads, output_len, rounds)
        config = drafted.resolved.config
    if not quiet:
        print(f"{config.draft}, {config.draft_tokens} drafts, loop={config.loop}")
        Console().print(spec_table(found))
    about = {"bench": "spec", "model": name, "draft": config.draft, "drafts": config.draft_tokens}
    print(json.dumps(about | {what: one.as_dict() for what, one in found.items()}))


def _chat_ids(llm: LLM, text: str) -> list[int]:
    return read_chat([{"role": "user", "content": text}], llm.tokenizer).ids


def _show(found: dict[str, Any], table: Callable[[dict[str, Any]], Table]) -> None:
    Console().print(table(found))
    print(json.dumps(found))


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


def measure_model(llm: LLM, load: Load) -> Summary:
    """Answers the load once, after a short one that is not counted; ConfigError if it is longer
    than the model, which would cut the answers short."""
    longest, room = load.input_len + load.output_len, llm.resolved.model_len
    if longest > room:
        raise ConfigError(
            f"input_len={load.input_len} and output_len={load.output_len} are {longest} tokens; "
            f"the model takes {room} in all"
        )
    random = np.random.default_rng(llm.resolved.config.seed)
    warm_up = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(_prompts(llm, 2, load.input_len, random), warm_up, use_tqdm=False)
    prompts = _prompts(llm, load.num_prompts, load.input_len, random)
    params = SamplingParams(temperature=0.0, max_tokens=load.output_len, ignore_eos=True)
    mark, before = llm.engine.books.mark(), llm.engine.syncs.copy()
    began_s, tally = time.monotonic(), RunTally()
    for output in llm.generate(prompts, params):
        tally.add(output)
    wall_s, books = time.monotonic() - began_s, llm.engine.books.summary(mark)
    syncs = llm.engine.syncs.since(before)
    return Summary(tally, wall_s, books, syncs, llm.probes(mark.at_ns))


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
    line |= {name: run.figures.rounded() for name, run in runs.items()}
    return line | {"probes": {name: run.probes.as_dict() for name, run in runs.items()}}
