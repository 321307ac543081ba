"""Reads trace files: Chrome's JSON, plain or gzipped, ours or another tool's.

What is ours comes back as the snapshot that it was made of, as far as the file holds it: slices
that were cut stay cut, and stages that took no time are gone.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, fields
from typing import IO, Any

import msgspec
import numpy as np

from stepahead.errors import ConfigError
from stepahead.observe.causes import CAUSES, Events
from stepahead.observe.idle import IdleSpans
from stepahead.observe.observer import Snapshot
from stepahead.observe.perfetto import (
    COMPUTE,
    DEVICE,
    ENGINE,
    FORMAT,
    HELD,
    IDLE,
    SCHEDULER,
    StepArgs,
)
from stepahead.observe.requests import Happened, RequestEvents
from stepahead.observe.stages import Stage
from stepahead.observe.steps import REASONS, Kind, Steps

MOST_BYTES = 2 << 30  # of a document; what is larger would not fit a browser either
_CHUNK = 1 << 20
_NOT_JSON = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"SQLite format": "an SQLite database, as Nsight Systems writes; export it as Chrome JSON",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first (zstd -d)",
    b"\x0a": "no JSON but, it seems, Perfetto's binary format; open it at https://ui.perfetto.dev",
}


class RawEvent(msgspec.Struct, gc=False):
    """An event as any tool writes it; `args` are left as they are until somebody asks."""

    ph: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = 0.0
    dur: float = 0.0
    cat: str | None = None
    id: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class Document(msgspec.Struct):
    """A trace document; `stepahead` is there where it is ours."""

    traceEvents: list[RawEvent] | None = None
    stepahead: dict[str, Any] | None = None
    baseTimeNanoseconds: int = 0

    @property
    def events(self) -> list[RawEvent]:
        """All its events."""
        return self.traceEvents or []


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trace of ours: what was taken down, and the device's idle time by cause."""

    snapshot: Snapshot
    idle: IdleSpans
    from_ns: int


_DOCUMENTS = msgspec.json.Decoder(Document | list[RawEvent], strict=False)
_ARGS = msgspec.json.Decoder(StepArgs)


def load_bytes(file: IO[bytes], name: str) -> bytes:
    """The file's JSON, unpacked; ConfigError when it is something else or too large."""
    head = file.read(16)
    file.seek(0)
    packed = head.startswith(b"\x1f\x8b")
    found = bytearray()
    source = gzip.GzipFile(fileobj=file) if packed else file
    try:
        while chunk := source.read(_CHUNK):
            found += chunk
            if len(found) > MOST_BYTES:
                raise ConfigError(
                    f"{name} holds more than {MOST_BYTES >> 30} GiB; record a shorter time (--last)"
                )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{name} is cut off or damaged ({error}); record it again") from None
    _check_kind(bytes(found[:64]), name)
    return bytes(found)


def _check_kind(head: bytes, name: str) -> None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        return
    if not text:
        raise ConfigError(f"{name} is empty; record it again")
    what = next((words for magic, words in _NOT_JSON.items() if head.startswith(magic)), None)
    raise ConfigError(
        f"{name} is {what}"
        if what
        else f"{name} is no trace: it holds no JSON; give a .json or .json.gz of `trace record`"
    )


def parse(data: bytes, name: str) -> Document:
    """The document; ConfigError when it is no trace."""
    try:
        found = _DOCUMENTS.decode(data.removeprefix(b"\xef\xbb\xbf"))
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{name} is no trace that can be read ({error}); it may be cut off: record it again"
        ) from None
    document = Document(found) if isinstance(found, list) else found
    if document.traceEvents is None:
        raise ConfigError(f"{name} is JSON without `traceEvents`, so no trace; see `trace record`")
    return document


def load_document(data: bytes, name: str) -> dict[str, Any]:
    """As `parse`, with every field of every event as it is; for changing and writing again."""
    parse(data, name)
    found = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"))
    return {"traceEvents": found} if isinstance(found, list) else found


def load(file: IO[bytes], name: str) -> Document:
    """`load_bytes`, then `parse`."""
    return parse(load_bytes(file, name), name)


def recorded(document: Document, name: str) -> Recorded:
    """What our trace tells; ConfigError when it is another tool's, or another format."""
    about = document.stepahead
    if about is None:
        raise ConfigError(
            f"{name} is a trace, but not of stepahead, so its steps are not known; "
            "`stepahead trace open` shows it, `trace record` makes one of ours"
        )
    if about.get("format") != FORMAT:
        raise ConfigError(
            f"{name} has format {about.get('format')!r}, this version reads {FORMAT}; "
            "record it again, or read it with the version that wrote it"
        )
    try:
        return _Reader(document, about).read()
    except (KeyError, ValueError, TypeError, OverflowError, msgspec.ValidationError) as error:
        raise ConfigError(f"{name} has been changed: {error!r}; record it again") from None


class _Header(msgspec.Struct):
    """What our documents say of themselves; as `observe.perfetto` writes it."""

    about: dict[str, str | int]
    zero_ns: int
    until_ns: int
    wall_ns: int
    syncs: dict[str, dict[str, int]]
    pauses: dict[str, int]


class _Reader:
    """Sorts the events of one document of ours into columns."""

    def __init__(self, document: Document, about: dict[str, Any]) -> None:
        self._document = document
        self._header = msgspec.convert(about, _Header)
        self._zero_ns = self._header.zero_ns
        int(self._header.about.get("depth", 1))  # judged by later: it must be a number

    def read(self) -> Recorded:
        tracks: dict[tuple[Any, Any], list[RawEvent]] = {}
        steps: list[RawEvent] = []
        requests: list[RawEvent] = []
        for event in self._document.events:
            if event.ph == "X":
                tracks.setdefault((event.pid, event.tid), []).append(event)
            elif event.cat == "step" and event.ph == "b":
                steps.append(event)
            elif event.cat == "request" and event.ph in "be":
                requests.append(event)
        for track in tracks.values():
            track.sort(key=lambda event: event.ts)
        header, landed = self._header, self._steps(steps)
        snapshot = Snapshot(
            header.about,
            header.until_ns,
            self._events(tracks, landed),
            landed,
            self._requests(requests),
            header.syncs,
            header.wall_ns + header.until_ns - self._zero_ns,
            header.pauses,
        )
        cause, start_ns, end_ns = self._caused(tracks.get((DEVICE, IDLE), []))
        return Recorded(snapshot, IdleSpans(start_ns, end_ns, cause), self._zero_ns)

    def _ns(self, us: list[float]) -> np.ndarray:
        return np.rint(np.array(us, float) * 1000).astype(np.int64) + self._zero_ns

    def _ends(self, track: list[RawEvent]) -> np.ndarray:
        took = np.rint(np.array([e.dur for e in track], float) * 1000).astype(np.int64)
        return self._ns([e.ts for e in track]) + took

    def _events(self, tracks: dict[tuple[Any, Any], list[RawEvent]], steps: Steps) -> Events:
        host = tracks.get((ENGINE, SCHEDULER), [])
        device = tracks.get((DEVICE, COMPUTE), [])
        args = [msgspec.json.decode(event.args) for event in device]
        ran = np.array([arg["step"] for arg in args], np.int64)
        # an engine is always in some stage, if only for an instant, which has no slice
        stages = [Stage[event.name.upper()] for event in host] or [Stage.IDLE]
        return Events(
            np.array(stages, np.int64),
            self._ns([event.ts for event in host] or [0.0]),
            self._header.until_ns,
            ran,
            self._ns([event.ts for event in device]),
            self._ends(device),
            _posts(steps, ran),
            np.stack(self._caused(tracks.get((ENGINE, HELD), []))),
        )

    def _caused(self, track: list[RawEvent]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(cause, start, end) of slices that are named by their causes."""
        cause = np.array([CAUSES.index(event.name) for event in track], np.int64)
        return cause, self._ns([event.ts for event in track]), self._ends(track)

    def _steps(self, begun: list[RawEvent]) -> Steps:
        args = [_ARGS.decode(event.args) for event in begun]
        reasons = {reason.value: i for i, reason in enumerate(REASONS)} | {None: -1}
        columns = {
            "step": [a.step for a in args],
            "kind": [Kind[event.name.upper()] for event in begun],
            "rows": [a.rows for a in args],
            "chunk_tokens": [a.prompt_tokens for a in args],
            "samples": [a.samples for a in args],
            "flights": [a.flights for a in args],
            "reason": [reasons[a.sync] for a in args],
        }
        found = {name: np.array(values, np.int64) for name, values in columns.items()}
        for field in fields(Steps):
            if field.name.endswith("_ns"):
                us = [getattr(a, field.name.replace("_ns", "_us")) for a in args]
                known = np.array([value is not None for value in us], bool)
                found[field.name] = np.where(known, self._ns([v or 0.0 for v in us]), 0)
        steps = Steps(**found)
        return steps.where(np.argsort(steps.step, kind="stable"))

    def _requests(self, marks: list[RawEvent]) -> RequestEvents:
        """The events behind the phases; of a request that was there before, those in the window."""
        rows: list[tuple[int, int, int, int]] = []
        facts: dict[Any, dict[str, Any]] = {}
        before: dict[Any, str] = {}
        for mark in marks:
            at_ns, rid = round(mark.ts * 1000) + self._zero_ns, mark.id
            if mark.name == "request" and mark.ph == "b":
                fact = facts[rid] = msgspec.json.decode(mark.args)
                if "cut" not in fact:
                    before[rid] = "queued"  # if only for an instant, which has no stretch
                    rows.append((at_ns, fact["rid"], Happened.ARRIVED, fact["prompt_tokens"]))
            elif mark.name == "request":
                end = _ENDS.get(facts[rid].get("end", ""))
                if end is not None:
                    rows.append((at_ns, facts[rid]["rid"], end, facts[rid]["output_tokens"]))
            elif mark.ph == "b":
                what = _begun(before.get(rid), mark.name)
                before[rid] = mark.name
                if what is not None:
                    cached = facts[rid].get("cached_tokens", 0)
                    value = cached if what is Happened.ADMITTED else 0
                    rows.append((at_ns, facts[rid]["rid"], what, value))
        rows.sort(key=lambda row: row[0])
        return RequestEvents(*np.array(rows, np.int64).reshape(-1, 4).T)


def _posts(steps: Steps, ran: np.ndarray) -> np.ndarray:
    """When each step that ran was handed over, received and queued; 0 where nobody says."""
    posts = np.zeros((3, len(ran)), np.int64)
    _, mine, theirs = np.intersect1d(steps.step, ran, return_indices=True)
    for row, column in enumerate((steps.launch_ns, steps.received_ns, steps.submitted_ns)):
        posts[row, theirs] = column[mine]
    return posts


_ENDS = {"finished": Happened.FINISHED, "aborted": Happened.ABORTED, "failed": Happened.FAILED}


def _begun(before: str | None, name: str) -> Happened | None:
    """The event between two phases of a request; None where its first one begins."""
    if before is None or before == name:
        return None
    if name == "queued":
        return Happened.PREEMPTED
    if name == "prefill" or before == "queued":
        return Happened.ADMITTED
    return Happened.FIRST_TOKEN
