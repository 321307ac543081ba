"""Chained decode: a steady plan repeats the last one and looks at no row, and nobody can tell.

The standing rows' steps are counted and kept, and reach the columns when somebody looks.  An eager
scheduler, in which no rows ever stand and no plan repeats, must give the same plans and, whenever
it is looked at, the same columns.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines import Variant, toy_engine
from harness import Client
from stepahead.cache.tokens import TokenMirror
from stepahead.engine import Engine
from stepahead.plan import Plan, encode_plan
from stepahead.scheduler.check import check
from stepahead.scheduler.scheduler import Scheduler
from stepahead.scheduler.table import Table, row_set
from stepahead.types import SamplingParams
from workloads import Ask, Workload, workload

OPTIONS = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": 4, "num_pages": 80}
CHAINED = [Variant("overlap", "paper"), Variant("batch-queue", "paper", depth=3)]


def greedy(max_tokens: int) -> SamplingParams:
    """A request that only its length ends."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def unchain(scheduler: Scheduler) -> None:
    """Makes it plan anew each time, and move its columns with every step."""
    scheduler._repeats = lambda again: False  # type: ignore[method-assign]
    scheduler.table.stand = lambda rows: None  # type: ignore[method-assign]


# --- how often ------------------------------------------------------------------------------


def played(variant: Variant, lengths: list[int], **options: Any) -> tuple[list[Plan], int]:
    """The plans for requests of so many outputs each, and how many of them were repeats."""
    plans: list[Plan] = []
    settings = OPTIONS | options
    engine = toy_engine(settings, variant, plans.append)
    asks = tuple(Ask(0, (2 + i, 3, 4), greedy(length)) for i, length in enumerate(lengths))
    Client(engine, Workload(0, settings, asks)).play()
    return plans, engine.scheduler.life.counters.repeats


def quiet(plan: Plan) -> bool:
    """Whether the plan says nothing new."""
    news = (plan.chunks, plan.joins, plan.grants, plan.leaves)
    return plan.same_rows and plan.tokens is None and not any(map(len, news))


@pytest.mark.parametrize("variant", CHAINED, ids=str)
def test_all_but_events_are_repeats(variant: Variant) -> None:
    plans, repeats = played(variant, [40, 40, 40])
    assert len(plans) == 40
    # the prompts, the first step that decodes, and a grant in eight steps
    events = [step for step, plan in enumerate(plans) if not quiet(plan)]
    assert events == [0, 1, 2, 10, 18, 26, 34]
    assert repeats == 40 - len(events) - 1  # the last outputs: they look quiet, and end everybody


@pytest.mark.parametrize("variant", CHAINED, ids=str)
def test_who_waits_in_vain_does_not_end_the_chain(variant: Variant) -> None:
    plans, repeats = played(variant, [30, 30, 30, 30], max_rows=2)
    ends = 2  # plans that bring somebody's last output look quiet, and are not repeats
    assert repeats == sum(map(quiet, plans)) - ends
    assert repeats > 40


def test_a_plan_that_brings_tokens_is_no_repeat() -> None:
    plans, repeats = played(Variant(device="paper"), [20, 20])
    assert repeats == 0
    assert all(plan.tokens is not None for plan in plans[1:])


def test_rows_whose_tokens_have_all_landed_are_planned_anew() -> None:
    # the ring of the relay by row need not hold them any more: the host brings their tokens
    engine = toy_engine(OPTIONS, Variant("batch-queue", "paper"))
    engine.add([2, 3, 4], greedy(20))
    for _ in range(4):
        engine.step()
    while engine._core.flights:
        engine._core.collect()
    plan = engine.scheduler.plan()
    assert plan is not None
    assert plan.same_rows
    assert plan.tokens is not None
    assert plan.tokens.tolist() == engine.scheduler.table.last[1:2].tolist()


def steady(engine: Engine) -> None:
    """Three rows that have begun to repeat."""
    for first in (2, 3, 4):
        engine.add([first, 3, 4], greedy(40))
    while engine.scheduler.life.counters.repeats < 2:
        engine.step()


@pytest.mark.parametrize("variant", CHAINED, ids=str)
def test_a_newcomer_is_in_the_next_plan(variant: Variant) -> None:
    plans: list[Plan] = []
    engine = toy_engine(OPTIONS, variant, plans.append)
    steady(engine)
    engine.add([9, 9], greedy(2))
    engine.step()
    assert len(plans[-1].joins) == 1


@pytest.mark.parametrize("variant", CHAINED, ids=str)
def test_who_has_left_is_named_in_the_next_plan(variant: Variant) -> None:
    plans: list[Plan] = []
    engine = toy_engine(OPTIONS, variant, plans.append)
    steady(engine)
    engine.abort(1)
    while not engine.scheduler.life.leaves:  # not before its last flight has landed
        engine.step()
        assert len(plans[-1].leaves) == 0
    engine.step()
    assert plans[-1].leaves.tolist() == [2]


# --- what it costs --------------------------------------------------------------------------

MOVING = (
    "_frontier",
    "_planned",
    "_in_flight",
    "_promised",
    "_pins",
    "_budget",
    "_length",
    "_last",
)


@pytest.mark.parametrize("variant", CHAINED, ids=str)
def test_a_repeat_touches_no_column_and_its_landing_only_looks_for_stops(variant: Variant) -> None:
    engine = toy_engine(OPTIONS, variant)
    scheduler, core = engine.scheduler, engine._core
    steady(engine)
    table = scheduler.table
    scheduler.limits = replace(scheduler.limits, debug=False)  # checks look at everything
    kept = {name: vars(table)[name] for name in (*MOVING, "pages", "deaf", "decoding")}
    for name in kept:
        setattr(table, name, None)  # nothing can be read or written there
    before = scheduler.life.counters.repeats
    plan, flight, *_ = core._flights.popleft()
    result = flight.land()
    assert scheduler.plan() is not None
    assert len(scheduler.retire(plan, result).tokens) == 3
    assert scheduler.life.counters.repeats == before + 1
    vars(table).update(kept)


def test_checks_leave_the_folding_to_whoever_looks() -> None:
    # a check that brought the columns up to date would hide that somebody had forgotten to
    engine = toy_engine(OPTIONS, Variant("overlap", "paper"))
    engine.add([2, 3, 4], greedy(40))
    for _ in range(6):
        engine.step()
    table = engine.scheduler.table
    launches, kept = table._launches, len(table._kept)
    assert launches > 1 <= kept
    check(engine.scheduler.life, engine.scheduler._launched)
    assert (table._launches, len(table._kept)) == (launches, kept)
    frontier = table.folded()
    assert not np.array_equal(table._frontier, frontier)
    assert np.array_equal(table.frontier, frontier)
    assert (table._launches, table._kept) == (0, [])


# --- nobody can tell ------------------------------------------------------------------------


def seen(scheduler: Scheduler) -> tuple[Any, ...]:
    """All that moves, as somebody would see it now; the scheduler's own table stays as it is."""
    table = copy.deepcopy(scheduler.table)
    columns = (table.frontier, table.length, table.last)
    return *(column.tolist() for column in columns), table._mirror.by_cell.tolist()


def witnessed(seed: int, variant: Variant, prepare: Callable[[Engine], None]) -> list[Any]:
    """Every plan of a workload, and everything seen after each plan, retirement and abort."""
    found: list[Any] = []
    work = workload(seed)
    engine = toy_engine(work.options, variant, lambda plan: found.append(encode_plan(plan)))
    prepare(engine)
    scheduler = engine.scheduler

    def watch(name: str) -> None:
        inner = getattr(scheduler, name)

        def outer(*args: Any) -> Any:
            outcome = inner(*args)
            found.append((name, seen(scheduler)))
            return outcome

        setattr(scheduler, name, outer)

    for name in ("plan", "retire", "abort"):
        watch(name)
    Client(engine, work).play()
    return found


def looks_now_and_then(engine: Engine) -> None:
    """Somebody reads a column at random moments."""
    rnd, scheduler = random.Random(7), engine.scheduler
    retire = scheduler.retire

    def looking(*args: Any) -> Any:
        if rnd.random() < 0.3:
            assert rnd.choice((scheduler.table.planned, scheduler.table.length)) is not None
        return retire(*args)

    scheduler.retire = looking  # type: ignore[method-assign]


@pytest.mark.parametrize("variant", [*CHAINED, Variant(device="paper")], ids=str)
def test_lazy_columns_are_the_eager_ones_whenever_they_are_seen(variant: Variant) -> None:
    for seed in range(40):
        eager = witnessed(seed, variant, lambda engine: unchain(engine.scheduler))
        assert len(eager) > 4
        for prepare in (lambda engine: None, looks_now_and_then):
            assert witnessed(seed, variant, prepare) == eager, f"seed {seed}"


# --- the table alone ------------------------------------------------------------------------


def tables(slots: list[int]) -> tuple[Table, Table, Any]:
    """A table in which rows stand, one in which they don't, and the rows; pages of 4."""
    both = []
    for _ in range(2):
        table = Table(8, 6, TokenMirror(64, 4))
        table.pages[:] = np.arange(48).reshape(8, 6)
        table.length[:] = np.arange(3, 11)
        table.last[:] = 7
        both.append(table)
    rows = row_set(np.array(slots, np.int64), np.zeros(len(slots), np.int64))
    both[0].stand(rows)
    return *both, rows


@pytest.mark.parametrize("slots", [[2, 3, 4], [1, 4, 6], [5]])
@pytest.mark.parametrize("landings", [1, 3, 9])
def test_kept_steps_are_written_as_if_one_by_one(slots: list[int], landings: int) -> None:
    # nine positions of four a page: every row turns at least two pages
    lazy, eager, rows = tables(slots)
    for step in range(landings + 2):
        for table in (lazy, eager):
            table.launch(rows)
            if step < landings:
                table.land(rows, np.arange(len(slots), dtype=np.int32) + 10 * step)
    assert not np.array_equal(lazy._length, eager._length)
    for name in ("frontier", "length", "last"):
        assert getattr(lazy, name).tolist() == getattr(eager, name).tolist()
    assert lazy._mirror.by_cell.tolist() == eager._mirror.by_cell.tolist()
    assert eager._mirror.by_cell.any()


def test_the_newest_tokens_are_told_without_a_fold() -> None:
    lazy, _, rows = tables([2, 3])
    assert lazy.newest(rows).tolist() == [7, 7]
    lazy.land(rows, np.array([8, 9], np.int32))
    assert lazy.newest(rows).tolist() == [8, 9]
    assert lazy._last[2:4].tolist() == [7, 7]
    others = row_set(np.array([3], np.int64), np.zeros(1, np.int64))
    assert lazy.newest(others).tolist() == [9]


def test_a_rows_tokens_are_appended_in_the_order_of_landing() -> None:
    # a step of some of the rows, as pages were short for the others, lands behind one of all
    lazy, eager, rows = tables([2, 3])
    some = row_set(np.array([3], np.int64), np.zeros(1, np.int64))
    for table in (lazy, eager):
        table.land(rows, np.array([8, 9], np.int32))
        table.land(some, np.array([10], np.int32))
    assert lazy._last[2:4].tolist() == [8, 10]
    assert lazy._length.tolist() == eager._length.tolist()
    assert lazy._mirror.by_cell.tolist() == eager._mirror.by_cell.tolist()


def test_what_nobody_looks_at_does_not_pile_up() -> None:
    lazy, _, rows = tables([2])
    for step in range(16):
        assert len(lazy._kept) == step
        lazy.land(rows, np.array([step], np.int32))
    assert lazy._kept == []
    assert lazy._mirror.by_cell.any()
