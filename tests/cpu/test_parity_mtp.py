"""A model's own drafts inside the loops: they change no token, and they are what they should be.

What is drafted is compared with a plain account of it: the whole sequence through model and MTP
layer in fresh pages, then the chain.  So drafts that are wrong, which would only be slow, show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_parity_llama import CLOSE, engine_of
from tiny_models import Pages, random_ids
from tiny_sparse import make_with_mtp
from torch import Tensor

from engines import Variant
from harness import Client
from stepahead.engine import Engine
from stepahead.model.glm_moe_dsa import GlmMoeDsa
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_sparse
from stepahead.plan import Plan
from stepahead.runner.draft import Brought
from stepahead.types import DraftCounts, SamplingParams
from workloads import Ask, Workload

MTP = "stepahead.runner.mtp:MtpDrafter"
STEPS = 64
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "page_size": 4,
    "max_rows": 3,
    "max_step_tokens": 12,
    "num_pages": 40,  # too few for three rows at their full lengths
    "vocab_size": 96,
}
LOOPS = (("serial", 0), ("overlap", 0), ("batch-queue", 3))


@dataclass
class Tiny:
    """Models of one folder: one with random weights, whose drafts are hardly ever right, and one
    whose model and MTP layer go mostly by the newest token, and so agree about half the time."""

    folder: Path
    random: GlmMoeDsa
    half: GlmMoeDsa
    plain: dict[int, dict[tuple[int, int], list[int]]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("mtp")
    make_with_mtp(folder, index_share_for_mtp_iteration=True)
    random, half = (load_sparse(read_spec(folder), "float32", drafts=True) for _ in range(2))
    assert random.sparse.mtp_shares_index
    agree(half, 1.6)
    return Tiny(folder, random, half)


def agree(model: GlmMoeDsa, weight: float) -> None:
    """The newest token's embedding outweighs what the layers add to it, in both; by itself it says
    the next token in a round of all of them."""
    assert model.mtp is not None
    size = model.spec.hidden_size
    torch.manual_seed(3)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight.roll(1, 0))
        model.embed.weight *= weight * size**0.5
        some = 0.3 * torch.randn(size, size) * size**-0.5
        model.mtp.combine.weight.copy_(torch.cat((torch.eye(size) * weight, some), 1))
        model.mtp.token_norm.weight.fill_(1)
        model.mtp.norm.weight.copy_(model.norm.weight)


# --- the same tokens ------------------------------------------------------------------------


def asks() -> tuple[Ask, ...]:
    """Greedy and sampled ones; the last begins like the first one, up to the middle of a page."""
    prompts = [random_ids(22, seed=0), random_ids(9, seed=1)]
    prompts.append(prompts[0][:18] + random_ids(11, seed=9))
    temperatures = (0.0, 0.7, 0.0)
    return tuple(
        Ask(
            3 * i,
            tuple(prompt),
            SamplingParams(temperature=heat, seed=i, max_tokens=STEPS, ignore_eos=True),
        )
        for i, (prompt, heat) in enumerate(zip(prompts, temperatures, strict=True))
    )


def play(model: GlmMoeDsa, variant: Variant) -> tuple[dict[Any, list[int]], Any, DraftCounts]:
    engine = engine_of(model, OPTIONS, variant)
    run = Client(engine, Workload(0, OPTIONS, asks())).play()
    tokens = {who: one.tokens for who, one in run.told.items()}
    return tokens, run.counts, engine.scheduler.draft_counts()


def hold_to_plain(tiny: Tiny, model: GlmMoeDsa, variant: Variant) -> DraftCounts:
    """What came of the drafts, having changed nothing."""
    if id(model) not in tiny.plain:
        tiny.plain[id(model)] = play(model, Variant())[0]
    tokens, met, counts = play(model, variant)
    assert [len(answer) for answer in tokens.values()] == [STEPS] * len(tokens)
    assert tokens == tiny.plain[id(model)]
    assert met["prefix_hits"] > 0
    # so many places are kept for drafts then that fewer rows are let in
    assert met["preemptions"] > 0 or variant.drafts == 6
    return counts


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_sixty_four_tokens_with_the_model_s_own_drafts(
    loop: str, depth: int, drafts: int, tiny: Tiny
) -> None:
    counts = hold_to_plain(tiny, tiny.half, Variant(loop, depth=depth, draft=MTP, drafts=drafts))
    assert 0.3 < counts.accepted_at[0] / counts.drafted < 0.7
    assert counts.accepted > 50


def test_own_drafts_that_are_hardly_ever_right(tiny: Tiny) -> None:
    variant = Variant("overlap", draft=MTP, drafts=2)
    counts = hold_to_plain(tiny, tiny.random, variant)
    assert counts.accepted < counts.proposed / 20


@pytest.mark.parametrize(("loop", "depth", "drafts"), [("overlap", 0, 2), ("batch-queue", 4, 6)])
def test_own_drafts_on_the_hostile_device(loop: str, depth: int, drafts: int, tiny: Tiny) -> None:
    variant = Variant(loop, "hostile", 7, depth, draft=MTP, drafts=drafts)
    assert hold_to_plain(tiny, tiny.half, variant).accepted > 50


@pytest.mark.parametrize("skips", [True, False])
def test_own_drafts_up_to_the_last_place_of_a_page_table(skips: bool, tiny: Tiny) -> None:
    """Rows that end where their page table does: a chain has no place left, and must not look for
    one there."""
    options = OPTIONS | {"max_model_len": 40, "num_pages": 40}
    params = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    asks = tuple(Ask(i, tuple(random_ids(22, seed=i)), params) for i in range(3))
    answers = []
    for variant in (Variant(), Variant("batch-queue", depth=3, draft=MTP, drafts=6)):
        engine = engine_of(tiny.half, options, variant)
        if variant.draft:
            set_skips(engine, skips)
        run = Client(engine, Workload(0, options, asks)).play()
        answers.append([one.tokens for one in run.told.values()])
    assert answers[0] == answers[1]


def set_skips(engine: Engine, skips: bool) -> Any:
    """Whether what does not count is left out, as on the CPU; the runner."""
    runner: Any = engine._executor._runner  # type: ignore[attr-defined]
    runner._verifier.skips = runner._verifier._drafter.skips = skips
    return runner


# --- the right drafts -----------------------------------------------------------------------


class Drafted:
    """What an engine's drafter proposes: by prompt, (newest place, drafts)."""

    def __init__(self, engine: Engine, skips: bool) -> None:
        self.found: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        self._owners: dict[int, tuple[int, ...]] = {}
        runner = set_skips(engine, skips)
        drafter = runner._verifier._drafter
        self._propose: Callable[[Brought], Tensor] = drafter.propose
        drafter.propose = self.propose
        self._launch: Callable[[Plan], Any] = runner.launch
        runner.launch = self.launch

    def launch(self, plan: Plan) -> Any:
        """The device is the host here: a step is run as it is launched."""
        for join in plan.joins:
            self._owners[join.slot] = tuple(join.tokens[: join.prompt_len].tolist())
        return self._launch(plan)

    def propose(self, brought: Brought) -> Tensor:
        drafts = self._propose(brought)
        columns = (brought.slots_dev, brought.ends_dev, drafts)
        for slot, end, row in zip(*(column.tolist() for column in columns), strict=True):
            self.found.setdefault(self._owners[slot], []).append((end, row))
        return drafts


def chain(model: GlmMoeDsa, known: list[int], drafts: int, shares: bool) -> list[list[int]]:
    """After these tokens: for each draft in turn its token, and others as good but for rounding."""
    pages = Pages(model)
    whole = known[:-1]
    with torch.inference_mode():
        _, inputs = pages.inputs(chunks={"a": whole})
        hidden = model(inputs, pages.kv)
        mine = replace(inputs, token_ids_dev=torch.tensor(known[1:]))
        states, reads = model.draft(hidden, mine, pages.kv)
        states, seed = states[-1:], reads[-1:] if shares else None
        found: list[list[int]] = []
        while True:
            logits = model.logits(states)[0]
            best = (logits > logits.max() - CLOSE).nonzero().view(-1).tolist()
            found.append(best)
            if len(found) == drafts or len(best) > 1:
                return found
            _, inputs = pages.inputs({"a": best[0]})
            states, _ = model.draft(states, inputs, pages.kv, seed)


@pytest.mark.parametrize(
    ("loop", "kind", "skips", "shares"),
    [
        ("serial", "random", True, True),
        ("overlap", "half", False, True),
        ("overlap", "random", True, False),
    ],
)
def test_what_is_drafted_is_what_the_whole_sequence_says(
    loop: str, kind: str, skips: bool, shares: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, rows of other lengths, prefix hits, preemptions, runs of any length.  All
    contexts are longer than what is read of them."""
    model, drafts = {"random": tiny.random, "half": tiny.half}[kind], 3
    monkeypatch.setattr(model, "sparse", replace(model.sparse, mtp_shares_index=shares))
    options = OPTIONS | {"num_pages": 28}
    engine = engine_of(model, options, Variant(loop, draft=MTP, drafts=drafts))
    drafted = Drafted(engine, skips)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [random_ids(22, seed=0), random_ids(40, seed=1)]
    prompts.append(prompts[0][:18] + random_ids(11, seed=9))
    work = Workload(0, options, tuple(Ask(3 * i, tuple(p), params) for i, p in enumerate(prompts)))
    run = Client(engine, work).play()
    assert run.counts["prefix_hits"] > 0
    assert run.counts["preemptions"] > 0
    compared = wrong = 0
    account = cache(lambda known: chain(model, [*known], drafts, shares))
    for (which, _), told in run.told.items():
        whole = prompts[which] + told.tokens
        for end, row in drafted.found[tuple(prompts[which])]:
            left = len(whole) - 1 - end
            if left <= 0:
                continue  # it had ended
            expected = account(tuple(whole[: end + 1]))[:left]
            compared += 1
            wrong += any(draft not in best for draft, best in zip(row, expected, strict=False))
    assert compared > 40
    assert wrong == 0
