#!/usr/bin/env python3
"""Answers under a schema's masks from a model that knows nothing: random logits, temperature 1.

    python tests/walks.py [--walks 2000] [--seed 0] [--real]

Each walk takes the next schema of tests/schemas.py.  What finishes must parse and validate; what
max_tokens cuts is counted as cut.  `--real` takes SmolLM2's 49,152 tokens in place of 500.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import numpy as np
import torch

import text_makers
from schemas import SCHEMAS
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.runner.grammar import Matchers, apply_masks
from stepahead.structured import Grammar, StructuredOutputs
from stepahead.text import Tokenizer

ROWS = 32  # walks side by side


@dataclass
class Report:
    """What became of the walks; `cut` by schema, `wrong` in words."""

    finished: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0


def small_vocabulary(folder: Path) -> Vocabulary:
    """500 tokens of a byte-level BPE, in 512 logits."""
    texts = Tokenizer.load(text_makers.chat_folder(folder))
    return Vocabulary.of(texts, 512, texts.eos_ids)


def walk(vocabulary: Vocabulary, walks: int, seed: int = 0, max_tokens: int = 300) -> Report:
    """Random walks over the schemas in turn, and what became of them."""
    compiler = GrammarCompiler(vocabulary)
    names = [list(SCHEMAS)[number % len(SCHEMAS)] for number in range(walks)]
    grammars = {name: compiler.compile(StructuredOutputs(json=SCHEMAS[name])) for name in SCHEMAS}
    report = Report()
    made = answers(vocabulary, [grammars[name] for name in names], report, seed, max_tokens)
    for name, answer in zip(names, made, strict=True):
        judge(report, name, answer)
    return report


def judge(report: Report, name: str, answer: bytes | None) -> None:
    """Counts an answer under the schema of that name; None is one that max_tokens cut."""
    if answer is None:
        report.cut[name] += 1
        return
    report.finished += 1
    try:
        jsonschema.validate(json.loads(answer.decode()), SCHEMAS[name])
    except (ValueError, jsonschema.ValidationError) as error:
        report.wrong.append(f"{name}: {answer!r}: {str(error)[:200]}")


def answers(
    vocabulary: Vocabulary,
    grammars: Sequence[Grammar],
    report: Report,
    seed: int = 0,
    max_tokens: int = 300,
) -> list[bytes | None]:
    """What random logits make under each grammar, None where max_tokens cut it; `ROWS` at a time,
    each in a slot that many others have had before."""
    matchers, noise = Matchers(vocabulary, ROWS + 1, threads=1), torch.Generator().manual_seed(seed)
    masks = np.zeros((ROWS, matchers.words), np.int32)
    made: list[bytes | None] = [None] * len(grammars)
    running: dict[int, tuple[int, list[int]]] = {}  # by slot: number, tokens
    begun = step = 0
    while running or begun < len(grammars):
        for slot in range(1, ROWS + 1):
            if slot not in running and begun < len(grammars):
                matchers.start(slot, begun, grammars[begun])
                running[slot] = (begun, [])
                begun += 1
        slots = np.array(sorted(running))
        matchers.fill(slots.tolist(), masks)
        logits = torch.randn(len(slots), len(vocabulary.token_bytes), generator=noise)
        apply_masks(logits, torch.from_numpy(masks[: len(slots)]))
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=noise)[:, 0].numpy()
        generations = np.array([running[slot][0] for slot in slots.tolist()])
        matchers.advance(step, slots, generations, tokens)
        report.wrong += [f"{error}" for error in matchers.take_errors()]
        step += 1
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            number, ids = running[slot]
            ids.append(token)
            if matchers.ended[slot]:
                made[number] = b"".join(
                    vocabulary.token_bytes[token]
                    for token in ids
                    if token not in vocabulary.eos_ids
                )
            if matchers.ended[slot] or len(ids) == max_tokens:
                matchers.leave(slot, number)
                report.tokens += len(ids)
                del running[slot]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="SmolLM2's vocabulary")
    given = parser.parse_args()
    if given.real:
        texts = Tokenizer.load(text_makers.smollm2())
        vocabulary = Vocabulary.of(texts, texts.vocab_size, texts.eos_ids)
    else:
        with tempfile.TemporaryDirectory() as folder:
            vocabulary = small_vocabulary(Path(folder))
    report = walk(vocabulary, given.walks, given.seed)
    share = report.finished / given.walks
    print(f"{given.walks} walks over {len(SCHEMAS)} schemas, {report.tokens} tokens")
    print(f"finished {report.finished} ({share:.1%}), cut {dict(report.cut.most_common())}")
    print(f"invalid {len(report.wrong)}", *report.wrong[:20], sep="\n")


if __name__ == "__main__":
    main()
