"""Requests' events and times against a recorder that looks at every token; on paper."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import Variant, toy_engine
from harness import Client
from stepahead.engine import Engine
from stepahead.observe.latency import BUCKETS, NS, Distribution, Histogram, scale
from stepahead.observe.requests import ENDS, Happened, RequestLog
from stepahead.plan import Plan
from stepahead.types import Outputs, SamplingParams
from workloads import Abort, Ask, Workload, workload

LOOPS = [
    Variant(device="paper"),
    Variant("overlap", "paper"),
    *(Variant("batch-queue", "paper", depth=depth) for depth in (2, 4)),
]


@dataclass
class Clock:
    """Moves only when it is told to."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Recorder:
    """Looks at every token of an engine whose clock it moves: at each launch, and between steps."""

    variant: Variant
    options: dict[str, Any]
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    values: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in BUCKETS})
    events: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = toy_engine(self.options, self.variant, self.planned, clock_ns=self.clock)
        self._random = random.Random(self.seed)
        self._arrived: dict[int, int] = {}
        self._admitted: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._step, self._add = self.engine.step, self.engine.add
        self._preempt = self.engine.scheduler.life.preempt
        self.engine.step = self.step  # type: ignore[method-assign]
        self.engine.add = self.add  # type: ignore[method-assign]
        self.engine.scheduler.life.preempt = self.preempt  # type: ignore[method-assign]

    def note(self, rid: int, what: Happened, value: int = 0) -> None:
        self.events.append((self.clock.now_ns, rid, what, value))

    def add(self, prompt: Any, params: SamplingParams, wait: bool = True, **more: Any) -> list[int]:
        rids = self._add(prompt, params, wait, **more)
        for rid in rids:
            self._arrived[rid] = self.clock.now_ns
            self.note(rid, Happened.ARRIVED, len(prompt))
        return rids

    def preempt(self, entry: Any) -> None:
        self.note(entry.request.rid, Happened.PREEMPTED)
        self._preempt(entry)

    def planned(self, plan: Plan) -> None:
        for join in plan.joins:
            rid = int(self.engine.scheduler.table.rid[join.slot])
            self.note(rid, Happened.ADMITTED, join.cached)
            if rid not in self._admitted:
                self._admitted[rid] = self.clock.now_ns
                self.values["queue"].append(self.clock.now_ns - self._arrived[rid])
        self.clock.now_ns += self._random.choice((0, 1, 3 * NS // 1000, NS))

    def step(self) -> Outputs | None:
        self.clock.now_ns += self._random.choice((0, 7, NS // 100))
        outputs = self._step()
        if outputs is not None:
            self.hear(outputs)
        return outputs

    def hear(self, outputs: Outputs) -> None:
        now_ns, values = self.clock.now_ns, self.values
        for rid in outputs.rids.tolist():
            if rid in self._last:
                values["itl"].append(now_ns - self._last[rid])
            else:
                self._first[rid] = now_ns
                values["ttft"].append(now_ns - self._arrived[rid])
                values["prefill"].append(now_ns - self._admitted[rid])
            self._last[rid] = now_ns
        for rid in outputs.first:
            self.note(rid, Happened.FIRST_TOKEN)
        for finish in outputs.finishes:
            kinds = {"abort": Happened.ABORTED, "error": Happened.FAILED}
            count = len(finish.tokens)
            self.note(finish.rid, kinds.get(finish.reason, Happened.FINISHED), count)
            if finish.reason in ("stop", "length"):
                values["e2e"].append(now_ns - self._arrived[finish.rid])
                values["decode"].append(now_ns - self._first[finish.rid])
                values["output_tokens"].append(count)

    def check(self) -> None:
        """The log says the same, value by value."""
        log = self.engine.observer.requests
        recent = log.recent()
        columns = (recent.at_ns, recent.rid, recent.what, recent.value)
        # a plan admits and preempts in its own order; here it is seen once it is made
        assert sorted(zip(*(c.tolist() for c in columns), strict=True)) == sorted(self.events)
        totals = log.totals()
        for name, values in self.values.items():
            if name != "prompt_tokens":
                found = totals.spreads[name]
                assert found.total == sum(values), name
                assert spread_out(found) == sorted(values), name
        assert totals.generated_tokens == len(self.values["itl"]) + len(self.values["ttft"])
        assert totals.preemptions == self.engine.scheduler.life.counters.preemptions
        self.check_ends()

    def check_ends(self) -> None:
        log = self.engine.observer.requests
        ends = log.ends()
        assert len(ends) == log.ended_count == sum(log.totals().ends.values())
        reasons = Counter(ENDS[place] for place in ends.reason.tolist())
        assert reasons == {name: n for name, n in log.totals().ends.items() if n}
        rids = ends.rid.tolist()
        assert ends.arrived_ns.tolist() == [self._arrived[rid] for rid in rids]
        assert ends.admitted_ns.tolist() == [self._admitted.get(rid, -1) for rid in rids]
        assert ends.first_ns.tolist() == [self._first.get(rid, -1) for rid in rids]
        preempted = Counter(rid for _, rid, what, _ in self.events if what == Happened.PREEMPTED)
        assert ends.preemptions.tolist() == [preempted[rid] for rid in rids]


def spread_out(found: Distribution) -> list[int]:
    values, counts = found.recent.T
    return sorted(np.repeat(values, counts).tolist())


@pytest.mark.parametrize("variant", LOOPS, ids=str)
def test_every_time_is_what_a_recorder_of_each_token_finds(variant: Variant) -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        work = workload(seed)
        recorder = Recorder(variant, work.options, seed)
        met += Client(recorder.engine, work).play().counts
        recorder.check()
        met["preempted"] += recorder.engine.observer.requests.totals().preemptions
        met["aborted"] += recorder.engine.observer.requests.totals().ends["abort"]
    print(dict(met))
    assert met["preempted"] > 4
    assert met["aborted"] > 20


@pytest.mark.parametrize("variant", LOOPS, ids=str)
@pytest.mark.parametrize("pages", [7, 9])
def test_a_row_that_was_left_out_gets_its_true_gap(variant: Variant, pages: int) -> None:
    """Pages for less than all rows, so some are put off while others run; the odds that every
    token of this came in every step are nil."""
    options = {"vocab_size": 64, "max_model_len": 64, "page_size": 2, "num_pages": pages}
    recorder = Recorder(variant, options | {"max_rows": 4, "prefix_cache": False}, seed=5)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    asks = tuple(Ask(0, (k, k + 1), greedy) for k in range(2, 6))
    Client(recorder.engine, Workload(0, options, asks)).play()
    recorder.check()
    gaps = recorder.engine.observer.requests.totals().spreads["itl"]
    assert gaps.count == 4 * 8
    assert recorder.engine.scheduler.life.counters.preemptions > 0


class Rows:
    """A log and what deliveries of any make should give, without an engine."""

    def __init__(self) -> None:
        self.clock = Clock(10)
        self.log = RequestLog(self.clock)
        self.last: dict[int, int] = {}
        self.gaps: list[int] = []
        self.open: set[int] = set()

    def deliver(self, rids: np.ndarray) -> None:
        first = []
        for rid in rids.tolist():
            if rid in self.last:
                self.gaps.append(self.clock.now_ns - self.last[rid])
            else:
                first.append(rid)
            self.last[rid] = self.clock.now_ns
        self.log.delivered(rids, first)

    def end(self, rid: int) -> None:
        self.open.discard(rid)
        self.last.pop(rid, None)
        self.log.ended(rid, "abort", 0)


@settings(max_examples=300)
@given(st.data())
def test_any_rows_in_any_steps_have_their_own_gaps(data: st.DataObject) -> None:
    rows, same = Rows(), np.zeros(0, np.int64)
    for rid in range(6):
        rows.log.arrived(rid, 3)
        rows.log.admitted(rid, 0)
        rows.open.add(rid)
    for _ in range(data.draw(st.integers(1, 12))):
        rows.clock.now_ns += data.draw(st.integers(0, 5))
        if len(same) == 0 or data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.sampled_from(sorted(rows.open)), unique=True))
            same = np.array(chosen, np.int64)
        rows.deliver(same)
        if len(rows.open) > 1 and data.draw(st.integers(0, 3)) == 0:
            rows.end(data.draw(st.sampled_from(sorted(rows.open))))
            same = np.array([rid for rid in same.tolist() if rid in rows.open], np.int64)
    found = rows.log.totals().spreads["itl"]
    assert spread_out(found) == sorted(rows.gaps)
    assert found.total == sum(rows.gaps)


def test_a_steady_step_adds_one_pair_whatever_the_rows() -> None:
    log, clock = RequestLog(clock := Clock()), clock
    rids = np.arange(256)
    for rid in rids.tolist():
        log.arrived(rid, 1)
        log.admitted(rid, 0)
    log.delivered(rids, rids.tolist())
    for _ in range(50):
        clock.now_ns += 5
        log.delivered(rids, ())
    gaps = log.totals().spreads["itl"]
    assert gaps.recent.tolist() == [[5, 256]] * 50
    assert (gaps.count, gaps.total) == (50 * 256, 50 * 256 * 5)


@given(st.lists(st.tuples(st.integers(0, 200 * NS), st.integers(1, 300)), max_size=60))
def test_buckets_are_cumulative_and_exact_at_each_bound(pairs: list[tuple[int, int]]) -> None:
    histogram = Histogram("itl")
    for value, count in pairs:
        histogram.add(value, count)
    found = histogram.taken()
    assert found.count == sum(count for _, count in pairs)
    for bounds in BUCKETS["itl"].values():
        exact = tuple(round(bound * NS) for bound in bounds)
        below = [sum(c for v, c in pairs if v <= bound) for bound in exact]
        assert found.upto(exact) == below
        assert below == sorted(below)


@pytest.mark.parametrize("name", BUCKETS)
def test_bounds_ascend_and_stay_apart(name: str) -> None:
    for bounds in BUCKETS[name].values():
        units = [round(bound * scale(name)) for bound in bounds]
        assert units == sorted(set(units))
        assert units[0] > 0


def test_memory_of_times_is_bounded_and_no_count_is_lost() -> None:
    log = RequestLog(Clock(), keep=8, keep_ended=4)
    rids = np.array([0])
    log.arrived(0, 5)
    log.admitted(0, 2)
    log.delivered(rids, [0])
    for _ in range(30_000):
        log.delivered(rids, ())
    log.ended(0, "length", 30_001)
    for rid in range(1, 40):
        log.arrived(rid, 5)
        log.ended(rid, "abort", 0)
    totals = log.totals()
    assert totals.generated_tokens == 30_001
    assert len(totals.spreads["itl"].recent) <= 8192
    assert (totals.arrived, totals.admitted) == (40, 1)
    assert (totals.prompt_tokens, totals.cached_tokens) == (5, 2)
    assert (len(log.ends()), len(log.recent()), log.ended_count) == (4, 8, 40)
    assert log.ends(38).rid.tolist() == [38, 39]
    assert len(log.ends(40)) == 0


def test_a_row_that_missed_a_step_waited_for_both() -> None:
    log, rids = RequestLog(clock := Clock()), np.arange(3)
    for rid in rids.tolist():
        log.arrived(rid, 1)
        log.admitted(rid, 0)
    for chosen, first in ((rids, [0, 1, 2]), (rids[:2], ()), (rids.copy(), ())):
        clock.now_ns += 10
        log.delivered(chosen, first)
    assert spread_out(log.totals().spreads["itl"]) == [10, 10, 10, 10, 20]


def test_who_has_ended_leaves_nothing_behind() -> None:
    log, rids = RequestLog(Clock()), np.arange(3)
    for rid in rids.tolist():
        log.arrived(rid, 1)
        log.admitted(rid, 0)
    log.delivered(rids, rids.tolist())
    log.delivered(rids[:1], ())  # 1 and 2 are left out
    for rid in rids.tolist():
        log.ended(rid, "abort", 1)
    assert not log._heard
    assert not log._left_ns
    assert not log._open


def test_an_aborted_request_counts_no_latency_of_a_whole_answer() -> None:
    recorder = Recorder(LOOPS[1], {"vocab_size": 64, "max_model_len": 64, "max_rows": 2})
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    asks = (Ask(0, (2, 3), greedy, Abort("token", 2)), Ask(0, (4, 5), greedy))
    Client(recorder.engine, Workload(0, {"page_size": 16}, asks)).play()
    recorder.check()
    totals = recorder.engine.observer.requests.totals()
    assert totals.ends == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    assert totals.spreads["e2e"].count == totals.spreads["output_tokens"].count == 1


def test_ends_of_a_closed_engine_are_taken_down() -> None:
    recorder = Recorder(LOOPS[2], {"vocab_size": 64, "max_model_len": 64, "max_rows": 2})
    engine: Engine = recorder.engine
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    for first in range(2, 7):
        engine.add([first, 3], greedy)
    for _ in range(4):
        engine.step()
    engine.close()
    while engine.has_work:
        engine.step()
    recorder.check()
    assert engine.observer.requests.totals().ends["abort"] == 5


def test_an_answer_whose_arrival_an_interrupt_has_swallowed_has_no_times() -> None:
    clock = Clock(1 << 50)  # a machine that has been up for days
    log = RequestLog(clock)
    log.delivered(np.array([7]), [7])
    log.ended(7, "length", 1)
    totals = log.totals()
    assert totals.ends["length"] == 1
    assert [totals.spreads[name].count for name in ("decode", "e2e")] == [0, 0]
