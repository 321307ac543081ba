"""The four probes: known schedules give known figures, to the nanosecond, and the right words."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.executor.virtual import Timing
from stepahead.observe.causes import Events
from stepahead.observe.observer import Snapshot
from stepahead.observe.probes import Probes, probes
from stepahead.observe.requests import RequestEvents
from stepahead.observe.spread import spread
from stepahead.observe.stages import Stage
from stepahead.observe.step_times import LONGEST_NS, Pairs, token_gaps, windows
from stepahead.observe.steps import Kind, Steps
from stepahead.sim import shapes
from stepahead.sim.virtual import LOOPS, MS, OVERLAP, SERIAL, LoopChoice, host_work, rig, steady
from stepahead.types import SamplingParams

EVERY_LOOP = pytest.mark.parametrize("choice", LOOPS, ids=str)
NONE = np.zeros(0, np.int64)
DECODE, PREFILL, MIXED = Kind.DECODE, Kind.PREFILL, Kind.MIXED


def steps_of(count: int, **columns: object) -> Steps:
    """Decode steps of 4 rows, 10 ns apart, with those columns instead."""
    at_ns = 10 * np.arange(count)
    plain = {
        "step": np.arange(count),
        "kind": 0,
        "rows": 4,
        "chunk_tokens": 0,
        "samples": 4,
        "flights": 1,
        "reason": -1,
        "plan_ns": at_ns,
        "launch_ns": at_ns + 1,
        "received_ns": 0,
        "submitted_ns": 0,
        "start_ns": at_ns + 2,
        "end_ns": at_ns + 7,
        "land_ns": at_ns + 8,
    }
    given = plain | columns
    return Steps(*(np.broadcast_to(np.array(given[name], np.int64), count) for name in plain))


def events_of(steps: Steps, host: list[tuple[Stage, int]]) -> Events:
    stages, start_ns = zip(*host, strict=True)
    until_ns = int(steps.land_ns[-1]) if len(steps) else 0
    return Events(
        np.array(stages, np.int64),
        np.array(start_ns, np.int64),
        until_ns,
        steps.step,
        steps.start_ns,
        steps.end_ns,
    )


def snapshot_of(steps: Steps, events: Events, depth: int = 1, **syncs: int) -> Snapshot:
    about: dict[str, str | int] = {"loop": "serial" if depth == 1 else "overlap", "depth": depth}
    requests = RequestEvents(NONE, NONE, NONE, NONE)
    held = {reason: {"steps": steps, "rows": steps} for reason, steps in syncs.items()}
    return Snapshot(about, events.until_ns, events, steps, requests, held)


def busy_host(steps: Steps) -> Events:
    return events_of(steps, [(Stage.PLAN, -1)])


def of_kind(found: Probes, probe: str, figure: str, kind: str = "decode") -> tuple[int, ...] | None:
    one = found.four[probe].spreads[figure].get(kind)
    return None if one is None else (one.count, one.p50_ns, one.p90_ns, one.p99_ns)


# --- percentiles --------------------------------------------------------------------------------

VALUES = st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), max_size=60)


@given(VALUES)
def test_percentiles_are_those_of_every_value_counted_out(pairs: list[tuple[int, int]]) -> None:
    values, weights = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    for counted, given_weights in ((values, None), (np.repeat(values, weights), weights)):
        found = spread(values, given_weights)
        if not len(counted):
            assert found is None
            continue
        expected = np.percentile(counted, (50, 90, 99), method="inverted_cdf").tolist()
        assert found is not None
        assert [found.p50_ns, found.p90_ns, found.p99_ns] == expected
        assert found.count == len(counted)


# --- on the virtual clock -------------------------------------------------------------------------


def measured(choice: LoopChoice, forward: float, host: float, handover: float = 0.25) -> Probes:
    rigged = rig(choice, shapes.timing(forward, handover=handover), host_work(host))
    steady(rigged, shapes.STEPS)
    since_ns = rigged.clock.now_ns()
    rigged.hear(80)
    return probes(rigged.engine.observer.snapshot(), since_ns)


def alike(found: Probes) -> dict[str, float]:
    """Every figure in ms, of decode steps that are all alike."""
    told = {}
    for name, probe in found.four.items():
        for figure, kinds in probe.spreads.items():
            assert set(kinds) <= {"decode", "all"}
            (one,) = {(one.p50_ns, one.p90_ns, one.p99_ns) for one in kinds.values()}
            assert len(set(one)) == 1, (name, figure, one)
            told[figure] = one[0] / MS
    return told


@EVERY_LOOP
def test_a_slow_device_gives_the_closed_form(choice: LoopChoice) -> None:
    found = alike(measured(choice, 10.0, 6.0))
    ahead = choice.depth - 1
    if choice is SERIAL:
        expected = {"hidden": 0.0, "exposed": 6.0, "blocked": 10.25, "interval": 16.25}
        between = (-6.0, -6.25)
    else:
        expected = {"hidden": 6.0, "exposed": 0.0, "blocked": 4.0, "interval": 10.0}
        between = (10.0 * ahead - 6.0, 10.0 * ahead - 6.25)
    assert found == expected | {
        "work": 6.0,
        "run": 10.0,
        "gap": expected["interval"],
        "land_after_launch": between[0],
        "end_after_launch": between[1],
    }


@EVERY_LOOP
def test_a_slow_host_gives_the_closed_form(choice: LoopChoice) -> None:
    found = alike(measured(choice, 6.0, 10.0))
    serial = choice is SERIAL
    interval = 16.25 if serial else 10.0
    assert found == {
        "work": 10.0,
        "hidden": 0.0 if serial else 6.0,
        "exposed": 10.0 if serial else 4.0,
        "blocked": 6.25 if serial else 0.0,
        "interval": interval,
        "gap": interval,
        "run": 6.0,
        "land_after_launch": -10.0 if serial else 10.0 * (choice.depth - 2),
        "end_after_launch": -10.25 if serial else -4.0,
    }


@EVERY_LOOP
def test_verdicts_of_a_slow_device_and_of_a_slow_host(choice: LoopChoice) -> None:
    for forward, host in ((10.0, 6.0), (6.0, 10.0)):
        found = measured(choice, forward, host)
        told = {name: probe.verdict for name, probe in found.four.items()}
        assert (found.loop, found.depth) == (choice.loop, choice.depth)
        if choice is SERIAL:
            assert told["host"].startswith("the device waits for the host: ")
            assert told["host"].endswith("--loop overlap hides it")
            assert told["results"].startswith("results come first: ")
        elif forward > host:
            assert found.verdict == "device busy 100 %, host hidden 100 %, exposed 0 µs a step"
            assert told["host"] == (
                "overlap works: the host worked 6 ms a step, all of it under a busy device"
            )
            assert told["results"].startswith("it runs ahead: ")
        else:
            assert "4 ms of each 10 ms step is exposed host work" in told["host"]
            assert ": plan 2.5 ms, retire 1.5 ms; the device idles for: plan late 4" in told["host"]
            assert "more depth would not help" in told["host"]
            assert told["results"].startswith("launched ahead, but late: in 100 % of steps")
        assert "evenly (p99" in told["launches"]
        assert "steadily (p99" in told["tokens"]


def test_the_totals_are_the_books_own() -> None:
    rigged = rig(OVERLAP, shapes.timing(6.0, handover=0.25), host_work(10.0))
    steady(rigged, shapes.STEPS)
    rigged.hear(70)
    found, books = probes(rigged.engine.observer.snapshot()), rigged.engine.books.per_step()
    totals = found.totals
    # the books' first window begins with them, the probes' with the first plan: at the same time
    assert totals.steps == len(books.step) > 64
    assert totals.wall_ns == books.wall_ns.sum()
    assert totals.hidden_ns == books.hidden_ns.sum()
    assert totals.exposed_ns == books.exposed_ns.sum()
    assert totals.busy_ns == books.busy_ns.sum()
    assert totals.idle_ns == {cause: ns.sum() for cause, ns in books.idle_ns.items()}


@EVERY_LOOP
def test_each_steps_window_is_that_of_the_books(choice: LoopChoice) -> None:
    rng = np.random.default_rng(choice.depth)
    draws = rng.integers(1, 5 * MS, 128).tolist()
    timing = Timing(lambda size: draws[size.step % 128], submit_ns=MS // 3, handover_ns=MS // 5)
    rigged = rig(choice, timing, host_work(2.0))
    steady(rigged, 100)
    rigged.hear(100)
    snapshot, books = rigged.engine.observer.snapshot(), rigged.engine.books.per_step()
    waits_ns = books.cells[:, Stage.WAIT].sum(1)
    for first in (0, 60):
        found = windows(snapshot.steps, snapshot.events, first)
        assert found.steps.step.tolist() == books.step[first:].tolist()
        columns = (books.hidden_ns, books.exposed_ns, waits_ns, books.waiting_ns - waits_ns)
        assert np.array_equal(found.host_ns, np.stack(columns, axis=1)[first:])
        assert np.array_equal(found.cells, books.cells[first:].sum(0))


# --- what counts and what does not ----------------------------------------------------------------


def test_only_steps_planned_since_then_count() -> None:
    steps = steps_of(60)
    snapshot = snapshot_of(steps, busy_host(steps))
    found = probes(snapshot, since_ns=200)
    assert found.totals.steps == 40
    assert of_kind(found, "launches", "interval") == (39, 10, 10, 10)
    assert of_kind(found, "tokens", "gap") == (4 * 39, 10, 10, 10)
    assert probes(snapshot, since_ns=201).totals.steps == 39


def test_a_pair_of_another_kind_is_not_contiguous() -> None:
    steps = steps_of(8, kind=[0, 0, 1, 1, 0, 2, 2, 0])
    found = probes(snapshot_of(steps, busy_host(steps)))
    assert of_kind(found, "launches", "interval") == (1, 10, 10, 10)
    assert of_kind(found, "launches", "interval", "prefill") == (1, 10, 10, 10)
    assert of_kind(found, "launches", "interval", "mixed") == (1, 10, 10, 10)


def test_a_pair_around_time_without_work_is_not_contiguous() -> None:
    steps = steps_of(6)
    # launches at 1, 11, 21, 31, 41, 51; without work right at the launch of step 3, and later again
    host = [
        (Stage.PLAN, -1),
        (Stage.IDLE, 31),
        (Stage.PLAN, 31),
        (Stage.IDLE, 42),
        (Stage.PLAN, 43),
    ]
    pairs = Pairs(steps, events_of(steps, host))
    assert pairs.contiguous(steps.launch_ns).tolist() == [True, True, False, True, False]
    assert pairs.linked().tolist() == [True, True, False, True, False]


def test_a_pair_around_dropped_steps_is_not_contiguous() -> None:
    steps = steps_of(5, step=[7, 8, 10, 11, 12])
    pairs = Pairs(steps, busy_host(steps))
    assert pairs.contiguous(steps.launch_ns).tolist() == [True, False, True, True]
    assert pairs.linked().tolist() == [True, False, True, True]
    assert token_gaps(pairs).weight.tolist() == [4, 4, 4]


def test_a_pause_of_two_seconds_is_not_contiguous() -> None:
    launch_ns = np.cumsum([0, 5, LONGEST_NS - 1, LONGEST_NS, 5])
    steps = steps_of(5, launch_ns=launch_ns)
    pairs = Pairs(steps, busy_host(steps))
    assert pairs.contiguous(launch_ns).tolist() == [True, True, False, True]


def test_a_pair_of_which_the_host_is_not_known_is_not_contiguous() -> None:
    steps = steps_of(4)
    pairs = Pairs(steps, events_of(steps, [(Stage.PLAN, 11)]))
    assert pairs.contiguous(steps.launch_ns).tolist() == [False, True, True]
    # step 1's window begins at 7, before what is known; that of step 2 at 17
    assert probes(snapshot_of(steps, events_of(steps, [(Stage.PLAN, 11)]))).totals.steps == 2


TIMES = st.lists(st.integers(0, 6), min_size=9, max_size=9)


@given(
    st.lists(st.sampled_from((1, 1, 1, 2)), min_size=9, max_size=9),
    st.lists(st.sampled_from((0, 0, 1, 2)), min_size=9, max_size=9),
    TIMES,
    st.lists(st.tuples(st.sampled_from((Stage.PLAN, Stage.IDLE)), st.integers(0, 40)), max_size=6),
)
def test_the_rule_of_contiguity_step_by_step(
    numbers: list[int], kinds: list[int], waits: list[int], host: list[tuple[Stage, int]]
) -> None:
    step, launch_ns = np.cumsum(numbers), np.cumsum(waits)
    steps = steps_of(9, step=step, kind=kinds, launch_ns=launch_ns)
    segments = sorted(host, key=lambda segment: segment[1])
    pairs = Pairs(steps, events_of(steps, [(Stage.PLAN, 3), *segments]))
    rests = [at for stage, at in segments if stage is Stage.IDLE]
    for i, found in enumerate(pairs.contiguous(launch_ns).tolist()):
        a, b = int(launch_ns[i]), int(launch_ns[i + 1])
        assert found == (
            kinds[i] == kinds[i + 1]
            and step[i + 1] == step[i] + 1
            and not any(a < at <= b for at in rests)
            and a >= 3
        )


def test_prefill_steps_are_measured_from_landing_to_landing() -> None:
    land_ns = [100, 130, 190, 200]
    steps = steps_of(
        4, kind=PREFILL, land_ns=land_ns, launch_ns=[0, 1, 2, 3], start_ns=0, end_ns=[1, 2, 3, 4]
    )
    found = probes(snapshot_of(steps, busy_host(steps)))
    assert of_kind(found, "launches", "interval", "prefill") == (3, 30, 60, 60)
    assert of_kind(found, "launches", "run", "prefill") == (3, 3, 4, 4)  # of the later steps


def test_decode_steps_are_measured_from_launch_to_launch() -> None:
    steps = steps_of(4, launch_ns=[0, 30, 90, 100], start_ns=0, end_ns=[1, 2, 3, 4])
    found = probes(snapshot_of(steps, busy_host(steps)))
    assert of_kind(found, "launches", "interval") == (3, 30, 60, 60)
    assert of_kind(found, "launches", "run") == (3, 2, 3, 3)  # of the earlier steps


def test_results_are_told_against_the_launch_of_the_next_step() -> None:
    steps = steps_of(
        5,
        step=[0, 1, 2, 3, 5],
        kind=[0, 0, 0, 1, 0],
        flights=[1, 2, 1, 2, 2],
        launch_ns=[0, 10, 20, 30, 50],
        end_ns=[8, 23, 21, 37, 60],
        land_ns=[12, 19, 25, 39, 61],
    )
    found = probes(snapshot_of(steps, busy_host(steps), depth=2))
    assert of_kind(found, "results", "land_after_launch") == (2, -1, 2, 2)
    assert of_kind(found, "results", "land_after_launch", "prefill") == (1, -5, -5, -5)
    assert of_kind(found, "results", "end_after_launch", "all") == (3, -2, 3, 3)
    shares = found.results.shares
    assert shares == {
        "launched_before_land_pct": pytest.approx(200 / 3),
        "launched_before_end_pct": pytest.approx(100 / 3),
    }


def test_the_host_is_told_by_kind_of_step() -> None:
    # windows: 0 to 7, 7 to 17, 17 to 27; the device runs 5 of each
    steps = steps_of(3, kind=[PREFILL, DECODE, DECODE])
    host = [(Stage.PLAN, 0), (Stage.WAIT, 3), (Stage.RETIRE, 8), (Stage.WAIT, 9), (Stage.PLAN, 20)]
    found = probes(snapshot_of(steps, events_of(steps, host)))
    assert of_kind(found, "host", "work", "prefill") == (1, 3, 3, 3)
    assert of_kind(found, "host", "exposed", "prefill") == (1, 2, 2, 2)
    assert of_kind(found, "host", "hidden", "prefill") == (1, 1, 1, 1)
    assert of_kind(found, "host", "work") == (2, 1, 7, 7)
    assert of_kind(found, "host", "exposed") == (2, 1, 2, 2)
    assert of_kind(found, "host", "blocked") == (2, 3, 9, 9)
    assert of_kind(found, "host", "blocked", "all") == (3, 4, 9, 9)


# --- tokens ---------------------------------------------------------------------------------------


def gaps(steps: Steps, events: Events | None = None) -> list[tuple[int, int, int, bool]]:
    found = token_gaps(Pairs(steps, events or busy_host(steps)))
    columns = (found.ns, found.weight, found.kind, found.prompts)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_rows_wait_over_prefill_steps_and_newcomers_from_their_first_token() -> None:
    land_ns = [8, 20, 31, 45, 57, 70]
    steps = steps_of(
        6,
        kind=[DECODE, PREFILL, PREFILL, DECODE, MIXED, DECODE],
        rows=[4, 0, 0, 7, 7, 8],
        samples=[4, 2, 1, 7, 8, 8],
        land_ns=land_ns,
    )
    assert gaps(steps) == [
        (45 - 8, 4, DECODE, True),
        (45 - 20, 2, DECODE, True),
        (45 - 31, 1, DECODE, False),
        (57 - 45, 7, MIXED, True),
        (70 - 57, 8, DECODE, False),
    ]


def test_a_prefill_step_that_gives_no_token_is_only_waited_for() -> None:
    steps = steps_of(3, kind=[0, 1, 0], rows=[4, 0, 4], samples=[4, 0, 4])
    assert gaps(steps) == [(20, 4, DECODE, True)]


def test_tokens_around_time_without_work_are_not_of_one_request() -> None:
    steps = steps_of(4)
    host = [(Stage.PLAN, -1), (Stage.IDLE, 19), (Stage.PLAN, 20)]  # landings: 8, 18, 28, 38
    assert [gap[0] for gap in gaps(steps, events_of(steps, host))] == [10, 10]


def test_more_newcomers_than_rows_do_not_count_backwards() -> None:
    steps = steps_of(3, kind=[0, 1, 0], rows=[4, 0, 1], samples=[4, 3, 1])
    assert gaps(steps) == [(10, 3, DECODE, False)]


@EVERY_LOOP
@pytest.mark.parametrize("serial_prefill", [False, True])
def test_gaps_are_those_of_the_requests_while_nobody_ends(
    choice: LoopChoice, serial_prefill: bool
) -> None:
    """Against the tokens themselves, request by request, with newcomers all the time."""
    rng = np.random.default_rng(choice.depth)
    draws = rng.integers(1, 5 * MS, 512).tolist()
    timing = Timing(lambda size: draws[size.step % 512] + 1000 * size.chunk_tokens)
    rigged = rig(choice, timing, host_work(2.0), rows=24)
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    told: dict[int, list[int]] = defaultdict(list)
    for turn in range(160):
        if turn % 7 == 0 and turn < 7 * 24:
            rigged.add(int(rng.integers(1, 900)), params)
        if (heard := rigged.step()) is not None:
            for rid in heard.outputs.rids.tolist():
                told[rid].append(heard.outputs.step)
    observer = rigged.engine.observer.snapshot()
    land_ns = dict(zip(observer.steps.step.tolist(), observer.steps.land_ns.tolist(), strict=True))
    expected: Counter[int] = Counter()
    for at in told.values():
        expected.update(land_ns[b] - land_ns[a] for a, b in pairwise(at))
    found = token_gaps(Pairs(observer.steps, observer.events))
    counted: Counter[int] = Counter()
    for ns, weight in zip(found.ns.tolist(), found.weight.tolist(), strict=True):
        counted[ns] += weight
    assert counted == expected
    assert found.prompts.any()
    assert not found.prompts.all()


# --- JSON -----------------------------------------------------------------------------------------

FIGURES = {
    "host": {"work", "hidden", "exposed", "blocked"},
    "results": {"land_after_launch", "end_after_launch"},
    "launches": {"interval", "run"},
    "tokens": {"gap"},
}


def test_the_json_has_the_same_names_with_and_without_steps() -> None:
    steps = steps_of(0)
    empty = probes(snapshot_of(steps, busy_host(steps))).as_dict()
    full = measured(OVERLAP, 10.0, 6.0).as_dict()
    for told in (empty, full):
        assert json.loads(json.dumps(told)) == told
        assert list(told["probes"]) == list(FIGURES)
        for name, figures in FIGURES.items():
            assert set(told["probes"][name]["figures"]) == figures
    assert list(empty) == list(full)
    assert {name: list(probe) for name, probe in empty["probes"].items()} == {
        name: list(probe) for name, probe in full["probes"].items()
    }
    assert empty["verdict"] == "no step has landed yet"
    assert empty["device_busy_pct"] is None
    assert full["exposed_us_per_step"] == 0.0
    assert full["probes"]["launches"]["figures"]["interval"]["decode"] == {
        "count": 78,
        "p50_us": 10_000.0,
        "p90_us": 10_000.0,
        "p99_us": 10_000.0,
    }
