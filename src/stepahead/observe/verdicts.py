"""What probes mean, in sentences: figures in, words out, by the thresholds that stand here.

A sentence says how it is, what causes it, and what to do; or that there are too few steps to tell.
Knows causes by the names it is given.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepahead.observe.figures import Quantiles, Seen, TokenGaps, Totals

MIN_STEPS = 32  # steps, pairs or gaps; with fewer a sentence would be about chance
_MATTERS = 0.02  # of a step: exposed host work below it is no reason to change anything
_MOSTLY = 0.5  # of the device's idle time: exposed host work from there on is what it waits for
_MOST = 98.0  # percent of steps from which on it counts as all, and, from 100 down, as none
_EVEN = 1.5  # p99 of intervals against their median, up to which steps come evenly
_STEADY = 2.0  # the same of the gaps between tokens
_COMPUTES = "nothing runs ahead, the host's thread is the device (--executor inline)"

# what to do about idle time, by its cause
ADVICE = {
    "plan late": "ask for less of each step (log-probabilities, stop strings, changes of rows), or "
    "give the device more rows a step",
    "launch late": "steps take long to reach the device: the runner needs a process (--executor "
    "process, the default) and a core of its own; a CPU takes none before it has ended the last",
    "mask late": "simpler grammars, or fewer rows with one in a step, would shorten it",
    "fence": "let plans wait for reads, not for a step's end (--fence fine)",
    "copy": "launch further ahead (--loop overlap, or --loop batch-queue --depth 3), and look for "
    "copies that block among the sync reasons",
    "garbage collection": "keep fewer objects that Python has to look through",
    "unknown": "record a timeline (stepahead trace record) and look at the gaps",
}
# neither another loop nor other steps are a remedy for these
_WHATEVER_THE_LOOP = ("garbage collection", "mask late")


def overall(totals: Totals) -> str:
    """One line about the whole: device busy, host hidden, exposed host work a step."""
    if not totals.steps:
        return "no step has landed yet"
    told = totals.as_dict()
    words = f"device busy {_share(told['device_busy_pct'])}"
    if not totals.host_computes:
        words += f", host hidden {_share(told['host_hidden_pct'])}"
    words += f", exposed {duration(totals.exposed_ns / totals.steps)} a step"
    if totals.steps < MIN_STEPS:
        return f"{words} ({totals.steps} steps, too few to judge by)"
    if totals.idle_with_work_ns <= _MATTERS * totals.asked_ns:
        return words
    cause, ns = totals.causes[0]
    return f"{words}; it idles most for: {cause} ({duration(ns / totals.steps)} a step)"


def host(totals: Totals) -> str:
    """Whether the host's work is out of the device's way."""
    steps = totals.steps
    if steps < MIN_STEPS:
        return _too_few(steps, "steps")
    work, exposed = duration(totals.work_ns / steps), duration(totals.exposed_ns / steps)
    step, matters_ns = duration(totals.asked_ns / steps), _MATTERS * totals.asked_ns
    if totals.host_computes:
        return (
            f"{_COMPUTES}: {exposed} of each {step} step is its other work"
            f"{_parts(': ', totals.exposed_parts, steps)}; "
            "--executor process can hide that, in a loop that runs ahead"
        )
    if totals.exposed_ns > matters_ns:
        # host work that is exposed while the device waits for something else is not in its way
        mostly = totals.exposed_ns >= _MOSTLY * totals.idle_with_work_ns
        words = (
            "the device waits for the host"
            if mostly
            else "the device waits, mostly not for the host"
        )
        return (
            f"{words}: {exposed} of each {step} step is exposed host work"
            f"{_parts(': ', totals.exposed_parts, steps)}{_idle(totals)}; {_remedy(totals)}"
        )
    words = f"the host is not in the way: it worked {work} of each {step} step"
    if 2 * totals.hidden_ns >= totals.work_ns and totals.depth > 1:
        shown = f"all but {exposed}" if totals.exposed_ns else "all of it"
        words = f"overlap works: the host worked {work} a step, {shown} under a busy device"
    if totals.idle_with_work_ns > matters_ns:
        words += f"{_idle(totals)}; {_remedy(totals)}"
    return words


def _idle(totals: Totals) -> str:
    return _parts("; the device idles for: ", totals.causes, totals.steps)


def _parts(before: str, parts: list[tuple[str, int]], steps: int) -> str:
    """The longest of them, a step."""
    told = [f"{name} {duration(ns / steps)}" for name, ns in parts[:3]]
    return before + ", ".join(told) if told else ""


def _remedy(totals: Totals) -> str:
    cause = totals.causes[0][0] if totals.causes else ""
    if cause in _WHATEVER_THE_LOOP:
        return ADVICE[cause]
    if totals.depth == 1:
        return "this loop never runs ahead: --loop overlap hides it"
    if totals.blocked_ns <= _MATTERS * totals.asked_ns:
        return (
            "the host never waits, so more depth would not help: "
            "give it more rows a step, or less to do for each"
        )
    return ADVICE.get(cause, ADVICE["unknown"])


def results(seen: Seen) -> str:
    """Whether a step is launched before the result of the one before it is there."""
    if seen.pairs < MIN_STEPS or seen.ahead_pct is None or seen.fed_pct is None:
        return _too_few(seen.pairs, "pairs of steps")
    if seen.host_computes:
        return f"{_COMPUTES}: it computes a step while it launches it"
    if seen.ahead_pct <= 100 - _MOST:
        words = f"results come first: the next step is launched {duration(-seen.land_ns)} after"
        return f"{words} (p50){_why_serial(seen)}"
    if seen.ahead_pct < _MOST:
        return (
            f"{_share(seen.ahead_pct)} of steps are launched before the result of the one before "
            f"is there{_why_serial(seen)}"
        )
    if seen.fed_pct >= _MOST:
        return (
            f"it runs ahead: the next step is launched {duration(seen.end_ns)} before the device "
            "ends the one before (p50)"
        )
    if seen.end_ns > 0:
        return (
            f"it mostly runs ahead: {_share(seen.fed_pct)} of steps are launched before the device "
            "ends the one before; for the others it had to wait"
        )
    return (
        f"launched ahead, but late: in {_share(100 - seen.fed_pct)} of steps the device had "
        f"already ended the one before, {duration(-seen.end_ns)} earlier (p50); the host sets the "
        "pace"
    )


def _why_serial(seen: Seen) -> str:
    if seen.depth == 1:
        return ", and the device idles in between: this loop never runs ahead (--loop overlap does)"
    if not seen.syncs:
        return ""
    told = ", ".join(f"{reason} {steps:,}" for reason, steps in seen.syncs.items())
    return f"; steps held up since the start: {told}"


def launches(kinds: Mapping[str, Quantiles]) -> str:
    """How evenly steps come; of decode steps if there are enough, else of the most frequent."""
    enough = {name: one for name, one in kinds.items() if one.count >= MIN_STEPS}
    if not enough:
        return _too_few(max((one.count for one in kinds.values()), default=0), "contiguous steps")
    name = "decode" if "decode" in enough else max(enough, key=lambda kind: enough[kind].count)
    one = enough[name]
    words = f"a {name} step comes every {duration(one.p50_ns)}"
    words += f", {duration(one.run_ns)} of it on the device"
    if one.p99_ns <= _EVEN * one.p50_ns:
        return f"{words}; evenly (p99 {duration(one.p99_ns)})"
    return f"{words}; unevenly: one in a hundred takes {_times(one.p99_ns, one.p50_ns)}"


def tokens(gaps: TokenGaps | None) -> str:
    """How evenly a request's tokens come."""
    if gaps is None or gaps.count < MIN_STEPS:
        return _too_few(gaps.count if gaps else 0, "gaps between tokens")
    words = f"a request's tokens come {duration(gaps.p50_ns)} apart (p50)"
    if gaps.p99_ns <= _STEADY * gaps.p50_ns:
        return f"{words}, steadily (p99 {duration(gaps.p99_ns)})"
    words += f"; one in a hundred takes {_times(gaps.p99_ns, gaps.p50_ns)}"
    if gaps.prompt_pct is not None and gaps.prompt_pct >= 50:
        return (
            f"{words}: {_share(gaps.prompt_pct)} of the late ones waited for prompts; smaller "
            "chunks (--max-step-tokens) shorten that"
        )
    return f"{words}, and not for prompts: look for pauses of the host in a timeline"


def duration(ns: float) -> str:
    """Of three digits or so: 212 µs, 8.41 ms, 1.20 s."""
    for unit_ns, unit in ((1e9, "s"), (1e6, "ms")):
        if abs(ns) >= unit_ns:
            value = ns / unit_ns
            return f"{value:.3g} {unit}" if abs(value) < 100 else f"{value:,.0f} {unit}"
    return f"{ns / 1e3:.3g} µs" if abs(ns) < 1e5 else f"{ns / 1e3:.0f} µs"


def _times(long_ns: int, short_ns: int) -> str:
    times = f", {long_ns / short_ns:.1f} times the median" if short_ns else ""
    return duration(long_ns) + times


def _too_few(count: int, what: str) -> str:
    return f"too few {what} to tell: {count}, {MIN_STEPS} are needed"


def _share(percent: float | None) -> str:
    if percent is None:
        return "-"
    if 99 < percent < 100 or 0 < percent < 1:  # not whole must not read as if it were
        return f"{min(max(percent, 0.1), 99.9):.1f} %"
    return f"{percent:.0f} %"
