"""Lanes in bins: exact, told once, and the same however often somebody asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest  # noqa: TC002  (of a fixture's type)
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.executor.virtual import Timing
from stepahead.observe import lanes as lanes_module
from stepahead.observe.causes import CAUSES
from stepahead.observe.lanes import BIN_NS, MOST_BINS, lanes, read_lanes
from stepahead.observe.observer import Observer
from stepahead.observe.stages import Stage
from stepahead.plan import Plan, Result
from stepahead.sim.virtual import LOOPS, MS, SERIAL, HostWork, LoopChoice, constant, host_work, rig
from stepahead.sync import SyncReason
from stepahead.types import Load, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def overlap_us(runs: list[tuple[int, int]], first: int, count: int) -> list[int]:
    """How much of each bin lies in the runs, one ms at a time."""
    busy = {ms for start, end in runs for ms in range(start, end)}
    bins = [range(10 * i, 10 * i + 10) for i in range(first, first + count)]
    return [1000 * sum(ms in busy for ms in one) for one in bins]


def columns(told: dict[str, Any]) -> dict[str, list[int]]:
    """All columns of an answer; causes that do not occur are zeros."""
    count = told["next"] - told["first"]
    idle = {cause: told["device"]["idle_us"].get(cause, [0] * count) for cause in CAUSES}
    flat = {name: told[name] for name in ("steps", "tokens", "rows")}
    return told["host"] | {"busy_us": told["device"]["busy_us"]} | idle | flat


def test_each_bin_holds_what_the_schedule_says() -> None:
    rigged = rig(SERIAL, Timing(constant(10 * MS)), host_work(4))
    for _ in range(4):
        rigged.add(16, GREEDY)
    while rigged.engine.has_work:
        rigged.step()
    told = lanes(read_lanes(rigged.engine, None))
    # a step plans for 1 ms, runs for 10 and retires for 3; eight of them, then nothing
    assert (told["first"], told["next"], told["now"]) == (0, 11, 11.2)
    plans = [(14 * i, 14 * i + 1) for i in range(8)]
    runs = [(14 * i + 1, 14 * i + 11) for i in range(8)]
    retirements = [(14 * i + 11, 14 * i + 14) for i in range(8)]
    assert told["device"]["busy_us"] == overlap_us(runs, 0, 11)
    assert told["device"]["idle_us"] == {"plan late": overlap_us(plans + retirements, 0, 11)}
    assert told["host"]["exposed_us"] == overlap_us(plans + retirements, 0, 11)
    assert told["host"]["hidden_us"] == [0] * 11
    landings = [sum((14 * i + 11) // 10 == one for i in range(8)) for one in range(11)]
    assert told["steps"] == landings
    assert told["tokens"] == [4 * steps for steps in landings]
    assert told["rows"] == [0 if one <= 1 else 4 * steps for one, steps in enumerate(landings)]
    assert (told["syncs"], told["flights"], told["bin_ms"]) == ([], 0, 10)
    assert told["load"]["rows_running"] == 0
    assert told["about"] == rigged.engine.observer.about


SLOW = st.lists(st.integers(0, 31), min_size=1, max_size=6)


@settings(max_examples=40)
@given(st.sampled_from(LOOPS), SLOW, SLOW, st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_answers_one_after_the_other_are_the_whole(
    choice: LoopChoice, run_ms: list[int], host_ms: list[int], asks: set[int], second: int
) -> None:
    """A bin that is told too early would lack what a step in the air has run in it; one that is
    told late, or twice, would shift all others.  The books fold every few segments meanwhile."""

    def at(values: list[int], step: int) -> int:
        return values[step % len(values)] * MS + 1

    timing = Timing(lambda size: at(run_ms, size.step))
    rigged = rig(choice, timing, HostWork(constant(MS), lambda step: at(host_ms, step)))
    engine = rigged.engine
    engine.books._batch = 16
    told = lanes(read_lanes(engine, None))
    first, later = told["first"], [told]
    rigged.add(16, GREEDY)
    for step in range(41):
        if step == second:
            rigged.add(9, GREEDY)
        rigged.step()
        if step in asks:
            later.append(lanes(read_lanes(engine, later[-1]["next"])))
    later.append(lanes(read_lanes(engine, later[-1]["next"])))
    whole = lanes(read_lanes(engine, first))
    joined: dict[str, list[int]] = {name: [] for name in columns(whole)}
    for before, answer in zip([whole | {"next": first}, *later], later, strict=False):
        assert answer["first"] == before["next"]
        for name, values in columns(answer).items():
            assert len(values) == answer["next"] - answer["first"]
            joined[name] += values
    assert joined == columns(whole)
    assert [mark for answer in later for mark in answer["syncs"]] == whole["syncs"]
    busy_us = np.array(joined["busy_us"]) + sum(np.array(joined[cause]) for cause in CAUSES)
    assert np.abs(busy_us - 10_000).max(initial=0) <= len(CAUSES)  # µs are rounded


class Fake:
    """An engine that does what the test says, on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now_ns = 7 * BIN_NS
        self.observer = Observer(lambda: self.now_ns, {"model": "fake"})
        self.failure, self.closed, self.flights = None, False, 0

    def load(self) -> Load:
        return Load(rows_running=3)

    def run(self, step: int, rows: int, ns: int, awaited: SyncReason | None = None) -> None:
        plan = Plan(step, np.arange(rows, dtype=np.int32), False, chunks=np.zeros(0, np.int32))
        books, start_ns = self.observer.books, self.now_ns
        books.enter(Stage.WAIT)
        self.now_ns += ns
        result = Result(step, np.zeros(rows, np.int32), start_ns, self.now_ns)
        books.busy(step, start_ns, self.now_ns)
        self.observer.steps.add(plan, result, start_ns, start_ns, 1, self.now_ns, awaited)

    def rest(self, ns: int) -> None:
        self.observer.books.rest(Stage.IDLE)
        self.now_ns += ns


def test_steps_are_told_in_the_bin_they_landed_in_with_why_they_waited() -> None:
    fake = Fake()
    for step in range(6):
        fake.run(step, step + 1, BIN_NS // 2, SyncReason.DRAIN if step in (2, 3, 5) else None)
    fake.rest(BIN_NS)
    told = lanes(read_lanes(fake, None))
    # the first of them lands in the middle of bin 7, the last at the very beginning of bin 10
    assert (told["first"], told["next"]) == (7, 11)
    assert told["steps"] == [1, 2, 2, 1]
    assert told["tokens"] == [1, 2 + 3, 4 + 5, 6]
    assert told["rows"] == [1, 3, 5, 6]
    assert told["syncs"] == [[8, "drain", 1], [9, "drain", 1], [10, "drain", 1]]
    assert lanes(read_lanes(fake, 10))["syncs"] == [[10, "drain", 1]]
    assert lanes(read_lanes(fake, 10))["tokens"] == [6]


def test_a_step_in_the_air_is_not_told_before_it_has_landed() -> None:
    fake = Fake()
    fake.run(0, 1, 2 * BIN_NS)
    fake.observer.books.enter(Stage.WAIT)
    fake.flights = 1
    fake.now_ns += 5 * BIN_NS
    told = lanes(read_lanes(fake, 8))
    assert (told["first"], told["next"], told["now"]) == (8, 9, 14.0)
    later = lanes(read_lanes(fake, told["next"]))
    assert (later["first"], later["next"], later["steps"]) == (9, 9, [])


def test_no_more_than_ten_seconds_are_told_and_another_clocks_number_is_not_waited_for() -> None:
    fake = Fake()
    fake.rest(3 * MOST_BINS * BIN_NS)
    now = fake.now_ns // BIN_NS
    for asked in (None, 9, now + 5):
        told = lanes(read_lanes(fake, asked))
        assert (told["first"], told["next"]) == (now - MOST_BINS, now)
    told = lanes(read_lanes(fake, now))
    assert (told["first"], told["next"], told["host"]["hidden_us"]) == (now, now, [])


def test_an_answer_costs_what_is_new_and_not_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    tally = lanes_module.tally
    monkeypatch.setattr(
        lanes_module,
        "tally",
        lambda events, cuts: seen.append(len(events.stage)) or tally(events, cuts),
    )
    fake = Fake()
    fake.observer.books._batch = 64
    for step in range(3000):
        fake.rest(1000)
        fake.run(step, 1, BIN_NS // 10)
    recent = read_lanes(fake, fake.now_ns // BIN_NS - 25)
    lanes(recent)
    assert len(recent.steps) <= 260
    assert seen[0] <= 2 * 260 + 2 * 64
    assert len(fake.observer.books.recent().stage) > 5000
