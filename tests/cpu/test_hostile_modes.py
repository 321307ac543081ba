"""Modes of the hostile device, its virtual clock, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stepahead.device.base import Stream, Work
from stepahead.device.clocks import RaceError
from stepahead.device.counts import call_site
from stepahead.device.hostile import HostileDevice, HostileEvent, HostileModes, InjectedFailure
from stepahead.device.timing import Timing
from stepahead.errors import ConfigError
from stepahead.sync import SyncReason

SCHEDULE, FORWARD, COPY = Stream.SCHEDULE, Stream.FORWARD, Stream.COPY
SEEDS = range(20)


def nothing() -> None:
    """An operation that only takes time."""


def launch(device: HostileDevice, step: int, ran: list[str]) -> HostileEvent:
    """A step of three operations: copy in, forward, copy out."""
    staging = device.stage(step)
    staging.add(np.arange(4))
    staging.send()
    device.wait(FORWARD, device.record(SCHEDULE))
    forward = lambda: ran.append(f"forward {step}")  # noqa: E731
    device.enqueue(FORWARD, forward, (staging.name,), (f"results {step}",))
    device.wait(COPY, device.record(FORWARD))
    device.download(lambda: torch.ones(3, dtype=torch.int32), f"results {step}")
    return device.record(COPY)


# --- paces ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_before_a_slow_host_everything_has_run(seed: int) -> None:
    device, ran = HostileDevice(seed, modes=HostileModes(slow_host=True)), []
    for i in range(4):
        device.enqueue(FORWARD, lambda i=i: ran.append(i))
        assert ran == list(range(i + 1))
    assert device.record(FORWARD).done()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_device_runs_when_the_host_waits(seed: int) -> None:
    device, ran = HostileDevice(seed, modes=HostileModes(slow_device=True)), []
    event = launch(device, 0, ran)
    for _ in range(20):
        assert not event.done()
    assert ran == []
    event.wait()
    assert ran == ["forward 0"]
    assert event.done()


def test_a_device_is_not_slow_and_fast() -> None:
    with pytest.raises(ConfigError, match="slow_host and slow_device contradict"):
        HostileModes(slow_host=True, slow_device=True)


# --- copies that block ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_blocking_copy_holds_the_host_and_is_counted(seed: int) -> None:
    device = HostileDevice(seed, modes=HostileModes(blocking_copies=True, slow_device=True))
    device.enqueue(FORWARD, nothing, writes=("results 0",))
    device.wait(COPY, device.record(FORWARD))
    leaves = device.download(lambda: torch.ones(2), "results 0")
    assert leaves.read().tolist() == [1, 1]
    assert device.counts.syncs == {SyncReason.BLOCKING_COPY: 1}
    assert device.counts.landings == 0


def test_a_blocking_copy_takes_the_hosts_time() -> None:
    times = {}
    for blocking in (False, True):
        timing = Timing(10, lambda stream, writes: 1000, lambda nbytes: nbytes)
        device = HostileDevice(1, 1, HostileModes(blocking_copies=blocking), timing)
        device.enqueue(FORWARD, nothing, writes=("results 0",))  # 10 to 1010
        device.wait(COPY, device.record(FORWARD))
        device.download(lambda: torch.ones(2, dtype=torch.int64), "results 0")  # to 1026
        times[blocking] = device.now_ns()
    assert times == {False: 40, True: 1026}


# --- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("at", "stream"), [(4, "schedule"), (5, "forward"), (6, "copy")])
def test_any_operation_may_fail_later_than_it_was_enqueued(seed: int, at: int, stream: str) -> None:
    device, ran = HostileDevice(seed, 3, HostileModes(fail_at=at, slow_device=True)), []
    landings = [launch(device, step, ran) for step in range(3)]
    landings[0].wait()  # what lies before the failure is as it should be
    for event in landings[1:]:
        with pytest.raises(InjectedFailure, match=f"operation {at}, on stream {stream}, failed"):
            event.wait()
        with pytest.raises(InjectedFailure):
            event.done()
    assert landings[0].done()
    assert ran == ["forward 0", "forward 1", "forward 2"][: 3 if stream == "copy" else 1]


def test_a_failure_elsewhere_is_not_this_events() -> None:
    device, ran = HostileDevice(0, modes=HostileModes(fail_at=1, slow_host=True)), []
    device.enqueue(FORWARD, nothing)
    device.enqueue(COPY, lambda: ran.append(1))
    assert device.record(COPY).done()
    assert ran == [1]


def test_a_blocking_copy_that_fails_raises_where_it_blocks() -> None:
    device = HostileDevice(0, modes=HostileModes(fail_at=1, blocking_copies=True))
    with pytest.raises(InjectedFailure, match="on stream copy"):
        device.download(lambda: torch.ones(1), "results 0")


# --- the clock ------------------------------------------------------------------------------

# a host call 10 ns, a forward 1000, a copy a nanosecond a byte
TIMING = Timing(10, lambda stream, writes: 1000 if stream is FORWARD else 100, lambda n: n)


@pytest.mark.parametrize("modes", [HostileModes(), HostileModes(slow_device=True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_times_are_those_of_streams_events_and_the_host(seed: int, modes: HostileModes) -> None:
    device = HostileDevice(seed, 2, modes, TIMING)
    device.enqueue(SCHEDULE, nothing)  # host 10; runs 10 to 110
    brought = device.record(SCHEDULE)  # 20; 110
    device.wait(FORWARD, brought)  # 30
    device.enqueue(FORWARD, nothing)  # 40; 110 to 1110
    first = device.record(FORWARD)  # 50; 1110
    device.spend(5000)
    assert device.now_ns() == 5050
    device.enqueue(FORWARD, nothing)  # 5060 to 6060: the host was late
    second = device.record(FORWARD)  # 5070
    device.enqueue(FORWARD, nothing)  # 6060 to 7060: behind the other
    device.wait(COPY, second)  # 5090
    device.download(lambda: torch.ones(4, dtype=torch.int64), "results 0")  # 6060 to 6092
    copied = device.record(COPY)  # 5110
    copied.wait()  # 5120
    assert device.now_ns() == copied.at_ns() == 6092
    assert [brought.at_ns(), first.at_ns(), second.at_ns()] == [110, 1110, 6060]
    device.record(FORWARD).wait()
    assert device.now_ns() == 7060
    assert device.counts.idle_ns == 5060 - 1110


@pytest.mark.parametrize("seed", SEEDS)
def test_an_event_is_done_when_the_hosts_time_has_come_to_it(seed: int) -> None:
    device = HostileDevice(seed, 1, HostileModes(slow_host=True), TIMING)
    device.enqueue(FORWARD, nothing)  # 10 to 1010
    event = device.record(FORWARD)  # 20
    asked = 1
    while not event.done():
        asked += 1
        assert asked < 200
    assert device.now_ns() == 1010
    assert asked == 99


def test_when_an_event_passed_is_asked_after_waiting() -> None:
    device = HostileDevice(0, modes=HostileModes(slow_host=True))
    device.enqueue(FORWARD, nothing)
    before = device.record(FORWARD)
    after = device.record(FORWARD)
    device.enqueue(COPY, nothing)  # both have passed by now, and the host knows of one
    before.wait()
    before.at_ns()
    with pytest.raises(RaceError, match="an event of stream forward passed, and did not wait"):
        after.at_ns()


def test_the_parts_of_a_graph_leave_no_gap() -> None:
    device = HostileDevice(0, 1, HostileModes(), TIMING)
    graph = device.capture(nothing, nothing)
    between = graph.launch(Work(nothing), Work(nothing))  # 20
    device.record(FORWARD).wait()
    assert between.at_ns() == 1020
    assert device.now_ns() == 2020
    assert device.counts.idle_ns == 0


# --- counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_is_counted_exactly(seed: int) -> None:
    device, ran = HostileDevice(seed, 2, timing=TIMING), []
    for step in range(3):
        event = launch(device, step, ran)
        event.wait()
    device.sync(event, SyncReason.DRAIN)
    assert device.counts.as_dict() == {
        "landings": 3,
        "syncs": {"drain": 1},
        "hidden": {},
        "uploads": {"staging": {"copies": 3, "bytes": 3 * 32}},
        "downloads": {"results": {"copies": 3, "bytes": 3 * 12}},
        "operations": {"schedule": 3, "forward": 3, "copy": 3},
        # from one forward's end to the next: 12 for the copy out, and six calls of 10 to launch,
        # seven once the ring comes round and asks whether its copy has passed
        "idle_ns": 72 + 82,
    }
    assert device.counts.host_waits == 4


def test_idle_time_is_the_same_in_any_order() -> None:
    idle = set()
    for seed in SEEDS:
        device, ran, flights = HostileDevice(seed, 2, timing=TIMING), [], []
        for step in range(6):
            flights.append(launch(device, step, ran))
            device.spend(600 * step)
            if len(flights) == 2:
                flights.pop(0).wait()
        flights[0].wait()
        idle.add(device.counts.idle_ns)
    assert len(idle) == 1
    assert idle != {0}


@pytest.mark.parametrize(
    ("name", "site"),
    [("results 12", "results"), ("kv", "kv"), ("7", "7"), ("late results 3", "late results")],
)
def test_a_call_site_is_a_name_without_its_step(name: str, site: str) -> None:
    assert call_site(name) == site
