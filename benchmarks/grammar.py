"""What grammars cost the processors: compiling, starting, masks, advancing, rolling back.

The regime: SmolLM2's 49,152 tokens, random logits under the masks, no model.  CPU time of the whole
process, not wall time, so that a busy machine shows less.  "Compile" is `GrammarCompiler.compile`
of a schema that it has not seen (the library compiles it and makes the first mask); "start" a row
whose grammar is among those kept.  Masks are filled for 32 rows in one call, one thread; the first
walk through a grammar is slower than the next, and both are shown.

Last line: JSON, medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import text_makers
from schemas import SCHEMAS
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.runner.grammar import Matchers
from stepahead.structured import Grammar, StructuredOutputs
from stepahead.text import Tokenizer

ROWS = 32
CHOSEN = ("person", "order", "tree", "string long")


def cpu_us(began_ns: int) -> float:
    """CPU time of the process since `began_ns`."""
    return (time.process_time_ns() - began_ns) / 1000


def compile_us(compiler: GrammarCompiler, name: str, times: int) -> float:
    """Median of compiling schemas that differ in their title only."""
    found = []
    for number in range(times):
        asked = StructuredOutputs(json=SCHEMAS[name] | {"title": f"{number}"})
        began = time.process_time_ns()
        compiler.compile(asked)
        found.append(cpu_us(began))
    return median(found)


def walk_us(matchers: Matchers, grammar: Grammar, steps: range) -> dict[str, float]:
    """Medians of what `ROWS` rows cost in a step; a row that ends starts again."""
    noise, slots = np.random.default_rng(steps.start), np.arange(1, ROWS + 1)
    out = np.zeros((ROWS, matchers.words), np.int32)
    found: dict[str, list[float]] = {"fill": [], "advance": [], "start": []}
    for slot in slots.tolist():
        matchers.start(slot, 0, grammar)
    for step in steps:
        began = time.process_time_ns()
        matchers.fill(slots.tolist(), out)
        found["fill"].append(cpu_us(began) / ROWS)
        bits = np.unpackbits(out.view(np.uint8), bitorder="little", axis=1)
        tokens = np.array([noise.choice(row.nonzero()[0]) for row in bits])
        began = time.process_time_ns()
        matchers.advance(step, slots, np.zeros(ROWS, np.int32), tokens)
        found["advance"].append(cpu_us(began) / ROWS)
        for slot in slots[matchers.ended[slots]].tolist():
            began = time.process_time_ns()
            matchers.start(slot, 0, grammar)
            found["start"].append(cpu_us(began))
    return {name: median(values) for name, values in found.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compiles", type=int, default=21)
    given = parser.parse_args()
    texts = Tokenizer.load(text_makers.smollm2())
    vocabulary = Vocabulary.of(texts, texts.vocab_size, texts.eos_ids)
    compiler = GrammarCompiler(vocabulary)
    began = time.process_time_ns()
    matchers = Matchers(vocabulary, ROWS + 1, threads=1)
    figures: dict[str, dict[str, float]] = {"tokenizer": {"set up": cpu_us(began)}}
    table = Table("schema", "compile", "start", "fill, first", "fill", "advance", title="CPU, µs")
    for place, name in enumerate(CHOSEN):
        compile_us(compiler, name, 1)
        grammar = compiler.compile(StructuredOutputs(json=SCHEMAS[name]))
        # landed steps have rising numbers
        ours = range(2 * place * given.steps, 2 * (place + 1) * given.steps)
        first = walk_us(matchers, grammar, ours[: given.steps])
        warm = walk_us(matchers, grammar, ours[given.steps :])
        figures[name] = {
            "compile": compile_us(compiler, name, given.compiles),
            "start": warm.get("start", 0.0),
            "first fill a row": first["fill"],
            "fill a row": warm["fill"],
            "advance a row": warm["advance"],
        }
        table.add_row(name, *(f"{value:,.1f}" for value in figures[name].values()))
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
