"""Whole engines under grammars: answers to JSON schemas are valid, and nothing of a step outlives
it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import validity
from engines import Variant, resolved, runner_spec, toy_engine
from offline_makers import tiny_llama
from schemas import SCHEMAS
from stepahead import LLM, SamplingParams
from stepahead.executor.inline import InlineExecutor
from stepahead.runner.build import build_runner
from stepahead.runner.flight import Heard, LateFlight, Look, Masks, StepBox
from structured import compiled

VOCAB, ROWS, STEPS = 64, 2, 2000
OPTIONS = {"vocab_size": VOCAB, "max_model_len": 256, "max_rows": ROWS, "max_step_tokens": 64}
KEPT = (StepBox, Look, LateFlight, Masks, Heard)


def test_an_answer_to_every_schema_is_valid_or_cut(tmp_path: Path) -> None:
    options: dict[str, Any] = {"executor": "inline", "loop": "overlap", "threads": 1}
    with LLM(tiny_llama(tmp_path), max_rows=len(SCHEMAS), **options) as llm:
        report = validity.answer(llm, len(SCHEMAS), max_tokens=100)
    print(f"finished {report.finished} of {len(SCHEMAS)}, cut {dict(report.cut)}")
    assert report.wrong == []
    assert report.finished >= 0.6 * len(SCHEMAS)
    assert report.finished + sum(report.cut.values()) == len(SCHEMAS)


def alive() -> tuple[Counter[str], int]:
    """How many of a step's things there are, by kind, and the bytes of all tensors."""
    gc.collect()
    found = gc.get_objects()
    kinds = Counter(type(thing).__name__ for thing in found if type(thing) in KEPT)
    return kinds, sum(thing.nbytes for thing in found if type(thing) is Tensor)


def test_of_two_thousand_steps_under_grammars_nothing_is_left() -> None:
    """Each step's logits are gone when the next has been launched.  Kept with what a flight holds,
    they would live for as many steps more as there are in the air: a share of the memory that the
    pages could have had, and no growth that a test of the total would see."""
    variant = Variant("overlap")
    settled = resolved(OPTIONS, variant)
    runner = build_runner(runner_spec(settled))
    logits_of, made = runner._sampling._logits_of, list[weakref.ref[Tensor]]()

    def watched(states_dev: Tensor) -> Tensor:
        logits_dev = logits_of(states_dev)
        made.append(weakref.ref(logits_dev))
        return logits_dev

    runner._sampling._logits_of = watched
    engine = toy_engine(OPTIONS, variant, executor=InlineExecutor(runner))
    grammar = compiled(VOCAB, "(?:[ab](?:[cd][ab]){40}[abcd]*)")
    params = SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True)
    running, found, most = 0, list[tuple[Counter[str], int]](), 0
    try:
        for step in range(STEPS):
            while running < ROWS:
                engine.add([5] * 8, params, grammar=grammar)
                running += 1
            outputs = engine.step()
            running -= 0 if outputs is None else len(outputs.finishes)
            most = max(most, sum(ref() is not None for ref in made[-8:]))
            if step % 400 == 399:
                found.append(alive())
    finally:
        engine.close()
    assert len(made) >= STEPS - 1
    assert most == 1  # the newest step's, where it waits for its masks
    bytes_left = [size for _, size in found]
    print(f"tensors: {bytes_left} bytes; {found[-1][0]}")
    # rows come and go, and a step may wait or not
    assert max(bytes_left) - min(bytes_left) <= 4 * ROWS * VOCAB * torch.float32.itemsize
    assert all(count <= 4 for kinds, _ in found for count in kinds.values())
