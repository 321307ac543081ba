"""The loops on a virtual clock: exact shapes, and both books balanced to the nanosecond."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from engines import Variant, paper, resolved, toy_engine, toy_of
from harness import Client, differences, exactly
from stepahead.executor.virtual import StepSize, Timing, VirtualClock, VirtualExecutor
from stepahead.observe.books import BookSummary, Stage
from stepahead.plan import NO_INTS, Plan
from stepahead.sim import shapes
from stepahead.sim.host_cost import PreparedExecutor
from stepahead.sim.virtual import (
    LOOPS,
    MS,
    OVERLAP,
    QUEUES,
    SERIAL,
    HostWork,
    LoopChoice,
    charge,
    constant,
    host_work,
    intervals_ns,
    rig,
    steady,
)
from stepahead.types import SamplingParams
from workloads import workload

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
EVERY_LOOP = pytest.mark.parametrize("choice", LOOPS, ids=str)


def balance(summary: BookSummary, wall_ns: int) -> None:
    """Promise 8: both books add up to the wall clock, in integers."""
    host = summary.hidden_ns + summary.exposed_ns + summary.waiting_ns
    assert host == sum(summary.host_ns.values()) == summary.wall_ns == wall_ns
    assert summary.busy_ns + sum(summary.idle_ns.values()) == wall_ns


# --- the executor -------------------------------------------------------------------------------


def plan(step: int, rows: int = 0, same: bool = False, chunk: int = 0) -> Plan:
    chunks = np.array([9, 0, chunk, 1], np.int32) if chunk else NO_INTS
    return Plan(step, np.arange(rows, dtype=np.int32), same, chunks=chunks)


def test_a_step_takes_its_turn_on_the_device_and_lands_a_hand_over_later() -> None:
    clock, seen = VirtualClock(), []

    def forward_ns(size: StepSize) -> int:
        seen.append(size)
        return 1000 * size.rows + 10 * size.chunk_tokens

    timing = Timing(forward_ns, launch_ns=5, submit_ns=300, handover_ns=7)
    executor = VirtualExecutor(PreparedExecutor(), clock, timing)
    first = executor.launch(plan(0, rows=2, chunk=3))
    assert clock.now_ns() == 5  # a launch costs the host its own time and nothing else
    again = executor.launch(plan(1, same=True))
    assert seen == [StepSize(0, 2, 3), StepSize(1, 2, 0)]  # rows that are not sent again still run
    assert (first.start_ns, first.end_ns) == (305, 2335)
    assert (again.start_ns, again.end_ns) == (2335, 4335)  # submitted at 605, while the first ran
    result = first.land()
    assert clock.now_ns() == 2342
    assert (result.device_start_ns, result.device_end_ns) == (305, 2335)
    clock.work(10_000)
    again.land()
    assert clock.now_ns() == 12_342  # it had long been there


def test_the_runner_submits_one_step_at_a_time() -> None:
    clock = VirtualClock()
    timing = Timing(constant(10), submit_ns=300)
    executor = VirtualExecutor(PreparedExecutor(), clock, timing)
    starts = [executor.launch(plan(step, rows=1)).start_ns for step in range(3)]
    assert starts == [300, 600, 900]
    assert clock.now_ns() == 0


def test_simulations_load_no_torch() -> None:
    program = "import sys, stepahead.sim.shapes; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


# --- time per output token ------------------------------------------------------------------------


@EVERY_LOOP
@pytest.mark.parametrize("handover", [0.0, 0.2, 1.5])
@pytest.mark.parametrize("submit", [0.0, 7.0])
def test_a_steady_step_takes_what_the_formula_says(
    choice: LoopChoice, handover: float, submit: float
) -> None:
    for forward in (2.0, 10.0):
        for host in (1.0, 6.0, 9.5, 10.0, 25.0):
            costs = shapes.timing(forward, handover=handover, submit=submit)
            rigged = rig(choice, costs, host_work(host))
            steady(rigged, shapes.STEPS)
            took_ns = sum(intervals_ns(rigged.hear(1 + shapes.STEPS)))
            around = round((forward + host + handover + submit) * MS)
            slowest = round(max(forward, host, submit) * MS)
            turns = shapes.STEPS // choice.depth
            assert took_ns == max(slowest * choice.depth, around) * turns


def test_serial_adds_and_overlap_hides() -> None:
    costs, work = shapes.timing(10.0, handover=0.25), host_work(6.0)
    assert shapes.tpot_ms(SERIAL, costs, work) == 16.25
    for choice in (OVERLAP, *QUEUES):
        assert shapes.tpot_ms(choice, costs, work) == 10.0
        assert shapes.tpot_ms(choice, costs, host_work(14.0)) == 14.0


@pytest.mark.parametrize("plan_share", [0.0, 0.25, 1.0])
def test_where_the_hosts_work_lies_does_not_matter(plan_share: float) -> None:
    costs = shapes.timing(10.0, handover=0.25)
    for choice, expected in ((SERIAL, 16.25), (OVERLAP, 10.0), (QUEUES[1], 10.0)):
        assert shapes.tpot_ms(choice, costs, host_work(6.0, plan_share)) == expected


def test_a_deeper_queue_is_for_times_that_vary() -> None:
    for row in shapes.jitter(steps=480):
        deep = [row[str(choice)] for choice in QUEUES]
        assert row[str(OVERLAP)] == deep[0]
        assert row[str(SERIAL)] > deep[0] >= deep[1] >= deep[2]
        if row["spread"] == "none":
            assert deep == [10.0] * 3
        if "five times" in row["spread"]:
            assert deep[0] > 1.04 * deep[2]


def test_the_same_times_give_the_same_run() -> None:
    assert shapes.jitter(steps=96) == shapes.jitter(steps=96)


# --- the books ------------------------------------------------------------------------------------


@EVERY_LOOP
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_times_and_the_books_balance(choice: LoopChoice, seed: int) -> None:
    work = workload(seed)
    variants = [
        Variant(one.loop, "paper", depth=one.depth * (one.loop == "batch-queue"))
        for one in (SERIAL, choice)
    ]
    runs = []
    for variant in variants:
        rng, clock = np.random.default_rng(seed), VirtualClock()
        draws = rng.integers(0, 50_000, (4, 512)).tolist()
        timing = Timing(
            lambda size, draws=draws: 1 + draws[0][size.step % 512] + 100 * size.chunk_tokens,
            launch_ns=draws[1][0],
            submit_ns=draws[1][1],
            handover_ns=draws[1][2],
        )
        settled = resolved(work.options, variant)
        executor = VirtualExecutor(paper(settled, toy_of(work.options)), clock, timing)
        engine = toy_engine(work.options, variant, executor=executor, clock_ns=clock.now_ns)
        plan_ns, retire_ns = (lambda step, row=row: row[step % 512] for row in draws[2:])
        charge(engine, clock, HostWork(plan_ns, retire_ns))
        runs.append(Client(engine, work).play())
        balance(engine.books.summary(), clock.now_ns())
        assert engine.books.summary().busy_ns > 0
        steps = engine.books.per_step()
        idle_ns = sum(steps.idle_ns.values())
        assert (steps.hidden_ns + steps.exposed_ns + steps.waiting_ns == steps.wall_ns).all()
        assert (steps.busy_ns + idle_ns == steps.wall_ns).all()
    assert differences(*runs, exactly) == []


def test_the_device_idles_for_named_causes_and_no_longer() -> None:
    costs, work = shapes.timing(10.0, handover=0.25, launch=0.5), host_work(6.0)
    expected = {
        SERIAL: {"plan late": 6.0, "launch late": 0.5, "copy": 0.25},
        OVERLAP: {},
        QUEUES[1]: {},
    }
    for choice, causes in expected.items():
        rigged = rig(choice, costs, work)
        steady(rigged, shapes.STEPS)
        mark = rigged.engine.books.mark()
        began_ns = rigged.clock.now_ns()
        rigged.hear(40)
        # what flights in the air have run is not in the books yet: count up to the last landing
        events = rigged.engine.books.recent()
        summary = rigged.engine.books.summary(mark)
        balance(summary, rigged.clock.now_ns() - began_ns)
        gaps_ns = events.busy_start_ns[-30:] - events.busy_end_ns[-31:-1]
        assert gaps_ns.tolist() == [round(sum(causes.values()) * MS)] * 30
        if choice is SERIAL:
            idle = {cause: ns / MS / 40 for cause, ns in summary.idle_ns.items() if ns}
            assert idle == causes


def test_hidden_work_is_all_of_it_when_the_device_is_slower() -> None:
    rigged = rig(OVERLAP, shapes.timing(10.0, handover=0.25), host_work(6.0))
    steady(rigged, shapes.STEPS)
    rigged.hear(64)
    steps = rigged.engine.books.per_step()
    assert set(steps.hidden_ns[-40:-1].tolist()) == {6 * MS}
    assert set(steps.exposed_ns[-40:-1].tolist()) == {0}
    assert set(steps.waiting_ns[-40:-1].tolist()) == {4 * MS}


# --- publication ----------------------------------------------------------------------------------


@EVERY_LOOP
def test_tokens_are_out_in_order_a_hand_over_and_a_retirement_after_their_landing(
    choice: LoopChoice,
) -> None:
    rigged = rig(choice, shapes.timing(10.0, handover=0.25), host_work(6.0))
    for _ in range(4):
        rigged.add(16, GREEDY)
    heard = rigged.hear(1000)
    ended_ns = rigged.landings_ns()
    assert [each.outputs.step for each in heard] == list(range(64))
    assert all(before.at_ns < after.at_ns for before, after in pairwise(heard))
    late_ns = [each.at_ns - ended_ns[each.outputs.step] for each in heard]
    assert late_ns == [round(4.75 * MS)] * 64


@EVERY_LOOP
def test_a_slow_submit_delays_tokens_only_on_the_loops_own_thread(choice: LoopChoice) -> None:
    aside = shapes.publication_ms(choice, shapes.timing(50.0, handover=0.25, submit=100.0))
    in_line = shapes.publication_ms(choice, shapes.timing(50.0, handover=0.25, launch=100.0))
    assert aside == 4.75
    assert (in_line == 4.75) if choice is SERIAL else (in_line > 50)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_second_long_prefill_does_not_delay_the_first_ones_token(chunked: bool) -> None:
    serial, *others = shapes.two_prefills(chunked)
    for other in others:
        assert other["earlier_ms"] <= serial["earlier_ms"] + shapes.HANDOVER_MS
        assert other["earlier_ms"] < other["later_ms"] < serial["later_ms"]


# --- queue shapes and what depth costs ------------------------------------------------------------


def test_what_is_in_the_air_and_what_is_wasted_follow_from_the_depth() -> None:
    for row, choice in zip(shapes.queue_shapes(), LOOPS, strict=True):
        ahead = choice.depth - 1
        air = [row[f"air_{point}"] for point in ("plan", "wait", "retire", "between")]
        assert air == [ahead, choice.depth, ahead, ahead]
        waste = [row[f"waste_{kind}"] for kind in ("length", "stop_token", "stop_string")]
        assert waste == [0, ahead, ahead]


def test_depth_costs_a_forward_each_for_newcomers_and_slots() -> None:
    costs = {row["loop"]: row for row in shapes.depth_costs()}
    for choice in (OVERLAP, *QUEUES):
        row = costs[str(choice)]
        assert row["first_token_ms"] == 10.0 * choice.depth
        assert row["slot_back_ms"] == 10.0 * (choice.depth - 1)
        assert row["abort_told_ms"] == 10.0
    assert costs["serial"]["first_token_ms"] == 16.2


def test_outputs_alternate_only_where_forward_and_host_are_within_a_hand_over() -> None:
    for row in shapes.cadence():
        alternates = row["H_ms"] == 10.0 and row["loop"] in (str(OVERLAP), str(QUEUES[0]))
        assert len(row["steady_ms"]) == (2 if alternates else 1)
        assert max(row["steady_ms"]) - min(row["steady_ms"]) <= shapes.HANDOVER_MS + 1e-9


def test_the_timeline_has_every_stage_of_every_step() -> None:
    drawn = shapes.timeline(OVERLAP)
    assert [bar[1] for bar in drawn["device"]] == list(range(8))
    retired = [bar[1] for bar in drawn["host"] if bar[0] == Stage.RETIRE.name.lower()]
    assert retired == list(range(8))
    for (_, step, start, _), (_, _, ran, _) in zip(
        [bar for bar in drawn["host"] if bar[0] == "plan"], drawn["device"], strict=False
    ):
        assert start < ran, f"step {step} ran before it was planned"
