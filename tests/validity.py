#!/usr/bin/env python3
"""Answers of a whole engine under JSON schemas, at temperature 1: those that end must be valid.

    python tests/validity.py [--model tiny|smollm2|PATH] [--answers 2000] [--max-tokens 100]

Each request takes the next schema of tests/schemas.py.  `tiny` is a Llama of random weights with
500 tokens, which knows nothing of JSON.  What ends by its grammar must parse and validate with
`jsonschema`; what max_tokens cuts must say so.  Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import text_makers
from offline_makers import tiny_llama
from schemas import SCHEMAS
from stepahead import LLM, SamplingParams
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.structured import StructuredOutputs
from stepahead.types import Finish
from walks import Report, judge

MIN_SHARE = 0.6  # of the answers, that must end by themselves


def answer(
    llm: LLM,
    answers: int,
    max_tokens: int,
    seed: int = 0,
    count: Callable[[int], Any] = lambda ended: None,
) -> Report:
    """Has the engine give so many answers, under the schemas in turn; `count` is told each step how
    many more have ended."""
    facts = llm.resolved.facts
    vocabulary = Vocabulary.of(llm.tokenizer, facts.vocab_size, facts.eos_ids)
    compiler = GrammarCompiler(vocabulary)
    names: dict[int, str] = {}
    for number in range(answers):
        name = list(SCHEMAS)[number % len(SCHEMAS)]
        asked = StructuredOutputs(json=SCHEMAS[name])
        params = SamplingParams(max_tokens=max_tokens, seed=seed + number, structured_outputs=asked)
        prompt = llm.tokenizer.encode(f"An example of {name} in JSON: ")
        (rid,) = llm.engine.add(prompt, params, grammar=compiler.compile(asked))
        names[rid] = name
    report = Report()
    while llm.engine.has_work:
        outputs = llm.engine.step()
        if outputs is not None and outputs.finishes:
            for finish in outputs.finishes:
                take(report, vocabulary, names.pop(finish.rid), finish, max_tokens)
            count(len(outputs.finishes))
    report.wrong += [f"{name}: no end" for name in names.values()]
    return report


def take(
    report: Report, vocabulary: Vocabulary, name: str, finish: Finish, max_tokens: int
) -> None:
    """Judges a terminal message."""
    tokens = finish.tokens.tolist()
    report.tokens += len(tokens)
    if finish.reason == "length" and len(tokens) == max_tokens:
        judge(report, name, None)
    elif finish.reason == "stop":
        said = [token for token in tokens if token not in vocabulary.eos_ids]
        judge(report, name, b"".join(vocabulary.token_bytes[token] for token in said))
    else:
        report.wrong.append(f"{name}: {finish.reason} at {len(tokens)} tokens, {finish.error}")


def table(found: dict[str, Any]) -> Table:
    """What `main` found, for people."""
    lines = Table("what", "", title=f"{found['model']}, loop={found['loop']}")
    for what in ("answers", "schemas", "finished", "share", "cut", "invalid", "tokens"):
        lines.add_row(what, f"{found[what]:,}")
    for name, times in found["cut_most"].items():
        lines.add_row(f"cut: {name}", f"{times}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--loop", default="overlap")
    given = parser.parse_args()
    began = time.perf_counter()
    errors = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, Progress(console=errors) as bar:
        places = {"tiny": lambda: tiny_llama(Path(folder)), "smollm2": text_makers.smollm2}
        path = places.get(given.model, lambda: Path(given.model))()
        task = bar.add_task("answers", total=given.answers)
        with LLM(path, loop=given.loop, max_rows=given.rows, max_model_len=512) as llm:
            report = answer(
                llm, given.answers, given.max_tokens, count=lambda ended: bar.advance(task, ended)
            )
    found = {
        "bench": "validity",
        "model": given.model,
        "loop": given.loop,
        "answers": given.answers,
        "schemas": len(SCHEMAS),
        "finished": report.finished,
        "share": round(report.finished / given.answers, 3),
        "cut": sum(report.cut.values()),
        "cut_most": dict(report.cut.most_common(5)),
        "invalid": len(report.wrong),
        "tokens": report.tokens,
        "max_tokens": given.max_tokens,
        "seconds": round(time.perf_counter() - began),
    }
    for line in report.wrong[:20]:
        errors.print(line, markup=False)
    Console().print(table(found))
    print(json.dumps(found))
    if report.wrong or report.finished < MIN_SHARE * given.answers:
        sys.exit(1)


if __name__ == "__main__":
    main()
