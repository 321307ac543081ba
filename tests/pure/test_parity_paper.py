"""Promise 1 for the scheduler and the loops alone: on paper, without torch, and at any depth."""

from __future__ import annotations

from collections import Counter

import pytest

from engines import Variant
from harness import check

SHARDS = 4
WORKLOADS = 150  # a shard
SERIAL = Variant(device="paper")


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_client_hears_the_same_at_any_depth(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
        depth = (0, 0, 3, 6)[seed % 4]
        counts += check(seed, [Variant("overlap", "paper", depth=depth)], oracle=SERIAL)[1]
    met = ("preempted in flight", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows")
    met += ("hidden states",)
    assert [name for name in met if not counts[name]] == []


@pytest.mark.parametrize("shard", range(2))
def test_runs_of_any_length_are_planned_for_and_taken_back(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * WORKLOADS // 2, (shard + 1) * WORKLOADS // 2):
        loop, depth = (("serial", 0), ("overlap", 0), ("batch-queue", 3), ("overlap", 5))[seed % 4]
        variant = Variant(loop, "paper", depth=depth, draft="paper", drafts=1 + seed % 6)
        counts += check(seed, [variant], oracle=SERIAL)[1]
    met = ("preempted in flight", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows")
    met += ("hidden states", "drafts accepted", "repeats")
    assert [name for name in met if not counts[name]] == []
