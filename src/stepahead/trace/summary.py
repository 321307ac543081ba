"""What a trace says, in numbers: stages, device, bubbles, kinds of steps, time per token.

Over the time in which both lanes are known: from the first host slice to the end of the device's
last run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stepahead.observe.books import exposed_ns, hidden_ns, waiting_ns
from stepahead.observe.causes import BUSY, Events, no_cells, tally
from stepahead.observe.idle import IdleSpans
from stepahead.observe.probes import Probes, probes
from stepahead.observe.stages import REST, Stage
from stepahead.observe.steps import REASONS, Kind, Steps
from stepahead.sync import Cause
from stepahead.trace.read import Recorded

BUBBLES = 8
_LISTS = ("stages", "bubbles", "kinds")


@dataclass(frozen=True)
class StageTime:
    """A stage of the host: how often, and its time with the device busy and with it idle."""

    name: str
    count: int
    hidden_ns: int
    exposed_ns: int
    rests: bool

    @property
    def total_ns(self) -> int:
        """All of its time."""
        return self.hidden_ns + self.exposed_ns


@dataclass(frozen=True)
class Bubble:
    """The device idle between two steps, but for want of work; the largest of `causes` first."""

    after: int
    before: int
    idle_ns: int
    causes: dict[str, int]
    at_us: float


@dataclass(frozen=True)
class KindOfStep:
    """Medians of the steps of one kind; `period_us` since the run before ended, 0 if unknown."""

    kind: str
    steps: int
    rows: float
    prompt_tokens: float
    device_us: float
    period_us: float


@dataclass(frozen=True)
class TraceSummary:
    """A trace in numbers; times in ns, of the whole known time unless named otherwise.

    `probes` are those of its steps.
    """

    about: dict[str, Any]
    wall_ns: int
    steps: int
    busy_ns: int
    hidden_ns: int
    exposed_ns: int
    waiting_ns: int
    stages: list[StageTime]
    idle_ns: dict[str, int]
    bubbles: list[Bubble]
    kinds: list[KindOfStep]
    syncs: dict[str, int]
    probes: Probes

    def as_dict(self) -> dict[str, Any]:
        """Its JSON; probes as in `/state`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        parts = {name: [asdict(one) for one in values[name]] for name in _LISTS}
        return values | parts | {"probes": self.probes.as_dict()}

    def per_step_us(self, ns: int) -> float:
        """µs a step."""
        return ns / 1e3 / self.steps if self.steps else 0.0


def known(found: Recorded) -> tuple[int, int]:
    """The time in which both lanes are known; empty without a device run."""
    events = found.snapshot.events
    if not len(events.stage) or not len(events.step):
        return 0, 0
    return int(events.start_ns[0]), int(events.busy_end_ns[-1])


def summarise(found: Recorded) -> TraceSummary:
    """The summary of a trace; all zero where nothing landed in it."""
    snapshot = found.snapshot
    events, steps = snapshot.events, snapshot.steps
    from_ns, to_ns = known(found)
    cells = no_cells(1)[0]
    if from_ns < to_ns:
        cells = tally(events, np.array([from_ns, to_ns]))[0]
    return TraceSummary(
        about=dict(snapshot.about),
        wall_ns=to_ns - from_ns,
        steps=len(events.step),
        busy_ns=int(cells[:, BUSY].sum()),
        hidden_ns=int(hidden_ns(cells)),
        exposed_ns=int(exposed_ns(cells)),
        waiting_ns=int(waiting_ns(cells)),
        stages=_stages(events, cells, to_ns),
        idle_ns=found.idle.within(from_ns, to_ns).by_cause(),
        bubbles=bubbles(events, found.idle, found.from_ns),
        kinds=_kinds(events, steps),
        syncs=_syncs(steps),
        probes=probes(snapshot),
    )


def _stages(events: Events, cells: np.ndarray, to_ns: int) -> list[StageTime]:
    counts = np.bincount(events.stage[events.start_ns < to_ns], minlength=len(Stage)).tolist()
    return [
        StageTime(
            stage.name.lower(),
            counts[stage],
            int(cells[stage, BUSY]),
            int(cells[stage, :BUSY].sum()),
            stage in REST,
        )
        for stage in Stage
        if counts[stage]
    ]


def bubbles(events: Events, idle: IdleSpans, zero_ns: int, most: int = BUBBLES) -> list[Bubble]:
    """The longest between two runs, without the time in which there was nothing to do."""
    if len(events.step) < 2:
        return []
    idle = idle.but(Cause.NO_WORK).within(int(events.busy_end_ns[0]), int(events.busy_end_ns[-1]))
    gap = np.searchsorted(events.busy_end_ns, idle.start_ns, side="right") - 1
    took_ns = np.bincount(gap, idle.end_ns - idle.start_ns, len(events.step) - 1).astype(np.int64)
    longest = np.argsort(-took_ns, kind="stable")[:most]
    return [_bubble(events, idle, i, zero_ns) for i in longest.tolist() if took_ns[i] > 0]


def _bubble(events: Events, idle: IdleSpans, i: int, zero_ns: int) -> Bubble:
    start_ns, end_ns = int(events.busy_end_ns[i]), int(events.busy_start_ns[i + 1])
    causes = idle.within(start_ns, end_ns).by_cause()
    return Bubble(
        after=int(events.step[i]),
        before=int(events.step[i + 1]),
        idle_ns=sum(causes.values()),
        causes=causes,
        at_us=(start_ns - zero_ns) / 1e3,
    )


def _kinds(events: Events, steps: Steps) -> list[KindOfStep]:
    run_ns = events.busy_end_ns - events.busy_start_ns
    period_ns = np.append([-1], np.diff(events.busy_end_ns)) if len(events.step) else run_ns
    found = []
    _, mine, theirs = np.intersect1d(steps.step, events.step, return_indices=True)
    for kind in Kind:
        chosen = steps.kind[mine] == kind
        if chosen.any():
            periods = period_ns[theirs[chosen]]
            periods = periods[periods >= 0]
            found.append(
                KindOfStep(
                    kind.name.lower(),
                    int(chosen.sum()),
                    float(np.median(steps.rows[mine[chosen]])),
                    float(np.median(steps.chunk_tokens[mine[chosen]])),
                    float(np.median(run_ns[theirs[chosen]])) / 1e3,
                    float(np.median(periods)) / 1e3 if len(periods) else 0.0,
                )
            )
    return found


def _syncs(steps: Steps) -> dict[str, int]:
    held = np.bincount(steps.reason[steps.reason >= 0], minlength=len(REASONS)).tolist()
    return {reason.value: n for reason, n in zip(REASONS, held, strict=True) if n}
