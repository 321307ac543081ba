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
