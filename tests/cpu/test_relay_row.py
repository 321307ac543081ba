"""The relay by row: one slice while rows keep their places, a gather when they move, and the host
for rows that were left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engines import Variant, resolved, runner_spec, toy_engine
from harness import Client
from stepahead.plan import Plan
from stepahead.runner.build import build_runner
from stepahead.runner.relay.row import RowRelay, RowRoute
from stepahead.types import SamplingParams
from workloads import workload


def upload(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


class Steps:
    """A relay driven step by step; the token of slot s in step n is 100 n + s."""

    def __init__(self, depth: int = 3) -> None:
        self.relay = RowRelay(16, depth, True, torch.device("cpu"))
        self.step = 0

    def route(
        self, rows: list[int], sampled: list[int], tokens: list[int] | None = None
    ) -> tuple[RowRoute, list[int]]:
        """Routes a step, then runs it: its route and the input tokens it found."""
        brought = None if tokens is None else np.array(tokens, np.int32)
        slots = np.array(rows, np.int64)
        route = self.relay.route(slots, upload(slots), np.array(sampled, np.int64), brought, upload)
        found = self.relay.resolve(route).tolist()
        left = torch.tensor([100 * self.step + slot for slot in sampled], dtype=torch.int64)
        self.relay.stash(upload(np.array(sampled)), left)
        self.step += 1
        return route, found


def test_rows_that_stay_need_no_map() -> None:
    steps = Steps()
    steps.route([], [1, 2, 3])
    for n in range(1, 4):
        route, found = steps.route([1, 2, 3], [1, 2, 3])
        assert route.index_dev is None
        assert found == [100 * (n - 1) + slot for slot in (1, 2, 3)]


def test_rows_that_move_are_gathered() -> None:
    steps = Steps()
    steps.route([], [1, 2, 3])
    route, found = steps.route([2, 3], [2, 3])  # 1 has left: the others move up
    assert route.index_dev is not None
    assert found == [2, 3]
    route, found = steps.route([2, 3], [2, 3])
    assert route.index_dev is None  # and stay


def test_a_row_is_found_by_its_age() -> None:
    steps = Steps(depth=3)
    steps.route([], [1, 2])
    assert steps.route([2], [2, 5])[1] == [2]  # 1 is left out, 5 has its last chunk
    assert steps.route([1, 2, 5], [1, 2, 5])[1] == [1, 102, 105]


def test_steps_that_sample_nothing_count_too() -> None:
    steps = Steps(depth=3)
    steps.route([], [1])
    steps.route([], [])  # a prompt's middle chunk alone
    assert steps.route([1], [1])[1] == [1]


def test_what_has_left_the_ring_comes_from_the_host_or_is_an_error() -> None:
    steps = Steps(depth=2)
    steps.route([], [1, 2])
    for _ in range(2):
        steps.route([2], [2])
    assert steps.route([1, 2], [1, 2], [77, -1])[1] == [77, 202]
    steps.route([2], [2])
    steps.route([2], [2])
    with pytest.raises(AssertionError, match="has left the ring"):
        steps.route([1, 2], [1, 2])


def test_a_step_that_nobody_sampled_is_not_mistaken_for_tokens() -> None:
    steps = Steps()
    with pytest.raises(AssertionError, match="has left the ring"):
        steps.route([1], [1])


def test_short_of_pages_the_host_brings_tokens_and_the_slots_hold_none() -> None:
    brought = 0
    for seed in range(40):
        plans: list[Plan] = []
        work = workload(seed)
        engine = toy_engine(work.options, Variant("batch-queue", depth=3), plans.append)
        Client(engine, work).play()
        brought += sum(plan.tokens is not None and bool((plan.tokens >= 0).any()) for plan in plans)
        assert all(plan.tokens is None or len(plan.tokens) == len(plan.rows) for plan in plans)
    assert brought > 0
    settled = resolved(work.options, Variant("batch-queue", depth=3))
    assert not hasattr(build_runner(runner_spec(settled))._relay, "tokens_dev")


def test_a_steady_queue_sends_no_map() -> None:
    options = {"vocab_size": 64, "max_model_len": 64, "page_size": 16, "max_rows": 4}
    plans: list[Plan] = []
    engine = toy_engine(options | {"num_pages": 40}, Variant("batch-queue", depth=4), plans.append)
    for first in range(4):
        engine.add([first + 2, 3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    routes: list[RowRoute] = []
    # reaches in: routes are nobody's business but the runner's
    relay = engine._executor._executor._runner._relay  # type: ignore[attr-defined]
    route = relay.route
    relay.route = lambda *args: routes.append(route(*args)) or routes[-1]
    while engine.has_work:
        engine.step()
    steady = [one for one, plan in zip(routes, plans, strict=True) if plan.same_rows]
    assert len(steady) > 20
    assert all(one.index_dev is None and one.tokens_dev is None for one in steady)


def test_over_stages_a_row_is_found_by_its_age_among_the_tokens_that_are_back() -> None:
    """Three stages: a step's tokens come back before the third step after it."""
    relay = RowRelay(16, 6, True, torch.device("cpu"), lag=3)
    turns = [[1, 2], [3], [4, 5, 6], [2], [1, 3], [6, 4], [2, 5]]  # 1 and 5 sit a plan out
    sampled: list[list[int]] = []
    for step, rows in enumerate(turns):
        if step >= 3:
            slots = sampled[step - 3]
            left = torch.tensor([100 * (step - 3) + slot for slot in slots])
            relay.stash(upload(np.array(slots)), left)
        ready = np.array(rows if step >= 3 else [], np.int64)
        route = relay.route(ready, upload(ready), np.array(rows, np.int64), None, upload)
        last = [max(n for n, slots in enumerate(sampled) if slot in slots) for slot in ready]
        expected = [100 * n + slot for n, slot in zip(last, ready.tolist(), strict=True)]
        assert relay.resolve(route).tolist() == expected
        sampled.append(rows)
    with pytest.raises(AssertionError, match="still on its way"):
        relay.route(np.array([5]), upload(np.array([5])), np.array([5]), None, upload)
