"""The four probes: whether the host runs ahead of the device, as figures and in a sentence each.

    host      blocked against working time of the loop's thread, step by step
    results   when a result is there, against the launch of the step after it
    launches  time from launch to launch over contiguous steps
    tokens    time from a token of a request to its next one, as a distribution

Made of a snapshot, for one loop and depth.  Knows columns of times; words are in `verdicts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepahead.observe import verdicts
from stepahead.observe.books import exposed_ns, hidden_ns, idle_ns
from stepahead.observe.causes import BUSY
from stepahead.observe.figures import Quantiles, Seen, TokenGaps, Totals
from stepahead.observe.observer import Snapshot
from stepahead.observe.spread import Spread, spread
from stepahead.observe.stages import WORK, Stage
from stepahead.observe.step_times import (
    BLOCKED,
    EXPOSED,
    HIDDEN,
    Pairs,
    Windows,
    token_gaps,
    windows,
)
from stepahead.observe.steps import Kind

_LATE = 2  # a token is late from so many times the median gap on
ALL = "all"
Spreads = dict[str, dict[str, Spread]]  # by figure, then by kind of step


@dataclass(frozen=True)
class Probe:
    """A sentence, and what it is made of: `spreads` by figure, then by kind of step.

    `shares` are percentages by name, None where nothing was counted.
    """

    verdict: str
    spreads: Spreads
    shares: dict[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Its JSON: figures in µs, shares in percent."""
        figures = {
            name: {kind: one.as_dict() for kind, one in kinds.items()}
            for name, kinds in self.spreads.items()
        }
        return {"verdict": self.verdict, "figures": figures, **self.shares}


@dataclass(frozen=True)
class Probes:
    """The four probes of one engine, and in `totals` the sums that the sentences judge by.

    host      `work`, `hidden`, `exposed`, `blocked` of a step: the window from the end of the
              device's step before it to the end of its own
    results   `land_after_launch`: land of n minus launch of n + 1, negative where the host had
              the result first; `end_after_launch`: the same of the end of n on the device,
              negative where the device had nothing left to run
    launches  `interval`: launch to launch of contiguous steps, of prefill steps landing to
              landing; `run`: the device's run of the same steps
    tokens    `gap`: landing to landing of the steps that brought two tokens in a row of a request,
              counted once for each row; by kind of the later step
    """

    loop: str
    depth: int
    totals: Totals
    verdict: str
    host: Probe
    results: Probe
    launches: Probe
    tokens: Probe

    @property
    def four(self) -> dict[str, Probe]:
        """The probes by name."""
        return {
            "host": self.host,
            "results": self.results,
            "launches": self.launches,
            "tokens": self.tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        """Stable JSON; times in µs, shares in percent, None where nothing can be said."""
        return {
            "loop": self.loop,
            "depth": self.depth,
            "steps": self.totals.steps,
            "verdict": self.verdict,
            **self.totals.as_dict(),
            "probes": {name: probe.as_dict() for name, probe in self.four.items()},
        }


def probes(snapshot: Snapshot, since_ns: int | None = None) -> Probes:
    """The probes of the steps in the snapshot that were planned at `since_ns` or later; of all
    kept ones if None."""
    depth, steps, events = int(snapshot.about.get("depth", 1)), snapshot.steps, snapshot.events
    first = 0 if since_ns is None else int(np.searchsorted(steps.plan_ns, since_ns))
    found = windows(steps, events, first)
    totals = _totals(found, depth, _host_computes(snapshot))
    pairs = Pairs(steps.where(slice(first, None)), events)
    return Probes(
        loop=str(snapshot.about.get("loop", "")),
        depth=depth,
        totals=totals,
        verdict=verdicts.overall(totals),
        host=_host(found, totals),
        results=_results(pairs, totals, snapshot.syncs),
        launches=_launches(pairs),
        tokens=_tokens(pairs),
    )


# --- 1: the host --------------------------------------------------------------------------------


def _host_computes(snapshot: Snapshot) -> bool:
    """Whether each step was over when its launch was: an inline runner on the host's own cores."""
    about, steps = snapshot.about, snapshot.steps
    here = about.get("executor") == "inline" and about.get("device") == "cpu"
    return here and bool((steps.submitted_ns >= steps.end_ns).all())


def _totals(found: Windows, depth: int, host_computes: bool) -> Totals:
    cells = found.cells
    return Totals(
        steps=len(found.steps),
        depth=depth,
        wall_ns=int(cells.sum()),
        busy_ns=int(cells[:, BUSY].sum()),
        hidden_ns=int(hidden_ns(cells)),
        exposed_ns=int(exposed_ns(cells)),
        blocked_ns=int(cells[Stage.WAIT].sum()),
        idle_ns=idle_ns(cells),
        stages_ns={stage.name.lower(): int(cells[stage, :BUSY].sum()) for stage in WORK},
        host_computes=host_computes,
    )


def _host(found: Windows, totals: Totals) -> Probe:
    host_ns = found.host_ns.T
    figures = {
        "work": host_ns[HIDDEN] + host_ns[EXPOSED],
        "hidden": host_ns[HIDDEN],
        "exposed": host_ns[EXPOSED],
        "blocked": host_ns[BLOCKED],
    }
    kinds = found.steps.kind
    spreads = {name: _by_kind(ns, kinds) | _whole(ns) for name, ns in figures.items()}
    return Probe(verdicts.host(totals), spreads)


def _by_kind(
    values_ns: np.ndarray, kinds: np.ndarray, weights: np.ndarray | None = None
) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    for kind in Kind:
        chosen = kinds == kind
        one = spread(values_ns[chosen], None if weights is None else weights[chosen])
        if one is not None:
            found[kind.name.lower()] = one
    return found


def _whole(values_ns: np.ndarray, weights: np.ndarray | None = None) -> dict[str, Spread]:
    one = spread(values_ns, weights)
    return {} if one is None else {ALL: one}


# --- 2: results against launches ----------------------------------------------------------------


def _results(pairs: Pairs, totals: Totals, syncs: dict[str, dict[str, int]]) -> Probe:
    steps, linked = pairs.steps, pairs.linked()
    after = steps.where(slice(1, None)).where(linked)
    kinds, launch_ns = after.kind, after.launch_ns
    land_ns, end_ns = (at[:-1][linked] - launch_ns for at in (steps.land_ns, steps.end_ns))
    figures = {"land_after_launch": land_ns, "end_after_launch": end_ns}
    spreads = {name: _by_kind(ns, kinds) | _whole(ns) for name, ns in figures.items()}
    seen = Seen(
        pairs=len(launch_ns),
        depth=totals.depth,
        ahead_pct=_share(after.flights > 1),  # at one moment on the clock either may be first
        fed_pct=_share(end_ns > 0),
        land_ns=_median(land_ns),
        end_ns=_median(end_ns),
        syncs={reason: count["steps"] for reason, count in syncs.items()},
        host_computes=totals.host_computes,
    )
    shares = {"launched_before_land_pct": seen.ahead_pct, "launched_before_end_pct": seen.fed_pct}
    return Probe(verdicts.results(seen), spreads, shares)


def _share(flags: np.ndarray) -> float | None:
    return 100.0 * int(flags.sum()) / len(flags) if len(flags) else None


def _median(values_ns: np.ndarray) -> int:
    one = spread(values_ns)
    return one.p50_ns if one else 0


# --- 3: from launch to launch -------------------------------------------------------------------


def _launches(pairs: Pairs) -> Probe:
    steps = pairs.steps
    run_ns = steps.end_ns - steps.start_ns
    spreads: Spreads = {"interval": {}, "run": {}}
    for kind in Kind:
        # a prefill step's launch says little: the next one may wait for its end
        at_ns = steps.land_ns if kind is Kind.PREFILL else steps.launch_ns
        chosen = pairs.contiguous(at_ns) & (steps.kind[1:] == kind)
        # launch to launch is the earlier step's time, landing to landing the later one's
        runs_ns = run_ns[1:] if kind is Kind.PREFILL else run_ns[:-1]
        for name, values_ns in (("interval", np.diff(at_ns)), ("run", runs_ns)):
            one = spread(values_ns[chosen])
            if one is not None:
                spreads[name][kind.name.lower()] = one
    quantiles = {
        name: Quantiles(one.count, one.p50_ns, one.p99_ns, spreads["run"][name].p50_ns)
        for name, one in spreads["interval"].items()
    }
    return Probe(verdicts.launches(quantiles), spreads)


# --- 4: from token to token ---------------------------------------------------------------------


def _tokens(pairs: Pairs) -> Probe:
    gaps = token_gaps(pairs)
    kinds = _by_kind(gaps.ns, gaps.kind, gaps.weight) | _whole(gaps.ns, gaps.weight)
    whole = kinds.get(ALL)
    if whole is None:
        return Probe(
            verdicts.tokens(None), {"gap": {}}, {"late_pct": None, "late_prompt_pct": None}
        )
    late = gaps.ns > _LATE * whole.p50_ns
    late_rows = int(gaps.weight[late].sum())
    behind_prompts = int(gaps.weight[late & gaps.prompts].sum())
    told = TokenGaps(
        whole.count,
        whole.p50_ns,
        whole.p99_ns,
        100.0 * late_rows / whole.count,
        100.0 * behind_prompts / late_rows if late_rows else None,
    )
    shares = {"late_pct": told.late_pct, "late_prompt_pct": told.prompt_pct}
    return Probe(verdicts.tokens(told), {"gap": kinds}, shares)
