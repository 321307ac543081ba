"""Accesses that no stream makes, memory that is given back, and reads that end before a forward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from stepahead.device.base import Event, Stream, Work
from stepahead.device.clocks import RaceError
from stepahead.device.hostile import POISON, HostileDevice

SCHEDULE, FORWARD, COPY = Stream.SCHEDULE, Stream.FORWARD, Stream.COPY
SEEDS = range(8)


def nothing() -> None:
    """An operation that only declares what it touches."""


def race(do: Callable[[], object], *parts: str) -> None:
    """`do` is a race, and says so in these words."""
    with pytest.raises(RaceError) as caught:
        do()
    assert [part for part in parts if part not in str(caught.value)] == []


# --- results on the host --------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_a_result_that_was_not_waited_for_is_a_race(seed: int) -> None:
    device = HostileDevice(seed)
    early = device.record(COPY)
    leaves = device.download(lambda: torch.ones(2), "results 0")
    event = device.record(COPY)
    early.wait()
    race(leaves.read, "'results 0 on the host': host reads what is being written by stream copy")
    event.wait()
    assert leaves.read().tolist() == [1, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_event_seen_done_is_an_edge_as_one_waited_for(seed: int) -> None:
    device = HostileDevice(seed)
    leaves = device.download(lambda: torch.ones(2), "results 0")
    event = device.record(COPY)
    asked = 1
    while not event.done():
        race(leaves.read, "host reads what is being written")
        asked += 1
        assert asked < 200
    assert leaves.read().tolist() == [1, 1]
    assert device.counts.host_waits == 0


def test_each_result_of_a_step_is_waited_for_by_itself() -> None:
    device = HostileDevice(0)
    first = device.download(lambda: torch.ones(1), "results 0")
    event = device.record(COPY)
    second = device.download(lambda: torch.zeros(1), "results 0")
    event.wait()
    assert first.read().tolist() == [1]
    race(second.read, "'results 0 on the host, 2'")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.uint8])
def test_a_result_is_gone_when_its_place_is_needed(depth: int, dtype: torch.dtype) -> None:
    device, arrays, kept = HostileDevice(0, depth), [], []
    for step in range(depth):
        device.stage(step)
        arrays.append(device.download(lambda: torch.ones(2, dtype=dtype), f"results {step}"))
        device.record(COPY).wait()
        kept.append(arrays[step].read())
    assert [view.tolist() for view in kept] == [[1, 1]] * depth
    device.stage(depth)
    assert [view.tolist() for view in kept[1:]] == [[1, 1]] * (depth - 1)
    assert 1 not in kept[0].tolist(), "a view that was kept shows the next step's memory"
    race(arrays[0].read, "host reads 'results 0 on the host', which was freed")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_too_many_overwrites_a_result_that_is_on_its_way(seed: int) -> None:
    device = HostileDevice(seed, depth=1)
    device.stage(0)
    device.download(lambda: torch.ones(2), "results 0")
    race(lambda: device.stage(1), "'results 0 on the host': host frees what is being written by")


# --- given back -----------------------------------------------------------------------------


def staged(device: HostileDevice) -> torch.Tensor:
    """A block that has arrived, and that forward is ordered after."""
    staging = device.stage(3)
    tensor = staging.add(np.array([4, 5]))
    staging.send()
    device.wait(FORWARD, device.record(SCHEDULE))
    device.record(SCHEDULE).wait()
    return tensor


def test_what_is_freed_is_poison_at_once() -> None:
    device = HostileDevice(0)
    tensor = staged(device)
    assert tensor.tolist() == [4, 5]
    device.free(("staging 3",))
    assert tensor.tolist() == [POISON, POISON]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_freed_is_not_touched_again(seed: int) -> None:
    device = HostileDevice(seed)
    staged(device)
    device.free(("staging 3",))
    freed = "'staging 3', which was freed"
    race(lambda: device.enqueue(FORWARD, nothing, ("staging 3",)), "forward reads " + freed)
    race(lambda: device.enqueue(FORWARD, nothing, (), ("staging 3",)), "overwrites " + freed)
    race(lambda: device.download(lambda: torch.ones(1), "staging 3"), "copy reads " + freed)
    race(lambda: device.free(("staging 3",)), "host frees " + freed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_still_read_is_not_freed(seed: int) -> None:
    device = HostileDevice(seed)
    staged(device)
    device.enqueue(FORWARD, nothing, reads=("staging 3",))
    free = lambda: device.free(("staging 3",))  # noqa: E731
    race(free, "'staging 3': host frees what is being read by stream forward")
    device.record(FORWARD).wait()
    free()


def test_a_name_that_nothing_touched_may_be_freed() -> None:
    device = HostileDevice(0)
    device.free(("staging 9",))
    race(lambda: device.enqueue(FORWARD, nothing, ("staging 9",)), "which was freed")


# --- read windows ---------------------------------------------------------------------------


class Order:
    """When each of three operations ran, as tensors know it: 1, 2, 3; 0 before."""

    def __init__(self) -> None:
        self._clock = torch.zeros(1, dtype=torch.int64)
        self._at = torch.zeros(3, dtype=torch.int64)

    def stamp(self, place: int) -> Callable[[], None]:
        """An operation that stamps its place."""

        def run() -> None:
            self._clock.add_(1)
            self._at[place : place + 1] = self._clock

        return run

    @property
    def at(self) -> list[int]:
        """The stamps so far."""
        return self._at.tolist()


def graph_launched(
    device: HostileDevice, order: Order, first: tuple[str, ...], rest: tuple[str, ...]
) -> Event:
    """A graph whose parts, stamped 0 and 2, read this; and the event between them."""
    graph = device.capture(order.stamp(0), order.stamp(2))
    assert order.at == [0, 0, 0], "capturing is not running"

    def unused() -> None:
        raise AssertionError("a launch runs what was captured")

    return graph.launch(Work(unused, first, ("kv",)), Work(unused, rest, ("kv",)))


def test_a_write_after_the_last_read_may_come_before_the_forwards_end() -> None:
    orders = set()
    for seed in range(40):
        device, order = HostileDevice(seed), Order()
        reads_over = graph_launched(device, order, first=("pages",), rest=("kv",))
        device.wait(SCHEDULE, reads_over)
        device.enqueue(SCHEDULE, order.stamp(1), writes=("pages",))
        device.record(SCHEDULE).wait()
        device.record(FORWARD).wait()
        orders.add(tuple(order.at))
    assert orders == {(1, 2, 3), (1, 3, 2)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_without_a_fence_is_a_race(seed: int) -> None:
    device = HostileDevice(seed)
    graph_launched(device, Order(), first=("pages",), rest=("kv",))
    race(
        lambda: device.enqueue(SCHEDULE, nothing, writes=("pages",)),
        "'pages': stream schedule overwrites what is being read by stream forward",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fine_fence_for_reads_that_go_on_is_a_race(seed: int) -> None:
    device = HostileDevice(seed)
    reads_over = graph_launched(device, Order(), first=("pages",), rest=("pages",))
    device.wait(SCHEDULE, reads_over)
    race(
        lambda: device.enqueue(SCHEDULE, nothing, writes=("pages",)),
        "'pages': stream schedule overwrites what is being read by stream forward",
    )
    device.wait(SCHEDULE, device.record(FORWARD))  # the coarse one
    device.enqueue(SCHEDULE, nothing, writes=("pages",))


def test_nothing_is_captured_while_something_is_in_flight() -> None:
    device = HostileDevice(0)
    device.enqueue(FORWARD, nothing)
    race(
        lambda: device.capture(nothing, nothing),
        "a graph is captured while stream forward has work that the host did not wait for",
    )
    device.record(FORWARD).wait()
    device.capture(nothing, nothing)
