"""Promise 1 under drafts: random workloads, every loop, depth and number of drafts, each client
hears what the serial loop without drafts tells it.

Drafts are right about half of the time, never, or what prompt lookup finds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engines import MODES, Variant
from harness import check, differences, exactly, play_drafted
from matrix import CELLS
from workloads import workload

SHARDS = 4
WORKLOADS = 40  # a shard
FAILURES = 20
LOOPS = (("serial", 0), ("overlap", 0), ("batch-queue", 2), ("batch-queue", 3), ("batch-queue", 4))
DRAFTERS = ("drafters:Half", "drafters:Half", "drafters:Never", "ngram")
MET = (
    *("preemptions", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows", "repeats"),
    *("abort decode in flight", "preempted in flight", "drafts accepted", "hidden states"),
)

_counts: dict[int, Counter[str]] = {}


def variant_of(seed: int) -> Variant:
    """Loop, device and its ways, drafter and number of drafts, so that all pairs come up."""
    loop, depth = LOOPS[seed % 5]
    device = ("hostile", "cpu")[seed // 5 % 2]
    draft = DRAFTERS[seed // 10 % 4]
    model = "captured" if device == "hostile" and seed % 3 == 0 else "toy"
    drafts = 1 + (seed // 7) % 6
    fence, mode = ("fine", "coarse")[seed // 3 % 2], tuple(MODES)[seed % 4]
    how = (fence, mode if device == "hostile" else "plain", 0, model)
    return Variant(loop, device, seed, depth, *how, draft=draft, drafts=drafts)


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


def test_a_failure_amid_drafts_ends_everyone_once() -> None:
    """Whichever operation of the device fails: one end each, nothing after it, all given back."""
    failed = 0
    for seed in range(1000, 1000 + FAILURES):
        variant = replace(variant_of(seed), device="hostile", fail_at=1 + seed * 37 % 120)
        work = workload(seed)
        right = play_drafted(work, Variant())
        run = play_drafted(work, variant)
        failed += run.counts["failures"]
        right.told = {who: right.told[who] for who in run.told}  # the others were never asked
        lines = differences(right, run, exactly)
        assert not lines, f"{variant}: {lines}"
    assert failed


@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_any_number_of_drafts_gives_the_serial_loop_s_answers(loop: str, depth: int) -> None:
    """Greedy and seeded requests, each number of drafts, drafts half right and never."""
    for drafts in range(1, 7):
        for draft in ("drafters:Half", "drafters:Never"):
            variant = Variant(loop, "cpu", depth=depth, draft=draft, drafts=drafts)
            check(500 + drafts, [variant], player=play_drafted)


def test_every_cell_of_the_matrix_takes_drafts() -> None:
    """Chunks, fences, page sizes, hostile modes, captured steps; cache resets and shutdowns."""
    counts: Counter[str] = Counter()
    for number, cell in enumerate(CELLS):
        how = {"draft": DRAFTERS[number % 4], "drafts": 1 + number % 6}
        variant = replace(cell.variant(number), **how)
        counts += check(number, [variant], cell.make, play_drafted)[1]
    assert counts["drafts accepted"] > 50
