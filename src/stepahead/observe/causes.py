"""Both lanes laid over each other, and the one cause of each nanosecond in which the device idled.

The device idles at a moment t, and the next step that it runs is n.  The first rule that holds
gives the cause:

1.  The runner says that it, or the device, was held at t (`Result.held`): by a fence, a copy, a
    mask, or garbage collection.  That is the cause, if n is on its way, or if the host is in
    LAUNCH, where an executor without a process of its own is the runner.
2.  The host had not begun to hand n over.  Then what it did is the cause:

        GC                                       garbage collection
        IDLE                                     no work
        MASK                                     mask late
        ENCODE, LAUNCH                           launch late
        WAIT                                     copy: results are on their way home
        PLAN, RETIRE, DELIVER, DECODE, MAIL      plan late

3.  n was on its way to the device, and its runner had not queued it (`Result.submitted_ns`):
    launch late.  But where the host itself was held up while it handed over, in GC or MASK before
    the runner had the plan (`Result.received_ns`), it is that.
4.  n lay on the device: unknown.

Where nobody says when a step was handed over, rule 2 is all there is.  Where nobody says when it
was queued, rule 3 ends as soon as the host leaves ENCODE, LAUNCH, GC and MASK.

What a step in flight has run is not known before it lands: until then that time counts as idle, by
rule 2.  Knows stages and times, not what a plan says nor what a step computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepahead.observe.stages import Stage
from stepahead.sync import Cause

CAUSES = tuple(cause.label for cause in Cause)
BUSY = len(Cause)  # beside the causes, what the device may be at
_NEVER = np.iinfo(np.int64).max

_LATE = {
    Stage.GC: Cause.GARBAGE_COLLECTION,
    Stage.IDLE: Cause.NO_WORK,
    Stage.MASK: Cause.MASK_LATE,
    Stage.ENCODE: Cause.LAUNCH_LATE,
    Stage.LAUNCH: Cause.LAUNCH_LATE,
    Stage.WAIT: Cause.COPY,
}
_HELD_UP = {Stage.GC: Cause.GARBAGE_COLLECTION, Stage.MASK: Cause.MASK_LATE}
_HANDING = _HELD_UP | {Stage.ENCODE: Cause.LAUNCH_LATE, Stage.LAUNCH: Cause.LAUNCH_LATE}
# the cause by the host's stage: before the launch, before the runner had the plan, and after the
# launch where nobody says more
_BEFORE = np.array([_LATE.get(stage, Cause.PLAN_LATE) for stage in Stage])
_SENDING = np.array([_HELD_UP.get(stage, Cause.LAUNCH_LATE) for stage in Stage])
_AFTER = np.array([_HANDING.get(stage, Cause.UNKNOWN) for stage in Stage])


def _nobody_says() -> np.ndarray:
    return np.zeros((3, 0), np.int64)


@dataclass(frozen=True, eq=False)
class Events:
    """Raw events, oldest first, on the books' clock.

    Host: segment i is `stage[i]` int64[h] from `start_ns[i]` int64[h] to the next one's start, the
    last one to `until_ns`.  Device: step `step[j]` int64[d] ran from `busy_start_ns[j]` int64[d]
    to `busy_end_ns[j]` int64[d]; these intervals are ascending and disjoint.

    `posts_ns` int64[3, d]: when the host began to hand each step over, when the runner had it, when
    it lay on the device; 0, or no columns, where nobody says.  `held` int64[3, k]: (cause, start,
    end) of what held the runner up, ascending and disjoint.
    """

    stage: np.ndarray
    start_ns: np.ndarray
    until_ns: int
    step: np.ndarray
    busy_start_ns: np.ndarray
    busy_end_ns: np.ndarray
    posts_ns: np.ndarray = field(default_factory=_nobody_says)
    held: np.ndarray = field(default_factory=_nobody_says)

    @property
    def end_ns(self) -> np.ndarray:
        """Where each host segment ends, int64[h]."""
        return np.append(self.start_ns[1:], self.until_ns)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Contiguous pieces of time in which nothing changes; int64[n] each.

    `stage` is the host's; `device` is BUSY, or the Cause of its idling; `window` counts the cuts.
    Some are empty, and what they say is of no account.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    stage: np.ndarray
    device: np.ndarray
    window: np.ndarray


def pieces(events: Events, cuts_ns: np.ndarray) -> Pieces:
    """The time from the first to the last of `cuts_ns` int64[n], cut there and wherever anything
    changes.  No cut may be before the first host segment."""
    posts = _posts(events)
    lanes = (events.start_ns, events.busy_start_ns, cuts_ns, events.busy_end_ns)
    edges = np.concatenate((*lanes, _within_idle(posts, events), events.held[1:].ravel()))
    # sorted runs one after the other are merged, and counted: cheaper than to look each edge up
    order = np.argsort(edges, kind="stable")
    points = np.clip(edges[order], cuts_ns[0], cuts_ns[-1])
    at_ns, order = points[:-1], order[:-1]
    hosts, steps, cuts = np.cumsum([len(lane) for lane in lanes[:3]]).tolist()
    stage = events.stage[np.cumsum(order < hosts) - 1]
    begun = np.cumsum((order >= hosts) & (order < steps))
    window = np.cumsum((order >= steps) & (order < cuts)) - 1
    ended_ns = np.concatenate((cuts_ns[:1], events.busy_end_ns))[begun]  # of what began last
    device = np.full(len(at_ns), BUSY)
    idle = np.flatnonzero(at_ns >= ended_ns)
    device[idle] = _causes(events, posts[:, begun[idle]], at_ns[idle], stage[idle])
    return Pieces(at_ns, points[1:], stage, device, window)


def _within_idle(posts: np.ndarray, events: Events) -> np.ndarray:
    """The posts that were passed while the device idled: no others matter."""
    before_ns = np.concatenate(([0], events.busy_end_ns[:-1]))[: len(events.step)]
    known = posts[:, :-1]
    return known[(known > before_ns) & (known < events.busy_start_ns)]


def _causes(events: Events, posts: np.ndarray, at_ns: np.ndarray, stage: np.ndarray) -> np.ndarray:
    """The cause at each idle moment, int64[n]; `posts` int64[3, n] are of the step to come."""
    launch_ns, received_ns, submitted_ns = posts
    handed = at_ns >= launch_ns
    late = np.where(at_ns < received_ns, _SENDING[stage], Cause.LAUNCH_LATE)
    there = np.where(submitted_ns > 0, Cause.UNKNOWN, _AFTER[stage])
    cause = np.where(handed, np.where(at_ns < submitted_ns, late, there), _BEFORE[stage])
    if not events.held.size:
        return cause
    causes, start_ns, end_ns = events.held
    last = np.searchsorted(start_ns, at_ns, side="right") - 1
    held = (last >= 0) & (at_ns < end_ns[last]) & (handed | (stage == Stage.LAUNCH))
    return np.where(held, causes[last], cause)


def _posts(events: Events) -> np.ndarray:
    """`posts_ns` with what nobody says filled in, and a step that never comes: int64[3, d + 1]."""
    posts = np.zeros((3, len(events.step) + 1), np.int64)
    if events.posts_ns.size:
        posts[:, :-1] = events.posts_ns
    launch_ns, received_ns, submitted_ns = posts
    launch_ns[launch_ns == 0] = _NEVER
    silent = received_ns == 0
    received_ns[silent] = submitted_ns[silent]
    return posts


def tally(events: Events, cuts_ns: np.ndarray) -> np.ndarray:
    """Time of the windows between `cuts_ns` by the host's stage and by what the device was at.

    `cuts_ns` int64[w + 1], ascending, none before the first host segment.  Returns int64[w, s, 9]:
    [window, stage, cause] ns with the device idle for that cause, [window, stage, BUSY] ns with it
    busy.
    """
    cells = no_cells(len(cuts_ns) - 1)
    if not len(cells):
        return cells
    cut = pieces(events, cuts_ns)
    window = np.clip(cut.window, 0, len(cells) - 1)  # of empty pieces that may lie outside
    at = (window * len(Stage) + cut.stage) * (BUSY + 1) + cut.device
    # in float64, exact up to 2^53 ns, a hundred days: adding integers in place takes ten times that
    lengths = np.bincount(at, cut.end_ns - cut.start_ns, cells.size)
    return lengths.astype(np.int64).reshape(cells.shape)


def no_cells(windows: int) -> np.ndarray:
    """The tally of `windows` windows of no length."""
    return np.zeros((windows, len(Stage), BUSY + 1), np.int64)
