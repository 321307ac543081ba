"""Prompts whose hidden states are pooled: transformers' states, and each position just once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_return_hidden_states import CLOSE, LLAMA_OPTIONS, llama_engine, reference_states
from tiny_models import make_reference, random_ids, save

import closed_form
from engines import Variant, toy_engine
from harness import Client, check, pool_of
from offline_makers import TOY_OPTIONS, toy_flags
from stepahead import LLM, SamplingParams
from stepahead.cli.main import run_command
from stepahead.llm.answer import Pool
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_model
from stepahead.sync import SyncReason
from workloads import Ask, Workload, workload

MEAN, LAST = SamplingParams(pooling="mean"), SamplingParams(pooling="last")
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
VARIANTS = [
    Variant("serial"),
    Variant("overlap"),
    Variant("batch-queue", depth=3),
    Variant("overlap", "hostile", device_seed=3),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_pools_are_those_of_transformers_states(variant: Variant, tmp_path: Path) -> None:
    """Prompts in chunks, among rows that decode, some of their pages cached, pages short."""
    reference = save(make_reference("llama"), tmp_path)
    model = load_model(read_spec(tmp_path), "float32")
    prompts = [random_ids(length, seed=length) for length in (1, 2, 7, 16, 23, 40)]
    asks = [Ask(0, tuple(random_ids(9, seed=99)), GREEDY)]
    for at, prompt in enumerate(prompts):
        asks += [Ask(at, tuple(prompt), params) for params in (MEAN, LAST, GREEDY)]
    options = LLAMA_OPTIONS | {"vocab_size": model.spec.vocab_size}
    engine = llama_engine(model, variant)
    run = Client(engine, Workload(0, options, tuple(asks))).play()
    assert run.counts["pools in chunks"] > 0
    assert run.counts["prefix_hits"] > 0
    for (index, _), told in run.told.items():
        ask = asks[index]
        if ask.params is GREEDY:
            assert not told.pooled
            continue
        states = reference_states(reference, list(ask.prompt))
        want = states.mean(0) if ask.params is MEAN else states[-1]
        count = sum(count for count, _ in told.pooled.values())
        found = torch.tensor(pool_of(told)) / count
        assert (found - want).abs().max() < CLOSE
        assert (found - states.mean(0)).abs().max() < CLOSE or ask.params is LAST
    stretches = sum(len(told.pooled) for told in run.told.values())
    assert engine.syncs.rows(SyncReason.HIDDEN_STATES) >= stretches


def pooling(seed: int) -> Workload:
    """The random workload of this seed, half of whose requests want their prompt pooled."""
    work = workload(seed)

    def changed(place: int, ask: Ask) -> Ask:
        params = (MEAN, LAST, ask.params, ask.params)[(seed + place) % 4]
        return replace(ask, params=params)

    return replace(work, asks=tuple(changed(*pair) for pair in enumerate(work.asks)))


LOOPS = [Variant("serial"), Variant("overlap", "hostile", 7), Variant("batch-queue", depth=4)]


@pytest.mark.parametrize("variant", LOOPS, ids=str)
def test_a_pool_that_is_preempted_in_the_middle_begins_anew(variant: Variant) -> None:
    # the older one grows by a page a step, and takes those of a prompt that is half computed
    options = {"vocab_size": 64, "max_model_len": 40, "page_size": 1, "max_rows": 4}
    options |= {"max_step_tokens": 4, "num_pages": 2 + 20 + 3, "prefix_cache": True, "seed": 0}
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    asks = (Ask(0, (5, 6), greedy), Ask(0, tuple(range(2, 22)), MEAN))
    run = Client(toy_engine(options, variant), Workload(0, options, asks)).play()
    assert run.counts["pools begun anew"] == 1
    states = [closed_form.state_of(np.array(asks[1].prompt[:end])) for end in range(1, 21)]
    want = sum(float(closed_form.signed(state)) for state in states)
    assert pool_of(run.told[1, 0]) == pytest.approx([want], rel=1e-12)


@pytest.mark.parametrize("shard", range(2))
def test_every_loop_pools_each_position_once(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * 30, shard * 30 + 30):
        variants = [
            Variant("overlap", "hostile", seed),
            Variant("batch-queue", "hostile" if seed % 2 else "cpu", seed, depth=4),
            Variant("batch-queue", "cpu", seed, depth=3, stages=2),
        ]
        counts += check(seed, variants[seed % 3 : seed % 3 + 1], pooling)[1]
    met = ("preemptions", "pools in chunks", "aborts", "prefix_hits")
    assert [name for name in met if not counts[name]] == []


def test_on_paper_too() -> None:
    counts: Counter[str] = Counter()
    oracle = Variant(device="paper")
    for seed in range(200, 240):
        counts += check(seed, [Variant("overlap", "paper", depth=3)], pooling, oracle=oracle)[1]
    assert counts["pools in chunks"] > 0


@pytest.mark.parametrize("executor", ["inline", "process"])
@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
def test_an_llm_pools_the_toys_closed_form(loop: str, executor: str) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11] * 9, [5, 6, 7, 12]]
    # 36 positions, 8 a step
    options: dict[str, Any] = TOY_OPTIONS | {"loop": loop, "executor": executor}
    with LLM("toy", **options | {"max_step_tokens": 8, "max_rows": 4}) as llm:
        for params in (MEAN, LAST):
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                (choice,) = output.outputs
                assert (choice.token_ids, choice.text, choice.finish_reason) == ([], "", "length")
                ends = range(1, len(prompt) + 1) if params is MEAN else [len(prompt)]
                states = [closed_form.state_of(np.array(prompt[:end])) for end in ends]
                want = np.mean([float(closed_form.signed(state)) for state in states])
                assert choice.pooled is not None
                assert (choice.pooled.dtype, choice.pooled.shape) == (np.float32, (1,))
                assert choice.pooled[0] == pytest.approx(want, rel=1e-6)


def test_a_line_of_a_run_may_ask_for_it(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [{"prompt_token_ids": [3, 4, 5]}] * 2
    asked[1] = asked[1] | {"pooling": "last"}
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in asked))
    command = ["run", "toy", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert run_command([*command, *toy_flags(), "--quiet"]) == 0
    lines = {
        line["line"]: line for line in map(json.loads, (tmp_path / "out").read_text().splitlines())
    }
    assert "embedding" not in lines[1]
    state = closed_form.state_of(np.array([3, 4, 5]))
    assert lines[2]["embedding"] == [closed_form.hidden_of(state)]
    assert (lines[2]["token_ids"], lines[2]["usage"]["completion_tokens"]) == ([], 0)


def test_a_pool_that_begins_anew_forgets_and_one_that_is_cut_short_is_none() -> None:
    pool = Pool(7)
    ones = np.ones(2)
    for start, count in ((0, 4), (4, 2)):  # preempted here
        pool.add(start, count, 100.0 * ones)
        assert pool.mean() is None
    for start, count in ((0, 4), (4, 2), (6, 1)):
        assert pool.mean() is None
        pool.add(start, count, count * 3.0 * ones)
    found = pool.mean()
    assert found is not None
    assert found.tolist() == [3.0, 3.0]
