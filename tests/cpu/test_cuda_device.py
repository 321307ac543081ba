"""The CUDA device on a stand-in for `torch.cuda`: which calls it makes, on which streams.

What a GPU does with them is for tests/gpu.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, Pinned, install

from stepahead.device import cuda as house
from stepahead.device.base import Stream, Work
from stepahead.device.cuda import CudaDevice
from stepahead.device.side import Mark
from stepahead.errors import ConfigError, EngineClosed, EngineError
from stepahead.sync import SyncReason


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake)
    monkeypatch.setattr(house, "_PROBE_CYCLES", 10_000_000)
    return fake


@pytest.fixture
def blocking(fake: FakeCuda) -> FakeCuda:
    fake.blocking_copies = True
    return fake


def handle(device: CudaDevice, stream: Stream) -> int:
    return device._streams[stream].cuda_stream


# --- streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("handles", [[1, 2, 3, 4], [1, 1, 2, 0, 2, 3, 3, 4], [5, 0, 0, 6, 7, 5, 8]])
def test_streams_are_distinct_and_not_the_default(fake: FakeCuda, handles: list[int]) -> None:
    fake.handles = handles
    device = CudaDevice(2)
    drawn = [stream.cuda_stream for stream in (*device._streams.values(), device._marks)]
    assert len({0, *drawn}) == 5


def test_a_pool_that_is_too_small_is_an_error(fake: FakeCuda) -> None:
    fake.handles = [1, 2, 3]
    with pytest.raises(EngineError, match="3 distinct streams in 128 draws, and 4 are needed"):
        CudaDevice(2)
    assert fake.drawn == 128


@pytest.mark.parametrize(("devices", "index"), [(0, 0), (1, 1)])
def test_a_gpu_that_is_not_there_is_an_error(fake: FakeCuda, devices: int, index: int) -> None:
    fake.devices = devices
    with pytest.raises(ConfigError, match=f"no GPU {index}.*device=cpu"):
        CudaDevice(2, index)


def test_operations_run_on_their_streams(fake: FakeCuda) -> None:
    device, ran = CudaDevice(2), []
    for stream in Stream:
        device.enqueue(stream, lambda: ran.append(fake.current.cuda_stream), ("a",), ("b",))
    assert ran == [handle(device, stream) for stream in Stream]
    assert fake.current is fake.default


def test_what_was_built_before_is_waited_for_once(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    fake.calls.clear()
    device.stage(0)
    device.enqueue(Stream.FORWARD, lambda: None)
    waits = [call for call in fake.calls if call[0] == "wait"]
    assert waits == [("wait", handle(device, stream), 0) for stream in Stream]


# --- events -----------------------------------------------------------------------------------


def test_events_are_fresh_and_sleep(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    events = [device.record(stream) for stream in Stream for _ in range(3)]
    assert len({id(event.event) for event in events}) == 9
    assert all(event.event.records == 1 and event.event.blocking for event in events)
    for event in events:
        event.wait()
        assert event.done()


def test_streams_wait_for_events_and_the_host_does_not(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    fake.calls.clear()
    event = device.record(Stream.FORWARD)
    device.wait(Stream.COPY, event)
    forward, copy = handle(device, Stream.FORWARD), handle(device, Stream.COPY)
    assert [call[:2] for call in fake.calls] == [("record", forward), ("wait", copy)]
    assert fake.calls[-1] == ("wait", copy, forward)


def test_an_event_is_done_when_the_device_has_passed_it(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    device.enqueue(Stream.FORWARD, lambda: fake._sleep(200_000_000))
    begin = time.perf_counter()
    event = device.record(Stream.FORWARD)
    assert not event.done()
    assert device.waited() == ()
    device.sync(event, SyncReason.HOST_LENGTHS)
    assert time.perf_counter() - begin > 0.09
    assert event.done()
    (waited,) = device.waited()
    assert waited.reason is SyncReason.HOST_LENGTHS
    assert waited.start_ns <= waited.end_ns <= device.now_ns()
    assert device.waited() == ()


def test_a_failed_device_is_heard_of_and_nobody_waits(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    before, after = device.record(Stream.FORWARD), device.record(Stream.COPY)
    before.wait()
    fake.error = "CUDA error: an illegal memory access was encountered"
    assert after.done()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            after.wait()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.enqueue(Stream.FORWARD, lambda: None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.record(Stream.FORWARD).wait()
    device.close()


# --- time -------------------------------------------------------------------------------------


def float32_ms(drift: float, fake: FakeCuda) -> Any:
    """A device's clock: float32 milliseconds, `drift` parts fast."""
    return lambda a, b: float(np.float32((b.at - a.at) * 1e3 * (1 + drift)))


def test_events_tell_when_they_passed(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    begin_ns = device.now_ns()
    start = device.record(Stream.FORWARD)
    device.enqueue(Stream.FORWARD, lambda: fake._sleep(100_000_000))
    end = device.record(Stream.FORWARD)
    end.wait()
    assert begin_ns <= start.at_ns() <= end.at_ns() <= device.now_ns()
    assert 45e6 < end.at_ns() - start.at_ns() < 60e6


class Hours:
    """Steps every 0.4 s for an hour, on pretended clocks; each takes the device 0.3 s."""

    def __init__(self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: round(self.now * 1e9))
        monkeypatch.setattr(time, "sleep", self.sleep)
        self.fake = fake
        self.device = CudaDevice(2)
        fake.device_ms = float32_ms(drift, fake)

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.now += seconds + 20e-6  # that long the host takes to wake up

    def steps(self, count: int, *, asleep: bool) -> int:
        """How far off the time of a step's start or end is at most; the host sleeps for each step,
        or is busy until long after it."""
        worst = 0
        for _ in range(count):
            begin = self.now
            events = [self.device.record(Stream.FORWARD)]
            self.device.enqueue(Stream.FORWARD, lambda: self.fake._sleep(600_000_000))
            events.append(self.device.record(Stream.FORWARD))
            if not asleep:
                self.now += 0.7
            events[1].wait()
            for event, passed in zip(events, (begin, begin + 0.3), strict=True):
                worst = max(worst, abs(event.at_ns() - round(passed * 1e9)))
            self.now += 0.1
        return worst


@pytest.mark.parametrize("drift", [0.0, 3e-5, -3e-5])
def test_hours_do_not_blur_nor_shift_the_time(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    """A difference to the first event would be off by 0.1 ms from float32 alone, and by 0.1 s from
    drift."""
    hours = Hours(fake, monkeypatch, drift)
    assert hours.steps(9000, asleep=True) < 80_000


@pytest.mark.parametrize("drift", [3e-5, -3e-5])
def test_an_hour_without_work_does_not_shift_the_time(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    """Right from the first step after it that the host sleeps for."""
    hours = Hours(fake, monkeypatch, drift)
    hours.steps(10, asleep=True)
    hours.now += 3600.0
    hours.steps(1, asleep=True)
    assert hours.steps(10, asleep=True) < 80_000


@pytest.mark.parametrize("drift", [0.0, -3e-5])
def test_a_host_that_never_sleeps_knows_when_an_idle_device_began(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    hours = Hours(fake, monkeypatch, drift)
    assert hours.steps(9000, asleep=False) < 80_000


def test_a_long_pause_does_not_shift_the_time(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CudaDevice(2)
    fake.device_ms = lambda a, b: (b.at - a.at) * 1e3 + 4000  # the clocks went apart by 4 s
    begin_ns = device.now_ns()
    event = device.record(Stream.FORWARD)
    event.wait()
    assert begin_ns <= event.at_ns() <= device.now_ns()
    later = device.record(Stream.FORWARD)
    later.wait()
    fake.device_ms = lambda a, b: (b.at - a.at) * 1e3
    assert event.at_ns() <= later.at_ns() <= device.now_ns()


# --- copies -----------------------------------------------------------------------------------


def test_a_step_is_staged_in_one_pinned_copy(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    fake.copies.clear()
    staging = device.stage(0)
    first = staging.add(np.arange(3))
    second = staging.add(np.arange(8).reshape(2, 4))
    staging.send()
    assert fake.copies == [(handle(device, Stream.SCHEDULE), True, False)]
    assert not isinstance(first, Pinned)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_a_block_stays_until_it_is_freed(fake: FakeCuda) -> None:
    device = CudaDevice(1)
    staging = device.stage(0)
    staging.add(np.arange(3))
    staging.send()
    (block,) = device._blocks[staging.name]
    other = device.stage(1)
    other.add(np.arange(3))
    other.send()
    assert block[:3].tolist() == [0, 1, 2]
    device.free((staging.name, "kv"))
    assert list(device._blocks) == [other.name]


def test_device_memory_of_a_block_is_the_schedule_streams(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, streams, real = CudaDevice(1), [], torch.empty

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        streams.append(fake.current.cuda_stream)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", watched)
    device.block(4, "staging 0")
    assert streams == [handle(device, Stream.SCHEDULE)]


def test_downloads_go_to_fresh_pinned_memory(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    assert not device.copies_block
    fake.copies.clear()
    source = torch.arange(4)
    arrays = [device.download(lambda: source + 0, "results") for _ in range(2)]
    device.record(Stream.COPY).wait()
    assert fake.copies == [(handle(device, Stream.COPY), True, True)] * 2
    assert all(isinstance(array.host, Pinned) for array in arrays)
    arrays[0].read()[:] = 9
    assert arrays[1].read().tolist() == [0, 1, 2, 3]


def test_pinned_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "empty", lambda shape, **more: asked.update(more, shape=shape))
    house.new_pinned((3, 2), torch.float32)
    assert asked == {"shape": (3, 2), "dtype": torch.float32, "pin_memory": True}


# --- copies that block ------------------------------------------------------------------------


def test_blocking_copies_are_found_and_get_a_thread(blocking: FakeCuda) -> None:
    device = CudaDevice(2)
    assert device.copies_block
    device.close()
    assert "stepahead-copy" not in {thread.name for thread in threading.enumerate()}


def test_with_blocking_copies_the_host_runs_ahead(blocking: FakeCuda) -> None:
    device = CudaDevice(2)
    begin = time.perf_counter()
    device.enqueue(Stream.FORWARD, lambda: blocking._sleep(200_000_000))
    over = device.record(Stream.FORWARD)
    device.wait(Stream.COPY, over)
    early: list[bool] = []
    array = device.download(lambda: (early.append(not over.done()), torch.arange(3))[1], "results")
    event = device.record(Stream.COPY)
    asked = time.perf_counter() - begin
    assert isinstance(event, Mark)
    event.wait()
    assert asked < 0.05 < 0.09 < time.perf_counter() - begin
    assert array.read().tolist() == [0, 1, 2]
    assert early == [False], "a copy was asked for before its forward was over"
    device.close()


def test_a_blocking_copy_that_fails_is_heard_of(blocking: FakeCuda) -> None:
    device = CudaDevice(2)

    def gone() -> torch.Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    device.download(gone, "results")
    event = device.record(Stream.COPY)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        event.wait()
    device.close()


def test_a_failed_forward_is_heard_of_through_the_thread(blocking: FakeCuda) -> None:
    device = CudaDevice(2)
    go = threading.Event()
    device.download(lambda: (go.wait(30), torch.arange(1))[1], "results 0")
    over = device.record(Stream.FORWARD)
    blocking.error = "CUDA error: an illegal memory access was encountered"
    device.wait(Stream.COPY, over)
    device.download(lambda: torch.arange(1), "results 1")
    event = device.record(Stream.COPY)
    go.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        event.wait()
    device.close()


def test_closing_lets_go_of_whoever_waits(blocking: FakeCuda) -> None:
    device, forever = CudaDevice(2), threading.Event()
    device.download(lambda: (forever.wait(60), torch.arange(1))[1], "results")
    event = device.record(Stream.COPY)
    begin = time.perf_counter()
    device.close()
    assert time.perf_counter() - begin < 20
    with pytest.raises(EngineClosed):
        event.wait()
    forever.set()


def test_nothing_waits_for_the_copy_stream(blocking: FakeCuda) -> None:
    device = CudaDevice(2)
    with pytest.raises(AssertionError, match="nothing waits for the copy stream"):
        device.wait(Stream.FORWARD, device.record(Stream.COPY))
    device.close()


# --- graphs -----------------------------------------------------------------------------------

NOTHING = Work(lambda: None)


def test_a_graph_is_captured_after_a_warm_up_and_shares_memory(fake: FakeCuda) -> None:
    device, ran = CudaDevice(2), []

    def part(name: str) -> Any:
        return lambda: ran.append((name, fake.capturing is not None, fake.current.cuda_stream))

    fake.calls.clear()
    device.capture(part("first"), part("rest"))
    device.capture(part("first"), part("rest"))
    side = device._marks.cuda_stream
    once = [(name, inside, side) for inside in (False, True) for name in ("first", "rest")]
    assert ran == once * 2
    assert [capture["pool"] for capture in fake.captures] == [None, (0, 7)]
    assert all(capture["stream"] is device._marks for capture in fake.captures)
    assert [call[0] for call in fake.calls] == ["synchronize"] * 4
    assert fake.current is fake.default


def test_each_replay_has_an_event_of_its_own(fake: FakeCuda) -> None:
    device = CudaDevice(2)
    graph = device.capture(lambda: None, lambda: None)
    fake.calls.clear()
    events = [graph.launch(NOTHING, NOTHING) for _ in range(3)]
    inside = graph._between
    assert inside is not None
    assert inside.external
    assert inside.records == 3
    assert len({id(event.event) for event in events}) == 3
    forward, marks = handle(device, Stream.FORWARD), device._marks.cuda_stream
    of_one = ["replay", "wait", "record"]
    calls = [call for call in fake.calls if call[2] != 0]  # but those for what was built before
    assert [call[0] for call in calls] == of_one * 3
    assert {call[:2] for call in calls} == {("replay", forward), ("wait", marks), ("record", marks)}
    for event in events:
        event.wait()
        assert event.done()


def test_without_events_inside_graphs_the_end_is_what_is_known(fake: FakeCuda) -> None:
    fake.has_external = False
    device = CudaDevice(2)
    graph = device.capture(lambda: None, lambda: None)
    fake.calls.clear()
    event = graph.launch(NOTHING, NOTHING)
    forward = handle(device, Stream.FORWARD)
    assert [call[:2] for call in fake.calls[-2:]] == [("replay", forward), ("record", forward)]
    event.wait()
