"""Drafts: what prompt lookup finds, which of it counts, and what it costs the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from copying import CopyToy
from engines import Variant, resolved, runner_spec, toy_engine
from harness import Client, learn_from
from stepahead.assemble import build_engine
from stepahead.config import config_from
from stepahead.device.eager import EagerDevice
from stepahead.device.hostile import HostileDevice, HostileModes
from stepahead.executor.inline import InlineExecutor
from stepahead.model.toy import ToyModel
from stepahead.plan import Plan
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.ngram import LONGEST, SHORTEST, lookup
from stepahead.runner.noise import stream_key
from stepahead.runner.runner import Runner
from stepahead.runner.sampler import Drawn, SampleGroup, sample
from stepahead.runner.verify import Asked, accept
from stepahead.types import DraftCounts, SamplingParams
from workloads import Ask, Workload

OPTIONS: dict[str, Any] = {
    "vocab_size": 64,
    "max_model_len": 256,
    "page_size": 4,
    "max_rows": 4,
    "max_step_tokens": 32,
    "num_pages": 256,
}
LOOPS = (("serial", 0), ("overlap", 0), ("batch-queue", 2), ("batch-queue", 4))


# --- prompt lookup --------------------------------------------------------------------------


def expected(known: list[int], drafts: int) -> list[int]:
    """What `lookup` promises, place by place."""
    end = len(known) - 1
    best, at = 0, -1
    for place in range(end):
        length = 0
        while length < LONGEST and length <= place and known[place - length] == known[end - length]:
            length += 1
        if length >= max(best, SHORTEST):
            best, at = length, place
    if at < 0:
        return [-1] * drafts
    return [known[at + 1 + ahead % (end - at)] for ahead in range(drafts)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_lookup_takes_what_followed_the_longest_newest_match(
    rows: list[list[int]], drafts: int
) -> None:
    width = max(map(len, rows)) + 2
    known = torch.tensor([row + [9] * (width - len(row)) for row in rows], dtype=torch.int32)
    ends = torch.tensor([len(row) - 1 for row in rows])
    assert lookup(known, ends, drafts).tolist() == [expected(row, drafts) for row in rows]


def copying(variant: Variant, options: dict[str, Any], on_plan: Any = lambda plan: None) -> Any:
    """An engine around the toy that says things again."""
    settled = resolved(options, variant)
    spec = runner_spec(settled, variant.draft)
    hostile = variant.device == "hostile"
    device = HostileDevice(variant.device_seed, spec.depth) if hostile else EagerDevice()
    runner = Runner(CopyToy(**spec.options), device, spec, settled.facts.vocab_size)
    return toy_engine(options, variant, on_plan, InlineExecutor(runner))


def runs_of(engine: Any, asks: list[Ask]) -> tuple[dict[int, list[list[int]]], Counter[str]]:
    """The tokens of each step, for each request, and what its steps were like."""
    runs: dict[int, list[list[int]]] = defaultdict(list)
    step = engine.step

    def heard() -> Any:
        outputs = step()
        if outputs is not None:
            tokens: dict[int, list[int]] = defaultdict(list)
            for rid, token in zip(outputs.rids.tolist(), outputs.tokens.tolist(), strict=True):
                tokens[rid].append(token)
            for rid, run in tokens.items():
                runs[rid].append(run)
        return outputs

    engine.step = heard
    run = Client(engine, Workload(0, OPTIONS, tuple(asks))).play()
    return runs, run.counts


@pytest.mark.parametrize("pages", [256, 24])
@pytest.mark.parametrize(("loop", "depth"), LOOPS[:2])
def test_drafts_come_from_the_request_s_own_tokens(loop: str, depth: int, pages: int) -> None:
    """Slots change owners, requests are preempted and come back: what is proposed, and so how far
    each step gets, is what the request's own tokens say.  A drafter that still knew a slot's old
    owner, or had lost a prefix hit, would get another length of run in some step of 200."""
    drafts = 3
    variant = Variant(loop, "cpu", depth=depth, draft="ngram", drafts=drafts)
    engine = copying(variant, OPTIONS | {"num_pages": pages, "max_rows": 3})
    prompts = [[2 + (i * 7 + j) % 11 for j in range(5 + i % 3)] * 2 for i in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asks = [Ask(i // 2, tuple(prompt), params) for i, prompt in enumerate(prompts)]
    runs, counts = runs_of(engine, asks)
    steps = others = 0
    for rid, prompt in enumerate(prompts):
        outputs = [token for run in runs[rid] for token in run]
        known = prompt + outputs[:1]
        for run in runs[rid][1:]:
            left = outputs[len(known) - len(prompt) :]
            guess = expected(known, drafts)
            right = 0
            while right < min(drafts, len(left) - 1) and guess[right] == left[right]:
                right += 1
            steps += 1
            others += len(run) != right + 1
            known += run
    # after a preemption one token comes from the prompt's last chunk, without drafts
    assert others <= counts["preemptions"]
    assert (counts["preemptions"] > 0) == (pages == 24)
    assert counts["slot_reuses"] > 0
    assert counts["drafts accepted"] > steps / 2 > 60


@pytest.mark.parametrize("device", ["cpu", "hostile"])
@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_prompt_lookup_on_a_model_that_repeats_itself(loop: str, depth: int, device: str) -> None:
    asks = [
        Ask(i, tuple(range(2 + i, 9 + i)), SamplingParams(temperature=t, max_tokens=30, seed=i))
        for i, t in enumerate((0.0, 0.0, 1.0, 2.0, 4.0))
    ]
    work = Workload(0, OPTIONS, tuple(asks))
    plain = Client(copying(Variant(), OPTIONS), work).play()
    variant = Variant(loop, device, 3, depth, draft="ngram", drafts=4)
    drafted = Client(copying(variant, OPTIONS), work).play()
    assert {who: one.tokens for who, one in drafted.told.items()} == {
        who: one.tokens for who, one in plain.told.items()
    }
    assert drafted.counts["drafts accepted"] > 40


def test_drafts_cross_to_a_process_of_the_runner_s_own() -> None:
    """Runs come back over a pipe.  The toy rarely repeats itself; a bias towards two tokens makes
    it, so that drafts are accepted there too."""
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logit_bias={5: 9.0, 6: 9.0}
    )
    told = []
    for options in ({}, {"draft": "ngram", "draft_tokens": 2}):
        settings_ = {"max_rows": 2, "num_pages": 64, "threads": 1, "max_model_len": 128}
        engine = build_engine(config_from("toy", settings_ | options)).engine
        try:
            rid = engine.add([2, 3, 4], params)[0]
            tokens: list[int] = []
            while engine.has_work:
                if (outputs := engine.step()) is not None:
                    assert set(outputs.rids.tolist()) <= {rid}
                    tokens += outputs.tokens.tolist()
            told.append((tokens, sum(engine.scheduler.draft_counts().accepted_at)))
        finally:
            engine.close()
    assert told[0][0] == told[1][0]
    assert told[0][1] == 0 < told[1][1]


# --- what counts ----------------------------------------------------------------------------

WIDTH = 4
TOKENS = st.lists(st.integers(0, 2), min_size=WIDTH, max_size=WIDTH)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS, TOKENS, st.integers(0, WIDTH)), min_size=1, max_size=5))
def test_a_run_is_what_would_have_come_one_by_one(
    rows: list[tuple[list[int], list[int], list[int], int]],
) -> None:
    """Rows of (inputs, sampled, ends where 0, open positions) against a loop over places."""
    inputs, sampled, ends = (torch.tensor([row[i] for row in rows]) for i in range(3))
    is_open = torch.arange(WIDTH) < torch.tensor([[row[3]] for row in rows])
    seats = is_open.to(torch.int64)
    run = accept(Asked(inputs, torch.zeros(len(rows)), seats, is_open), sampled, ends == 0)
    for i, (given_, drawn, ending, opened) in enumerate(rows):
        tokens: list[int] = []
        for place in range(opened):
            if place and (given_[place] != drawn[place - 1] or ending[place - 1] == 0):
                break
            tokens.append(drawn[place])
        rest = [-1 if place < opened else -2 for place in range(len(tokens), WIDTH)]
        assert run.tokens_dev[i].tolist() == tokens + rest
        assert int(run.counts_dev[i]) == len(tokens)
        if tokens:
            assert int(run.newest_dev[i]) == tokens[-1]
        assert bool(run.ended_dev[i]) == (bool(tokens) and ending[len(tokens) - 1] == 0)


def test_sampled_tokens_keep_their_distribution_under_drafts() -> None:
    """80,000 rows with noise of their own, two drafts each, both the likeliest token: what comes
    out in each place is a sample of the softmax.  Chi-square with 7 degrees of freedom: 24.3 is
    passed in 99.9 % of all cases; noise and rows are the same in every run."""
    rows, vocab, temperature = 80_000, 8, 1.3
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -2.0, 0.2])
    keys = torch.tensor([stream_key(seed, 0) for seed in range(rows)]).repeat_interleave(3)
    first = torch.full((rows,), 20)
    asked = Asked(
        torch.zeros((rows, 3), dtype=torch.int64),
        first,
        torch.ones((rows, 3), dtype=torch.int64),
        torch.ones((rows, 3), dtype=torch.bool),
    )
    floats = torch.tensor([temperature, 1.0, 0.0, 0.0], dtype=torch.float64).view(torch.int64)
    everyone = torch.arange(3 * rows)
    drawn = Drawn(everyone, keys, floats.unsqueeze(1).expand(4, 3 * rows), False)
    nothing = np.zeros(0, np.int32)
    group = SampleGroup(drawn, None, None, nothing, None, 0, nothing, None, None)
    positions = asked.positions_dev.view(-1) + 1
    counts = PenaltyCounts(vocab, torch.device("cpu"))
    sampled = sample(logits.repeat(3 * rows, 1), group, positions, counts).view(rows, 3)
    run = accept(asked, sampled, torch.zeros((rows, 3), dtype=torch.bool))
    share = torch.softmax(logits / temperature, 0)
    for place in range(3):
        came = run.tokens_dev[:, place]
        came = came[came >= 0]
        found = torch.bincount(came, minlength=vocab).double()
        wanted = share.double() * len(came)
        assert len(came) > 8000
        assert float(((found - wanted) ** 2 / wanted).sum()) < 24.3


# --- how often ------------------------------------------------------------------------------


def accepted(draft: str) -> DraftCounts:
    """What came of 3 drafts a row, where the drafter knows the answers."""
    asks = [
        Ask(0, (i + 2, 9, 4, 33), SamplingParams(temperature=i % 2, max_tokens=60, seed=i))
        for i in range(6)
    ]
    asks = [replace(ask, params=_endless(ask.params)) for ask in asks]
    work = Workload(0, OPTIONS, tuple(asks))
    plain = Client(toy_engine(OPTIONS), work).play()
    learn_from(plain, work)
    engine = toy_engine(OPTIONS, Variant("overlap", draft=draft, drafts=3))
    drafted = Client(engine, work).play()
    for who, one in plain.told.items():
        assert drafted.told[who].tokens == one.tokens
    return engine.scheduler.draft_counts()


def _endless(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature, max_tokens=60, seed=params.seed, ignore_eos=True
    )


def test_half_of_the_drafts_or_none_or_all_are_accepted() -> None:
    half, never, always = map(accepted, ("drafters:Half", "drafters:Never", "drafters:Knowing"))
    assert 0.4 < sum(half.accepted_at) / half.proposed < 0.65
    assert never.proposed > 400 > sum(never.accepted_at) == 0
    assert sum(always.accepted_at) == always.proposed
    # 59 tokens of a decoding row come in runs of 4, the last of 3
    assert always.rows == 6 * 15
    first, second, third = half.accepted_at
    assert first > second > third > 0


# --- what it costs --------------------------------------------------------------------------

STEPS, WARM, ROWS = 12, 6, 4


@pytest.mark.parametrize(("loop", "depth"), LOOPS[1:])
def test_a_steady_step_with_drafts_waits_once_and_copies_once(loop: str, depth: int) -> None:
    variant = Variant(loop, "hostile", depth=depth, draft="drafters:Half", drafts=3)
    options = OPTIONS | {"page_size": 128, "num_pages": 16}
    settled = resolved(options, variant)
    spec = runner_spec(settled, variant.draft)
    device = HostileDevice(7, spec.depth, HostileModes(slow_host=True))
    runner = Runner(ToyModel(**spec.options), device, spec, 64)
    plans: list[Plan] = []
    engine = toy_engine(options, variant, plans.append, InlineExecutor(runner))
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for first in range(ROWS):
        engine.add([2 + first, 3, 4], params)
    for _ in range(WARM):
        engine.step()
    plans.clear()
    before = device.counts.as_dict()
    for _ in range(STEPS):
        assert engine.step() is not None
    after = device.counts.as_dict()
    assert after["landings"] - before["landings"] == STEPS
    assert after["syncs"] == after["hidden"] == {}
    sent = {
        site: told["copies"] - before["uploads"].get(site, {"copies": 0})["copies"]
        for site, told in after["uploads"].items()
    }
    assert not any(sent.values())
    assert all(plan.same_rows and not len(plan.grants) for plan in plans)
    assert plans


def test_bounds_of_lengths_follow_what_was_rejected() -> None:
    """Each rejected draft makes the host's bound of a context too high until its step has landed:
    never by more than the drafts of the steps in the air.  A bound that drifted would make every
    step read more and more cells that nobody needs: by 3 a step here, and 30 steps are run."""
    drafts, depth = 3, 3
    variant = Variant("batch-queue", "cpu", depth=depth, draft="drafters:Never", drafts=drafts)
    settled = resolved(OPTIONS, variant)
    spec = runner_spec(settled, variant.draft)
    runner = Runner(ToyModel(**spec.options), EagerDevice(), spec, 64)
    engine = toy_engine(OPTIONS, variant, executor=InlineExecutor(runner))
    engine.add([2, 3, 4], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    for _ in range(30):
        engine.step()
        slots = runner._slots
        over = slots.computed[1] - int(slots.length_dev[1])
        assert 0 <= over <= drafts * depth
    assert int(runner._slots.length_dev[1]) > 20


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 14])
@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_rows_are_launched_until_they_are_certain_to_end(
    loop: str, depth: int, max_tokens: int
) -> None:
    """A step in the air brings one token for certain.  Where it brings no more, exactly as many are
    launched as without drafts; where it brings four, no more than one for each further step that
    may be in the air."""
    work = Workload(
        0,
        OPTIONS,
        (Ask(0, (2, 3, 4), SamplingParams(temperature=0.0, max_tokens=max_tokens)),),
    )
    learn_from(Client(toy_engine(OPTIONS), work).play(), work)
    ahead = {"serial": 1, "overlap": 2}.get(loop, depth)
    for draft, runs in (("Never", max_tokens - 1), ("Knowing", -(-(max_tokens - 1) // 4))):
        plans: list[Plan] = []
        variant = Variant(loop, "cpu", depth=depth, draft=f"drafters:{draft}", drafts=3)
        told = Client(toy_engine(OPTIONS, variant, plans.append), work).play().told
        assert len(told[0, 0].tokens) == max_tokens
        rows = sum(len(plan.rows) for plan in plans)
        waste = 0 if draft == "Never" else ahead - 1
        assert runs <= rows <= runs + waste


class Lengths(ToyModel):
    """A model that wants exact lengths on the host, before each step that decodes."""

    host_lengths = True


def test_lengths_on_the_host_and_drafts_agree() -> None:
    """The host waits for the forward before, and takes what that left: the rejections of its own
    landings would take off too much.  Bounds too low would be contexts cut short."""
    variant = Variant("overlap", "hostile", 3, draft="drafters:Half", drafts=3)
    asks = [
        Ask(i, (i + 2, 7, 9), SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True))
        for i in range(4)
    ]
    work = Workload(0, OPTIONS, tuple(asks))
    plain = Client(toy_engine(OPTIONS), work).play()
    learn_from(plain, work)
    settled = resolved(OPTIONS, variant)
    spec = runner_spec(settled, variant.draft)
    runner = Runner(Lengths(**spec.options), HostileDevice(3, spec.depth), spec, 64)
    assert runner._verifier is not None
    runner._verifier.skips = False  # so that the host's bounds are what the model reads by
    drafted = Client(toy_engine(OPTIONS, variant, executor=InlineExecutor(runner)), work).play()
    for who, one in plain.told.items():
        assert drafted.told[who].tokens == one.tokens
    assert drafted.counts["drafts accepted"] > 20


@pytest.mark.parametrize("depth", [2, 4])
def test_rows_at_their_limit_write_nothing_under_drafts(depth: int) -> None:
    """A row in the air that has all its outputs by the time it runs: up to D - 1 steps, each of
    four positions.  They go to the padding page: a page of the row itself, or past its table, would
    be written after it was given away."""
    variant = Variant("batch-queue", "hostile", 5, depth, draft="drafters:Knowing", drafts=3)
    asks = [
        Ask(i // 2, (i + 2, 7, 9), SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for i, n in enumerate((2, 3, 4, 5, 6, 7, 8, 9, 21))
    ]
    options = OPTIONS | {"max_model_len": 24, "num_pages": 20}
    work = Workload(0, options, tuple(asks))
    plain = Client(toy_engine(options), work).play()
    learn_from(plain, work)
    drafted = Client(toy_engine(options, variant), work).play()
    assert drafted.counts["overshoot_rows"] > 0
    for who, one in plain.told.items():
        assert drafted.told[who].tokens == one.tokens
