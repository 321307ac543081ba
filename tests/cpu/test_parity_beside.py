"""Promise 1 where the CPU runs beside the thread that launches: random workloads, plain, under
grammars and under drafts, are the same for every client as the serial loop has them.

Steps change between the thread and the one that launches, as a seed says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_parity_drafts
import test_parity_grammar

from engines import Variant
from harness import check, play, play_drafted
from structured import structured
from workloads import workload

WORKLOADS = 60  # of a kind
LOOPS = (("overlap", 0), ("batch-queue", 2), ("batch-queue", 3), ("batch-queue", 4))


def variant_of(seed: int, like: Callable[[int], Variant]) -> Variant:
    """As a kind of workload has it, with a loop that runs ahead."""
    loop, depth = LOOPS[seed % 4]
    plain = {"mode": "plain", "model": "toy", "device": "beside"}
    return replace(like(seed), loop=loop, depth=depth, device_seed=seed, **plain)


KINDS: dict[str, tuple[Callable[[int], Variant], Callable[[int], Any], Any]] = {
    "plain": (lambda seed: Variant(fence=("fine", "coarse")[seed // 4 % 2]), workload, play),
    "drafts": (test_parity_drafts.variant_of, workload, play_drafted),
    "grammars": (lambda seed: test_parity_grammar.variant_of(seed, False), structured, play),
    "both": (lambda seed: test_parity_grammar.variant_of(seed, True), structured, play_drafted),
}


@pytest.mark.parametrize("kind", KINDS)
def test_beside_the_thread_that_launches_every_client_hears_the_same(kind: str) -> None:
    like, make, player = KINDS[kind]
    counts: Counter[str] = Counter()
    for seed in range(WORKLOADS):
        counts += check(seed, [variant_of(seed, like)], make, player)[1]
    assert counts["finished"] > WORKLOADS
    missed = [name for name in ("preemptions", "aborts", "slot_reuses") if not counts[name]]
    assert missed == []
