"""Promise 1 on float models: loops agree on a tiny random Llama, and `serial` is transformers.

The float rule: equal tokens unless the two that differ are less than 1e-4 apart, log-probabilities
within 1e-4.  After such a fork nothing can be compared, so forks are counted and must be rare.
Which rows fork, if any, is the machine's arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from teams import team
from tiny_models import laid_out, make_reference, reference_logits, save, smollm2_path
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from closed_form import pieces
from engines import ORACLE, Variant, resolved, runner_spec
from harness import Client, Row, Run, Told, check, ends_of, learn_from, replay
from stepahead.config import ModelFacts
from stepahead.engine import Engine
from stepahead.executor.inline import InlineExecutor
from stepahead.model.llama import Llama
from stepahead.model.load import load
from stepahead.model.packed import AS_READ, Packing, Quantization
from stepahead.model.spec import ModelSpec, kv_bytes_per_token
from stepahead.model.weights import random_model
from stepahead.runner.build import build_device
from stepahead.runner.runner import Runner
from stepahead.scheduler.stop import Vocabulary
from stepahead.types import SamplingParams
from workloads import Ask, Workload, workload

SHARDS = 5
WORKLOADS = 10  # a shard
CLOSE = 1e-4
VOCABULARIES = (17, 64)
PRECISIONS: tuple[Quantization, ...] = ("none", "float16", "int8", "int4")


def random_llama(vocab_size: int, packing: Packing = AS_READ, head_dim: int = 16) -> Llama:
    """The tiny model of that vocabulary; kernels run its layers as one if heads are whole vectors
    on every CPU."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        max_len=64,
    )
    return random_model(spec, seed=5, dtype="float32", packing=packing)


MODELS = {vocab: random_llama(vocab) for vocab in VOCABULARIES}


@cache
def fused_llama(vocab_size: int, kind: Quantization, threads: int) -> Llama:
    """As kernels run it."""
    model = random_llama(vocab_size, laid_out(kind, threads))
    assert model._fused is not None
    return model


def engine_of(model: Llama, options: dict[str, Any], variant: Variant, eos: int = 1) -> Engine:
    """An engine around this model in this thread."""
    torch.set_num_threads(1)
    settled = resolved(options, variant)
    facts = ModelFacts(
        model.spec.vocab_size, settled.model_len, (eos,), kv_bytes_per_token(model.spec, 4)
    )
    settled = replace(settled, facts=facts)
    spec = runner_spec(settled, variant.draft)
    runner = Runner(model, build_device(spec), spec, model.spec.vocab_size)
    vocabulary = Vocabulary(pieces(min(64, facts.vocab_size)), frozenset({0, 1}))
    engine = Engine(settled, InlineExecutor(runner), vocabulary)
    engine._core.depth = variant.depth or engine._core.depth
    return engine


def play(work: Workload, variant: Variant) -> Run:
    """The workload on the random Llama of its vocabulary."""
    return Client(engine_of(MODELS[work.options["vocab_size"]], work.options, variant), work).play()


def with_margins(seed: int) -> Workload:
    """The seed's workload, where every request asks for enough log-probabilities to see forks."""
    work = workload(seed)

    def asking(ask: Ask) -> Ask:
        wanted = max(3, ask.params.logprobs or 0)
        return replace(ask, params=msgspec.structs.replace(ask.params, logprobs=wanted))

    return replace(work, asks=tuple(map(asking, work.asks)))


@dataclass
class Nearly:
    """The float rule, and how often it could compare."""

    tokens: int = 0
    forks: int = 0

    def __call__(self, one: Told, two: Told) -> str:
        """What differs; "" if nothing does."""
        if one.refused or two.refused:
            return "" if one.refused == two.refused else "refused"
        rows = zip(one.tokens, two.tokens, one.logprobs, two.logprobs, strict=False)
        for place, (token, other, row, its) in enumerate(rows):
            if token != other:
                self.forks += 1
                apart = abs(row[0] - its[0])
                return "" if apart < CLOSE else f"tokens differ at {place}, {apart} apart"
            if not alike(row, its):
                return f"logprobs {row} and {its}"
            self.tokens += 1
        for at in one.prompt_logprobs.keys() & two.prompt_logprobs.keys():
            if not alike(one.prompt_logprobs[at], two.prompt_logprobs[at]):
                return f"prompt logprobs at {at}"
        if not all(alike(first, again) for first, again in one.retold + two.retold):
            return "told two prompt logprobs"
        if one.aborted or two.aborted:
            return ""
        return "" if ends_of(one) == ends_of(two) else f"ends {ends_of(one)}, {ends_of(two)}"


def alike(one: Row, two: Row) -> bool:
    """Values within 1e-4; ranks and ids may change places only as far as that allows."""
    values = zip((one[0], *one[3]), (two[0], *two[3]), strict=True)
    return all(abs(a - b) < CLOSE for a, b in values)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_tiny_llama_gives_the_same_from_every_loop(shard: int) -> None:
    counts: Counter[str] = Counter()
    nearly = Nearly()
    for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
        device = "hostile" if seed % 3 == 0 else "cpu"
        variants = [Variant("overlap", device, seed, depth=4 if seed % 5 == 4 else 0)]
        if seed % 5 == 2:
            variants = [Variant("batch-queue", device, seed, depth=3)]
        if seed % 5 == 1:
            variants.append(Variant("serial", "hostile", seed))
        counts += check(seed, variants, with_margins, play, nearly, replay=__file__)[1]
    assert counts["aborts"] > 0
    assert counts["prefix_hits"] > 0
    assert nearly.tokens > 50  # of 120 and more: a fork ends a comparison
    assert nearly.forks <= 2


def play_drafted(work: Workload, variant: Variant) -> Run:
    """As `play`; a run without drafts teaches the drafters its answers."""
    run = play(work, variant)
    if not variant.draft:
        learn_from(run, work)
    return run


def test_a_tiny_llama_gives_the_same_under_drafts() -> None:
    counts: Counter[str] = Counter()
    nearly = Nearly()
    for seed in range(100, 112):
        loop, depth = (("serial", 0), ("overlap", 0), ("batch-queue", 3))[seed % 3]
        device = ("hostile", "cpu")[seed % 2]
        draft = "ngram" if seed % 4 == 3 else "drafters:Half"
        variant = Variant(loop, device, seed, depth, draft=draft, drafts=1 + seed % 6)
        counts += check(seed, [variant], with_margins, play_drafted, nearly, replay=__file__)[1]
    assert counts["drafts accepted"] > 50
    assert nearly.tokens > 100
    assert nearly.forks <= 2


@dataclass
class ToTheBit:
    """The rule of rows that do not depend on their neighbours, and how often it could compare."""

    tokens: int = 0

    def __call__(self, one: Told, two: Told) -> str:
        """What differs; "" if nothing does."""
        if one.refused or two.refused:
            return "" if one.refused == two.refused else "refused"
        for place, (row, its) in enumerate(zip(one.logprobs, two.logprobs, strict=False)):
            if row != its:
                return f"logprobs at {place}: {row} and {its}"
            self.tokens += 1
        for at in one.prompt_logprobs.keys() & two.prompt_logprobs.keys():
            if one.prompt_logprobs[at] != two.prompt_logprobs[at]:
                return f"prompt logprobs at {at}"
        if one.aborted or two.aborted:
            return ""
        return "" if ends_of(one) == ends_of(two) else f"ends {ends_of(one)}, {ends_of(two)}"


Player = Callable[[Workload, Variant], Run]


def fused_player(kind: Quantization, threads: int) -> Player:
    """As `play`, by kernels; the oracle's run on one thread, the others on this many."""

    def play_it(work: Workload, variant: Variant) -> Run:
        of = 1 if variant == ORACLE else threads
        model = fused_llama(work.options["vocab_size"], kind, of)
        return Client(engine_of(model, work.options, variant), work).play()

    return play_it


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_kernels_give_the_same_to_the_bit_from_every_loop(kind: Quantization, threads: int) -> None:
    """Loops, chunks, preemptions and drafts put a request beside others, and change nothing."""
    to_the_bit = ToTheBit()
    counts: Counter[str] = Counter()
    for seed in range(300, 308):
        device = ("cpu", "hostile")[seed % 3 == 0]
        loop, depth = (("overlap", 0), ("batch-queue", 3), ("serial", 0), ("overlap", 4))[seed % 4]
        draft = {"draft": "ngram", "drafts": 3} if seed % 5 == 3 else {}
        variant = Variant(loop, device, seed, depth, **draft)
        player = fused_player(kind, threads)
        counts += check(seed, [variant], with_margins, player, to_the_bit, replay=__file__)[1]
    assert counts["prefix_hits"] > 0
    assert to_the_bit.tokens > 100


@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_batch_invariant_llama_gives_the_same_to_the_bit(kind: Quantization) -> None:
    """One whose heads are no whole vectors: torch attends, a prompt position at a time."""
    packing = Packing(kind, invariant=True, team=team())
    models = {vocab: random_llama(vocab, packing, head_dim=4) for vocab in VOCABULARIES}

    def play_it(work: Workload, variant: Variant) -> Run:
        model = models[work.options["vocab_size"]]
        return Client(engine_of(model, work.options, variant), work).play()

    to_the_bit = ToTheBit()
    counts: Counter[str] = Counter()
    for seed in range(300, 308):
        loop, depth = (("overlap", 0), ("batch-queue", 3))[seed % 2]
        variants = [Variant(loop, "cpu", seed, depth)]
        if seed % 4 == 3:
            variants.append(Variant("overlap", "cpu", seed, draft="ngram", drafts=3))
        counts += check(seed, variants, with_margins, play_it, to_the_bit, replay=__file__)[1]
    assert counts["prefix_hits"] > 0
    assert to_the_bit.tokens > 100


# --- transformers ---------------------------------------------------------------------------

PROMPT_LENGTHS = (1, 2, 7, 16, 23, 40)


def greedy_answers(
    model: Llama, prompts: list[list[int]], count: int, loop: str
) -> list[list[int]]:
    """Our greedy tokens, from chunked prefills and small pages."""
    options = {
        "max_model_len": 96,
        "page_size": 4,
        "max_rows": 4,
        "max_step_tokens": 12,
        "num_pages": 120,
        "vocab_size": model.spec.vocab_size,
    }
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    asks = tuple(Ask(2 * i, tuple(prompt), params) for i, prompt in enumerate(prompts))
    run = Client(engine_of(model, options, Variant(loop)), Workload(0, options, asks)).play()
    return [told.tokens for told in run.told.values()]


def hold_greedy(reference: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Each token is the reference's best after the same ones, or less than 1e-4 behind it."""
    logits = reference_logits(reference, prompt + answer)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    assert (logits.max(1).values - chosen < CLOSE).all()


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_tiny_model_gives_transformers_greedy_tokens(
    family: str, loop: str, tmp_path: Path
) -> None:
    reference = save(make_reference(family, hidden_size=64), tmp_path)
    model = load(str(tmp_path), "float32")  # kernels run it, as they run what people ask for
    assert isinstance(model, Llama)
    assert model._fused is not None
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(0, 96, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]
    answers = greedy_answers(model, prompts, 24, loop)
    assert len({tuple(answer) for answer in answers}) == len(prompts), "one answer to everything"
    for prompt, answer in zip(prompts, answers, strict=True):
        hold_greedy(reference, prompt, answer)


def read_by_transformers(path: Path) -> PreTrainedModel:
    """What `from_pretrained(gguf_file=...)` does, without the accelerate package it asks for."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


def test_smollm2_gives_transformers_greedy_tokens() -> None:
    path = smollm2_path()
    reference = read_by_transformers(path)
    model = load(str(path), "float32")
    assert isinstance(model, Llama)
    assert model._fused is not None
    # "The capital of France is", "def fibonacci(n):", and a list of numbers, as SmolLM2 has them
    prompts = [[504, 3575, 282, 4649, 314], [1604, 4513, 30, 24], [33, 28, 34, 28, 35, 28, 36]]
    answers = greedy_answers(model, prompts, 12, "serial")
    for prompt, answer in zip(prompts, answers, strict=True):
        hold_greedy(reference, prompt, answer)


if __name__ == "__main__":
    replay(with_margins, play_drafted, Nearly())
