"""A snapshot as Chrome's trace JSON, for ui.perfetto.dev and what reads torch.profiler's files.

Host stages, the runner's submits, the device's runs and its idle time are slices that lie side by
side on tracks of their own; steps and requests overlap each other and are async tracks; one flow a
step runs plan → launch → device → land → retire.  Names are few, numbers are in `args`.  Times are
µs with the nanoseconds behind the point, from the snapshot's first moment on; `stepahead` in the
document says where that lies on the observer's clock, `baseTimeNanoseconds` where on the wall
clock.  Draws what was taken down, measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from stepahead.observe.books import exposed_ns
from stepahead.observe.causes import CAUSES, Events, tally
from stepahead.observe.idle import IdleSpans, idle_spans
from stepahead.observe.observer import Snapshot
from stepahead.observe.phases import Life, Lives, lives
from stepahead.observe.requests import Happened
from stepahead.observe.stages import Stage
from stepahead.observe.steps import REASONS, Kind, Steps

FORMAT = 1  # of what stands under "stepahead"
ENGINE, DEVICE, REQUESTS = 1, 2, 3  # pids
SCHEDULER, RUNNER, HELD = 1, 2, 3  # tids of ENGINE
COMPUTE, LANDING, IDLE = 1, 2, 3  # tids of DEVICE


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """One event of the format; `ts` and `dur` in µs."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: float
    dur: float | None = None
    cat: str = ""
    id: int | None = None
    args: Any = None
    s: str = ""
    bp: str = ""


class StepArgs(msgspec.Struct, omit_defaults=True, gc=False):
    """A step's numbers, those of `Steps`; times in µs as `ts`, left out where unknown."""

    step: int
    rows: int
    prompt_tokens: int
    samples: int
    flights: int
    plan_us: float
    launch_us: float
    land_us: float
    received_us: float | None = None
    submitted_us: float | None = None
    start_us: float | None = None
    end_us: float | None = None
    sync: str | None = None


class _Run(msgspec.Struct, gc=False):
    """Args of a device slice: what kineto's readers want of a kernel, and the step's size."""

    step: int
    correlation: int
    rows: int = -1
    prompt_tokens: int = -1
    device: int = 0
    stream: int = 7  # a number that kineto gives compute streams


class _Of(msgspec.Struct, gc=False):
    """Args of what belongs to a step and has no more to say."""

    step: int


@dataclass(frozen=True)
class Window:
    """What is told: [from_ns, until_ns] on the observer's clock; `ts` 0 is `from_ns`."""

    from_ns: int
    until_ns: int

    def us(self, at_ns: np.ndarray | int) -> Any:
        """µs since its start; floats, exact to the nanosecond for 100 days."""
        return (at_ns - self.from_ns) / 1000

    def spans(self, start_ns: np.ndarray, end_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths in µs."""
        return self.us(start_ns), (end_ns - start_ns) / 1000


def chrome_trace(snapshot: Snapshot, last_s: float | None = None) -> bytes:
    """The trace of a snapshot, or of its last `last_s` seconds, as JSON.

    What reaches into that time is cut at its start.  A flow that has lost its beginning starts
    where it comes in.  Nothing is told from before the oldest kept host segment, whatever is kept
    of the rest: a device without its host has no causes.
    """
    window = _window(snapshot, last_s)
    events = clipped(snapshot.events, window)
    steps = snapshot.steps.where(snapshot.steps.land_ns >= window.from_ns)
    known = lives(snapshot.requests, window.from_ns, window.until_ns)
    trace = [
        *_names(),
        *_host(events, steps, window),
        *_runner(steps, window),
        *_held(events, window),
        *_device(events, steps, window),
        *_idle(idle_spans(snapshot.events).within(window.from_ns, window.until_ns), window),
        *_landings(steps, window),
        *_steps(steps, window),
        *_requests(known.lives, window),
        *_flows(events, steps, window),
        *_counters(events, steps, known, window),
        *_instants(steps, known.lives, snapshot, window),
    ]
    return msgspec.json.encode(_document(snapshot, window, trace))


def _window(snapshot: Snapshot, last_s: float | None) -> Window:
    from_ns = int(snapshot.events.start_ns[0])
    if last_s is not None:
        from_ns = max(from_ns, snapshot.at_ns - round(last_s * 1e9))
    return Window(min(from_ns, snapshot.at_ns), snapshot.at_ns)


def clipped(events: Events, window: Window) -> Events:
    """The raw lanes inside the window; what reaches in begins at its start.  Empty slices go."""
    start_ns, end_ns = np.maximum(events.start_ns, window.from_ns), events.end_ns
    host = start_ns < end_ns
    busy_ns = np.maximum(events.busy_start_ns, window.from_ns)
    device = busy_ns < events.busy_end_ns
    return replace(
        events,
        stage=events.stage[host],
        start_ns=start_ns[host],
        step=events.step[device],
        busy_start_ns=busy_ns[device],
        busy_end_ns=events.busy_end_ns[device],
        posts_ns=events.posts_ns[:, device] if events.posts_ns.size else events.posts_ns,
    )


def _document(snapshot: Snapshot, window: Window, trace: list[Event]) -> dict[str, Any]:
    wall_ns = snapshot.wall_ns - (snapshot.at_ns - window.from_ns) if snapshot.wall_ns else 0
    about = snapshot.about
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": "none", "rank": 0, "world_size": 1},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": wall_ns,
        "traceName": f"stepahead {about.get('model', '')} {about.get('loop', '')}".strip(),
        "stepahead": {
            "format": FORMAT,
            "about": about,
            "zero_ns": window.from_ns,
            "until_ns": window.until_ns,
            "wall_ns": wall_ns,
            "syncs": snapshot.syncs,
            "pauses": snapshot.pauses,
        },
        "traceEvents": trace,
    }


# --- tracks -----------------------------------------------------------------------------------


def _names() -> Iterator[Event]:
    for order, (pid, name) in enumerate(
        ((ENGINE, "engine"), (DEVICE, "device 0"), (REQUESTS, "requests"))
    ):
        yield Event("M", "process_name", pid, 0, 0.0, args={"name": name})
        yield Event("M", "process_sort_index", pid, 0, 0.0, args={"sort_index": order})
    for pid, tid, name in (
        (ENGINE, SCHEDULER, "scheduler"),
        (ENGINE, RUNNER, "runner"),
        (ENGINE, HELD, "runner held"),
        (DEVICE, COMPUTE, "compute"),
        (DEVICE, LANDING, "copy d2h"),
        (DEVICE, IDLE, "device idle"),
    ):
        yield Event("M", "thread_name", pid, tid, 0.0, args={"name": name})
        yield Event("M", "thread_sort_index", pid, tid, 0.0, args={"sort_index": tid})


def _slices(
    track: tuple[int, int],
    cat: str,
    names: Sequence[str] | Iterator[str],
    times: tuple[np.ndarray, np.ndarray],
    args: Sequence[Any] | Iterator[Any],
) -> Iterator[Event]:
    """`times` are starts and lengths in µs."""
    pid, tid = track
    rows = zip(names, times[0].tolist(), times[1].tolist(), args, strict=False)
    return (Event("X", name, pid, tid, ts, dur, cat, None, arg) for name, ts, dur, arg in rows)


_STAGES = [stage.name.lower() for stage in Stage]
_KINDS = [kind.name.lower() for kind in Kind]


def _host(events: Events, steps: Steps, window: Window) -> Iterator[Event]:
    if not len(events.stage):
        return iter(())
    names = [_STAGES[stage] for stage in events.stage.tolist()]
    args: list[_Of | None] = [None] * len(names)
    waits = events.stage == Stage.WAIT
    waited = _matches(events.end_ns, steps.land_ns, waits)
    for at, found in (*_host_posts(events, steps), waited):
        for place, step in zip(at[found].tolist(), steps.step[found].tolist(), strict=True):
            args[place] = _Of(step)
    times = window.spans(events.start_ns, events.end_ns)
    return _slices((ENGINE, SCHEDULER), "host", names, times, args)


def _matches(
    ascending: np.ndarray, wanted: np.ndarray, fit: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `wanted` stands in `ascending`, and the indices of those that are there, and
    where `fit` bool[len(ascending)] holds."""
    if not len(ascending):
        return np.zeros(len(wanted), np.int64), np.zeros(0, np.int64)
    at = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    there = ascending[at] == wanted
    return at, np.flatnonzero(there if fit is None else there & fit[at])


def _host_posts(events: Events, steps: Steps) -> list[tuple[np.ndarray, np.ndarray]]:
    """The slices of the host that each step's plan, launch and retirement begin.

    A stage that took no time has no slice; what stands there then belongs to something else.
    """
    plans, waits = (events.stage == stage for stage in (Stage.PLAN, Stage.WAIT))
    return [
        _matches(events.start_ns, steps.plan_ns, plans),
        _matches(events.start_ns, steps.launch_ns, ~plans & ~waits),
        _matches(events.start_ns, steps.land_ns, ~plans & ~waits),
    ]


def _lane(
    start_ns: np.ndarray, end_ns: np.ndarray, window: Window
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of these ascending stretches are left when each begins behind the one before it, and
    their starts and ends: slices of one track must not overlap."""
    end_ns = np.maximum.accumulate(end_ns)
    before_ns = np.concatenate(([window.from_ns], end_ns))[:-1]
    start_ns = np.maximum(np.maximum(start_ns, before_ns), window.from_ns)
    left = np.flatnonzero(start_ns < end_ns)
    return left, start_ns[left], end_ns[left]


def _runner(steps: Steps, window: Window) -> Iterator[Event]:
    told = steps.where((steps.received_ns > 0) & (steps.submitted_ns > 0))
    if not len(told):
        return iter(())
    left, *times = _lane(told.received_ns, told.submitted_ns, window)
    args = map(_Of, told.step[left].tolist())
    return _slices((ENGINE, RUNNER), "runner", repeat("submit"), window.spans(*times), args)


def _held(events: Events, window: Window) -> Iterator[Event]:
    """What kept the runner, or the device behind it, from going on."""
    cause, start_ns, end_ns = events.held
    left, *times = _lane(start_ns, end_ns, window)
    names = [CAUSES[i] for i in cause[left].tolist()]
    return _slices((ENGINE, HELD), "held", names, window.spans(*times), repeat(None))


def _device(events: Events, steps: Steps, window: Window) -> Iterator[Event]:
    names = ["step"] * len(events.step)
    args = [_Run(step, step) for step in events.step.tolist()]
    at, found = _matches(steps.step, events.step)
    known = steps.where(at[found])
    columns = (found, known.kind, known.rows, known.chunk_tokens)
    for i, kind, rows, chunk in zip(*(column.tolist() for column in columns), strict=True):
        names[i] = _KINDS[kind]
        args[i].rows, args[i].prompt_tokens = rows, chunk
    times = window.spans(events.busy_start_ns, events.busy_end_ns)
    return _slices((DEVICE, COMPUTE), "kernel", names, times, args)


def _idle(spans: IdleSpans, window: Window) -> Iterator[Event]:
    names = [CAUSES[cause] for cause in spans.cause.tolist()]
    times = window.spans(spans.start_ns, spans.end_ns)
    return _slices((DEVICE, IDLE), "idle", names, times, repeat(None))


def _landings(steps: Steps, window: Window) -> Iterator[Event]:
    """From the end of a step's run until the host has taken its result."""
    ran = steps.where(steps.end_ns > 0)
    if not len(ran):
        return iter(())
    left, *times = _lane(ran.end_ns, ran.land_ns, window)
    args = map(_Of, ran.step[left].tolist())
    return _slices((DEVICE, LANDING), "landing", repeat("land"), window.spans(*times), args)


# --- async tracks -----------------------------------------------------------------------------


def _step_args(steps: Steps, window: Window) -> list[StepArgs]:
    def us(column: np.ndarray) -> list[float]:
        return window.us(column).tolist()

    def told(column: np.ndarray) -> list[float | None]:
        return [t if at else None for t, at in zip(us(column), column.tolist(), strict=True)]

    reasons = [REASONS[r].value if r >= 0 else None for r in steps.reason.tolist()]
    counts = (steps.step, steps.rows, steps.chunk_tokens, steps.samples, steps.flights)
    columns = (
        *(column.tolist() for column in counts),
        *(us(column) for column in (steps.plan_ns, steps.launch_ns, steps.land_ns)),
        *map(told, (steps.received_ns, steps.submitted_ns, steps.start_ns, steps.end_ns)),
        reasons,
    )
    return [StepArgs(*row) for row in zip(*columns, strict=True)]


def _steps(steps: Steps, window: Window) -> Iterator[Event]:
    """From plan to landing; D of them at a time."""
    starts = window.us(np.maximum(steps.plan_ns, window.from_ns)).tolist()
    lands = window.us(steps.land_ns).tolist()
    for args, kind, start, land in zip(
        _step_args(steps, window), steps.kind.tolist(), starts, lands, strict=True
    ):
        name, step = _KINDS[kind], args.step
        yield Event("b", name, ENGINE, SCHEDULER, start, None, "step", step, args)
        yield Event("e", name, ENGINE, SCHEDULER, land, None, "step", step)


_ENDED = {Happened.FINISHED: "finished", Happened.ABORTED: "aborted", Happened.FAILED: "failed"}


def _requests(found: Sequence[Life], window: Window) -> Iterator[Event]:
    def event(ph: str, name: str, life: Life, at_ns: int, args: Any = None) -> Event:
        ts = window.us(max(at_ns, window.from_ns))
        return Event(ph, name, REQUESTS, 0, ts, None, "request", life.rid, args)

    for life in found:
        if life.end_ns <= max(life.start_ns, window.from_ns):
            continue
        counts = {
            name: getattr(life, name)
            for name in ("prompt_tokens", "cached_tokens", "output_tokens")
            if getattr(life, name) >= 0
        }
        end = {"end": _ENDED[life.end]} if life.end is not None else {}
        # it was there before: what follows is not its arrival
        cut = {"cut": True} if life.start_ns < window.from_ns or life.prompt_tokens < 0 else {}
        yield event("b", "request", life, life.start_ns, {"rid": life.rid, **counts, **end, **cut})
        for phase, start_ns, end_ns in life.phases:
            if end_ns > max(start_ns, window.from_ns):
                name = phase.name.lower()
                yield event("b", name, life, start_ns)
                yield event("e", name, life, end_ns)
        yield event("e", "request", life, life.end_ns)


# --- flows, counters, instants ----------------------------------------------------------------


def _flows(events: Events, steps: Steps, window: Window) -> Iterator[Event]:
    """One arrow a step through those of its slices that are there, each bound at its start."""
    at, ran = _matches(events.step, steps.step)
    device_ns, landing_ns = np.zeros((2, len(steps)), np.int64)
    device_ns[ran] = events.busy_start_ns[at[ran]]
    ended = np.flatnonzero(steps.end_ns > 0)
    left, start_ns, _ = _lane(steps.end_ns[ended], steps.land_ns[ended], window)
    landing_ns[ended[left]] = start_ns
    host = (ENGINE, SCHEDULER)
    tracks = (host, host, (DEVICE, COMPUTE), (DEVICE, LANDING), host)
    columns = (steps.plan_ns, steps.launch_ns, device_ns, landing_ns, steps.land_ns)
    plan, launch, retire = (found for _, found in _host_posts(events, steps))
    inside = np.zeros((len(steps), 5), bool)
    for post, found in enumerate((plan, launch, ran, ended[left], retire)):
        inside[found, post] = True
    inside[inside.sum(1) < 2] = False  # an arrow has two ends
    first, last = inside.argmax(1), 4 - inside[:, ::-1].argmax(1)
    for post, (pid, tid) in enumerate(tracks):
        rows = np.flatnonzero(inside[:, post])
        kinds = np.where(first[rows] == post, "s", np.where(last[rows] == post, "f", "t")).tolist()
        points = (kinds, steps.step[rows].tolist(), window.us(columns[post][rows]).tolist())
        for ph, step, ts in zip(*points, strict=True):
            yield Event(ph, "step", pid, tid, ts, None, "flow", step, None, "", "e")


class _Value(msgspec.Struct, gc=False):
    value: float


class _Size(msgspec.Struct, gc=False):
    decode_rows: int
    prompt_tokens: int


class _Load(msgspec.Struct, gc=False):
    waiting: int
    running: int


def _counter(
    name: str,
    kind: Callable[..., msgspec.Struct],
    at_ns: np.ndarray,
    values: Sequence[np.ndarray],
    window: Window,
) -> Iterator[Event]:
    """Values that hold from these ascending moments on; of several at one moment the last."""
    if not len(at_ns):
        return iter(())
    last = np.append(at_ns[1:] != at_ns[:-1], [True])
    # the one that holds when the window opens is told there
    after = np.append(at_ns[1:] > window.from_ns, [True])
    chosen = last & after & (at_ns <= window.until_ns)
    ts = window.us(np.maximum(at_ns[chosen], window.from_ns)).tolist()
    args = map(kind, *(column[chosen].tolist() for column in values))
    pairs = zip(ts, args, strict=True)
    return (Event("C", name, ENGINE, 0, at, None, "counter", None, arg) for at, arg in pairs)


def _counters(events: Events, steps: Steps, known: Lives, window: Window) -> Iterator[Event]:
    sizes = (steps.rows, steps.chunk_tokens)
    yield from _counter("step size", _Size, steps.launch_ns, sizes, window)
    yield from _counter("tokens of a step", _Value, steps.land_ns, (steps.samples,), window)
    at_ns, flights = _in_the_air(steps)
    yield from _counter("flights", _Value, at_ns, (flights,), window)
    if len(events.step) and len(events.stage):
        # clipped: the first step's window begins where the lanes do
        cuts_ns = np.concatenate((events.start_ns[:1], events.busy_end_ns))
        exposed_us = exposed_ns(tally(events, cuts_ns)) / 1000
        yield from _counter("host exposed, us", _Value, events.busy_end_ns, (exposed_us,), window)
    if known.load:
        at_ns, waiting, running = np.array(known.load, np.int64).T
        yield from _counter("requests", _Load, at_ns, (waiting, running), window)


def _in_the_air(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Flights after each launch and each landing, of steps that have landed since; a landing comes
    before a launch at the same moment."""
    count = len(steps)
    at_ns = np.concatenate((steps.land_ns, steps.launch_ns))
    change = np.concatenate((np.full(count, -1), np.full(count, 1)))
    order = np.argsort(at_ns, kind="stable")
    return at_ns[order], np.cumsum(change[order])


def _instants(
    steps: Steps, found: Sequence[Life], snapshot: Snapshot, window: Window
) -> Iterator[Event]:
    def instant(name: str, cat: str, at_ns: int, args: Any) -> Event:
        ts = window.us(at_ns)
        return Event("i", name, ENGINE, SCHEDULER, ts, None, cat, None, args, "t")

    held = steps.where((steps.reason >= 0) & (steps.launch_ns >= window.from_ns))
    columns = (held.step, held.reason, held.launch_ns)
    for step, reason, at_ns in zip(*(column.tolist() for column in columns), strict=True):
        yield instant(REASONS[reason].value, "sync", at_ns, _Of(step))
    named = {Happened.PREEMPTED: "preempt", Happened.ABORTED: "abort", Happened.FAILED: "fail"}
    events = snapshot.requests
    chosen = np.isin(events.what, list(named)) & (events.at_ns >= window.from_ns)
    columns = (events.at_ns[chosen], events.rid[chosen], events.what[chosen])
    for at_ns, rid, what in zip(*(column.tolist() for column in columns), strict=True):
        yield instant(named[Happened(what)], "request", at_ns, {"rid": rid})
