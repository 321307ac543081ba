"""The matrix of the hostile device: loops, fences, chunks, prefix cache, page sizes, modes.

A list of configurations in which every pair of values of two factors occurs, and the random traces
that are played on them: join, leave, move, preempt, abort, reuse of slots, cache reset, shutdown.

    python tests/matrix.py --traces 20000 --jobs 2        the long run (`make fuzz`)

prints what was met and, for a failure, one line that replays it.  Each trace is played by the
serial loop on the plain cpu with the same settings, too, and every client must hear the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines import MODES, Variant
from harness import check, play
from workloads import Workload, pool_for, workload

FACTORS: dict[str, tuple[Any, ...]] = {
    "loop": ("serial", "overlap", "batch-queue 2", "batch-queue 3", "batch-queue 4"),
    "fence": ("fine", "coarse"),
    "chunked": (True, False),
    "prefix_cache": (True, False),
    "page_size": (1, 16, 64),
    "mode": tuple(MODES),
    "model": ("toy", "captured"),
}
# what the traces must have met, or they prove less than they say
MET = (
    *("joins", "joins beside rows", "leaves", "rows moved", "grants", "chunks that go on"),
    *("preemptions", "preempted in flight", "aborts", "slot_reuses", "prefix_hits"),
    *("overshoot_rows", "repeats", "cache resets", "shutdowns"),
    *("shutdowns with flights in the air", "abort waiting", "abort prefill in flight"),
    *("abort decode in flight", "abort overshoot", "hidden states", "launched_rows"),
)


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix."""

    loop: str
    fence: str
    chunked: bool
    prefix_cache: bool
    page_size: int
    mode: str
    model: str

    def variant(self, seed: int) -> Variant:
        """The engine that plays it, with the device's order."""
        loop, _, depth = self.loop.partition(" ")
        return Variant(loop, "hostile", seed, int(depth or 0), self.fence, self.mode, 0, self.model)

    def make(self, seed: int) -> Workload:
        """The trace of this seed under these settings."""
        rnd = random.Random(seed ^ 0x5EED)
        work = workload(seed)
        length = work.options["max_model_len"]
        settings = {
            "page_size": self.page_size,
            "prefix_cache": self.prefix_cache,
            "max_step_tokens": rnd.choice((2, 4, 8)) if self.chunked else 20 * length,
            "num_pages": pool_for(rnd, work.asks, self.page_size, length),
        }
        flushes = (rnd.randrange(20), rnd.randrange(40)) if rnd.random() < 0.2 else work.flushes
        shutdown = rnd.randrange(1, 30) if rnd.random() < 0.1 else None
        return replace(work, options=work.options | settings, flushes=flushes, shutdown=shutdown)


def covering(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Configurations in which each pair of values of two factors occurs; greedy, few of them."""
    names = list(factors)
    rnd = random.Random(seed)
    every = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    rnd.shuffle(every)
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda one: len(pairs(one) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(one: dict[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    """Every pair of (factor, value) in a configuration."""
    return set(itertools.combinations(one.items(), 2))


CELLS = tuple(Cell(**one) for one in covering(FACTORS))


def play_trace(number: int) -> Counter[str]:
    """One trace on the cell whose turn it is; AssertionError with a line that replays it."""
    cell, seed = CELLS[number % len(CELLS)], number
    replay = f"tests/matrix.py --replay {number}"
    return check(seed, [cell.variant(seed)], cell.make, play, replay=replay)[1]


def play_range(numbers: range) -> tuple[Counter[str], list[str]]:
    """Traces, and what was wrong with them."""
    counts: Counter[str] = Counter()
    faults = []
    for number in numbers:
        try:
            counts += play_trace(number)
        except AssertionError as error:
            faults.append(f"trace {number} on {CELLS[number % len(CELLS)]}\n{error}")
    return counts, faults


def told(counts: Counter[str], traces: int) -> str:
    """What was met, for people."""
    return f"{traces} traces: " + ", ".join(f"{name} {counts[name]}" for name in MET)


def unmet(counts: Counter[str]) -> list[str]:
    """What should have been met and was not."""
    return [name for name in MET if not counts[name]]


def _runs(first: int, traces: int, share: int = 50) -> Iterator[range]:
    for start in range(first, first + traces, share):
        yield range(start, min(start + share, first + traces))


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)


def fuzz(first: int, traces: int, jobs: int) -> int:
    """Plays traces in parallel, shows how far it is, and returns 1 if one failed."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    began, done = time.monotonic(), 0
    shares = list(_runs(first, traces))
    with ProcessPoolExecutor(jobs, initializer=_start_worker) as pool:
        for share, (more, wrong) in zip(shares, pool.map(play_range, shares), strict=True):
            counts += more
            faults += wrong
            done += len(share)
            rate = done / (time.monotonic() - began)
            print(f"\r{done} of {traces} traces, {rate:.0f}/s, {len(faults)} failed", end="")
    print()
    print(told(counts, traces))
    print(f"{len(CELLS)} configurations cover every pair of {', '.join(FACTORS)}")
    for fault in faults:
        print(fault, file=sys.stderr)
    if missing := unmet(counts):
        print(f"never met: {', '.join(missing)}", file=sys.stderr)
    return 1 if faults or missing else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, help="play this one trace alone")
    parser.add_argument("--keep", default="", help="numbers of the requests to keep in it")
    given, _ = parser.parse_known_args()
    if given.replay is None:
        return fuzz(given.first, given.traces, given.jobs)
    cell, seed = CELLS[given.replay % len(CELLS)], given.replay
    print(cell)
    kept = [int(i) for i in given.keep.split(",") if i]
    make = partial(_kept, cell, kept)
    check(seed, [cell.variant(seed)], make)
    print("the same")
    return 0


def _kept(cell: Cell, kept: list[int], seed: int) -> Workload:
    work = cell.make(seed)
    return work.keeping(kept) if kept else work


if __name__ == "__main__":
    sys.exit(main())
