"""What only a real GPU can tell of the CUDA device.  Not yet run on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from stepahead.device.base import Stream, Work
from stepahead.device.cuda import CudaDevice

CYCLES = 100_000_000  # some 50 ms
NOTHING = Work(lambda: None)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice(2)
    yield device
    torch.cuda.synchronize()
    device.close()


def busy() -> None:
    torch.cuda._sleep(CYCLES)


def test_the_host_runs_ahead_and_sleeps(device: CudaDevice) -> None:
    begin_ns = time.perf_counter_ns()
    device.enqueue(Stream.FORWARD, busy)
    event = device.record(Stream.FORWARD)
    asked_ns = time.perf_counter_ns() - begin_ns
    assert not event.done()
    begin_cpu = time.process_time()
    event.wait()
    waited_ns = time.perf_counter_ns() - begin_ns
    assert asked_ns < waited_ns / 4
    assert (time.process_time() - begin_cpu) * 1e9 < waited_ns / 4, "the host spun"
    assert event.done()
    assert begin_ns < event.at_ns() <= time.perf_counter_ns()


def test_streams_overlap(device: CudaDevice) -> None:
    events = []
    for stream in (Stream.SCHEDULE, Stream.FORWARD):
        start = device.record(stream)
        device.enqueue(stream, busy)
        events.append((start, device.record(stream)))
    for start, end in events:
        end.wait()
        assert start.at_ns() < end.at_ns()
    (start_one, end_one), (start_two, end_two) = events
    assert start_two.at_ns() < end_one.at_ns()
    assert start_one.at_ns() < end_two.at_ns()


def test_what_is_staged_arrives_and_what_is_downloaded_too(device: CudaDevice) -> None:
    for step in range(6):
        staging = device.stage(step)
        wide, narrow = np.arange(8).reshape(2, 4) + step, np.array([step])
        tensors = staging.add(wide), staging.add(narrow)
        staging.send()
        device.wait(Stream.FORWARD, device.record(Stream.SCHEDULE))
        out: list[torch.Tensor] = []
        device.enqueue(Stream.FORWARD, lambda t=tensors, out=out: out.append(t[0] * 2 + t[1]))
        device.wait(Stream.COPY, device.record(Stream.FORWARD))
        array = device.download(lambda out=out: out[0], "results")
        device.record(Stream.COPY).wait()
        assert (array.read() == wide * 2 + step).all()
        device.free((staging.name,))


def test_an_event_passes_inside_each_replay(device: CudaDevice) -> None:
    flag = torch.zeros(1, dtype=torch.int64, device=device.place)

    def part(value: int) -> Callable[[], None]:
        def run() -> None:
            flag.fill_(value)
            busy()

        return run

    graph = device.capture(part(1), part(2))
    for _ in range(3):
        start = device.record(Stream.FORWARD)
        between = graph.launch(NOTHING, NOTHING)
        end = device.record(Stream.FORWARD)
        device.wait(Stream.SCHEDULE, between)
        seen: list[torch.Tensor] = []
        device.enqueue(Stream.SCHEDULE, lambda seen=seen: seen.append(flag.clone()))
        early = device.record(Stream.SCHEDULE)
        early.wait()
        assert not end.done(), "the event did not pass before the end"
        end.wait()
        whole = end.at_ns() - start.at_ns()
        assert 0.3 * whole < between.at_ns() - start.at_ns() < 0.7 * whole
        assert seen[0].item() in (1, 2)
