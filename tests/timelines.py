"""A strict reader of Chrome traces: what Perfetto would draw wrongly or drop is a complaint."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def parsed(data: bytes) -> dict[str, Any]:
    """The document; NaN and Infinity, which JSON has not, are errors."""

    def refuse(word: str) -> float:
        raise ValueError(f"{word} in a trace")

    return json.loads(data, parse_constant=refuse)


def ns(us: float) -> int:
    """µs of a trace as whole ns."""
    value = round(us * 1000)
    assert abs(value - us * 1000) < 1e-3, f"{us} µs is no whole number of ns"
    return value


def complaints(document: dict[str, Any]) -> list[str]:
    """What is wrong with a trace, a line each."""
    events = document["traceEvents"]
    by_ph: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_ph[event["ph"]].append(event)
    found = [f"unknown ph {ph!r}" for ph in by_ph if ph not in set("MXbestfCi")]
    found += _named(by_ph, events)
    found += _slices(by_ph["X"])
    found += _pairs(events)
    found += _flows([e for ph in "stf" for e in by_ph[ph]], by_ph["X"])
    found += _counters(by_ph["C"])
    found += [
        f"instant without a scope: {e['name']}" for e in by_ph["i"] if e.get("s") not in "tpg"
    ]
    return found + [f"before the start: {e['name']}" for e in events if e["ts"] < 0]


def track(event: Event) -> tuple[int, int]:
    """Its pid and tid."""
    return event["pid"], event["tid"]


def tracks(document: dict[str, Any]) -> dict[str, list[Event]]:
    """The slices of each thread, by its name."""
    names = {
        track(e): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"
    }
    found: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            found[names[track(event)]].append(event)
    return found


def _named(by_ph: dict[str, list[Event]], events: list[Event]) -> list[str]:
    metas = by_ph["M"]
    pids = {e["pid"] for e in metas if e["name"] == "process_name"}
    tids = {track(e) for e in metas if e["name"] == "thread_name"}
    found = [f"pid {e['pid']} has no name" for e in events if e["pid"] not in pids]
    threaded = (*by_ph["X"], *by_ph["i"], *(e for ph in "stf" for e in by_ph[ph]))
    found += [f"thread {track(e)} has no name" for e in threaded if track(e) not in tids]
    sorted_pids = {e["pid"] for e in metas if e["name"] == "process_sort_index"}
    return found + [f"pid {pid} has no place" for pid in pids - sorted_pids]


def _slices(slices: list[Event]) -> list[str]:
    """Slices of a track nest: each lies wholly inside, or wholly outside, every other one."""
    found = [f"slice {e['name']} of no length" for e in slices if ns(e["dur"]) <= 0]
    lanes: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for e in slices:
        lanes[track(e)].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), e["name"]))
    for lane in lanes.values():
        open_ns: list[int] = []
        for start, end, name in sorted(lane, key=lambda item: (item[0], -item[1])):
            while open_ns and open_ns[-1] <= start:
                open_ns.pop()
            if open_ns and end > open_ns[-1]:
                found.append(f"slice {name} at {start} reaches out of the one around it")
            open_ns.append(end)
    return found


def _pairs(events: list[Event]) -> list[str]:
    """Each `b` has its `e`, in the order of the file, nested for an id, at a time not before it."""
    found: list[str] = []
    stacks: dict[tuple[str, int, int], list[Event]] = defaultdict(list)
    for event in (e for e in events if e["ph"] in "be"):
        stack = stacks[event["cat"], event["pid"], event["id"]]
        if event["ph"] == "b":
            if stack and ns(event["ts"]) < ns(stack[-1]["ts"]):
                found.append(f"async {event['name']} {event['id']} begins before its outer one")
            stack.append(event)
        elif not stack or stack[-1]["name"] != event["name"]:
            found.append(f"async {event['name']} {event['id']} ends without a beginning")
        elif ns(event["ts"]) < ns(stack.pop()["ts"]):
            found.append(f"async {event['name']} {event['id']} ends before it begins")
    return found + [f"async {e['name']} {e['id']} has no end" for s in stacks.values() for e in s]


def _flows(points: list[Event], slices: list[Event]) -> list[str]:
    """Of a category, name and id one `s`, one `f`, in order; each point in a slice of its track."""
    found: list[str] = []
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in slices:
        lanes[track(e)].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
    starts = {lane: sorted(spans) for lane, spans in lanes.items()}
    chains: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for e in points:
        chains[e["cat"], e["name"], e["id"]].append(e)
        if not _inside(ns(e["ts"]), starts.get(track(e), [])):
            found.append(f"flow {e['id']} {e['ph']} at {e['ts']} is in no slice")
    for key, chain in chains.items():
        order = sorted(chain, key=lambda e: (ns(e["ts"]), "stf".index(e["ph"])))
        if "".join(e["ph"] for e in order) != "s" + "t" * (len(chain) - 2) + "f":
            found.append(f"flow {key} is {''.join(e['ph'] for e in order)}")
        found += [f"flow {key} binds to the next slice" for e in chain if e.get("bp") != "e"]
    return found


def _inside(at: int, spans: list[tuple[int, int]]) -> bool:
    place = bisect.bisect_right(spans, (at, 1 << 62)) - 1
    return place >= 0 and spans[place][0] <= at < spans[place][1]


def _counters(counters: list[Event]) -> list[str]:
    last: dict[tuple[int, str], int] = {}
    found: list[str] = []
    for e in counters:
        key, at = (e["pid"], e["name"]), ns(e["ts"])
        if at <= last.get(key, -1):
            found.append(f"counter {e['name']} goes back to {at}")
        last[key] = at
        found += [f"counter {e['name']} below zero" for v in e["args"].values() if v < 0]
    return found
