"""The scheduler step by step, on paper: who is admitted, granted, preempted, ended, released.

Random workloads are in test_parity_paper; here each rule has a small scene of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from closed_form import Toy, complete, pieces
from engines import Variant, resolved, toy_engine
from harness import check_frontiers
from paper import PaperFlight, PaperRunner
from stepahead.errors import InvalidParameter, PoolFull, PromptTooLong
from stepahead.plan import Plan
from stepahead.scheduler.policy import Limits
from stepahead.scheduler.scheduler import Scheduler
from stepahead.scheduler.stop import StopTable, Vocabulary
from stepahead.types import Finish, Outputs, Request, SamplingParams
from workloads import workload

TOY = Toy(64, 64)


class Desk:
    """A scheduler and a runner on paper; the test says when to launch and when to land."""

    def __init__(self, **limits: Any) -> None:
        sizes = {"max_rows": 4, "max_step_tokens": 32, "page_size": 4, "num_pages": 33}
        sizes |= {"num_slots": 13, "model_len": TOY.model_len, "debug": True}
        self.limits = Limits(**(sizes | limits))
        vocabulary = Vocabulary(pieces(64), TOY.specials)
        self.scheduler = Scheduler(self.limits, StopTable(64, (TOY.eos,), vocabulary))
        sizes_of = self.limits.num_slots, self.limits.num_pages, self.limits.page_size
        self.runner = PaperRunner(TOY, *sizes_of)
        self.flights: deque[tuple[Plan, PaperFlight]] = deque()
        self.ends: dict[int, Finish] = {}

    def add(self, rid: int, prompt: list[int], wait: bool = True, **fields: Any) -> None:
        """A greedy request that only its length ends, unless `fields` say otherwise."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8} | fields
        tokens = np.array(prompt, np.int32)
        self.scheduler.add([Request(rid, tokens, SamplingParams(**params), rid)], wait)

    def launch(self) -> Plan | None:
        """Plans and launches a step."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.flights.append((plan, self.runner.launch(plan)))
        check_frontiers(self.scheduler)
        return plan

    def land(self) -> Outputs:
        """Lands and retires the oldest flight."""
        plan, flight = self.flights.popleft()
        outputs = self.scheduler.retire(plan, flight.land())
        for finish in outputs.finishes:
            assert finish.rid not in self.ends
            self.ends[finish.rid] = finish
        check_frontiers(self.scheduler)
        return outputs

    def run(self, depth: int = 2) -> None:
        """Runs to the end at this depth, and holds the scheduler to its rest."""
        steps = 0
        while self.scheduler.has_work:
            launched = len(self.flights) < depth and self.launch() is not None
            if self.flights and (not launched or len(self.flights) == depth):
                self.land()
            steps += 1
            assert steps < 1000, "no progress"
        self.scheduler.check_at_rest()


def slots_of(plan: Plan | None) -> list[int]:
    """The slots that a plan names, decoding or in prefill."""
    assert plan is not None
    return [*plan.rows.tolist(), *plan.chunk_table[:, 0].tolist()]


# --- planning -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_a_step_stays_within_its_limits(seed: int) -> None:
    work = workload(seed)
    settled = resolved(work.options, Variant("overlap", "paper"))
    most, rows = settled.config.max_step_tokens, settled.config.max_rows
    plans: list[Plan] = []
    engine = toy_engine(work.options, Variant("overlap", "paper"), plans.append)
    for ask in work.asks[:4]:
        if len(ask.prompt) < work.options["max_model_len"]:
            engine.add(list(ask.prompt), ask.params)
    while engine.has_work:
        engine.step()
    for plan in plans:
        names = slots_of(plan)
        assert len(plan.rows) + int(plan.chunk_table[:, 2].sum()) <= most
        assert len({*names}) == len(names) <= rows
        assert names, "an empty step"


def test_a_long_prompt_runs_in_chunks_beside_decoding_rows() -> None:
    desk = Desk(max_step_tokens=6)
    desk.add(0, [2, 3, 4])
    desk.launch()
    desk.add(1, list(range(2, 18)), max_tokens=2)
    chunks = [plan.chunk_table.tolist()[0] for _ in range(4) if (plan := desk.launch())]
    # five positions a step, for one goes to the row that decodes
    assert [tuple(chunk[1:]) for chunk in chunks] == [(0, 5, 0), (5, 5, 0), (10, 5, 0), (15, 1, 1)]
    desk.run()


def test_steady_decoding_says_nothing_new() -> None:
    desk = Desk(page_size=16, num_pages=9)
    desk.add(0, [2, 3], max_tokens=12)
    desk.add(1, [4, 5], max_tokens=12)
    plans = [desk.launch() for _ in range(6)]
    steady = plans[2]
    assert steady is not None
    assert steady.same_rows
    assert not steady.joins
    assert len(steady.chunks) == len(steady.grants) == len(steady.leaves) == 0
    assert steady.tokens is None
    desk.run()


def test_without_a_relay_the_host_sends_the_tokens() -> None:
    desk = Desk(relay="host")
    desk.add(0, [2, 3, 4])
    desk.launch()
    first = desk.land().tokens.tolist()
    plan = desk.launch()
    assert plan is not None
    assert plan.tokens is not None
    assert plan.tokens.tolist() == first
    desk.run(depth=1)


def test_a_row_certain_to_end_is_never_launched_again() -> None:
    desk = Desk()
    desk.add(0, [2, 3], max_tokens=3)
    assert [desk.launch() is not None for _ in range(5)] == [True, True, True, False, False]
    desk.run()
    assert len(desk.ends[0].tokens) == 3


def test_rows_beyond_the_most_wait_their_turn() -> None:
    desk = Desk(max_rows=2)
    for rid in range(5):
        desk.add(rid, [2 + rid, 3], max_tokens=2)
    assert len(slots_of(desk.launch())) == 2
    desk.run()
    assert list(desk.ends) == [0, 1, 2, 3, 4]


# --- admission ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        (64, 1, "prompt"),  # of a model of 64 positions
        (25, 1, "prompt"),  # of a pool of 24
        (24, 2, "max_tokens"),
    ],
)
def test_what_can_never_be_held_is_refused_by_name(
    prompt: int, max_tokens: int | None, param: str
) -> None:
    desk = Desk(num_pages=7)
    with pytest.raises(PromptTooLong) as caught:
        desk.add(0, [2] * prompt, max_tokens=max_tokens)
    assert caught.value.param == param
    desk.scheduler.check_at_rest()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(24, 1), (23, 2), (5, 20)])
def test_what_can_just_be_held_is_taken(prompt: int, max_tokens: int) -> None:
    desk = Desk(num_pages=7)
    desk.add(0, [2] * prompt, max_tokens=max_tokens)
    desk.run()
    assert len(desk.ends[0].tokens) == max_tokens


def test_as_many_as_there_is_room_for_is_what_the_pool_holds() -> None:
    # a pool smaller than the model once refused every request that named no max_tokens
    desk = Desk(num_pages=7)
    desk.add(0, [2] * 8, max_tokens=None, ignore_eos=True)
    desk.run()
    assert len(desk.ends[0].tokens) == 24 - 8 + 1  # the last one's KV is never written


def test_a_request_id_is_taken_once() -> None:
    desk = Desk()
    desk.add(0, [2, 3])
    with pytest.raises(InvalidParameter, match="request id 0 is already running"):
        desk.add(0, [2, 3])
    desk.run()
    desk.add(0, [2, 3])  # it has ended: nobody confuses them
    desk.ends.clear()
    desk.run()


def test_without_waiting_a_request_is_held_at_once_or_refused_at_once() -> None:
    desk = Desk(num_pages=9, max_rows=3)
    desk.add(0, [2] * 12, wait=False)  # 3 of 8 pages
    # nothing was planned in between: whoever waits counts
    desk.add(1, [3] * 12, wait=False)
    with pytest.raises(PoolFull) as caught:
        desk.add(2, [4] * 4, wait=False)  # the last two are owed to those that decode
    assert caught.value.param == "prompt"
    plan = desk.launch()
    assert plan is not None
    assert [join.slot for join in plan.joins] == [1, 2]
    desk.run()
    desk.add(3, [4] * 12, wait=False)
    desk.run()


def test_without_waiting_rows_are_counted_too() -> None:
    desk = Desk(max_rows=2)
    desk.add(0, [2], wait=False)
    desk.add(1, [3], wait=False)
    with pytest.raises(PoolFull):
        desk.add(2, [4], wait=False)
    desk.run()


def test_who_gave_up_in_the_queue_keeps_nobody_out() -> None:
    # the queue still held the aborted request, and an empty engine called itself full
    desk = Desk(max_rows=1)
    desk.add(0, [2, 3])
    desk.add(1, [4, 5])
    desk.launch()
    assert desk.scheduler.abort(0) is not None
    assert desk.scheduler.abort(1) is not None
    desk.land()
    desk.scheduler.check_at_rest()
    desk.add(2, [6, 7], wait=False)
    desk.run()
    assert list(desk.ends) == [2]


def test_an_admission_leaves_a_page_for_each_running_row() -> None:
    # else the newcomer would be preempted at once
    desk = Desk(num_pages=6, page_size=4)  # five pages
    desk.add(0, [2] * 8, max_tokens=5)  # two now, a third later
    desk.add(1, [3] * 11, max_tokens=1)  # three: with them nothing would be left
    plan = desk.launch()
    assert plan is not None
    assert [join.slot for join in plan.joins] == [1]
    desk.run()
    assert desk.scheduler.life.counters.preemptions == 0
    assert len(desk.ends) == 2


# --- prefix hits ----------------------------------------------------------------------------


def test_prompt_pages_are_found_once_they_are_settled_and_not_before() -> None:
    desk = Desk()
    prompt = list(range(2, 14))
    desk.add(0, prompt)
    desk.launch()
    desk.add(1, [*prompt, 50])
    plan = desk.launch()  # 0 is in the air
    assert plan is not None
    assert [join.cached for join in plan.joins] == [0]
    desk.land()
    desk.add(2, [*prompt, 51])
    plan = desk.launch()
    assert plan is not None
    assert [join.cached for join in plan.joins] == [12]
    desk.run()
    assert [desk.ends[rid].cached_tokens for rid in (0, 1, 2)] == [0, 0, 12]


def test_pages_of_an_answer_are_found_after_its_end() -> None:
    desk = Desk()
    desk.add(0, [2, 3, 4, 5], max_tokens=9)
    desk.run()
    answer = desk.ends[0].tokens.tolist()
    desk.add(1, [2, 3, 4, 5, *answer, 7])
    plan = desk.launch()
    assert plan is not None
    # 4 + 9 tokens, but the last one was never computed: three pages of four
    assert plan.joins[0].cached == 12
    desk.run()


def test_what_an_overshoot_wrote_is_found_by_nobody() -> None:
    desk = Desk()
    desk.add(0, [2, 3, 4, 5, 6, 7, 8], stop_token_ids=list(range(64)))
    desk.run()
    assert (desk.ends[0].reason, len(desk.ends[0].tokens)) == ("stop", 1)
    assert desk.scheduler.life.counters.overshoot_rows == 1
    # the overshoot step computed the eighth position, and with it a second full page
    assert len(desk.scheduler.store.tree) == 1


def test_wanted_prompt_logprobs_take_no_hit() -> None:
    desk = Desk()
    desk.add(0, list(range(2, 14)))
    desk.run()
    desk.add(1, [*range(2, 14), 5], prompt_logprobs=1)
    plan = desk.launch()
    assert plan is not None
    assert plan.joins[0].cached == 0
    desk.run()


def test_a_flushed_cache_is_empty_and_balanced() -> None:
    desk = Desk()
    desk.add(0, list(range(2, 14)))
    desk.run()
    assert desk.scheduler.flush_cache() == 4
    desk.scheduler.check_at_rest()
    desk.add(1, [*range(2, 14), 5])
    plan = desk.launch()
    assert plan is not None
    assert plan.joins[0].cached == 0
    desk.run()


# --- preemption -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_youngest_yields_and_every_answer_is_whole(depth: int) -> None:
    desk = Desk(
        num_pages=8, page_size=2, relay="host" if depth == 1 else "slot", prefix_cache=False
    )
    prompts = {rid: [2 + rid, 3, 4] for rid in range(3)}
    for rid, prompt in prompts.items():
        desk.add(rid, prompt, max_tokens=9)
    desk.run(depth)
    counters = desk.scheduler.life.counters
    assert counters.preemptions > 0
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    for rid, prompt in prompts.items():
        assert desk.ends[rid].tokens.tolist() == complete(TOY, prompt, params, rid).tokens
    # the oldest is never a victim
    assert next(iter(desk.ends)) == 0


# --- ends -----------------------------------------------------------------------------------


def test_an_abort_in_flight_gives_nothing_back_until_it_lands() -> None:
    desk = Desk()
    desk.add(0, [2] * 8)
    desk.launch()
    table, store = desk.scheduler.table, desk.scheduler.store
    free = store.available
    finish = desk.scheduler.abort(0)
    assert finish is not None
    assert (finish.reason, len(finish.tokens)) == ("abort", 0)
    assert desk.scheduler.abort(0) is None, "two ends"
    assert (store.available, table.pins[1]) == (free, 1)
    assert desk.scheduler.has_work, "a flight is in the air"
    assert desk.launch() is None, "an aborted request was launched again"
    outputs = desk.land()
    assert len(outputs.tokens) == 0
    assert store.available == desk.limits.num_pages - 1
    desk.scheduler.check_at_rest()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_last_flight_that_names_a_slot_releases_it_once(ahead: int) -> None:
    desk = Desk()
    desk.add(0, [2] * 8, max_tokens=20)
    for _ in range(ahead):
        desk.launch()
    desk.scheduler.abort(0)
    for left in range(ahead, 0, -1):
        assert desk.scheduler.table.pins[1] == left
        assert desk.scheduler.table.free_slots == desk.limits.num_slots - 2
        desk.land()
    assert desk.scheduler.table.free_slots == desk.limits.num_slots - 1
    assert desk.scheduler.table.generation[1] == 1
    desk.scheduler.life.release(1)  # idempotent
    desk.scheduler.life.sweep()
    desk.scheduler.check_at_rest()


def test_a_slot_used_again_says_so() -> None:
    desk = Desk(max_rows=1)
    desk.add(0, [2, 3], max_tokens=1)
    desk.run()
    desk.add(1, [4, 5], max_tokens=1)
    plan = desk.launch()
    assert plan is not None
    assert plan.leaves.tolist() == [1]
    assert [(join.slot, join.generation) for join in plan.joins] == [(1, 1)]
    desk.run()


def test_load_is_published_at_retirement() -> None:
    desk = Desk(max_rows=1)
    assert desk.scheduler.load.step == -1
    desk.add(0, [2] * 8, max_tokens=3)
    desk.add(1, [3] * 4, max_tokens=3)
    desk.launch()
    assert desk.scheduler.load.step == -1, "one step late, and labelled so"
    desk.land()
    load = desk.scheduler.load
    assert (load.step, load.rows_running, load.requests_waiting) == (0, 1, 1)
    assert load.pages_total == 32
    assert load.pages_free + load.pages_cached == 32
    desk.run()
    assert desk.scheduler.load.rows_running == desk.scheduler.load.requests_waiting == 0


def test_flights_retire_in_the_order_of_launch() -> None:
    desk = Desk()
    desk.add(0, [2, 3])
    desk.launch()
    desk.launch()
    plan, flight = desk.flights[1]
    with pytest.raises(AssertionError, match="in the order of launch"):
        desk.scheduler.retire(plan, flight.land())


def test_a_lost_runner_ends_everyone_once_and_leaves_no_unwritten_page() -> None:
    desk = Desk(max_rows=2, max_step_tokens=8)
    for rid in range(4):
        desk.add(rid, [2 + rid] * 12)
    for _ in range(2):
        desk.launch()
    desk.land()
    desk.launch()
    finishes = desk.scheduler.drop_all("error", "the runner is gone")
    assert sorted(finish.rid for finish in finishes) == [0, 1, 2, 3]
    assert {finish.reason for finish in finishes} == {"error"}
    assert {finish.error for finish in finishes} == {"the runner is gone"}
    desk.scheduler.check_at_rest()
    # of 0's twelve tokens only eight had landed
    assert len(desk.scheduler.store.match(np.array([2] * 13, np.int32))) == 2
    assert desk.scheduler.store.match(np.array([3] * 13, np.int32)) == []


def test_a_refused_request_is_let_in_when_its_prefix_is_published() -> None:
    # it was once not asked again before pages came free, and ran after the other's end
    desk = Desk(num_pages=9, page_size=4)
    prompt = list(range(2, 19))
    desk.add(0, prompt, max_tokens=4)  # takes 5 pages of 8
    desk.add(1, [*prompt, 20], max_tokens=3)  # needs 5 of its own, or 1 beside a hit of 4
    first = desk.launch()
    assert first is not None
    assert len(first.joins) == 1
    desk.land()  # the prompt's pages are known now, none has come free
    second = desk.launch()
    assert second is not None
    assert [join.cached for join in second.joins] == [16]
    desk.run()


def test_rows_that_lack_pages_only_for_later_go_on_as_they_are() -> None:
    # after one had got the last page, all were regrouped at every step
    desk = Desk(page_size=8, num_pages=4)
    desk.add(0, list(range(2, 9)), max_tokens=8)
    desk.add(1, [2, 3, 4], max_tokens=12)
    plans = [plan for _ in range(5) if (plan := desk.launch())]
    # the third grants the last page to the row that needs one; the other wants one ahead
    assert [len(plan.grants) // 3 for plan in plans] == [0, 0, 1, 0, 0]
    assert [plan.same_rows for plan in plans[2:]] == [True, True, True]
    desk.run()
    assert [len(desk.ends[rid].tokens) for rid in range(2)] == [8, 12]


def test_who_would_wait_is_counted_by_rows_and_then_by_pages() -> None:
    desk = Desk(num_pages=40, max_rows=3)
    count = desk.scheduler.would_wait
    assert [count([4] * n) for n in (1, 3, 4, 9)] == [0, 0, 1, 6]
    desk.add(0, [2, 3])
    desk.add(1, [2, 3])
    # nothing was planned yet, and still it is known that these two will have rows
    assert [count([4] * n) for n in (1, 2, 5)] == [0, 1, 4]
    assert desk.scheduler.waiting == 2
    desk.launch()
    assert desk.scheduler.waiting == 0
    assert [count([4] * n) for n in (1, 2, 5)] == [0, 1, 4]
    # rows are there, and pages are not: whoever has no row waits
    assert count([4 * 39]) == 1
    desk.run()


def test_a_preempted_request_counts_in_the_queue() -> None:
    desk = Desk(num_pages=9, max_rows=2)
    desk.add(0, [2] * 12, max_tokens=18)
    desk.add(1, [3] * 8, max_tokens=20)
    life = desk.scheduler.life
    while not life.counters.preemptions:
        desk.launch()
        if len(desk.flights) == 2:
            desk.land()
    assert desk.scheduler.waiting == 1
    assert life.queued_pages >= 2
    while desk.flights:
        desk.land()
    (entry,) = [e for e in desk.scheduler._entries.values() if not e.slot]
    assert life.queued_pages == -(-len(entry.tokens) // 4) > 2  # with what it had made
    desk.run()
    assert life.queued_pages == 0
