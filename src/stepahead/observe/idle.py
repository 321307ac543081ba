"""The device's idle time as stretches, each with its cause; for timelines and lists of bubbles."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepahead.observe.causes import BUSY, CAUSES, Events, pieces
from stepahead.observe.stages import Stage
from stepahead.sync import Cause


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class IdleSpans:
    """Stretches in which the device idled for one cause, ascending and disjoint; int64[n] each.

    `cause` indexes CAUSES.
    """

    start_ns: np.ndarray = field(default_factory=_none)
    end_ns: np.ndarray = field(default_factory=_none)
    cause: np.ndarray = field(default_factory=_none)

    def by_cause(self) -> dict[str, int]:
        """ns of each cause that occurs, largest first."""
        took_ns = np.bincount(self.cause, self.end_ns - self.start_ns, len(CAUSES))
        found = {name: int(ns) for name, ns in zip(CAUSES, took_ns, strict=True) if ns}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def within(self, from_ns: int, to_ns: int) -> IdleSpans:
        """Their parts in that time."""
        start_ns, end_ns = np.maximum(self.start_ns, from_ns), np.minimum(self.end_ns, to_ns)
        left = start_ns < end_ns
        return IdleSpans(start_ns[left], end_ns[left], self.cause[left])

    def but(self, cause: Cause) -> IdleSpans:
        """Those of every other cause."""
        left = self.cause != cause
        return IdleSpans(self.start_ns[left], self.end_ns[left], self.cause[left])


def idle_spans(events: Events) -> IdleSpans:
    """All idle time from the first host segment on.

    After the device's last known run only up to the end of the last segment in which nothing was
    to be done: a flight in the air may have begun.
    """
    if not len(events.stage):
        return IdleSpans()
    until_ns = max(known_until(events), int(events.start_ns[0]))
    cut = pieces(events, np.array([events.start_ns[0], until_ns]))
    idle = (cut.device != BUSY) & (cut.start_ns < cut.end_ns)
    return _joined(cut.start_ns[idle], cut.end_ns[idle], cut.device[idle])


def known_until(events: Events) -> int:
    """Up to where nothing of the device's lane can change any more."""
    last_ns = int(events.busy_end_ns[-1]) if len(events.step) else 0
    rest_ns = events.end_ns[events.stage == Stage.IDLE]
    return max(last_ns, int(rest_ns[-1]) if len(rest_ns) else 0)


def _joined(start_ns: np.ndarray, end_ns: np.ndarray, cause: np.ndarray) -> IdleSpans:
    """Neighbours of one cause made one."""
    if not len(start_ns):
        return IdleSpans()
    new = np.append([True], (start_ns[1:] != end_ns[:-1]) | (cause[1:] != cause[:-1]))
    firsts = np.flatnonzero(new)
    lasts = np.append(firsts[1:], len(new)) - 1
    return IdleSpans(start_ns[firsts], end_ns[lasts], cause[firsts])
