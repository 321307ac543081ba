"""Promise 1 on the toy: 2,000 random workloads, every loop and device, the same for every client.

Each is played by the serial loop on the plain cpu (the oracle) and by a share's other one: the
overlap loop there or on the hostile device, at depth 2, 3 or 4, or the serial loop on the hostile
device.  A failure prints one line that replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from engines import Variant
from harness import check

SHARDS = 20
WORKLOADS = 100  # a shard
MET = (
    *("preemptions", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows", "refused"),
    *("abort waiting", "abort prefill", "abort prefill in flight", "abort decode in flight"),
    *("abort decode", "abort overshoot", "abort ended", "preempted in flight"),
)

_counts: dict[int, Counter[str]] = {}


def variants(seed: int) -> list[Variant]:
    """What a workload is played on, beside the oracle."""
    if seed % 5 == 0:
        return [Variant("overlap", "hostile", seed)]
    if seed % 10 == 1:
        return [Variant("serial", "hostile", seed), Variant("overlap")]
    if seed % 10 in (3, 4, 6):
        depth = {3: 2, 4: 3, 6: 4}[seed % 10]
        return [Variant("batch-queue", "hostile" if seed % 20 < 10 else "cpu", seed, depth)]
    if seed % 10 == 2:
        return [Variant("overlap", "hostile", seed, depth=4)]
    return [Variant("overlap", depth=seed % 10 // 9 * 3)]


def play_shard(shard: int) -> Counter[str]:
    """Plays a shard once; AssertionError with a replayable line."""
    if shard not in _counts:
        counts: Counter[str] = Counter()
        for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
            counts += check(seed, variants(seed))[1]
        _counts[shard] = counts
    return _counts[shard]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_client_hears_the_same(shard: int) -> None:
    assert play_shard(shard)["finished"] > WORKLOADS


def test_the_workloads_met_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    # of the shards that ran; of two if this test was asked for alone
    shards = [*_counts] or [0, 1]
    counts = sum((play_shard(shard) for shard in shards), Counter[str]())
    with capsys.disabled():
        listed = ", ".join(f"{name} {counts[name]}" for name in MET)
        print(f"\n{len(shards) * WORKLOADS} workloads: {listed}")
    assert [name for name in MET if not counts[name]] == []
