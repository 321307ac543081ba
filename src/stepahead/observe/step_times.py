"""Times of steps, one with another: each step's window, pairs that follow on one another, and gaps
between tokens.  Columns in, columns out; judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepahead.observe.causes import BUSY, Events, no_cells, pieces
from stepahead.observe.stages import WORK, Stage
from stepahead.observe.steps import Kind, Steps

LONGEST_NS = 2_000_000_000  # from launch to launch; what is longer was a pause
HIDDEN, EXPOSED, BLOCKED, _AT_REST = range(4)
_HOST = np.array([EXPOSED if stage in WORK else _AT_REST for stage in Stage])
_HOST[Stage.WAIT] = BLOCKED


@dataclass(frozen=True, eq=False)
class Windows:
    """The host's time in the window of each of `steps`: `host_ns` int64[n, 4], hidden, exposed,
    blocked, at rest; and `cells` int64[s, 9], both books of all of them as in `causes.tally`."""

    steps: Steps
    host_ns: np.ndarray
    cells: np.ndarray


def windows(steps: Steps, events: Events, first: int) -> Windows:
    """Of the steps from number `first` of them on, as far as the whole window is known.

    The very first step's window begins where its planning did.
    """
    # ascending, whatever a device says of the times of its steps
    cuts_ns = np.maximum.accumulate(np.concatenate((steps.plan_ns[:1], steps.end_ns)))
    first = max(first, int(np.searchsorted(cuts_ns[:-1], events.start_ns[0])))
    chosen, cuts_ns = steps.where(slice(first, None)), cuts_ns[first:]
    count = len(chosen)
    if not count:
        return Windows(chosen, np.zeros((0, 4), np.int64), no_cells(1)[0])
    cut = pieces(events, cuts_ns)
    took_ns = cut.end_ns - cut.start_ns
    window = np.minimum(np.searchsorted(cuts_ns, cut.start_ns, side="right"), count) - 1
    host = _HOST[cut.stage]
    host[(host == EXPOSED) & (cut.device == BUSY)] = HIDDEN
    # sums of floats are exact here: there are no 104 days in a window
    host_ns = np.bincount(4 * window + host, took_ns, 4 * count).astype(np.int64)
    cell = cut.stage * (BUSY + 1) + cut.device
    cells = np.bincount(cell, took_ns, len(Stage) * (BUSY + 1)).astype(np.int64)
    return Windows(chosen, host_ns.reshape(-1, 4), cells.reshape(len(Stage), -1))


class Pairs:
    """Steps, and which of them follow on one another.

    Two steps are *linked* when their numbers are consecutive and the host was never without work
    from the launch of the first to that of the second.
    """

    def __init__(self, steps: Steps, events: Events) -> None:
        self.steps = steps
        self._known_ns = int(events.start_ns[0])
        self._rests_ns = events.start_ns[events.stage == Stage.IDLE]

    def linked(self) -> np.ndarray:
        """Of each step but the last, whether the next one follows on it: bool[n - 1]."""
        launch_ns = self.steps.launch_ns
        return (np.diff(self.steps.step) == 1) & self.without_rest(launch_ns[:-1], launch_ns[1:])

    def contiguous(self, at_ns: np.ndarray) -> np.ndarray:
        """The rule for intervals of `at_ns` int64[n]: bool[n - 1].

        Kind unchanged, steps consecutive, no time without work, shorter than LONGEST_NS.
        """
        steps = self.steps
        return (
            (np.diff(steps.kind) == 0)
            & (np.diff(steps.step) == 1)
            & (np.diff(at_ns) < LONGEST_NS)
            & self.without_rest(at_ns[:-1], at_ns[1:])
        )

    def without_rest(self, from_ns: np.ndarray, to_ns: np.ndarray) -> np.ndarray:
        """Whether the host always had work from then to then; False where that is not known."""
        before, after = (np.searchsorted(self._rests_ns, t, side="right") for t in (from_ns, to_ns))
        return (before == after) & (from_ns >= self._known_ns)


@dataclass(frozen=True, eq=False)
class Gaps:
    """Times from one token of a request to its next, int64[g] each, but for `prompts` bool[g].

    weight   rows that waited so long
    kind     of the step that ended the wait
    prompts  whether prompt positions were computed in it or in steps it spanned
    """

    ns: np.ndarray
    weight: np.ndarray
    kind: np.ndarray
    prompts: np.ndarray


def token_gaps(pairs: Pairs) -> Gaps:
    """Gaps between tokens, from the sizes of steps alone: exact while nobody ends or is preempted.

    A step that gives tokens is followed, for its rows, by the next step that has decode rows.
    First tokens of the prefill steps between two of those join the later one; its other rows had
    their last token in the earlier one.
    """
    steps = pairs.steps
    decoding = np.flatnonzero(steps.rows > 0)
    at = np.arange(len(steps))
    place = np.searchsorted(decoding, at, side="right")
    at = at[place < len(decoding)]
    after = decoding[place[place < len(decoding)]]
    firsts = np.where(steps.rows > 0, 0, steps.samples)
    joined = np.concatenate(([0], np.cumsum(firsts)))
    others = steps.rows[after] - (joined[after] - joined[at + 1])
    weight = np.maximum(np.where(steps.rows[at] > 0, others, firsts[at]), 0)
    land_ns = steps.land_ns
    known = (
        (weight > 0)
        & (steps.step[after] - steps.step[at] == after - at)
        & pairs.without_rest(land_ns[at], land_ns[after])
    )
    at, after, weight = at[known], after[known], weight[known]
    kind = steps.kind[after]
    prompts = (kind == Kind.MIXED) | (after - at > 1)
    return Gaps(land_ns[after] - land_ns[at], weight, kind, prompts)
