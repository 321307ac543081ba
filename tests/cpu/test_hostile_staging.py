"""The staging ring, on the device that sees what is wrong with it.

Steps here land as the runner's do: schedule copies in, forward reads, copy takes out, and the host
waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from stepahead.device.base import Event, HostArray, Stream
from stepahead.device.clocks import RaceError
from stepahead.device.hostile import POISON, HostileDevice, HostileEvent
from stepahead.device.staging import StagingRing
from stepahead.errors import EngineError
from stepahead.sync import SyncReason

SCHEDULE, FORWARD, COPY = Stream.SCHEDULE, Stream.FORWARD, Stream.COPY
SEEDS = range(12)


def step(device: HostileDevice, number: int, *arrays: np.ndarray) -> tuple[HostileEvent, HostArray]:
    """Stages arrays, adds them up in a forward, and takes the sum out."""
    staging = device.stage(number)
    tensors = [staging.add(array) for array in arrays]
    staging.send()
    sums: list[Tensor] = []
    results = f"results {number}"
    device.wait(FORWARD, device.record(SCHEDULE))
    total = lambda: sums.append(torch.stack([t.sum() for t in tensors]))  # noqa: E731
    device.enqueue(FORWARD, total, (staging.name,), (results,))
    device.wait(COPY, device.record(FORWARD))
    leaves = device.download(lambda: sums[0], results)
    return device.record(COPY), leaves


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_as_deep_as_the_steps_ahead_is_no_race(seed: int, depth: int) -> None:
    device, flights = HostileDevice(seed, depth), []
    for number in range(8):
        if len(flights) == depth:
            event, leaves = flights.pop(0)
            event.wait()
            assert leaves.read().tolist() == [6 + 10 * (number - depth), 4]
            device.free((f"staging {number - depth}",))
        array = np.array([1, 2, 3 + 10 * number])
        flights.append(step(device, number, array, np.full((2, 2), 1, np.int32)))
        array[:] = 0  # it was copied when it was added
    assert device.counts.syncs == {}
    assert device.counts.hidden == {}
    ran = device.counts.operations
    assert min(ran[SCHEDULE], ran[FORWARD]) >= 8 - depth


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_more_than_the_ring_is_deep_is_a_race(seed: int, depth: int) -> None:
    device = HostileDevice(seed, depth)
    for number in range(depth):
        step_without_a_result(device, number)
    with pytest.raises(RaceError) as caught:
        step_without_a_result(device, depth)
    assert "'pinned 0': host overwrites what is being read by stream schedule" in str(caught.value)


def step_without_a_result(device: HostileDevice, number: int) -> None:
    """One that nobody waits for."""
    staging = device.stage(number)
    staging.add(np.arange(3))
    staging.send()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_step_is_one_copy(seed: int) -> None:
    device = HostileDevice(seed)
    event, _ = step(device, 0, np.arange(3), np.arange(4), np.arange(5))
    event.wait()
    counts = device.counts.as_dict()
    assert counts["uploads"] == {"staging": {"copies": 1, "bytes": 8 * 12}}
    assert counts["operations"]["schedule"] == 1


def test_a_step_with_nothing_to_stage_copies_nothing() -> None:
    device = HostileDevice(0)
    device.stage(0).send()
    device.record(SCHEDULE).wait()
    assert device.counts.uploads == {}


def test_a_block_that_was_not_sent_is_named_when_it_is_read() -> None:
    device = HostileDevice(0)
    staging = device.stage(0)
    staging.add(np.arange(3))
    with pytest.raises(RaceError, match="forward reads 'staging 0', which was never written"):
        device.enqueue(FORWARD, lambda: None, reads=(staging.name,))


def test_a_block_is_sent_once() -> None:
    staging = HostileDevice(0).stage(7)
    staging.add(np.arange(3))
    staging.send()
    with pytest.raises(EngineError, match="'staging 7' was sent; a step has one copy"):
        staging.send()
    with pytest.raises(EngineError, match="added after 'staging 7' was sent"):
        staging.add(np.arange(3))


def test_views_are_there_before_the_copy_and_keep_their_shapes() -> None:
    device = HostileDevice(1)
    staging = device.stage(0)
    arrays = [
        np.array([[1, 2], [3, 4]], np.int32),
        np.zeros((2, 0), np.int64),
        np.array([True, False]),
        np.arange(12).reshape(3, 4)[:, 1],
    ]
    tensors = [staging.add(array) for array in arrays]
    assert {t.untyped_storage().data_ptr() for t in tensors} == {
        tensors[0].untyped_storage().data_ptr()
    }
    assert all(value == POISON for t in tensors for value in t.flatten().tolist())
    staging.send()
    device.record(SCHEDULE).wait()
    assert [t.dtype for t in tensors] == [torch.int64] * 4
    assert [t.tolist() for t in tensors] == [a.astype(np.int64).tolist() for a in arrays]


def test_a_step_that_does_not_fit_takes_a_second_copy_once() -> None:
    device = HostileDevice(3)
    ring = StagingRing(device, 2, count=4)

    def send(number: int, *sizes: int) -> tuple[int, int]:
        before = device.counts.uploads.get("staging")
        copies, nbytes = (before.copies, before.nbytes) if before else (0, 0)
        staging = ring.open(number)
        arrays = [np.arange(size) + number for size in sizes]
        tensors = [staging.add(array) for array in arrays]
        staging.send()
        device.record(SCHEDULE).wait()
        assert [t.tolist() for t in tensors] == [a.tolist() for a in arrays]
        now = device.counts.uploads["staging"]
        return now.copies - copies, (now.nbytes - nbytes) // 8

    assert send(0, 3, 1) == (1, 4)
    assert send(1, 3, 4, 2) == (2, 9)  # 4 was too small for the first two, 8 for all of them
    assert send(2, 3, 4, 2) == (1, 9)  # the other buffer, which has learnt of it
    assert send(3, 3, 4, 2) == (1, 9)
    assert send(4, 40) == (1, 40)  # known at once
    assert send(5, 70, 60) == (2, 130)
    assert ring.count == 256


def test_the_blocks_of_two_steps_are_not_the_same_memory() -> None:
    device = HostileDevice(0)
    blocks = []
    for number in range(3):
        staging = device.stage(number)
        blocks.append(staging.add(np.array([number])))
        staging.send()
        device.record(SCHEDULE).wait()
    assert [block.tolist() for block in blocks] == [[0], [1], [2]]


def test_pageable_memory_is_a_hidden_wait() -> None:
    device = HostileDevice(0)
    device.copy_in(device.block(3, "staging 0"), "staging 0", torch.arange(3), "a list")
    assert device.counts.as_dict()["hidden"] == {"pageable staging": 1}
    pinned = device.pinned(3, "pinned 0")
    device.copy_in(device.block(3, "staging 1"), "staging 1", pinned[1:], "pinned 0")
    assert device.counts.hidden.total() == 1


# --- without clocks -------------------------------------------------------------------------


@dataclass
class Late:
    """An event that passes when it is waited for."""

    passed: bool = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.passed = True

    def at_ns(self) -> int:
        return 0


@dataclass
class Plain:
    """A device's memory whose copies run when somebody waits for them, and that checks nothing."""

    waits: list[SyncReason] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    taken: list[tuple[str, int]] = field(default_factory=list)
    events: list[Late] = field(default_factory=list)

    def pinned(self, count: int, name: str) -> Tensor:
        self.taken.append((name, count))
        return torch.zeros(count, dtype=torch.int64)

    def block(self, count: int, name: str) -> Tensor:
        self.taken.append((name, count))
        return torch.full((count,), POISON, dtype=torch.int64)

    def host_writes(self, name: str) -> None:
        return

    def copy_in(self, target: Tensor, name: str, source: Tensor, source_name: str) -> None:
        self.copies.append((target, source))

    def record(self, stream: Stream) -> Event:
        assert stream is SCHEDULE
        self.events.append(Late())
        return self.events[-1]

    def sync(self, event: Event, reason: SyncReason) -> None:
        self.waits.append(reason)
        for target, source in self.copies:
            target.copy_(source)
        self.copies.clear()
        event.wait()


def test_a_step_nobody_awaited_is_waited_for_by_name_before_its_buffer_is_written() -> None:
    memory = Plain()
    ring = StagingRing(memory, 2, count=4)
    tensors = []
    for number in range(2):
        staging = ring.open(number)
        tensors.append(staging.add(np.array([number])))
        staging.send()
    assert memory.waits == []
    ring.open(2).add(np.array([2]))
    assert memory.waits == [SyncReason.STAGING]
    assert [t.tolist() for t in tensors] == [[0], [1]]
    memory.events[1].passed = True
    ring.open(3).add(np.array([3]))
    assert memory.waits == [SyncReason.STAGING], "this one had passed"


def test_a_ring_takes_no_memory_again_until_it_grows() -> None:
    memory = Plain()
    ring = StagingRing(memory, 2, count=4)
    for number in range(6):
        staging = ring.open(number)
        staging.add(np.arange(3 if number < 4 else 6))
        staging.send()
    pinned = [taken for taken in memory.taken if taken[0].startswith("pinned")]
    assert pinned == [("pinned 0", 4), ("pinned 1", 4), ("pinned 0", 8), ("pinned 1", 8)]
    blocks = [taken for taken in memory.taken if taken[0].startswith("staging")]
    assert blocks == [(f"staging {n}", 4 if n < 4 else 8) for n in range(6)]
