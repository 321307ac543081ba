"""Sentences of the probes: which figures give which words, on both sides of each threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepahead.observe.causes import CAUSES
from stepahead.observe.figures import Quantiles, Seen, TokenGaps, Totals
from stepahead.observe.verdicts import (
    ADVICE,
    MIN_STEPS,
    duration,
    host,
    launches,
    overall,
    results,
    tokens,
)
from stepahead.sync import Cause

NO_WORK = Cause.NO_WORK.label
MS = 1_000_000
# 100 steps of 8.4 ms: all of the host's 212 µs but 3 are hidden
GOOD = Totals(
    steps=100,
    depth=2,
    wall_ns=840 * MS,
    busy_ns=839_700_000,
    hidden_ns=20_900_000,
    exposed_ns=300_000,
    blocked_ns=800 * MS,
    idle_ns={"plan late": 300_000, NO_WORK: 0},
    stages_ns={"plan": 300_000},
)
LATE = replace(
    GOOD,
    busy_ns=640 * MS,
    exposed_ns=190 * MS,
    blocked_ns=500 * MS,
    idle_ns={"copy": 70 * MS, "plan late": 120 * MS, "fence": 10 * MS, NO_WORK: 0, "unknown": 1},
    stages_ns={"launch": 0, "plan": 50 * MS, "retire": 140 * MS},
)
SEEN = Seen(100, 2, 100.0, 100.0, 4 * MS, 3 * MS, {})
EVEN = Quantiles(100, 8 * MS, 9 * MS, 7 * MS)
GAPS = TokenGaps(1000, 8 * MS, 9 * MS, 0.0, None)


def change(figures: Any, **values: Any) -> Any:
    return replace(figures, **values)


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        (GOOD, "overlap works: the host worked 212 µs a step, all but 3 µs under a busy device"),
        (
            change(GOOD, exposed_ns=0),
            "the host worked 209 µs a step, all of it under a busy device",
        ),
        (
            LATE,
            "the device waits for the host: 1.9 ms of each 8.4 ms step is exposed host work: "
            "retire 1.4 ms, plan 500 µs; the device idles for: plan late 1.2 ms, copy 700 µs, "
            "fence 100 µs; " + ADVICE["plan late"],
        ),
        # exposed work of 2 % of the step is let pass, more is not
        (change(GOOD, exposed_ns=16_800_000), "overlap works"),
        (change(GOOD, exposed_ns=16_800_001), "the device waits for the host"),
        # time without work is no part of a step
        (change(GOOD, idle_ns={NO_WORK: 840 * MS}, wall_ns=1680 * MS), "all but 3 µs under"),
        (
            change(GOOD, exposed_ns=16_800_001, wall_ns=1680 * MS, idle_ns={NO_WORK: 840 * MS}),
            "of each 8.4 ms step",
        ),
        (change(LATE, depth=1), "this loop never runs ahead: --loop overlap hides it"),
        (change(LATE, blocked_ns=16_800_000), "more depth would not help"),
        (change(LATE, blocked_ns=16_800_001), ADVICE["plan late"]),
        (change(LATE, idle_ns={"a new cause": MS}), ADVICE["unknown"]),
        # what another loop, or steps of another size, would not help
        (
            change(LATE, blocked_ns=0, idle_ns={"garbage collection": 200 * MS, "copy": MS}),
            "garbage collection 2 ms, copy 10 µs; " + ADVICE["garbage collection"],
        ),
        (change(LATE, depth=1, idle_ns={"mask late": 200 * MS}), ADVICE["mask late"]),
        (change(LATE, idle_ns={}, stages_ns={}), "exposed host work; " + ADVICE["unknown"]),
        # little work, or none of it hidden: nothing that overlap did
        (
            change(GOOD, depth=1, hidden_ns=0, exposed_ns=8 * MS),
            "the host is not in the way: it worked 80 µs of each 8.4 ms step",
        ),
        (change(GOOD, hidden_ns=4 * MS, exposed_ns=4_000_001), "the host is not in the way"),
        # exposed work that is less than half of the idle time is not what the device waits for
        (
            change(LATE, idle_ns={"launch late": 380 * MS}),
            "the device waits for the host: 1.9 ms of each 8.4 ms step is exposed",
        ),
        (
            change(LATE, idle_ns={"launch late": 380 * MS + 2}),
            "the device waits, mostly not for the host: 1.9 ms of each 8.4 ms step is exposed host "
            "work: retire 1.4 ms, plan 500 µs; the device idles for: launch late 3.8 ms; "
            + ADVICE["launch late"],
        ),
        (
            change(GOOD, idle_ns={"copy": 16_800_001}),
            "under a busy device; the device idles for: copy 168 µs; " + ADVICE["copy"],
        ),
        (change(GOOD, hidden_ns=4 * MS, exposed_ns=4 * MS), "overlap works"),
        (change(GOOD, steps=MIN_STEPS - 1), f"too few steps to tell: 31, {MIN_STEPS} are needed"),
        (change(GOOD, steps=MIN_STEPS), "overlap works"),
        (
            change(GOOD, host_computes=True),
            "nothing runs ahead, the host's thread is the device (--executor inline): 3 µs of each "
            "8.4 ms step is its other work: plan 3 µs; --executor process can hide that, in a loop",
        ),
    ],
)
def test_verdicts_on_the_host(totals: Totals, words: str) -> None:
    assert words in host(totals)


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        (GOOD, "device busy 99.9 %, host hidden 99 %"),
        (GOOD, ", exposed 3 µs a step"),
        (LATE, "it idles most for: plan late (1.2 ms a step)"),
        (change(GOOD, idle_ns={"copy": 16_800_000}), "exposed 3 µs a step"),
        (change(GOOD, idle_ns={"copy": 16_800_001}), "it idles most for: copy (168 µs a step)"),
        (change(GOOD, idle_ns={NO_WORK: 420 * MS}), "device busy 200 %"),  # of the time with work
        (change(GOOD, hidden_ns=0, exposed_ns=0), "host hidden -,"),
        (change(GOOD, host_computes=True), "device busy 99.9 %, exposed 3 µs a step"),
        (change(GOOD, steps=31), "(31 steps, too few to judge by)"),
        (change(GOOD, steps=0), "no step has landed yet"),
    ],
)
def test_verdicts_on_the_whole(totals: Totals, words: str) -> None:
    assert words in overall(totals)


def test_a_host_out_of_the_way_of_a_busy_device_is_all_that_is_said() -> None:
    assert host(change(GOOD, idle_ns={"copy": 16_800_000})).endswith("under a busy device")


def test_a_good_run_has_no_cause_in_its_line() -> None:
    assert overall(GOOD).endswith("exposed 3 µs a step")


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (SEEN, "it runs ahead: the next step is launched 3 ms before the device ends the one"),
        (change(SEEN, fed_pct=98.0), "it runs ahead"),
        (
            change(SEEN, fed_pct=97.9, end_ns=-MS),
            "late: in 2 % of steps the device had already ended the one before, 1 ms earlier (p50)",
        ),
        (change(SEEN, fed_pct=20.0, end_ns=0), "in 80 % of steps the device had already ended"),
        (
            change(SEEN, fed_pct=60.0, end_ns=1),
            "it mostly runs ahead: 60 % of steps are launched before the device ends the one",
        ),
        (change(SEEN, ahead_pct=98.0), "it runs ahead"),
        (change(SEEN, ahead_pct=97.9), "98 % of steps are launched before the result"),
        (
            change(SEEN, ahead_pct=50.0, syncs={"drain": 12}),
            "; steps held up since the start: drain 12",
        ),
        (
            change(SEEN, ahead_pct=2.0, land_ns=-5 * MS, syncs={"drain": 12}),
            "results come first: the next step is launched 5 ms after (p50); steps held up since",
        ),
        (change(SEEN, ahead_pct=2.1), "2 % of steps are launched before"),
        (change(SEEN, ahead_pct=0.0, depth=1, syncs={"drain": 1}), "this loop never runs ahead"),
        (change(SEEN, host_computes=True), "nothing runs ahead, the host's thread is the device"),
        (change(SEEN, pairs=31), "too few pairs of steps to tell: 31"),
        (change(SEEN, pairs=0, ahead_pct=None, fed_pct=None), "too few pairs of steps to tell: 0"),
    ],
)
def test_verdicts_on_results(seen: Seen, words: str) -> None:
    assert words in results(seen)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (
            {"decode": EVEN},
            "a decode step comes every 8 ms, 7 ms of it on the device; evenly (p99 9 ms)",
        ),
        ({"decode": change(EVEN, p99_ns=12 * MS)}, "evenly (p99 12 ms)"),
        ({"decode": change(EVEN, p99_ns=13 * MS)}, "unevenly: one in a hundred takes 13 ms, 1.6 t"),
        ({"prefill": change(EVEN, count=999), "decode": EVEN}, "a decode step"),
        ({"prefill": EVEN, "mixed": change(EVEN, count=101)}, "a mixed step"),
        ({"decode": change(EVEN, count=31), "mixed": change(EVEN, count=32)}, "a mixed step"),
        ({"decode": change(EVEN, count=31)}, "too few contiguous steps to tell: 31"),
        ({}, "too few contiguous steps to tell: 0"),
    ],
)
def test_verdicts_on_launches(kinds: dict[str, Quantiles], words: str) -> None:
    assert words in launches(kinds)


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        (GAPS, "a request's tokens come 8 ms apart (p50), steadily (p99 9 ms)"),
        (change(GAPS, p99_ns=16 * MS), "steadily (p99 16 ms)"),
        (
            change(GAPS, p99_ns=24 * MS, late_pct=3.0, prompt_pct=50.0),
            "one in a hundred takes 24 ms, 3.0 times the median: 50 % of the late ones waited for "
            "prompts; smaller chunks (--max-step-tokens)",
        ),
        (change(GAPS, p99_ns=24 * MS, late_pct=3.0, prompt_pct=49.9), "and not for prompts"),
        (change(GAPS, p50_ns=0, p99_ns=24 * MS), "one in a hundred takes 24 ms, and not"),
        (change(GAPS, count=31), "too few gaps between tokens to tell: 31"),
        (None, "too few gaps between tokens to tell: 0"),
    ],
)
def test_verdicts_on_tokens(gaps: TokenGaps | None, words: str) -> None:
    assert words in tokens(gaps)


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0, "0 µs"),
        (400, "0.4 µs"),
        (212_345, "212 µs"),
        (999_000, "999 µs"),
        (1_000_000, "1 ms"),
        (8_412_000, "8.41 ms"),
        (-8_412_000, "-8.41 ms"),
        (212_345_000, "212 ms"),
        (1_200_000_000, "1.2 s"),
        (4_321_000_000_000, "4,321 s"),
    ],
)
def test_durations_have_three_digits(ns: int, words: str) -> None:
    assert duration(ns) == words


def test_every_cause_has_advice() -> None:
    assert set(CAUSES) - {NO_WORK} == set(ADVICE)
