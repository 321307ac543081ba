"""`return_hidden_states` on real runners: transformers' states, and the toy's to the last digit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tiny_models import make_reference, random_ids, save

import closed_form
from engines import Variant, resolved, runner_spec
from harness import Client, Told
from offline_makers import TOY_OPTIONS, toy_flags
from stepahead import LLM, SamplingParams
from stepahead.cli.main import run_command
from stepahead.config import ModelFacts
from stepahead.engine import Engine
from stepahead.executor.inline import InlineExecutor
from stepahead.model.llama import Llama
from stepahead.model.spec import kv_bytes_per_token, read_spec
from stepahead.model.weights import load_model
from stepahead.runner.build import build_device
from stepahead.runner.runner import Runner
from stepahead.scheduler.stop import Vocabulary
from workloads import Ask, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLOSE = 1e-4
TOY = closed_form.Toy(512, TOY_OPTIONS["max_model_len"])
PROMPT_LENGTHS = (1, 2, 7, 16, 23, 40)
# chunked prefills, small pages, and too few of them for all
LLAMA_OPTIONS = {"max_model_len": 96, "page_size": 4, "max_rows": 4, "max_step_tokens": 12}
LLAMA_OPTIONS |= {"num_pages": 16}


def llama_engine(model: Llama, variant: Variant) -> Engine:
    torch.set_num_threads(1)
    vocab = model.spec.vocab_size
    settled = resolved(LLAMA_OPTIONS | {"vocab_size": vocab}, variant)
    facts = ModelFacts(vocab, settled.model_len, (1,), kv_bytes_per_token(model.spec, 4))
    settled = replace(settled, facts=facts)
    spec = runner_spec(settled)
    runner = Runner(model, build_device(spec), spec, vocab)
    vocabulary = Vocabulary(closed_form.pieces(64), frozenset({0, 1}))
    return Engine(settled, InlineExecutor(runner), vocabulary)


def reference_states(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float32[len(ids), hidden] from transformers, the final norm applied."""
    with torch.inference_mode():
        return model.model(torch.tensor([ids])).last_hidden_state[0].float()


VARIANTS = [
    Variant("serial"),
    Variant("overlap"),
    Variant("batch-queue", depth=3),
    Variant("overlap", "hostile", device_seed=3),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_states_are_those_that_transformers_has_before_its_head(
    family: str, variant: Variant, tmp_path: Path
) -> None:
    reference = save(make_reference(family), tmp_path)
    model = load_model(read_spec(tmp_path), "float32")
    asking = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, return_hidden_states=True
    )
    silent = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    prompts.append(prompts[-1])  # its prompt's pages are cached
    asks = tuple(
        Ask(i, tuple(prompt), silent if i in (1, 3) else asking) for i, prompt in enumerate(prompts)
    )
    options = LLAMA_OPTIONS | {"vocab_size": model.spec.vocab_size}
    run = Client(llama_engine(model, variant), Workload(0, options, asks)).play()
    assert run.counts["preemptions"] > 0
    assert run.counts["prefix_hits"] > 0
    for (index, _), told in run.told.items():
        if asks[index].params is silent:
            assert told.hidden == []
        else:
            hold_states(reference, prompts[index], told)


def hold_states(reference: PreTrainedModel, prompt: list[int], told: Told) -> None:
    want = reference_states(reference, prompt + told.tokens)[len(prompt) - 1 : -1]
    found = torch.tensor(told.hidden)
    assert found.shape == want.shape == (16, 32)
    assert (found - want).abs().max() < CLOSE
    # each is nearer to its own than to any other's, so no row stands a place off
    assert torch.equal(torch.cdist(found, want).argmin(1), torch.arange(16))


@pytest.mark.parametrize("executor", ["inline", "process"])
@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
def test_an_llm_gives_each_choice_its_own(loop: str, executor: str) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
    stops = SamplingParams(
        seed=7, max_tokens=40, stop_token_ids=[*range(60, 90)], return_hidden_states=True
    )
    params = [
        SamplingParams(seed=3, n=3, max_tokens=9, logprobs=2, return_hidden_states=True),
        SamplingParams(seed=4, max_tokens=9, logprobs=1),
        stops,
    ]
    with LLM("toy", **TOY_OPTIONS | {"loop": loop, "executor": executor}) as llm:
        outputs = llm.generate(prompts, params)
    assert outputs[1].outputs[0].hidden_states is None
    for at in (0, 2):
        for choice in outputs[at].outputs:
            seed = params[at].seed
            assert seed is not None
            want = closed_form.complete(TOY, prompts[at], params[at], seed, choice.index)
            assert want.sure == len(want.tokens), "an unlucky seed: choose another"
            assert choice.token_ids == want.tokens
            states = choice.hidden_states
            assert states is not None
            assert (states.dtype, states.shape) == (np.float32, (len(want.tokens), 1))
            assert states.ravel().tolist() == want.hidden
            assert (choice.logprobs is None) == (at == 2)
    # the stop token is in the ids, and so is its state
    assert outputs[2].outputs[0].finish_reason == "stop"


def test_a_run_writes_them_for_lines_that_ask(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt_token_ids": [3, 4, 5]},
        {"prompt_token_ids": [6, 7], "return_hidden_states": False},
        {"prompt_token_ids": [8, 9, 10], "n": 2, "temperature": 1.0, "seed": 5},
    ]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in asked))
    command = ["run", "toy", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    flags = ["--quiet", "--temperature", "0", "--max-tokens", "5", "--return-hidden-states"]
    assert run_command([*command, *toy_flags(), *flags]) == 0
    answers = {}
    for text in (tmp_path / "out").read_text().splitlines():
        answers[json.loads(text)["line"]] = json.loads(text)
    assert sorted(answers) == [1, 2, 3]
    assert "hidden_states" not in answers[2]
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=5)
    hold_line(answers[1], [3, 4, 5], greedy, 0)
    for choice in answers[3]["choices"]:
        hold_line(choice, [8, 9, 10], drawn, choice["index"])
    assert answers[3]["hidden_states"] == answers[3]["choices"][0]["hidden_states"]


def hold_line(answer: dict[str, Any], prompt: list[int], params: SamplingParams, at: int) -> None:
    """Its states are the closed form's to the bit."""
    want = closed_form.complete(TOY, prompt, params, params.seed or 0, at)
    assert want.sure == len(want.tokens), "an unlucky seed: choose another"
    assert answer["token_ids"] == want.tokens
    assert answer["hidden_states"] == [[state] for state in want.hidden]


def test_one_request_may_ask_on_the_command_line_of_json(tmp_path: Path) -> None:
    asked = [{"prompt_token_ids": [3, 4, 5]}] * 2
    asked[1] = asked[1] | {"return_hidden_states": True, "max_tokens": 3}
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in asked))
    command = ["run", "toy", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert run_command([*command, *toy_flags(), "--quiet", "--ignore-eos"]) == 0
    lines = map(json.loads, (tmp_path / "out").read_text().splitlines())
    shapes = {line["line"]: np.shape(line.get("hidden_states", ())) for line in lines}
    assert shapes == {1: (0,), 2: (3, 1)}
