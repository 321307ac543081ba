"""Trace files are read or refused by name, summed up, compared, drawn and merged; answers known."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepahead.errors import ConfigError
from stepahead.observe.perfetto import chrome_trace
from stepahead.observe.steps import Steps
from stepahead.sim import shapes
from stepahead.sim.virtual import OVERLAP, SERIAL, LoopChoice, Rig, host_work, rig, steady
from stepahead.trace.diff import align, diff
from stepahead.trace.hand_over import HandOver
from stepahead.trace.merge import merge
from stepahead.trace.page import Lane, lanes, page
from stepahead.trace.read import Document, Recorded, load, parse, recorded
from stepahead.trace.summary import summarise
from stepahead.types import SamplingParams
from timelines import complaints, parsed

MS = 1_000_000


def decoding(choice: LoopChoice, host: float = 6.0, steps: int = 20) -> Rig:
    """Four rows that have decoded for a while; 10 ms forwards, 0.25 ms hand-overs."""
    rigged = rig(choice, shapes.timing(10.0, handover=0.25), host_work(host))
    steady(rigged, steps)
    rigged.hear(steps)
    return rigged


def trace_of(rigged: Rig, last_s: float | None = None) -> bytes:
    return chrome_trace(rigged.engine.observer.snapshot(), last_s)


def read(data: bytes) -> Recorded:
    return recorded(load(io.BytesIO(data), "x.json"), "x.json")


# --- reading --------------------------------------------------------------------------------------


def test_plain_gzipped_and_marked_files_are_the_same() -> None:
    data = trace_of(decoding(OVERLAP))
    count = len(load(io.BytesIO(data), "x").events)
    assert count > 100
    for packed in (gzip.compress(data, mtime=0), b"\xef\xbb\xbf" + data, b"\n " + data):
        assert len(load(io.BytesIO(packed), "x").events) == count


def test_a_bare_list_of_events_is_a_trace_too() -> None:
    events = [{"ph": "X", "name": "a", "pid": 1, "tid": "main", "ts": "3.5", "dur": 1}]
    (event,) = load(io.BytesIO(json.dumps(events).encode()), "x").events
    assert (event.name, event.ts, event.tid) == ("a", 3.5, "main")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty; record it again"),
        (b"hello", "is no trace: it holds no JSON"),
        (b"PK\x03\x04rest", "is a zip archive; unpack it"),
        (b"SQLite format 3\x00", "Nsight Systems writes; export it"),
        (b"\x0a\x10\x01\x02", "Perfetto's binary format; open it at"),
        (b"\x28\xb5\x2f\xfd", "zstd -d"),
        (b'{"traceEvents": [{"ph":', "may be cut off: record it again"),
        (b'{"name": 3}', "JSON without `traceEvents`"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "is cut off or damaged"),
        (b"\x1f\x8b\x08\x00 not gzip at all", "is cut off or damaged"),
        (b'{"traceEvents": {"a": 1}}', "no trace that can be read"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        load(io.BytesIO(data), "some.json.gz")
    assert str(refused.value).startswith("some.json.gz ")


def test_a_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepahead.trace.read.MOST_BYTES", 1 << 20)
    bomb = gzip.compress(b"[" + b" " * (3 << 20) + b"]")
    assert len(bomb) < 10_000
    with pytest.raises(ConfigError, match="record a shorter time"):
        load(io.BytesIO(bomb), "x.json.gz")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stepahead": None}, "not of stepahead"),
        ({"stepahead": {"format": 99}}, "has format 99, this version reads 1"),
        ({"stepahead": {"format": 1}}, "has been changed"),
    ],
)
def test_only_traces_of_ours_have_steps(changed: dict[str, Any], words: str) -> None:
    document = parsed(trace_of(decoding(OVERLAP))) | changed
    with pytest.raises(ConfigError, match=words):
        read(json.dumps(document).encode())


@pytest.mark.parametrize(
    "changed",
    [
        {"about": 5},
        {"about": {"depth": "deep"}},
        {"zero_ns": 1 << 90},
        {"until_ns": 1.5},
        {"syncs": 5},
        {"pauses": "none"},
    ],
    ids=str,
)
def test_a_header_that_nobody_wrote_is_a_changed_file(changed: dict[str, Any]) -> None:
    document = parsed(trace_of(decoding(OVERLAP)))
    document["stepahead"] |= changed
    with pytest.raises(ConfigError, match="has been changed"):
        read(json.dumps(document).encode())


def test_a_stage_that_nobody_knows_is_a_changed_file() -> None:
    data = trace_of(decoding(OVERLAP)).replace(b'"name":"retire"', b'"name":"retyre"')
    with pytest.raises(ConfigError, match="RETYRE"):
        read(data)


# --- summary --------------------------------------------------------------------------------------


def test_the_summary_of_a_serial_run_says_what_the_schedule_says() -> None:
    rigged = decoding(SERIAL)
    found = summarise(read(trace_of(rigged, 0.1625)))  # the last ten steps, 16.25 ms each
    assert found.steps == 10
    assert found.hidden_ns == 0
    # the window ends with the last run, so its retirement and the plan of the first are outside
    assert found.per_step_us(found.busy_ns) == pytest.approx(10_000)
    gap = found.probes.tokens.spreads["gap"]["decode"]
    assert (gap.p50_ns, gap.p99_ns) == (16_250_000, 16_250_000)
    assert gap.count == 9 * 4  # of each row, between any two of the ten
    (kind,) = found.kinds
    assert (kind.kind, kind.steps, kind.rows) == ("decode", 10, 4)
    assert (kind.device_us, kind.period_us) == (10_000, 16_250)
    assert found.about["loop"] == "serial"
    assert sum(found.idle_ns.values()) + found.busy_ns == found.wall_ns
    assert sum(stage.total_ns for stage in found.stages) == found.wall_ns
    assert found.hidden_ns + found.exposed_ns + found.waiting_ns == found.wall_ns


def test_the_longest_bubbles_are_named_by_their_steps_and_causes() -> None:
    rigged = decoding(OVERLAP)
    retire = rigged.engine.scheduler.retire

    def slow(plan: Any, result: Any) -> Any:
        if plan.step == 50:
            rigged.clock.work(30 * MS)
        return retire(plan, result)

    rigged.engine.scheduler.retire = slow  # type: ignore[method-assign]
    rigged.hear(20)
    found = summarise(read(trace_of(rigged)))
    worst = found.bubbles[0]
    # step 51 was in the air: the device ran out of work after it
    assert (worst.after, worst.before) == (51, 52)
    assert list(worst.causes) == ["plan late"]
    assert worst.idle_ns == sum(worst.causes.values()) > 20 * MS
    assert [b.idle_ns for b in found.bubbles] == sorted(
        (b.idle_ns for b in found.bubbles), reverse=True
    )


def test_time_without_work_is_no_bubble() -> None:
    rigged = decoding(OVERLAP)
    rigged.hear(10_000)
    rigged.clock.work(500 * MS)
    rigged.add(8, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    rigged.hear(100)
    found = summarise(read(trace_of(rigged)))
    assert found.idle_ns["no work"] >= 500 * MS
    assert found.bubbles
    for bubble in found.bubbles:
        assert bubble.idle_ns == sum(bubble.causes.values()) < 30 * MS
        assert "no work" not in bubble.causes


def test_nothing_landed_sums_up_to_nothing() -> None:
    rigged = rig(OVERLAP, shapes.timing(1.0), host_work(1.0))
    found = summarise(read(trace_of(rigged)))
    assert (found.steps, found.wall_ns, found.bubbles, found.per_step_us(5)) == (0, 0, [], 0.0)


# --- diff -----------------------------------------------------------------------------------------


def test_serial_against_overlap_is_the_hosts_work_less() -> None:
    a, b = read(trace_of(decoding(SERIAL))), read(trace_of(decoding(OVERLAP)))
    found = diff(a, b, ("serial", "overlap"))
    assert found.aligned > 20
    assert (found.step.before_us, found.step.after_us) == (16_250, 10_000)
    changes = {change.name: change for change in found.changes}
    idle = changes["device idle: plan late"]
    assert (idle.before_us, idle.after_us) == (6_000, 0)
    assert changes["host: retire, hidden"].by_us == 4_500
    assert changes["host: retire, exposed"].by_us == -4_500
    sizes = [abs(change.by_us) for change in found.changes]
    assert sizes == sorted(sizes, reverse=True)
    assert found.verdict.startswith(
        "A step takes 10,000 µs in overlap, 16,250 µs in serial (-38.5 %): "
    )
    assert "device idle: plan late went from 6,000 to 0 µs" in found.verdict
    assert "wait" not in found.verdict


def test_a_trace_against_itself_has_not_moved() -> None:
    a = read(trace_of(decoding(OVERLAP)))
    found = diff(a, a, ("a", "b"))
    assert found.aligned == len(a.snapshot.events.step) - 1
    assert {change.by_us for change in found.changes} == {0.0}
    assert "as long in b as in a" in found.verdict


def test_traces_without_a_common_step_are_refused_with_what_they_hold() -> None:
    few = rig(SERIAL, shapes.timing(10.0), host_work(1.0), rows=2)
    steady(few, 20)
    a, b = read(trace_of(decoding(SERIAL), 0.1)), read(trace_of(few, 0.1))
    with pytest.raises(ConfigError, match=r"decode of 4 rows\).*decode of 2 rows.*same load"):
        diff(a, b, ("a", "b"))


def steps_of(numbers: list[int], rows: list[int]) -> Steps:
    columns: dict[str, Any] = {name: np.zeros(len(numbers), np.int64) for name in vars(none())}
    columns |= {"step": np.array(numbers), "rows": np.array(rows)}
    return Steps(**columns)


def none() -> Steps:
    return Steps(*(np.zeros(0, np.int64) for _ in range(14)))


def test_steps_are_aligned_by_number_only_where_they_are_alike() -> None:
    a, b = steps_of([4, 5, 6, 7], [8, 8, 8, 2]), steps_of([5, 6, 7, 8], [8, 8, 4, 2])
    left, right, how = align(a, b)
    assert (left.tolist(), right.tolist(), how) == ([1, 2], [0, 1], "by number")


def test_steps_whose_numbers_differ_are_aligned_by_order_within_their_size() -> None:
    a, b = steps_of([0, 1, 2, 3], [8, 8, 2, 2]), steps_of([100, 101, 102], [2, 8, 2])
    left, right, how = align(a, b)
    assert sorted(zip(left.tolist(), right.tolist(), strict=True)) == [(0, 1), (2, 0), (3, 2)]
    assert how.startswith("by order")


# --- pages ----------------------------------------------------------------------------------------


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_page_fetches_nothing() -> None:
    html = page(parse(trace_of(decoding(OVERLAP)), "x"), "a run")
    assert not re.search(r"https?://|\bsrc=|@import|url\(|fetch\(|XMLHttp|import\(", html)
    assert "@DATA@" not in html
    assert "@TITLE@" not in html


def test_a_page_holds_every_slice_in_lanes() -> None:
    document = parse(trace_of(decoding(OVERLAP)), "x")
    data = data_of(page(document, "a run"))
    names = [lane["name"] for lane in data["lanes"]]
    assert names[:4] == ["scheduler", "runner", "compute", "device idle"] or "runner" not in names
    assert {"scheduler", "compute", "steps", "requests"} <= set(names)
    slices = sum(len(lane["t"]) for lane in data["lanes"] if lane["name"] in names[:6])
    assert slices >= sum(event.ph == "X" for event in document.events)
    compute = data["lanes"][names.index("compute")]
    assert compute["d"][-1] == 10 * MS
    assert np.cumsum(compute["t"]).tolist() == sorted(np.cumsum(compute["t"]).tolist())
    assert compute["s"] == sorted(compute["s"])  # a step's number, to find it by


def test_names_in_a_trace_can_not_leave_the_page() -> None:
    events = [{"ph": "X", "name": "</script><b>", "pid": 1, "tid": 1, "ts": 0, "dur": 1}]
    html = page(parse(json.dumps(events).encode(), "x"), "<i>t & u</i>")
    assert data_of(html)["names"] == ["</script><b>"]
    assert "<b>" not in html
    assert "<i>" not in html


def rows_are_free(lane: Lane) -> None:
    until: dict[int, int] = {}
    for piece in lane.slices:
        assert piece.start_ns >= until.get(piece.row, 0), (lane.name, piece)
        until[piece.row] = piece.end_ns


def test_what_overlaps_stands_in_rows_of_its_own() -> None:
    drawn = {lane.name: lane for lane in lanes(parse(trace_of(decoding(OVERLAP)), "x"))}
    assert drawn["steps"].rows == 2
    assert drawn["requests"].rows == 4
    for lane in drawn.values():
        rows_are_free(lane)


def test_another_tools_slices_are_nested_by_thread() -> None:
    slices = [("a", 0, 10), ("b", 1, 5), ("c", 2, 1), ("d", 7, 2), ("e", 10, 3)]
    events: list[dict[str, Any]] = [
        {"ph": "X", "name": n, "pid": 7, "tid": 7, "ts": t, "dur": d, "args": {"step": "odd"}}
        for n, t, d in reversed(slices)
    ]
    events.append({"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "main"}})
    (lane,) = lanes(Document(parse(json.dumps(events).encode(), "x").events))
    assert lane.name == "main"
    assert [(p.name, p.row) for p in lane.slices] == [
        ("a", 0), ("b", 1), ("c", 2), ("d", 1), ("e", 0)
    ]  # fmt: skip


# --- handing over ---------------------------------------------------------------------------------


def ask(port: int, method: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_trace_is_handed_over_once_and_to_loopback_only() -> None:
    with HandOver(b"\x1f\x8btrace", "a<b>.json.gz") as server:
        status, body = ask(server.port, "GET", "/")
        assert status == 200
        assert b"a<b>" not in body
        assert b"https://ui.perfetto.dev" in body
        assert ask(server.port, "GET", "/trace") == (200, b"\x1f\x8btrace")
        assert ask(server.port, "GET", "/etc/passwd")[0] == 404
        assert ask(server.port, "POST", "/else")[0] == 404
        # a name that a foreign page has made point here
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", ""):
            assert ask(server.port, "GET", "/trace", host or "x")[0] == 403
            assert ask(server.port, "POST", "/done", host or "x")[0] == 403
        assert ask(server.port, "GET", "/trace", f"localhost:{server.port}")[0] == 200
        assert not server.wait(0.0)
        assert ask(server.port, "POST", "/done")[0] == 204
        assert server.wait(10.0)
    with pytest.raises(OSError, match="refused"):
        ask(server.port, "GET", "/")


# --- merging --------------------------------------------------------------------------------------


def theirs(numbers: list[int], starts_us: list[float], base_ns: int = 0) -> bytes:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 1, "args": {"name": "py"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 1, "args": {"name": "t"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "ts": 1, "args": {}},
    ]
    for number, at in zip(numbers, starts_us, strict=True):
        mark = {"name": f"stepahead step {number}", "cat": "user_annotation", "dur": 40.0}
        events.append({"ph": "X", "pid": 1, "tid": 1, "ts": at, **mark})
        for ph, shift in (("s", 1), ("f", 2)):
            flow = {"name": "ac2g", "cat": "ac2g", "id": number, "bp": "e"}
            events.append({"ph": ph, "pid": 1, "tid": 1, "ts": at + shift, **flow})
    return json.dumps({"traceEvents": events, "baseTimeNanoseconds": base_ns}).encode()


def test_marks_of_steps_align_the_clocks() -> None:
    ours = trace_of(decoding(OVERLAP))
    received = {
        e["id"]: e["args"]["received_us"]
        for e in parsed(ours)["traceEvents"]
        if e.get("cat") == "step" and e["ph"] == "b"
    }
    numbers = [20, 21, 22, 23, 24]
    at = [received[n] + 7e6 for n in numbers]
    at[2] += 900.0  # one mark is off; the median does not mind
    merged = merge(ours, theirs(numbers, at), ("a", "b"))
    assert (merged.marks, merged.spread_us) == (5, pytest.approx(0.0, abs=1e-3))
    document = parsed(merged.data)
    assert complaints(document) == []
    found = {
        e["name"]: e["ts"] for e in document["traceEvents"] if e["name"].startswith("stepahead")
    }
    assert found["stepahead step 20"] == pytest.approx(received[20], abs=0.002)
    assert found["stepahead step 22"] == pytest.approx(received[22] + 900, abs=0.002)
    # it is still ours
    assert summarise(read(merged.data)).steps == summarise(read(ours)).steps


def test_without_marks_the_wall_clocks_have_to_do() -> None:
    rigged = decoding(OVERLAP)
    ours = trace_of(rigged, 0.1)
    base_ns = parsed(ours)["baseTimeNanoseconds"]
    other = theirs([90_000, 90_001], [-500.0, 2_000.0], base_ns + 1_000_000)
    merged = merge(ours, other, ("a", "b"))
    assert merged.marks == 0
    found = [
        (e["name"], e["ph"], e["ts"])
        for e in parsed(merged.data)["traceEvents"]
        if e["pid"] == 1001 and e["ph"] != "M"
    ]
    assert found == [
        ("stepahead step 90000", "X", 500.0),
        ("ac2g", "s", 501.0),
        ("ac2g", "f", 502.0),
        ("stepahead step 90001", "X", 3_000.0),
        ("ac2g", "s", 3_001.0),
        ("ac2g", "f", 3_002.0),
    ]


def test_what_lies_before_our_start_is_left_out_with_all_its_arrows() -> None:
    ours = trace_of(decoding(OVERLAP), 0.1)
    base_ns = parsed(ours)["baseTimeNanoseconds"]
    # the slice and the arrow's first point lie before, its second point behind the start
    other = theirs([90_000, 90_001], [-1.5, 10.0], base_ns)
    document = parsed(merge(ours, other, ("a", "b")).data)
    assert complaints(document) == []
    assert {e["id"] for e in document["traceEvents"] if e.get("cat") == "ac2g"} == {90_001}


def test_traces_that_can_not_be_merged_are_refused() -> None:
    ours = trace_of(decoding(OVERLAP))
    with pytest.raises(ConfigError, match="b is of stepahead too"):
        merge(ours, ours, ("a", "b"))
    with pytest.raises(ConfigError, match="b is not of stepahead; the first"):
        merge(theirs([1], [0.0]), ours, ("b", "a"))
    with pytest.raises(ConfigError, match="no wall clock; profile the process"):
        merge(ours, theirs([90_000], [0.0]), ("a", "b"))


def test_the_page_and_the_hand_over_are_in_the_package() -> None:
    folder = Path(page.__code__.co_filename).parent
    assert (folder / "timeline.html").is_file()
