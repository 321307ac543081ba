"""The whole engine on the hostile device: a pairwise covering of its settings, random traces.

1,680 traces here; `make fuzz` plays 20,000.  And the same with an operation of the device that
fails: whichever it is, every request has one end, and nothing is kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from harness import differences, exactly, play
from matrix import CELLS, FACTORS, covering, pairs, play_range, told, unmet

SHARDS = 20
TRACES = 84  # a shard: every configuration four times
FAILURES = 10  # a shard of those that fail

_counts: dict[int, Counter[str]] = {}


def play_shard(shard: int) -> Counter[str]:
    """Plays a shard once; AssertionError with a line that replays the first fault."""
    if shard not in _counts:
        counts, faults = play_range(range(shard * TRACES, (shard + 1) * TRACES))
        assert not faults, faults[0]
        _counts[shard] = counts
    return _counts[shard]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_client_hears_the_same_on_the_hostile_device(shard: int) -> None:
    assert play_shard(shard)["finished"] > TRACES


def test_the_traces_met_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    shards = [*_counts] or [0, 1, 2, 3]
    counts = sum((play_shard(shard) for shard in shards), Counter[str]())
    with capsys.disabled():
        print(f"\n{told(counts, len(shards) * TRACES)}")
    assert unmet(counts) == []


def test_the_configurations_cover_every_pair() -> None:
    names = list(FACTORS)
    wanted = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(names, 2)
        for a in FACTORS[one]
        for b in FACTORS[two]
    }
    chosen = covering(FACTORS)
    assert set().union(*map(pairs, chosen)) == wanted
    assert len(chosen) == len(CELLS) <= 24


@pytest.mark.parametrize("shard", range(10))
def test_a_failure_of_any_operation_ends_everyone_once(shard: int) -> None:
    failed = 0
    for number in range(shard * FAILURES, (shard + 1) * FAILURES):
        cell = CELLS[number % len(CELLS)]
        work = cell.make(number)
        fail_at = 1 + (number * 37) % 120
        variant = replace(cell.variant(number), fail_at=fail_at)
        # the client holds it to one end each, to nothing after it, and to balance
        run = play(work, variant)
        failed += run.counts["failures"]
        right = play(work)
        right.told = {who: right.told[who] for who in run.told}  # the others were never asked
        lines = differences(right, run, exactly)
        assert not lines, f"{variant}: {lines}"
    assert failed
