"""A decode step's inputs and its greedy end as kernels: against their twins in torch, operation by
operation, and in whole engines on the hostile device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import MODES, Variant
from harness import differences, exactly, play
from stepahead.runner import decode, greedy
from stepahead.runner.decode import DecodeKernels
from stepahead.runner.ends import Ends, ended
from stepahead.runner.greedy import choose
from stepahead.runner.inputs import StagedStep, advance, build_inputs
from stepahead.runner.relay import Relay
from stepahead.runner.relay.row import RowRelay
from stepahead.runner.relay.slot import SlotRelay
from stepahead.runner.slots import SlotState
from stepahead.types import SamplingParams
from structured import structured
from workloads import Workload

PLACE = torch.device("cpu")
SLOTS, PAGE_SIZE, COLUMNS, VOCAB = 7, 4, 5, 11


class Side:
    """What a runner has of slots and tokens."""

    def __init__(self, by_row: bool, rnd: np.random.Generator) -> None:
        self.slots = SlotState(SLOTS, COLUMNS, PLACE)
        self.slots.pages_dev[1:] = torch.from_numpy(rnd.integers(1, 50, (SLOTS - 1, COLUMNS)))
        self.slots.length_dev[1:] = torch.from_numpy(rnd.integers(0, 9, SLOTS - 1))
        self.relay: Relay = (
            RowRelay(SLOTS, 2, True, PLACE) if by_row else SlotRelay(SLOTS, True, PLACE)
        )
        # the step before: each slot has been sampled for
        every = np.arange(1, SLOTS)
        self.relay.route(every[:0], torch.from_numpy(every[:0]), every, None, torch.from_numpy)
        self.relay.stash(torch.from_numpy(every), torch.from_numpy(every + 2))

    def stage(self, rows: np.ndarray, tokens: np.ndarray | None) -> StagedStep:
        """A step of these slots, whose bounds are those of the living."""
        rows_dev = torch.from_numpy(rows)
        route = self.relay.route(rows, rows_dev, rows, tokens, lambda array: torch.tensor(array))
        bounds = self.slots.length_dev[rows_dev].numpy() + 1
        return StagedStep(rows_dev, rows, route, bounds, rows, rows_dev)

    def told(self) -> list[list[int]]:
        """All that a later step may read."""
        waiting = self.relay.waiting_dev
        found = (self.slots.length_dev, self.slots.seat_dev)
        return [one.tolist() for one in (*found, *([] if waiting is None else [waiting]))]


def ends_of(rnd: np.random.Generator, count: int) -> Ends | None:
    """Rules as `Wishes` stages them: the model's, for all rows or some, and rows' own."""
    kind = int(rnd.integers(0, 5))
    if kind == 0:
        return None
    eos = torch.from_numpy(rnd.random(VOCAB) < 0.3) if kind != 1 else None
    heed = torch.from_numpy(rnd.integers(0, 2, count)) if kind == 2 else None
    own = None
    if kind in (1, 3):
        rules = int(rnd.integers(1, 9))
        table = [rnd.integers(0, most, rules) for most in (count, VOCAB, 12)]
        own = torch.from_numpy(np.stack(table))
    return Ends(eos, heed, own)


def masks_of(rnd: np.random.Generator, count: int) -> Tensor | None:
    if rnd.random() < 0.5:
        return None
    return torch.from_numpy(rnd.integers(0, 2**VOCAB, (count, 1)).astype(np.int32))


@given(seed=st.integers(0, 2**32), by_row=st.booleans(), steps=st.integers(1, 8))
def test_the_kernels_leave_what_torchs_operations_do(seed: int, by_row: bool, steps: int) -> None:
    """Rows come, go and change places, some are dead, and in some steps the host brings tokens."""
    rnd = np.random.default_rng(seed)
    one, two = Side(by_row, np.random.default_rng(seed)), Side(by_row, np.random.default_rng(seed))
    kernels = DecodeKernels(two.slots, two.relay, PAGE_SIZE)
    rows = np.arange(1, SLOTS)
    for _ in range(steps):
        rows = rnd.permutation(rows)[: max(1, len(rows) - int(rnd.integers(0, 2)))]
        tokens = rnd.integers(0, VOCAB, len(rows)) if rnd.random() < 0.2 else None
        staged, same = one.stage(rows, tokens), two.stage(rows, tokens)
        wanted = build_inputs(staged, one.slots, one.relay, PAGE_SIZE)
        advance(staged, one.slots)
        found = kernels.inputs(same)
        for name in ("token_ids_dev", "positions_dev", "cells_dev", "decode_lens_dev"):
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
        assert found.decode_pages_dev.tolist() == wanted.decode_pages_dev.tolist()
        assert (found.n_decode, found.max_decode_len) == (wanted.n_decode, wanted.max_decode_len)
        assert found.decode_bounds.tolist() == wanted.decode_bounds.tolist()
        positions = one.slots.length_dev[staged.rows_dev]
        assert kernels.ends_dev.tolist() == positions.tolist()

        logits = torch.from_numpy(rnd.integers(-2, 3, (len(rows), VOCAB + 2)).astype(np.float32))
        logits, masks, ends = logits[:, 2:], masks_of(rnd, len(rows)), ends_of(rnd, len(rows))
        right = choose(logits.clone(), None, masks)
        one.relay.stash(staged.rows_dev, right)
        if ends is not None:
            one.slots.bury(staged.rows_dev, ended(ends, right, positions))
        assert kernels.end(same.rows_dev, logits, masks, ends).tolist() == right.tolist()
        # who has brought tokens has taken none: those of the kernel's side are no longer there
        if tokens is None:
            assert two.told() == one.told()


def test_a_token_is_taken_once_and_a_row_has_a_page() -> None:
    side = Side(False, np.random.default_rng(0))
    kernels = DecodeKernels(side.slots, side.relay, PAGE_SIZE)
    staged = side.stage(np.array([1, 2]), None)
    kernels.inputs(staged)
    with pytest.raises(AssertionError, match="2 rows of 2"):
        kernels.inputs(staged)
    side.slots.length_dev[3] = PAGE_SIZE * COLUMNS
    with pytest.raises(AssertionError, match="1 rows of 1"):
        kernels.inputs(side.stage(np.array([3]), None))


def watched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on kernels are used whatever the vocabulary, and their calls are counted."""
    counts: Counter[str] = Counter()

    class Watched(DecodeKernels):
        def inputs(self, *args: Any) -> Any:
            counts["inputs"] += 1
            return super().inputs(*args)

        def end(self, *args: Any) -> Any:
            counts["end"] += 1
            counts["masked"] += args[2] is not None
            return super().end(*args)

    monkeypatch.setattr(greedy, "_LARGE", 0)
    monkeypatch.setattr(decode, "DecodeKernels", Watched)
    return counts


VARIANTS = [
    *(Variant(loop, "hostile", mode=mode) for loop in ("serial", "overlap") for mode in MODES),
    *(Variant("batch-queue", "hostile", depth=depth) for depth in (2, 3, 4)),
    *(Variant("overlap"), Variant("serial")),
]


def all_greedy(work: Workload) -> Workload:
    """None draws, and nothing is asked beside tokens."""
    kept = ("structured_outputs", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
    asks = []
    for ask in work.asks:
        wanted = {name: getattr(ask.params, name) for name in kept}
        asks.append(replace(ask, params=SamplingParams(temperature=0.0, **wanted)))
    return replace(work, asks=tuple(asks))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    greedy_only=st.booleans(),
    device_seed=st.integers(0, 99),
    variant=st.sampled_from(VARIANTS),
)
def test_engines_decode_with_kernels_as_the_serial_loop_does_without(
    seed: int, greedy_only: bool, device_seed: int, variant: Variant
) -> None:
    """Requests that come, go, are preempted, and sit elsewhere then; none, some or all of them
    under grammars."""
    work = structured(seed)
    if greedy_only:
        work = all_greedy(work)
    right = play(work)
    changed = {**vars(variant), "device_seed": device_seed}
    with pytest.MonkeyPatch.context() as patched:
        watched(patched)
        run = play(work, Variant(**changed))
    assert not differences(right, run, exactly)


def test_engines_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare torch's way with itself."""
    counts = watched(monkeypatch)
    play(all_greedy(structured(7)), Variant("overlap"))  # all under grammars
    assert counts["inputs"] >= counts["masked"] > 0
    play(all_greedy(structured(4)), Variant("overlap"))  # none
    assert counts["end"] > counts["masked"]
