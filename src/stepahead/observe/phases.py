"""Events of requests as stretches of time: queued, prefill, decode, one after another.

What began before the events that are kept began, as far as is known, at their start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from stepahead.observe.requests import Happened, RequestEvents


class Phase(IntEnum):
    """What a request is at."""

    QUEUED = 0  # for a slot: at first, or again after a preemption
    PREFILL = 1
    DECODE = 2


_ENDS = (Happened.FINISHED, Happened.ABORTED, Happened.FAILED)
# the phase that an event ends, where it is the first that is known of a request
_BEFORE = {
    Happened.ADMITTED: Phase.QUEUED,
    Happened.FIRST_TOKEN: Phase.PREFILL,
}


@dataclass
class Life:
    """One request, as far as its events are known; times in ns.

    `phases` are (phase, start, end), contiguous.  `end` is None while it lives.  Counts of tokens
    are -1 where no event tells them.
    """

    rid: int
    start_ns: int
    end_ns: int
    phases: list[tuple[Phase, int, int]] = field(default_factory=list)
    end: Happened | None = None
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1


@dataclass(frozen=True)
class Lives:
    """Requests in the order of their first event, and how many waited and ran after each event:
    (at_ns, waiting, running)."""

    lives: list[Life]
    load: list[tuple[int, int, int]]


@dataclass
class _Open:
    life: Life
    phase: Phase
    since_ns: int
    decoded: bool  # it had its first token: a prefill after that is a preempted request's

    def enter(self, phase: Phase, at_ns: int) -> None:
        if phase is not self.phase:
            self.leave(at_ns)
            self.phase, self.since_ns = phase, at_ns

    def leave(self, at_ns: int) -> None:
        self.life.phases.append((self.phase, self.since_ns, at_ns))


def lives(events: RequestEvents, from_ns: int, until_ns: int) -> Lives:
    """The requests of `events`; who is not heard of before an event was there from `from_ns` on.

    Nobody says when a preempted request has its prompt again: once it is back it decodes.
    """
    found: list[Life] = []
    open_now: dict[int, _Open] = {}
    load: list[tuple[int, int, int]] = []
    unheard = [0, 0]  # waiting and running from the start, learnt on the way
    waiting = running = 0
    columns = (events.at_ns, events.rid, events.what, events.value)
    for at_ns, rid, what, value in zip(*(column.tolist() for column in columns), strict=True):
        entry = open_now.get(rid)
        if entry is None:
            entry = open_now[rid] = _begin(rid, Happened(what), at_ns, from_ns)
            found.append(entry.life)
            if what != Happened.ARRIVED:
                unheard[entry.phase is not Phase.QUEUED] += 1
            else:
                waiting += 1
        queued = entry.phase is Phase.QUEUED
        _apply(entry, Happened(what), at_ns, value)
        if what in _ENDS:
            del open_now[rid]
            waiting, running = waiting - queued, running - (not queued)
        elif queued is not (entry.phase is Phase.QUEUED):
            waiting, running = waiting + (-1 if queued else 1), running + (1 if queued else -1)
        load.append((at_ns, waiting, running))
    for entry in open_now.values():
        entry.leave(max(until_ns, entry.since_ns))
        entry.life.end_ns = max(until_ns, entry.since_ns)
    return Lives(found, [(at, w + unheard[0], r + unheard[1]) for at, w, r in load])


def _begin(rid: int, what: Happened, at_ns: int, from_ns: int) -> _Open:
    start_ns = at_ns if what is Happened.ARRIVED else min(from_ns, at_ns)
    phase = Phase.QUEUED if what is Happened.ARRIVED else _BEFORE.get(what, Phase.DECODE)
    return _Open(Life(rid, start_ns, start_ns), phase, start_ns, phase is Phase.DECODE)


def _apply(entry: _Open, what: Happened, at_ns: int, value: int) -> None:
    life = entry.life
    if what is Happened.ARRIVED:
        life.prompt_tokens = value
    elif what is Happened.ADMITTED:
        if life.cached_tokens < 0:  # the first time: after a preemption its own pages are cached
            life.cached_tokens = value
        entry.enter(Phase.DECODE if entry.decoded else Phase.PREFILL, at_ns)
    elif what is Happened.FIRST_TOKEN:
        entry.decoded = True
        entry.enter(Phase.DECODE, at_ns)
    elif what is Happened.PREEMPTED:
        entry.enter(Phase.QUEUED, at_ns)
    else:
        life.end, life.end_ns, life.output_tokens = what, at_ns, value
        entry.leave(at_ns)
