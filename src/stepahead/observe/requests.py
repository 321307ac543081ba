"""What happened to requests and when, and how long it took them.

One event at a time; for the rows of a step, what they have in common.  In a steady step all rows
had their last token in the step before, so one gap is that of each of them: a row's own time is
looked at only when rows come or go.  For one thread, the engine's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from stepahead.observe.latency import BUCKETS, Distribution, Histogram


class Happened(IntEnum):
    """Kinds of events, with what their `value` is."""

    ARRIVED = 0  # positions of its prompt
    ADMITTED = 1  # positions found in the prefix cache; again after each preemption
    FIRST_TOKEN = 2  # 0
    PREEMPTED = 3  # 0
    FINISHED = 4  # output tokens
    ABORTED = 5  # output tokens
    FAILED = 6  # output tokens


ENDS = ("stop", "length", "abort", "error")  # what `Ended.reason` indexes
_KINDS = (Happened.FINISHED, Happened.FINISHED, Happened.ABORTED, Happened.FAILED)
_STEADY = 1024  # steps that give to the same rows before their gaps are put into buckets
_FINISHED = 2  # how many of ENDS are those of a whole answer


@dataclass(frozen=True, eq=False)
class RequestEvents:
    """Events of requests, oldest first; int64[n] each.  `what` holds values of Happened."""

    at_ns: np.ndarray
    rid: np.ndarray
    what: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.at_ns)


@dataclass(frozen=True, eq=False)
class EndedRequests:
    """Requests that have ended, in that order; int64[n] each.

    `reason` indexes ENDS.  `admitted_ns` is when it first entered a slot, `first_ns` when its first
    token was given, -1 where it never came so far; `cached_tokens` are of its first admission.
    """

    rid: np.ndarray
    reason: np.ndarray
    arrived_ns: np.ndarray
    admitted_ns: np.ndarray
    first_ns: np.ndarray
    ended_ns: np.ndarray
    prompt_tokens: np.ndarray
    cached_tokens: np.ndarray
    output_tokens: np.ndarray
    preemptions: np.ndarray

    def __len__(self) -> int:
        return len(self.rid)


_ENDED = len(fields(EndedRequests))


@dataclass(frozen=True, eq=False)
class RequestTotals:
    """All counts since the start, as they stood.

    `prompt_tokens` and, of them, `cached_tokens` are those of requests at their first admission.
    `ends` counts by reason.  `spreads` holds a Distribution for each name of BUCKETS: of those that
    were admitted (queue), had their first token (prefill, ttft), had another one (itl, one value a
    token), and of whole answers (decode, e2e, prompt_tokens, output_tokens).
    """

    arrived: int
    admitted: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    ends: dict[str, int]
    spreads: dict[str, Distribution]

    @property
    def generated_tokens(self) -> int:
        """Tokens given: each is the first of its request, or has a gap before it."""
        return self.spreads["ttft"].count + self.spreads["itl"].count


class _Open:
    """A request that has not ended."""

    __slots__ = ("admitted_ns", "arrived_ns", "cached", "first_ns", "preemptions", "prompt")

    def __init__(self, arrived_ns: int, prompt: int) -> None:
        self.arrived_ns = arrived_ns
        self.prompt = prompt
        self.admitted_ns = self.first_ns = -1
        self.cached = self.preemptions = 0


class RequestLog:
    """The last `keep` events, the last `keep_ended` requests that ended, and counts of it all.

    It is the scheduler's witness too: `admitted` and `preempted` are called while a step is
    planned.
    """

    def __init__(
        self, clock_ns: Callable[[], int], keep: int = 65536, keep_ended: int = 8192
    ) -> None:
        self.ended_count = 0
        self._clock_ns = clock_ns
        self._keep = keep
        self._keep_ended = keep_ended
        self._flat = array("q")
        self._ended = array("q")
        self._open: dict[int, _Open] = {}
        self._arrived = self._admitted = self._preemptions = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._ends = dict.fromkeys(ENDS, 0)
        self._spreads = {name: Histogram(name) for name in BUCKETS}
        self._gaps = self._spreads["itl"]
        # The last delivery: this very array and its ids that have not ended.  And when the steps
        # were that gave to just these rows, the last of them as well.
        self._rids = np.zeros(0, np.int64)
        self._heard: set[int] = set()
        self._heard_ns = array("q", (0,))
        self._left_ns: dict[int, int] = {}  # when rows that were left out had their last token

    # --- events -----------------------------------------------------------------------------

    def arrived(self, rid: int, prompt_tokens: int) -> None:
        """A request has come in."""
        now_ns = self._clock_ns()
        self._note(now_ns, rid, Happened.ARRIVED, prompt_tokens)
        self._open[rid] = _Open(now_ns, prompt_tokens)
        self._arrived += 1

    def admitted(self, rid: int, cached_tokens: int) -> None:
        """It has a slot, and so many of its positions are computed already."""
        now_ns = self._clock_ns()
        self._note(now_ns, rid, Happened.ADMITTED, cached_tokens)
        found = self._open.get(rid)
        if found is None or found.admitted_ns >= 0:
            return  # again, after a preemption
        found.admitted_ns, found.cached = now_ns, cached_tokens
        self._admitted += 1
        self._prompt_tokens += found.prompt
        self._cached_tokens += cached_tokens
        self._spreads["queue"].add(now_ns - found.arrived_ns)

    def preempted(self, rid: int) -> None:
        """It must give its slot back and wait again."""
        self._note(self._clock_ns(), rid, Happened.PREEMPTED, 0)
        self._preemptions += 1
        if (found := self._open.get(rid)) is not None:
            found.preemptions += 1

    def ended(self, rid: int, reason: str, output_tokens: int) -> None:
        """Its terminal message is told; after `delivered` of the same step."""
        place = ENDS.index(reason)
        now_ns = self._clock_ns()
        self._note(now_ns, rid, _KINDS[place], output_tokens)
        # an interrupt may have come between a request's arrival and our hearing of it
        found = self._open.pop(rid, None) or _Open(now_ns, 0)
        self._heard.discard(rid)
        self._left_ns.pop(rid, None)
        self._ends[reason] += 1
        if place < _FINISHED and found.first_ns >= 0:  # else nobody knows when it began
            self._measure(found, now_ns, output_tokens)
        times_ns = (found.arrived_ns, found.admitted_ns, found.first_ns, now_ns)
        counts = (found.prompt, found.cached, output_tokens, found.preemptions)
        self._ended.extend((rid, place, *times_ns, *counts))
        self.ended_count += 1
        if len(self._ended) >= 2 * _ENDED * self._keep_ended:
            del self._ended[: -_ENDED * self._keep_ended]

    def _measure(self, found: _Open, now_ns: int, output_tokens: int) -> None:
        spreads = self._spreads
        spreads["e2e"].add(now_ns - found.arrived_ns)
        spreads["decode"].add(now_ns - found.first_ns)
        spreads["prompt_tokens"].add(found.prompt)
        spreads["output_tokens"].add(output_tokens)

    def _note(self, at_ns: int, rid: int, what: Happened, value: int) -> None:
        self._flat.extend((at_ns, rid, what, value))
        if len(self._flat) >= 8 * self._keep:
            del self._flat[: -4 * self._keep]

    # --- tokens -----------------------------------------------------------------------------

    def delivered(self, rids: np.ndarray, first: Sequence[int], together: int = 0) -> None:
        """Each of `rids` int64[n], all different, is given a token now; those in `first` their
        first one.  The same array as last time says that these are the same requests.  `together`
        more tokens came right behind one of these, and have a gap of nothing."""
        if together:
            self._gaps.add(0, together)
        if rids is self._rids:
            self._heard_ns.append(self._clock_ns())
            if len(self._heard_ns) > _STEADY:
                self._settle()
        elif len(rids):
            self._regroup(rids, first)

    def _settle(self) -> None:
        """The gaps of the steps that gave to the same rows become known; only the last stays."""
        self._gaps.add_all(np.diff(np.array(self._heard_ns, np.int64)), len(self._rids))
        del self._heard_ns[:-1]

    def _regroup(self, rids: np.ndarray, first: Sequence[int]) -> None:
        if len(self._heard_ns) > 1:
            self._settle()
        before_ns, before, these = self._heard_ns[0], self._heard, set(rids.tolist())
        came, now_ns = these - before, self._clock_ns()
        for rid in first:
            self._first(rid, now_ns)
        for rid in before - these:
            self._left_ns[rid] = before_ns
        if stayed := len(these) - len(came):
            self._gaps.add(now_ns - before_ns, stayed)
        for rid in came:
            left_ns = self._left_ns.pop(rid, None)
            if left_ns is not None:
                self._gaps.add(now_ns - left_ns)
        self._rids, self._heard, self._heard_ns[0] = rids, these, now_ns

    def _first(self, rid: int, now_ns: int) -> None:
        self._note(now_ns, rid, Happened.FIRST_TOKEN, 0)
        if (found := self._open.get(rid)) is None:
            return
        found.first_ns = now_ns
        self._spreads["ttft"].add(now_ns - found.arrived_ns)
        self._spreads["prefill"].add(now_ns - found.admitted_ns)

    # --- reading ----------------------------------------------------------------------------

    def recent(self) -> RequestEvents:
        """The events kept."""
        flat = np.array(self._flat[-4 * self._keep :], np.int64)
        return RequestEvents(*flat.reshape(-1, 4).T)

    def ends(self, since: int = 0) -> EndedRequests:
        """Requests that ended after the first `since` ones, as far as they are kept."""
        count = min(self._keep_ended, max(0, self.ended_count - since))
        flat = np.array(self._ended[len(self._ended) - count * _ENDED :], np.int64)
        return EndedRequests(*flat.reshape(-1, _ENDED).T)

    def totals(self) -> RequestTotals:
        """A copy of all counts."""
        self._settle()
        return RequestTotals(
            self._arrived,
            self._admitted,
            self._preemptions,
            self._prompt_tokens,
            self._cached_tokens,
            dict(self._ends),
            {name: histogram.taken() for name, histogram in self._spreads.items()},
        )
