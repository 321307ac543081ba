"""Answers under grammars: the serial loop gives the toy's closed form under a regex walked by hand,
and every loop, depth and device gives what the serial loop gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from test_closed_form import hold

from closed_form import complete
from engines import MODES, ORACLE, Variant, toy_of
from harness import check, play, play_drafted
from structured import allowed, structured

SHARDS = 4
WORKLOADS = 40  # a shard
LOOPS = (("serial", 0), ("overlap", 0), ("batch-queue", 2), ("batch-queue", 3), ("batch-queue", 4))
DRAFTERS = ("drafters:Half", "drafters:Never", "ngram")
MET = (
    *("preemptions", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows"),
    *("abort decode in flight", "preempted in flight", "dead ends"),
)

_counts: dict[str, Counter[str]] = {}


def variant_of(seed: int, drafts: bool) -> Variant:
    """Loop, device and its ways, and who drafts, so that all pairs come up."""
    loop, depth = LOOPS[seed % 5]
    device = ("hostile", "cpu")[seed // 5 % 2]
    fence, mode = ("fine", "coarse")[seed // 3 % 2], tuple(MODES)[seed // 4 % 4]
    model = "captured" if device == "hostile" and seed % 3 == 0 else "toy"
    how = (fence, mode if device == "hostile" else "plain", 0, model)
    draft: dict[str, Any] = {}
    if drafts:
        draft = {"draft": DRAFTERS[seed // 10 % 3], "drafts": 1 + (seed // 7) % 6}
    return Variant(loop, device, seed, depth, *how, **draft)


def play_shard(shard: int, drafts: bool) -> Counter[str]:
    """Plays a shard once; AssertionError with a replayable line."""
    key = f"{shard} {drafts}"
    if key not in _counts:
        counts: Counter[str] = Counter()
        for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
            player = play_drafted if drafts else play
            counts += check(seed, [variant_of(seed, drafts)], structured, player)[1]
        _counts[key] = counts
    return _counts[key]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_loop_keeps_to_grammars_as_the_serial_one(shard: int, drafts: bool) -> None:
    assert play_shard(shard, drafts)["finished"] > WORKLOADS


def test_the_structured_workloads_met_what_they_are_for() -> None:
    shards = [*_counts] or ["0 False", "1 True"]
    counts = sum((play_shard(int(s.split()[0]), "True" in s) for s in shards), Counter[str]())
    assert [name for name in MET if not counts[name]] == []


@pytest.mark.parametrize("shard", range(SHARDS))
def test_serial_gives_the_closed_form_under_a_regex(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
        work = structured(seed)
        toy = toy_of(work.options)
        for (index, choice), told in play(work, ORACLE).told.items():
            ask, may = work.asks[index], None
            if told.refused:
                continue
            if ask.params.structured_outputs is not None:
                may = allowed(toy.vocab_size, ask.params.structured_outputs)
            answer = complete(toy, list(ask.prompt), ask.params, told.seed, choice, may)
            try:
                hold(ask, told, answer)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {ask}: {told} is not {answer}") from error
            if may is not None:
                counts[answer.reason] += 1
                counts["tokens"] += len(answer.tokens)
    assert counts["stop"] > 20, counts
    assert counts["length"] > 5, counts
