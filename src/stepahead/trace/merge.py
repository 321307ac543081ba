"""Lays a trace of torch.profiler beside ours, on our clock.

Its ranges `stepahead step N` (`runner/marks.py`) begin where the runner receives step N, which our
trace tells too: the median of the differences is how far the clocks are apart.  Without such ranges
the two wall clocks have to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from stepahead.errors import ConfigError
from stepahead.trace.read import load_document

_MARK = re.compile(r"stepahead step (\d+)")
_THEIRS = 1000  # added to small process numbers of theirs: kineto counts devices from 0
_FLOWS = frozenset("stf")


@dataclass(frozen=True)
class Merged:
    """The document, and how the clocks were found: by so many marks, 0 for the wall clocks.

    `spread_us`: half of the marks agree to within this.
    """

    data: bytes
    events: int
    marks: int
    spread_us: float


def merge(ours: bytes, theirs: bytes, names: tuple[str, str]) -> Merged:
    """Our trace with all of theirs that is not from before it.

    ConfigError when the first is not ours, the second is, or no clock is common.
    """
    document, other = (load_document(*pair) for pair in zip((ours, theirs), names, strict=True))
    if "stepahead" not in document:
        raise ConfigError(f"{names[0]} is not of stepahead; the first of the two must be")
    if "stepahead" in other:
        raise ConfigError(
            f"{names[1]} is of stepahead too; `trace diff` compares two, `trace merge` adds "
            "torch.profiler's"
        )
    offset_us, marks, spread_us = _offset_us(document, other, names)
    added = _moved(other["traceEvents"], offset_us)
    document["traceEvents"] += added
    return Merged(msgspec.json.encode(document), len(added), marks, spread_us)


def _offset_us(
    ours: dict[str, Any], theirs: dict[str, Any], names: tuple[str, str]
) -> tuple[float, int, float]:
    """What to add to their times, the number of marks, and how far apart half of those are."""
    received = {
        event["id"]: event["args"]["received_us"]
        for event in ours["traceEvents"]
        if event["ph"] == "b" and event["cat"] == "step" and "received_us" in event["args"]
    }
    found = []
    for event in theirs["traceEvents"]:
        mark = _MARK.fullmatch(str(event.get("name", "")))
        if mark and event.get("ph") == "X" and int(mark[1]) in received:
            found.append(received[int(mark[1])] - float(event["ts"]))
    if found:
        middle = median(found)
        return middle, len(found), median(abs(one - middle) for one in found)
    bases_ns = [int(one.get("baseTimeNanoseconds") or 0) for one in (ours, theirs)]
    if not all(bases_ns):
        raise ConfigError(
            f"{names[1]} has no range `stepahead step N` of a step of {names[0]}, and no wall "
            "clock; profile the process in which the runner is, while the trace is recorded"
        )
    return (bases_ns[1] - bases_ns[0]) / 1000, 0, 0.0


def _moved(events: list[dict[str, Any]], offset_us: float) -> list[dict[str, Any]]:
    """On our clock, without what lies before its start: of flows all points or none."""
    moved = [_shifted(event, offset_us) for event in events]
    lost = {_flow(event) for event in moved if event.get("ph") in _FLOWS and event["ts"] < 0}
    return [
        event
        for event in moved
        if event.get("ph") == "M"
        or (event["ts"] >= 0 and not (event.get("ph") in _FLOWS and _flow(event) in lost))
    ]


def _shifted(event: dict[str, Any], offset_us: float) -> dict[str, Any]:
    pid = event.get("pid")
    if isinstance(pid, int) and pid < _THEIRS:
        event["pid"] = pid + _THEIRS
    at_us = float(event.get("ts", 0.0)) + offset_us
    event["ts"] = 0.0 if event.get("ph") == "M" else round(at_us, 3)
    return event


def _flow(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("cat"), event.get("id")
