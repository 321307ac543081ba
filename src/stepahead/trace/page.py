"""A trace as one HTML page: lanes to zoom and pan in, nothing fetched, nothing installed.

Takes any Chrome trace.  Ours has its lanes in the order of a step's life; of another tool's each
thread is a lane, with slices inside each other below each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from stepahead.trace.read import Document, RawEvent

_OURS = ("scheduler", "runner", "compute", "device idle", "copy d2h", "steps", "requests")
_MOST_ROWS = 48  # of a lane of things that overlap; what does not fit shares the last row


class _Of(msgspec.Struct, gc=False):
    """What an event's args tell of whom it is about."""

    step: int | None = None
    rid: int | None = None


_OF = msgspec.json.Decoder(_Of)


@dataclass(frozen=True)
class Slice:
    """A stretch of a lane, in ns from the trace's first moment; `about` is a step or request."""

    start_ns: int
    end_ns: int
    name: str
    row: int
    about: int | None


@dataclass(frozen=True)
class Lane:
    """A row of the page; its slices lie in `rows` rows by start."""

    group: str
    name: str
    slices: list[Slice]

    @property
    def rows(self) -> int:
        """How many rows it needs."""
        return 1 + max((piece.row for piece in self.slices), default=0)


def page(document: Document, title: str) -> str:
    """The whole page; `title` is plain text."""
    drawn = lanes(document)
    names = list(dict.fromkeys(piece.name for lane in drawn for piece in lane.slices))
    data = {
        "title": title,
        "ours": document.stepahead is not None,
        "about": (document.stepahead or {}).get("about", {}),
        "names": names,
        "lanes": [_packed(lane, {name: i for i, name in enumerate(names)}) for lane in drawn],
    }
    # in a script element only `<` could end it
    packed = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    template = files("stepahead.trace").joinpath("timeline.html").read_text("utf-8")
    head, _, tail = template.partition("@DATA@")
    return head.replace("@TITLE@", escape(title)) + packed + tail


def _packed(lane: Lane, places: dict[str, int]) -> dict[str, Any]:
    """Columns, starts as differences: a page of numbers stays small."""
    starts = np.array([piece.start_ns for piece in lane.slices], np.int64)
    return {
        "group": lane.group,
        "name": lane.name,
        "rows": lane.rows,
        "t": np.diff(starts, prepend=0).tolist(),
        "d": [piece.end_ns - piece.start_ns for piece in lane.slices],
        "n": [places[piece.name] for piece in lane.slices],
        "z": [piece.row for piece in lane.slices] if lane.rows > 1 else [],
        "s": [-1 if piece.about is None else piece.about for piece in lane.slices],
    }


# --- lanes ------------------------------------------------------------------------------------


def lanes(document: Document) -> list[Lane]:
    """Lanes that hold anything, in the order to be drawn; times from the earliest slice on."""
    threads, asyncs = _sorted(document.events)
    first_us = min(
        (event.ts for track in (*threads.values(), *asyncs.values()) for event in track),
        default=0.0,
    )
    processes = _named(document.events, "process_name")
    names = _named(document.events, "thread_name")
    found = [
        Lane(
            processes.get(pid, f"process {pid}"),
            names.get((pid, tid), f"thread {tid}"),
            list(_nested(track, first_us)),
        )
        for (pid, tid), track in threads.items()
    ]
    if document.stepahead is not None:
        found += [
            Lane("engine" if cat == "step" else "requests", f"{cat}s", list(_side(track, first_us)))
            for cat, track in asyncs.items()
        ]
        order = {name: i for i, name in enumerate(_OURS)}
        found.sort(key=lambda lane: order.get(lane.name, len(order)))
    return [lane for lane in found if lane.slices]


def _sorted(
    events: Sequence[RawEvent],
) -> tuple[dict[tuple[Any, Any], list[RawEvent]], dict[str, list[RawEvent]]]:
    threads: dict[tuple[Any, Any], list[RawEvent]] = {}
    asyncs: dict[str, list[RawEvent]] = {}
    for event in events:
        if event.ph == "X":
            threads.setdefault((event.pid, event.tid), []).append(event)
        elif event.ph in "be" and event.cat in ("step", "request"):
            asyncs.setdefault(event.cat, []).append(event)
    for track in threads.values():
        track.sort(key=lambda event: (event.ts, -event.dur))
    return threads, asyncs


def _named(events: Sequence[RawEvent], what: str) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for event in events:
        if event.ph == "M" and event.name == what:
            key = event.pid if what == "process_name" else (event.pid, event.tid)
            found[key] = str(msgspec.json.decode(event.args).get("name", ""))
    return found


def _nested(track: Sequence[RawEvent], first_us: float) -> Iterator[Slice]:
    open_ns: list[int] = []
    for event in track:
        start_ns = round((event.ts - first_us) * 1000)
        end_ns = start_ns + round(event.dur * 1000)
        while open_ns and open_ns[-1] <= start_ns:
            open_ns.pop()
        yield Slice(start_ns, end_ns, event.name, len(open_ns), _of(event).step)
        open_ns.append(end_ns)


def _of(event: RawEvent) -> _Of:
    try:
        return _OF.decode(event.args)
    except msgspec.ValidationError:  # another tool's args, where `step` is something else
        return _Of()


def _side(marks: Sequence[RawEvent], first_us: float) -> Iterator[Slice]:
    """Async stretches in rows: those of one id share a row, a row is used again when it is free."""
    began: dict[tuple[Any, str], RawEvent] = {}
    found: dict[Any, list[tuple[int, int, str, int | None]]] = {}
    for mark in marks:
        key = mark.id, mark.name
        if mark.ph == "b":
            began[key] = mark
        elif (begin := began.pop(key, None)) is not None:
            start_ns, end_ns = (round((e.ts - first_us) * 1000) for e in (begin, mark))
            about = mark.id if isinstance(mark.id, int) else None
            found.setdefault(mark.id, []).append((start_ns, end_ns, mark.name, about))
    yield from sorted(_in_rows(found), key=lambda piece: piece.start_ns)


def _in_rows(found: dict[Any, list[tuple[int, int, str, int | None]]]) -> Iterator[Slice]:
    free_ns: list[int] = []
    for stretches in sorted(found.values(), key=lambda s: min(map(itemgetter(0), s))):
        begin_ns = min(map(itemgetter(0), stretches))
        row = next((i for i, at in enumerate(free_ns) if at <= begin_ns), len(free_ns))
        if row == len(free_ns) and row < _MOST_ROWS:
            free_ns.append(0)
        row = min(row, _MOST_ROWS - 1)
        free_ns[row] = max(free_ns[row], *map(itemgetter(1), stretches))
        inner = [s for s in stretches if s[2] != "request"] or stretches
        for start_ns, end_ns, name, about in inner:
            yield Slice(start_ns, end_ns, name, row, about)
