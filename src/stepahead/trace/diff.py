"""Two traces held against each other, step by step: what moved.

A step's window runs from the end of the device's run before it to the end of its own: it holds the
idle time that came before the run, and what the host did meanwhile.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from stepahead.errors import ConfigError
from stepahead.observe.causes import BUSY, CAUSES, tally
from stepahead.observe.stages import WORK, Stage
from stepahead.observe.steps import Kind, Steps
from stepahead.trace.read import Recorded

_SAME = 0.01  # a change of less than this share of the step is none
_WAIT = "host: wait"  # what is left over: never why a step is shorter


@dataclass(frozen=True)
class Change:
    """The median over aligned steps of one part of a step, in µs, before and after.

    Medians of parts do not add up to the median of the whole.
    """

    name: str
    before_us: float
    after_us: float

    @property
    def by_us(self) -> float:
        """After less before."""
        return self.after_us - self.before_us


@dataclass(frozen=True)
class TraceDiff:
    """What moved from trace A to trace B.  `changes` are sorted by size, `step` is the whole."""

    aligned: int
    steps: tuple[int, int]
    how: str
    step: Change
    changes: list[Change]
    verdict: str


@dataclass(frozen=True, eq=False)
class _Windows:
    """Steps with a known window, and their parts in ns by name; int64[n] each."""

    steps: Steps
    parts: dict[str, np.ndarray]
    whole_ns: np.ndarray


def diff(a: Recorded, b: Recorded, names: tuple[str, str]) -> TraceDiff:
    """From `a` to `b`; ConfigError when no step of one is like a step of the other."""
    one, two = _windows(a), _windows(b)
    left, right, how = align(one.steps, two.steps)
    if not len(left):
        raise ConfigError(
            f"no step of {names[0]} ({_words(one.steps)}) has the kind and rows of one of "
            f"{names[1]} ({_words(two.steps)}); record the same load twice"
        )
    whole = _change("step", one.whole_ns[left], two.whole_ns[right])
    parts = [
        _change(name, one.parts[name][left], two.parts[name][right])
        for name in dict.fromkeys([*one.parts, *two.parts])
        if name in one.parts and name in two.parts
    ]
    moved = sorted((p for p in parts if p.before_us or p.after_us), key=lambda p: -abs(p.by_us))
    counts = (len(one.steps), len(two.steps))
    return TraceDiff(len(left), counts, how, whole, moved, _verdict(whole, moved, names))


def align(a: Steps, b: Steps) -> tuple[np.ndarray, np.ndarray, str]:
    """Indices of steps that belong together, and how they were found.

    By step number where kind and rows agree, for at least half of the shorter; else the k-th step
    of a kind and rows with the k-th of the same.
    """
    _, left, right = np.intersect1d(a.step, b.step, return_indices=True)
    alike = (a.kind[left] == b.kind[right]) & (a.rows[left] == b.rows[right])
    alike &= a.chunk_tokens[left] == b.chunk_tokens[right]
    if 2 * alike.sum() >= min(len(a), len(b)) > 0:
        return left[alike], right[alike], "by number"
    places: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    for i, key in enumerate(_keys(a)):
        places[key].append(i)
    pairs = []
    for j, key in enumerate(_keys(b)):
        if places[key]:
            pairs.append((places[key].popleft(), j))
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1], "by order among steps of the same kind and rows"


def _keys(steps: Steps) -> list[tuple[int, ...]]:
    return list(
        zip(steps.kind.tolist(), steps.rows.tolist(), steps.chunk_tokens.tolist(), strict=True)
    )


def _windows(found: Recorded) -> _Windows:
    events, steps = found.snapshot.events, found.snapshot.steps
    if len(events.step) < 2:
        none = np.zeros(0, np.int64)
        return _Windows(steps.where(none), {}, none)
    cells = tally(events, events.busy_end_ns)
    run_ns = (events.busy_end_ns - events.busy_start_ns)[1:]
    parts = {"device: run": run_ns}
    for stage in Stage:
        name = stage.name.lower()
        if stage in WORK:
            parts[f"host: {name}, hidden"] = cells[:, stage, BUSY]
            parts[f"host: {name}, exposed"] = cells[:, stage, :BUSY].sum(1)
        elif stage is Stage.WAIT:
            parts[_WAIT] = cells[:, stage].sum(1)
    parts |= _idle_parts(found)
    _, mine, theirs = np.intersect1d(steps.step, events.step[1:], return_indices=True)
    chosen = {name: ns[theirs] for name, ns in parts.items()}
    return _Windows(steps.where(mine), chosen, cells.sum((1, 2))[theirs])


def _idle_parts(found: Recorded) -> dict[str, np.ndarray]:
    """Idle time by cause before each run but the first."""
    events, idle = found.snapshot.events, found.idle
    gap = np.searchsorted(events.busy_end_ns, idle.start_ns, side="right") - 1
    count = len(events.step) - 1
    between = (gap >= 0) & (gap < count)
    took_ns = idle.end_ns - idle.start_ns
    parts = {}
    for cause, name in enumerate(CAUSES):
        chosen = between & (idle.cause == cause)
        by_gap = np.bincount(gap[chosen], took_ns[chosen], count).astype(np.int64)
        parts[f"device idle: {name}"] = by_gap
    return parts


def _change(name: str, before_ns: np.ndarray, after_ns: np.ndarray) -> Change:
    return Change(name, float(np.median(before_ns)) / 1e3, float(np.median(after_ns)) / 1e3)


def _words(steps: Steps) -> str:
    """The most frequent sizes of a trace's steps."""
    if not len(steps):
        return "fewer than two steps"
    counts: dict[str, int] = defaultdict(int)
    for kind, rows, chunk in _keys(steps):
        size = f"{rows} rows" if kind == Kind.DECODE else f"{chunk} prompt tokens"
        counts[f"{Kind(kind).name.lower()} of {size}"] += 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} x {name}" for name, n in ranked[:2])


def _verdict(whole: Change, moved: list[Change], names: tuple[str, str]) -> str:
    """One sentence: how much longer or shorter a step is, and the part that moved most."""
    share = whole.by_us / whole.before_us if whole.before_us else 0.0
    if abs(share) < _SAME:
        said = f"A step takes as long in {names[1]} as in {names[0]} ({whole.after_us:,.0f} µs)"
    else:
        said = (
            f"A step takes {whole.after_us:,.0f} µs in {names[1]}, {whole.before_us:,.0f} µs in "
            f"{names[0]} ({100 * share:+.1f} %)"
        )
    told = [part for part in moved if abs(part.by_us) >= _SAME * whole.before_us]
    told = [part for part in told if part.name != _WAIT][:2]
    if not told:
        return f"{said}; no part of it moved by more than {100 * _SAME:.0f} % of it."
    parts = "; ".join(
        f"{part.name} went from {part.before_us:,.0f} to {part.after_us:,.0f} µs" for part in told
    )
    return f"{said}: {parts}."
