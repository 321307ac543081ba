"""What is launched beyond need, counted exactly; and that a plan trace is a function of its input.

A request that ends by length is never launched again; one that ends by a stop rule is launched
D-1 times more under a loop of depth D (the serial loop has D = 1), and emits nothing for it.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from closed_form import Toy, complete
from engines import Variant, toy_engine
from harness import Client, play
from stepahead.plan import Plan, encode_plan
from stepahead.types import SamplingParams
from workloads import Abort, Ask, Workload, workload

DEPTHS = {"serial": 1, "overlap": 2}
OPTIONS = {"vocab_size": 64, "max_model_len": 48, "page_size": 4, "max_rows": 4, "num_pages": 48}
PROMPT = (9, 4, 33, 20, 7)
ENDLESS = complete(
    Toy(64, 48), list(PROMPT), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), 0
).tokens


def sampled_rows(plan: Plan) -> int:
    """Rows of the plan that sample a token."""
    return len(plan.rows) + int(plan.chunk_table[:, 3].sum())


def launched(variant: Variant, asks: list[Ask]) -> tuple[int, int]:
    """Rows that were sampled for these requests, and tokens that their clients got."""
    plans: list[Plan] = []
    engine = toy_engine(OPTIONS, variant, plans.append)
    told = Client(engine, Workload(0, OPTIONS, tuple(asks))).play().told
    return sum(map(sampled_rows, plans)), sum(len(one.tokens) for one in told.values())


def greedy(**fields: object) -> SamplingParams:
    """Greedy parameters that no end-of-sequence token stops."""
    return SamplingParams(temperature=0.0, ignore_eos=True, **fields)


@pytest.mark.parametrize("device", ["cpu", "hostile"])
@pytest.mark.parametrize("loop", DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("requests", [1, 3])
def test_length_finishes_launch_exactly_max_tokens(
    device: str, loop: str, max_tokens: int, requests: int
) -> None:
    asks = [Ask(i, (*PROMPT, i + 2), greedy(max_tokens=max_tokens)) for i in range(requests)]
    rows, tokens = launched(Variant(loop, device, 5), asks)
    assert (rows, tokens) == (requests * max_tokens, requests * max_tokens)


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("loop", DEPTHS)
@pytest.mark.parametrize("place", [1, 2, 3, 7, 11, 12])
def test_stop_tokens_launch_one_step_more_for_each_step_ahead(
    loop: str, place: int, depth: int
) -> None:
    stop = ENDLESS[place - 1]
    place = ENDLESS.index(stop) + 1  # should it have come before
    asks = [Ask(0, PROMPT, greedy(max_tokens=12, stop_token_ids=[stop]))]
    ahead = DEPTHS[loop] if loop == "serial" else depth or DEPTHS[loop]
    rows, tokens = launched(Variant(loop, depth=ahead), asks)
    # never past the length, which is certain
    assert (tokens, rows) == (place, min(place + ahead - 1, 12))


@pytest.mark.parametrize("loop", DEPTHS)
def test_stop_strings_waste_no_more_than_stop_tokens(loop: str) -> None:
    # "cd" stands in some token of the answer, or across two of them
    params = greedy(max_tokens=12, stop=["cd", "bd", "ab"])
    answer = complete(Toy(64, 48), list(PROMPT), params, 0)
    assert answer.reason == "stop"
    assert len(answer.tokens) < 12
    rows, tokens = launched(Variant(loop), [Ask(0, PROMPT, params)])
    assert (tokens, rows) == (len(answer.tokens), len(answer.tokens) + DEPTHS[loop] - 1)


@pytest.mark.parametrize("loop", DEPTHS)
def test_an_abort_wastes_what_is_in_the_air_and_no_more(loop: str) -> None:
    asks = [Ask(0, PROMPT, greedy(max_tokens=12), Abort("token", 3))]
    rows, tokens = launched(Variant(loop), asks)
    assert (tokens, rows) == (3, 3 + DEPTHS[loop] - 1)


def ended_by_length(seed: int) -> Workload:
    """The seed's workload, where nothing but their length ends the requests."""
    work = workload(seed)

    def endless(ask: Ask) -> Ask:
        params = msgspec.structs.replace(
            ask.params, stop=None, stop_token_ids=None, ignore_eos=True, min_tokens=0
        )
        return replace(ask, params=params, abort=None)

    return replace(work, asks=tuple(map(endless, work.asks)))


@pytest.mark.parametrize(("loop", "depth"), [("serial", 0), ("overlap", 0), ("overlap", 4)])
def test_without_stops_each_token_is_sampled_once_however_short_the_pages(
    loop: str, depth: int
) -> None:
    # a preempted request computes its tokens again, but samples none of them twice: what was in
    # the air for it still counted
    preempted = 0
    for seed in range(120):
        plans: list[Plan] = []
        work = ended_by_length(seed)
        engine = toy_engine(work.options, Variant(loop, "paper", depth=depth), plans.append)
        run = Client(engine, work).play()
        tokens = sum(len(told.tokens) for told in run.told.values())
        assert sum(map(sampled_rows, plans)) == tokens, f"seed {seed}"
        preempted += run.counts["preempted in flight" if loop == "overlap" else "preemptions"]
    assert preempted > 5


def trace(seed: int, variant: Variant) -> list[bytes]:
    """Every plan of a workload, as bytes."""
    plans: list[bytes] = []
    work = workload(seed)
    engine = toy_engine(work.options, variant, lambda plan: plans.append(encode_plan(plan)))
    Client(engine, work).play()
    return plans


@pytest.mark.parametrize("loop", DEPTHS)
@pytest.mark.parametrize("seed", [0, 3, 8])
def test_ten_runs_have_one_plan_trace(loop: str, seed: int) -> None:
    first = trace(seed, Variant(loop))
    assert len(first) > 5
    for _ in range(9):
        assert trace(seed, Variant(loop)) == first


@pytest.mark.parametrize("loop", DEPTHS)
@pytest.mark.parametrize("seed", [0, 3, 8])
def test_the_devices_order_is_not_in_the_plan_trace(loop: str, seed: int) -> None:
    first = trace(seed, Variant(loop))
    assert all(trace(seed, Variant(loop, "hostile", order)) == first for order in range(10))


def test_another_workload_has_another_trace() -> None:
    # else the two tests above would compare nothing
    assert trace(0, Variant()) != trace(3, Variant())


def test_a_run_leaves_its_tokens_alone() -> None:
    # what a client holds must not change under it when the slot's memory is used again
    work = Workload(0, OPTIONS, tuple(Ask(i, PROMPT, greedy(max_tokens=6)) for i in range(12)))
    told = play(work, Variant("overlap")).told
    ends = [one.finish.tokens for one in told.values() if one.finish is not None]
    assert all(np.array_equal(tokens, ENDLESS[:6]) for tokens in ends)
