"""A steady decode step, counted exactly on the hostile device: one wait, one copy out, nothing in.

And what makes it more than that: each has its name.
"""

from __future__ import annotations

from typing import Any

import pytest

from engines import Variant, resolved, runner_spec, toy_engine
from stepahead.device.hostile import HostileDevice, HostileModes
from stepahead.engine import Engine
from stepahead.executor.inline import InlineExecutor
from stepahead.model.toy import ToyModel
from stepahead.runner.runner import Runner
from stepahead.sync import SyncReason
from stepahead.types import SamplingParams

OPTIONS: dict[str, Any] = {
    "vocab_size": 64,
    "max_model_len": 256,
    "page_size": 64,
    "max_rows": 8,
    "max_step_tokens": 64,
    "num_pages": 64,
}
ROWS, WARM, STEPS = 5, 6, 20
LOOPS = [
    *(Variant("serial", "hostile"), Variant("overlap", "hostile")),
    *(Variant("batch-queue", "hostile", depth=depth) for depth in (2, 3, 4)),
]


class Lengths(ToyModel):
    """A model that wants exact lengths on the host."""

    host_lengths = True


def steady(
    variant: Variant, modes: HostileModes, model: type[ToyModel] = ToyModel, **params: Any
) -> tuple[Engine, dict[str, Any], dict[str, Any]]:
    """An engine, and what its device had counted before STEPS steps of it and after them."""
    settled = resolved(OPTIONS, variant)
    spec = runner_spec(settled)
    device = HostileDevice(7, spec.depth, modes)
    runner = Runner(model(**spec.options), device, spec, 64)
    engine = toy_engine(OPTIONS, variant, executor=InlineExecutor(runner))
    asked = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, **params)
    for first in range(ROWS):
        engine.add([2 + first, 3, 4], asked)
    for _ in range(WARM):
        engine.step()
    before = device.counts.as_dict()
    for _ in range(STEPS):
        assert engine.step() is not None
    return engine, before, device.counts.as_dict()


def copies(before: dict[str, Any], after: dict[str, Any], way: str) -> dict[str, int]:
    """Copies by call site in between."""
    counts = {
        site: told["copies"] - before[way].get(site, {"copies": 0})["copies"]
        for site, told in after[way].items()
    }
    return {site: count for site, count in counts.items() if count}


@pytest.mark.parametrize("variant", LOOPS, ids=str)
def test_a_steady_step_waits_once_and_copies_once(variant: Variant) -> None:
    # a device that keeps up, so that as many copies have run as were asked for
    engine, before, after = steady(variant, HostileModes(slow_host=True))
    assert after["landings"] - before["landings"] == STEPS
    assert after["syncs"] == after["hidden"] == {}
    assert copies(before, after, "downloads") == {"results": STEPS}
    # the serial loop's tokens come from the host
    brought = {"staging": STEPS} if variant.loop == "serial" else {}
    assert copies(before, after, "uploads") == brought
    assert engine.syncs.as_dict() == {}


@pytest.mark.parametrize("variant", LOOPS[1:], ids=str)
def test_copies_that_block_are_named_and_counted(variant: Variant) -> None:
    engine, before, after = steady(variant, HostileModes(blocking_copies=True))
    told = engine.syncs.as_dict()
    assert after["syncs"]["blocking-copy"] - before["syncs"]["blocking-copy"] == STEPS
    assert set(told) == {"blocking-copy"}
    assert told["blocking-copy"]["steps"] == engine.scheduler.load.step + 1


@pytest.mark.parametrize("variant", LOOPS[1:], ids=str)
def test_lengths_wanted_on_the_host_are_named_and_counted(variant: Variant) -> None:
    engine, before, after = steady(variant, HostileModes(slow_device=True), Lengths)
    assert after["syncs"]["host-lengths"] - before["syncs"]["host-lengths"] == STEPS
    assert set(after["syncs"]) == {"host-lengths"}
    assert engine.syncs.rows(SyncReason.HOST_LENGTHS) >= ROWS * STEPS


def test_hidden_states_cost_a_copy_and_no_wait() -> None:
    engine, before, after = steady(
        LOOPS[1], HostileModes(slow_host=True), return_hidden_states=True
    )
    assert after["landings"] - before["landings"] == STEPS
    assert after["syncs"] == after["hidden"] == {}
    assert copies(before, after, "downloads") == {"results": 2 * STEPS}
    assert engine.syncs.rows(SyncReason.HIDDEN_STATES) >= ROWS * STEPS
