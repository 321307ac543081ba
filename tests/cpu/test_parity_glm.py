"""Promise 1 for sparse attention: every loop gives what `serial` gives, and that is transformers.

Through the engine: chunked prefill, ragged decode, prefix hits, preemption.  As for other float
models, tokens are equal unless the two that differ are less than 1e-4 apart.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from test_parity_llama import CLOSE, Nearly, engine_of, with_margins
from tiny_models import random_ids
from tiny_sparse import TOPK, make_sparse, reference, save_sparse
from transformers import PreTrainedModel

from engines import Variant
from harness import Client, Run, check, replay
from stepahead.model.glm_moe_dsa import GlmMoeDsa
from stepahead.model.sparse import SparseSpec
from stepahead.model.spec import ModelSpec, read_spec
from stepahead.model.weights import load_sparse, random_model
from stepahead.types import SamplingParams
from workloads import Ask, Workload

WORKLOADS = 12
SPARSE = SparseSpec(
    q_lora_rank=24,
    kv_lora_rank=16,
    nope_dim=8,
    rope_dim=4,
    v_dim=12,
    index_heads=16,
    index_dim=8,
    index_topk=6,
    indexers=(True, False),
    experts=(False, True),
    num_experts=6,
    experts_per_token=2,
    shared_experts=1,
    expert_size=16,
    routed_scale=2.5,
    norm_topk=True,
    latent_eps=1e-6,
)
MODELS = {
    vocab: random_model(
        ModelSpec(
            architecture="GlmMoeDsaForCausalLM",
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=1,
            head_dim=4,
            max_len=64,
            sparse=SPARSE,
        ),
        seed=5,
        dtype="float32",
    )
    for vocab in (17, 64)
}


def play(work: Workload, variant: Variant) -> Run:
    """The workload on the random model of its vocabulary."""
    return Client(engine_of(MODELS[work.options["vocab_size"]], work.options, variant), work).play()


def test_a_tiny_sparse_model_gives_the_same_from_every_loop() -> None:
    counts: Counter[str] = Counter()
    nearly = Nearly()
    variants = [
        Variant("overlap"),
        Variant("batch-queue", depth=3),
        Variant("overlap", "hostile", 3),
        Variant("batch-queue", "hostile", 4, depth=4),
        Variant("serial", "hostile", 5),
    ]
    for seed in range(WORKLOADS):
        mine = [variants[seed % 2], variants[2 + seed % 3]]
        counts += check(seed, mine, with_margins, play, nearly, replay=__file__)[1]
    for met in ("aborts", "prefix_hits", "preemptions", "overshoot_rows"):
        assert counts[met] > 0
    assert nearly.tokens > 500
    assert nearly.forks <= 2


# --- transformers -----------------------------------------------------------------------------

# lengths, and seeds whose answers are far from ties in every layer
PROMPTS = {1: 2, 7: 7, TOPK: 16, TOPK + 1: 20, 40: 42, 53: 53}
STEPS = 64
VARIANTS = [
    Variant("serial"),
    Variant("overlap"),
    Variant("batch-queue", depth=3),
    Variant("overlap", "hostile", device_seed=3),
]


@dataclass
class Tiny:
    """A model and its reference, which answers each prompt once."""

    model: GlmMoeDsa
    theirs: PreTrainedModel
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def best(self, prompt: list[int], answer: list[int]) -> list[int]:
        """The reference's best token after the prompt and after each but the last of the answer;
        if they are the answer, it is what the reference would have said by itself."""
        whole = (*prompt, *answer)
        if whole not in self.known:
            logits = reference(self.theirs, [*whole])[len(prompt) - 1 : -1]
            two = logits.topk(2).values
            assert (two[:, 0] - two[:, 1]).min() > CLOSE, "an unlucky prompt: choose another"
            self.known[whole] = logits.argmax(1).tolist()
        return self.known[whole]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("glm")
    theirs = save_sparse(make_sparse(), folder)
    return Tiny(load_sparse(read_spec(folder), "float32"), theirs)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_sixty_four_greedy_tokens_are_those_of_transformers(variant: Variant, tiny: Tiny) -> None:
    prompts = [random_ids(count, seed=seed) for count, seed in PROMPTS.items()]
    prompts.append(prompts[-1][:48] + random_ids(5, seed=9))  # its first pages are another's
    options = {
        "max_model_len": 128,
        "page_size": 4,
        "max_rows": 5,
        "max_step_tokens": 12,
        "num_pages": 56,  # too few for five rows at their full lengths
        "vocab_size": tiny.model.vocab_size,
    }
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    asks = tuple(Ask(6 * i, tuple(prompt), params) for i, prompt in enumerate(prompts))
    run = Client(engine_of(tiny.model, options, variant), Workload(0, options, asks)).play()
    answers = [told.tokens for told in run.told.values()]
    assert [len(answer) for answer in answers] == [STEPS] * len(prompts)
    assert len({tuple(answer) for answer in answers}) == len(prompts), "one answer to everything"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert tiny.best(prompt, answer) == answer
    assert run.counts["prefix_hits"] > 0
    assert run.counts["preemptions"] > 0


if __name__ == "__main__":
    replay(with_margins, play, Nearly())
