"""One step boundary out of the raw events: the end of a step on the device, and what lies around.

Chooses and cuts; draws nothing, and knows no loop: whether the device waited is for the reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepahead.errors import StepaheadError
from stepahead.observe.books import Events, Stage, idle_ns, tally

_OUTLIER = 0.25  # a steady step's run is within this share of the median run


@dataclass(frozen=True)
class HostSpan:
    """The host in one stage; times in ns after the boundary's step ended."""

    stage: Stage
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class DeviceSpan:
    """The device's run of one step; times in ns after the boundary's step ended."""

    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Boundary:
    """Both lanes around the end of `step`, which is time 0, and the start of `next_step`.

    `device` holds up to four runs: the two that meet here and a neighbour on each side.  `host`
    covers their whole time.  `gap_idle_ns` says by cause why the device idled for the `gap_ns`
    between the two.
    """

    step: int
    next_step: int
    gap_ns: int
    gap_idle_ns: dict[str, int]
    host: tuple[HostSpan, ...]
    device: tuple[DeviceSpan, ...]


def boundary(events: Events, step: int) -> Boundary:
    """The boundary after `step`; StepaheadError when it is not among `events`."""
    found = np.flatnonzero(events.step[:-1] == step)
    if not found.size or events.busy_end_ns[found[-1]] < events.start_ns[0]:
        raise StepaheadError(
            f"no boundary after step {step} among the last {len(events.step)} steps kept; "
            "ask for a later one that is not the last"
        )
    at = int(found[-1])
    zero_ns, next_ns = int(events.busy_end_ns[at]), int(events.busy_start_ns[at + 1])
    device = _device_spans(events, slice(max(at - 1, 0), at + 3), zero_ns)
    return Boundary(
        step=step,
        next_step=int(events.step[at + 1]),
        gap_ns=next_ns - zero_ns,
        gap_idle_ns=idle_ns(tally(events, np.array([zero_ns, next_ns]))[0]),
        host=_host_spans(events, device[0].start_ns, device[-1].end_ns, zero_ns),
        device=device,
    )


def _device_spans(events: Events, which: slice, zero_ns: int) -> tuple[DeviceSpan, ...]:
    columns = (
        events.step[which],
        events.busy_start_ns[which] - zero_ns,
        events.busy_end_ns[which] - zero_ns,
    )
    return tuple(DeviceSpan(*row) for row in np.stack(columns, axis=1).tolist())


def _host_spans(events: Events, from_ns: int, to_ns: int, zero_ns: int) -> tuple[HostSpan, ...]:
    start_ns, end_ns = events.start_ns - zero_ns, events.end_ns - zero_ns
    seen = (start_ns < to_ns) & (end_ns > from_ns) & (start_ns < end_ns)
    rows = np.stack((events.stage[seen], start_ns[seen], end_ns[seen]), axis=1).tolist()
    return tuple(HostSpan(Stage(stage), start, end) for stage, start, end in rows)


def typical_step(events: Events) -> int:
    """The step whose gap to the next one is the median gap of the steady steps.

    Steady: neither of the two is the first or the last, and both ran about as long as the median
    step, so prompts and warm-up stay out.  Where no pair is steady, all pairs count.
    StepaheadError when there are not two steps.
    """
    known = events.busy_end_ns[:-1] >= events.start_ns[0]
    if not known.any():
        raise StepaheadError(
            f"a step boundary needs two steps, {len(events.step)} are here; generate more tokens"
        )
    run_ns = events.busy_end_ns - events.busy_start_ns
    middle_ns = np.median(run_ns)
    steady = np.abs(run_ns - middle_ns) <= _OUTLIER * middle_ns
    steady[[0, -1]] = False
    pairs = np.flatnonzero(steady[:-1] & steady[1:] & known)
    if not pairs.size:
        pairs = np.flatnonzero(known)
    gaps_ns = events.busy_start_ns[pairs + 1] - events.busy_end_ns[pairs]
    return int(events.step[pairs[np.argsort(gaps_ns, kind="stable")[(len(pairs) - 1) // 2]]])
