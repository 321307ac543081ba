"""Timelines are what Perfetto can draw, say what the virtual clock did, and can be read back.

Each trace here is read by the strict reader of tests/timelines.py first.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.observe.causes import BUSY, CAUSES, tally
from stepahead.observe.idle import idle_spans
from stepahead.observe.observer import Snapshot
from stepahead.observe.perfetto import chrome_trace
from stepahead.observe.requests import Happened, RequestEvents
from stepahead.sim import shapes
from stepahead.sim.virtual import LOOPS, OVERLAP, QUEUES, SERIAL, LoopChoice, host_work, rig
from stepahead.trace.read import Recorded, load, recorded
from stepahead.types import SamplingParams
from timelines import complaints, ns, parsed, tracks

MS = 1_000_000
EVERY_LOOP = pytest.mark.parametrize("choice", LOOPS, ids=str)


def run(
    choice: LoopChoice,
    *,
    forward: float = 10.0,
    host: float = 6.0,
    handover: float = 0.25,
    submit: float = 1.0,
    launch: float = 0.0,
    requests: int = 6,
    tokens: int = 12,
) -> Snapshot:
    """An engine's whole life on the virtual clock: 4 rows at most, so some requests wait."""
    costs = shapes.timing(forward, handover=handover, submit=submit)
    costs = replace(costs, launch_ns=round(launch * MS))
    rigged = rig(choice, costs, host_work(host))
    for _ in range(requests):
        rigged.add(20, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    rigged.hear(10_000)
    return rigged.engine.observer.snapshot()


def read(data: bytes) -> Recorded:
    return recorded(load(io.BytesIO(data), "test"), "test")


def drawn(snapshot: Snapshot, last_s: float | None = None) -> dict[str, Any]:
    """The document, after the strict reader has had no complaints."""
    document = parsed(chrome_trace(snapshot, last_s))
    assert complaints(document) == []
    return document


def of_kind(document: dict[str, Any], ph: str, cat: str = "") -> list[dict[str, Any]]:
    return [
        e for e in document["traceEvents"] if e["ph"] == ph and (not cat or e.get("cat") == cat)
    ]


# --- what is drawn --------------------------------------------------------------------------------


@EVERY_LOOP
@pytest.mark.parametrize("host", [0.0, 6.0, 12.0])
@pytest.mark.parametrize("handover", [0.0, 3.0])
def test_every_loop_draws_a_sound_timeline(
    choice: LoopChoice, host: float, handover: float
) -> None:
    snapshot = run(choice, host=host, handover=handover)
    document = drawn(snapshot)
    compute = tracks(document)["compute"]
    assert [e["args"]["step"] for e in compute] == snapshot.steps.step.tolist()
    assert {ns(e["dur"]) for e in compute} == {10 * MS}
    for last_s in (0.0, 0.001, 0.05, 0.1, 3600.0):
        drawn(snapshot, last_s)


def test_steps_overlap_each_other_by_the_depth_of_the_loop() -> None:
    for choice in LOOPS:
        document = drawn(run(choice, host=1.0))
        marks = [
            (ns(e["ts"]), 1 if e["ph"] == "b" else -1)
            for e in document["traceEvents"]
            if e.get("cat") == "step" and e["ph"] in "be"
        ]
        marks.sort()
        assert np.cumsum([by for _, by in marks]).max() == choice.depth


@pytest.mark.parametrize("launch", [0.0, 0.5])
def test_a_flow_leads_from_plan_to_retirement_through_its_steps_slices(launch: float) -> None:
    document = drawn(run(OVERLAP, launch=launch))
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in document["traceEvents"]
        if e["name"] == "thread_name"
    }
    slices = of_kind(document, "X")
    chains: dict[int, list[tuple[str, str]]] = {}
    for point in (e for e in document["traceEvents"] if e["ph"] in "stf"):
        at = ns(point["ts"])
        (inside,) = [
            e
            for e in slices
            if (e["pid"], e["tid"]) == (point["pid"], point["tid"])
            and ns(e["ts"]) <= at < ns(e["ts"]) + ns(e["dur"])
        ]
        track = named[point["pid"], point["tid"]]
        assert inside["args"]["step"] == point["id"]
        chains.setdefault(point["id"], []).append((track, inside["name"]))
    hops = [("compute", "decode"), ("copy d2h", "land"), ("scheduler", "retire")]
    # a launch that takes no time has no slice to point at
    before = [("scheduler", "plan"), ("scheduler", "launch")][: 2 if launch else 1]
    assert chains[3] == [*before, *hops]
    assert len(chains) == len(of_kind(document, "b", "step"))


def test_the_host_is_contiguous_and_idle_time_fills_the_gaps_of_the_device() -> None:
    for choice in (SERIAL, OVERLAP):
        lanes = tracks(drawn(run(choice)))
        host = lanes["scheduler"]
        for before, after in pairwise(host):
            assert ns(before["ts"]) + ns(before["dur"]) == ns(after["ts"])
        device = sorted((*lanes["compute"], *lanes["device idle"]), key=lambda e: e["ts"])
        for before, after in pairwise(device):
            assert ns(before["ts"]) + ns(before["dur"]) == ns(after["ts"])


def test_idle_time_on_the_timeline_is_that_of_the_books() -> None:
    for choice in LOOPS:
        snapshot = run(choice, host=12.0)
        until_ns = snapshot.events.busy_end_ns[-1]
        cells = tally(snapshot.events, np.array([snapshot.events.start_ns[0], until_ns]))[0]
        booked = dict(zip(CAUSES, cells[:, :BUSY].sum(0).tolist(), strict=True))
        spans = idle_spans(snapshot.events).within(0, until_ns)
        assert spans.by_cause() == {cause: took for cause, took in booked.items() if took}
        told: Counter[str] = Counter()
        for e in tracks(drawn(snapshot))["device idle"]:
            if ns(e["ts"]) < until_ns - snapshot.events.start_ns[0]:
                told[e["name"]] += ns(e["dur"])
        assert dict(told) == spans.by_cause()


def test_an_idle_engine_says_no_work_after_its_last_step() -> None:
    rigged = rig(OVERLAP, shapes.timing(2.0), host_work(1.0))
    rigged.add(8, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    rigged.hear(100)
    rigged.clock.work(50 * MS)
    idle = tracks(drawn(rigged.engine.observer.snapshot()))["device idle"]
    assert idle[-1]["name"] == "no work"
    assert ns(idle[-1]["dur"]) == 50 * MS


def test_a_step_in_the_air_is_not_called_idle_time() -> None:
    rigged = rig(OVERLAP, shapes.timing(10.0), host_work(1.0))
    rigged.add(8, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    rigged.hear(9)
    rigged.clock.work(4 * MS)  # the device runs the step that was launched
    snapshot = rigged.engine.observer.snapshot()
    idle = idle_spans(snapshot.events)
    assert idle.end_ns.max(initial=0) <= snapshot.events.busy_end_ns[-1] < snapshot.at_ns


def test_requests_are_queued_then_filled_in_then_decoded() -> None:
    document = drawn(run(SERIAL, requests=6))
    phases: dict[int, list[str]] = {}
    for e in of_kind(document, "b", "request"):
        phases.setdefault(e["id"], []).append(e["name"])
    assert phases[0][0] == "request"
    assert phases[0][-2:] == ["prefill", "decode"]
    assert phases[5] == ["request", "queued", "prefill", "decode"]  # four rows, so it waited
    begun = [e for e in of_kind(document, "b", "request") if e["name"] == "request"]
    assert {e["args"]["prompt_tokens"] for e in begun} == {20}
    assert {e["args"]["output_tokens"] for e in begun} == {12}
    assert {e["args"]["end"] for e in begun} == {"finished"}
    last = [e for e in of_kind(document, "C") if e["name"] == "requests"][-1]
    assert last["args"] == {"waiting": 0, "running": 0}
    most = max(e["args"]["running"] for e in of_kind(document, "C") if e["name"] == "requests")
    assert most == 4


def test_counters_tell_sizes_flights_and_exposed_time() -> None:
    document = drawn(run(SERIAL, host=6.0, submit=0.0, handover=0.0))
    told = {
        name: [e["args"] for e in of_kind(document, "C") if e["name"] == name]
        for name in ("step size", "flights", "host exposed, us", "tokens of a step")
    }
    assert told["step size"][1] == {"decode_rows": 4, "prompt_tokens": 0}
    assert {value["value"] for value in told["flights"]} == {0, 1}
    # all of a step's 6 ms: serial hides nothing
    assert told["host exposed, us"][3]["value"] == pytest.approx(6000.0)
    assert {value["value"] for value in told["tokens of a step"]} <= {2, 4}


def test_aborts_are_instants() -> None:
    rigged = rig(OVERLAP, shapes.timing(5.0), host_work(1.0))
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    rids = [rigged.add(8, params) for _ in range(2)]
    rigged.hear(5)
    rigged.engine.abort(rids[1])
    rigged.hear(100)
    (abort,) = of_kind(drawn(rigged.engine.observer.snapshot()), "i")
    assert (abort["name"], abort["args"]) == ("abort", {"rid": rids[1]})


def test_a_preempted_request_waits_again() -> None:
    at_ns = np.arange(6) * MS
    what = [Happened.ARRIVED, Happened.ADMITTED, Happened.FIRST_TOKEN]
    what += [Happened.PREEMPTED, Happened.ADMITTED, Happened.FINISHED]
    events = RequestEvents(
        at_ns, np.zeros(6, np.int64), np.array(what), np.array([9, 3, 0, 0, 8, 5])
    )
    base = run(SERIAL)
    changed = Snapshot(base.about, base.at_ns, base.events, base.steps, events, base.syncs)
    document = drawn(changed)
    begun = of_kind(document, "b", "request")
    assert [e["name"] for e in begun[1:]] == ["queued", "prefill", "decode", "queued", "decode"]
    assert begun[0]["args"]["cached_tokens"] == 3  # not what it found of itself when it came back
    assert [e["name"] for e in of_kind(document, "i")] == ["preempt"]
    assert read(chrome_trace(changed)).snapshot.requests.what.tolist() == what


# --- cutting --------------------------------------------------------------------------------------


def test_a_cut_keeps_what_reaches_in() -> None:
    snapshot = run(OVERLAP)
    last_s = 0.055
    from_ns = snapshot.at_ns - round(last_s * 1e9)
    whole, part = tracks(drawn(snapshot)), tracks(drawn(snapshot, last_s))
    zero_ns = int(snapshot.events.start_ns[0])
    for name, slices in whole.items():
        kept = [
            (max(ns(e["ts"]) + zero_ns, from_ns), ns(e["ts"]) + ns(e["dur"]) + zero_ns, e["name"])
            for e in slices
            if ns(e["ts"]) + ns(e["dur"]) + zero_ns > from_ns
        ]
        found = [
            (ns(e["ts"]) + from_ns, ns(e["ts"]) + ns(e["dur"]) + from_ns, e["name"])
            for e in part[name]
        ]
        assert found == kept, name
    assert part["compute"]
    assert part["compute"][0]["ts"] == 0.0 or part["device idle"][0]["ts"] == 0.0


def test_counters_say_what_held_when_the_window_opened() -> None:
    snapshot = run(OVERLAP, tokens=40)
    document = drawn(snapshot, 0.2)
    first = {}
    for e in of_kind(document, "C"):
        first.setdefault(e["name"], e)
    assert first["requests"]["ts"] == 0.0
    assert first["requests"]["args"]["running"] == 2  # the last two of the six


# --- reading back ---------------------------------------------------------------------------------


def same_steps(a: Snapshot, b: Snapshot) -> None:
    for name, column in vars(a.steps).items():
        assert np.array_equal(column, getattr(b.steps, name)), name


@EVERY_LOOP
def test_a_trace_comes_back_as_the_snapshot_it_was_made_of(choice: LoopChoice) -> None:
    snapshot = run(choice, host=7.0)
    found = read(chrome_trace(snapshot))
    same_steps(snapshot, found.snapshot)
    cuts_ns = np.concatenate((snapshot.events.start_ns[:1], snapshot.events.busy_end_ns))
    assert np.array_equal(tally(snapshot.events, cuts_ns), tally(found.snapshot.events, cuts_ns))
    assert found.idle.by_cause() == idle_spans(snapshot.events).by_cause()
    assert found.snapshot.about == snapshot.about
    assert found.snapshot.at_ns == snapshot.at_ns
    assert found.snapshot.wall_ns == snapshot.wall_ns
    assert found.snapshot.pauses == snapshot.pauses
    assert sorted(found.snapshot.requests.what.tolist()) == sorted(snapshot.requests.what.tolist())


@st.composite
def lives(draw: st.DrawFn) -> tuple[Snapshot, float]:
    """A random life: some requests, some aborted, uneven host and device, and a time to cut at."""
    choice = draw(st.sampled_from((SERIAL, OVERLAP, *QUEUES)))
    costs = shapes.timing(
        draw(st.sampled_from((0.0, 0.3, 4.0))),
        handover=draw(st.sampled_from((0.0, 0.7))),
        submit=draw(st.sampled_from((0.0, 1.3, 6.0))),
    )
    rigged = rig(choice, costs, host_work(draw(st.sampled_from((0.0, 0.9, 5.0)))))
    for _ in range(draw(st.integers(1, 12))):
        act = draw(st.sampled_from(("add", "step", "steps", "abort", "rest")))
        if act == "add":
            tokens = draw(st.integers(1, 9))
            rigged.add(
                draw(st.integers(1, 40)),
                SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            )
        elif act == "abort":
            rigged.engine.abort(draw(st.integers(0, 6)))
        elif act == "rest":
            rigged.clock.work(draw(st.integers(0, 9 * MS)))
        else:
            rigged.hear(1 if act == "step" else 7)
    snapshot = rigged.engine.observer.snapshot()
    span_s = (snapshot.at_ns - int(snapshot.events.start_ns[0])) / 1e9
    return snapshot, draw(st.floats(0.0, 1.2)) * span_s


@given(lives())
@settings(max_examples=150, deadline=None)
def test_any_life_draws_soundly_whole_and_cut(life: tuple[Snapshot, float]) -> None:
    snapshot, last_s = life
    drawn(snapshot)
    same_steps(snapshot, read(chrome_trace(snapshot)).snapshot)
    document = drawn(snapshot, last_s)
    read(chrome_trace(snapshot, last_s))
    assert ns(max((e["ts"] for e in document["traceEvents"]), default=0)) <= max(
        round(last_s * 1e9), snapshot.at_ns - int(snapshot.events.start_ns[0])
    )


def test_an_engine_that_did_nothing_has_a_timeline_too() -> None:
    rigged = rig(OVERLAP, shapes.timing(1.0), host_work(1.0))
    document = drawn(rigged.engine.observer.snapshot())
    assert not of_kind(document, "X")
    found = read(chrome_trace(rigged.engine.observer.snapshot()))
    assert not len(found.snapshot.steps)


# --- what other readers want ----------------------------------------------------------------------


def test_the_document_has_the_keys_of_kineto() -> None:
    document = drawn(run(OVERLAP))
    wanted = {"schemaVersion", "deviceProperties", "distributedInfo", "traceEvents", "traceName"}
    assert wanted | {"displayTimeUnit", "baseTimeNanoseconds"} <= set(document)
    for e in of_kind(document, "X"):
        assert {"ph", "cat", "name", "pid", "tid", "ts", "dur"} <= set(e)
    kernel = tracks(document)["compute"][0]["args"]
    assert {"device", "stream", "correlation"} <= set(kernel)


def test_the_wall_clock_of_the_first_moment_is_told() -> None:
    snapshot = run(OVERLAP)
    document = drawn(snapshot, 0.05)
    assert document["baseTimeNanoseconds"] == snapshot.wall_ns - 50 * MS
    assert document["stepahead"]["zero_ns"] == snapshot.at_ns - 50 * MS
