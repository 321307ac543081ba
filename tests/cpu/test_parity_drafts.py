"""Promise 1 under drafts: random workloads, every loop, depth and number of drafts, each client
hears what the serial loop without drafts tells it.

Drafts are right about half of the time, never, or what prompt lookup finds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from engines import Variant
from harness import check, play_drafted

SHARDS = 4
WORKLOADS = 50  # a shard
LOOPS = (("serial", 0), ("overlap", 0), ("batch-queue", 2), ("batch-queue", 3), ("batch-queue", 4))
DRAFTERS = ("drafters:Half", "drafters:Half", "drafters:Never", "ngram")
MET = (
    *("preemptions", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows", "repeats"),
    *("abort decode in flight", "preempted in flight", "drafts accepted", "hidden states"),
)

_counts: dict[int, Counter[str]] = {}


def variant_of(seed: int) -> Variant:
    """Loop, device, drafter and number of drafts, so that all pairs come up."""
    loop, depth = LOOPS[seed % 5]
    device = ("hostile", "cpu")[seed // 5 % 2]
    draft = DRAFTERS[seed // 10 % 4]
    model = "captured" if device == "hostile" and seed % 3 == 0 else "toy"
    drafts = 1 + (seed // 7) % 6
    return Variant(loop, device, seed, depth, model=model, draft=draft, drafts=drafts)


def play_shard(shard: int) -> Counter[str]:
    """Plays a shard once; AssertionError with a replayable line."""
    if shard not in _counts:
        counts: Counter[str] = Counter()
        for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
            counts += check(seed, [variant_of(seed)], player=play_drafted)[1]
        _counts[shard] = counts
    return _counts[shard]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_drafts_change_nothing_that_a_client_hears(shard: int) -> None:
    assert play_shard(shard)["finished"] > WORKLOADS


def test_the_drafted_workloads_met_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    shards = [*_counts] or [0, 1]
    counts = sum((play_shard(shard) for shard in shards), Counter[str]())
    with capsys.disabled():
        listed = ", ".join(f"{name} {counts[name]}" for name in MET)
        print(f"\n{len(shards) * WORKLOADS} workloads: {listed}")
    assert [name for name in MET if not counts[name]] == []
