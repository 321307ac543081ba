"""A stand-in for `torch.cuda` on a machine without a GPU.

Operations run at once, in the order in which the host enqueues them, on CPU tensors.  Only time is
pretended: `_sleep` makes a stream busy, events carry a stream's time, and whoever synchronises
sleeps until then.  What is done on which stream is written down.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepahead.device import cuda as house
from stepahead.device import tape

if TYPE_CHECKING:
    import pytest

CYCLES_A_SECOND = 2e9


class Stream:
    def __init__(self, api: FakeCuda, handle: int) -> None:
        self.api = api
        self.cuda_stream = handle
        self.busy_until = 0.0

    def wait_event(self, event: Event) -> None:
        assert event.recorded_on is not None, "a stream waits for an event that nobody records"
        self.api.calls.append(("wait", self.cuda_stream, event.recorded_on))
        self.busy_until = max(self.busy_until, event.at)

    def wait_stream(self, other: Stream) -> None:
        self.api.calls.append(("wait", self.cuda_stream, other.cuda_stream))
        self.busy_until = max(self.busy_until, other.busy_until)


class Event:
    def __init__(
        self, api: FakeCuda, enable_timing: bool = False, blocking: bool = False, **more: Any
    ) -> None:
        self.api = api
        self.timed = enable_timing
        self.blocking = blocking
        self.external = more.get("external", False)
        self.recorded_on: int | None = None
        self.records = 0
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        if self.api.capturing is not None:
            assert self.external, "a plain event was recorded inside a graph"
            self.api.capturing.append(self)
            return
        self.records += 1
        self.recorded_on = stream.cuda_stream
        self.at = max(stream.busy_until, time.perf_counter())
        self.api.calls.append(("record", stream.cuda_stream, id(self)))

    def query(self) -> bool:
        self.api.check_error()
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        assert self.blocking, "the host would spin"
        self.api.check_error()
        time.sleep(max(0.0, self.at - time.perf_counter()))
        self.api.calls.append(("host waits", self.recorded_on or 0, id(self)))

    def elapsed_time(self, other: Event) -> float:
        assert self.timed
        assert other.timed
        self.api.check_error()
        return self.api.device_ms(self, other)


class Graph:
    """What was done to tensors while it was captured, to be done again."""

    def __init__(self, api: FakeCuda) -> None:
        self.api = api
        self.timeline: list[Event | int] = []  # events, and cycles slept
        self.again: Callable[[], None] = lambda: None

    def replay(self) -> None:
        stream = self.api.current
        self.api.calls.append(("replay", stream.cuda_stream, id(self)))
        self.again()
        for item in self.timeline:
            if isinstance(item, int):
                self.api._sleep(item)
                continue
            item.records += 1
            item.recorded_on = stream.cuda_stream
            item.at = max(stream.busy_until, time.perf_counter())

    def pool(self) -> tuple[int, int]:
        return (0, 7)


class FakeCuda:
    """The part of `torch.cuda` that the house uses."""

    def __init__(self, handles: list[int] | None = None) -> None:
        self.handles = handles if handles is not None else list(range(1, 33))
        self.drawn = 0
        self.default = Stream(self, 0)
        self.streams = [self.default]
        self._here = threading.local()  # each thread has a current stream of its own
        self.calls: list[tuple[str, int, int]] = []
        self.copies: list[tuple[int, bool, bool]] = []  # stream, non_blocking, to the host
        self.error: str | None = None
        self.blocking_copies = False
        self.capturing: list[Event | int] | None = None
        self.captures: list[dict[str, Any]] = []
        self.has_external = True
        self.events: list[Event] = []
        self.devices = 1
        self.device_ms: Callable[[Event, Event], float] = lambda a, b: (b.at - a.at) * 1e3

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._here.stream = stream

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def set_device(self, index: int) -> None:
        assert index < self.devices

    def default_stream(self, index: int) -> Stream:
        return self.default

    def Stream(self, index: int) -> Stream:
        handle = self.handles[self.drawn % len(self.handles)]
        self.drawn += 1
        self.streams.append(Stream(self, handle))
        return self.streams[-1]

    def Event(self, **options: Any) -> Event:
        if not self.has_external and "external" in options:
            raise TypeError("unexpected keyword argument 'external'")
        event = Event(self, **options)
        self.events.append(event)
        return event

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.check_error()
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Graph, **options: Any) -> Iterator[None]:
        self.captures.append(options)
        self.capturing, recorded = graph.timeline, tape._Tape()
        with self.stream(options["stream"]), torch.inference_mode(), recorded:
            yield
        recorded.restore()
        graph.again = tape._replay(recorded.calls)
        self.capturing = None

    def synchronize(self, index: int) -> None:
        self.calls.append(("synchronize", index, 0))
        busy_until = max(stream.busy_until for stream in self.streams)
        time.sleep(max(0.0, busy_until - time.perf_counter()))

    def _sleep(self, cycles: int) -> None:
        if self.capturing is not None:
            self.capturing.append(cycles)
            return
        begin = max(self.current.busy_until, time.perf_counter())
        self.current.busy_until = begin + cycles / CYCLES_A_SECOND

    def check_error(self) -> None:
        """Raises what went wrong on the device, from then on at every call."""
        if self.error is not None:
            raise RuntimeError(self.error)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype).as_subclass(Pinned)
        tensor.api = self
        return tensor

    def copied(self, non_blocking: bool, to_host: bool) -> None:
        self.copies.append((self.current.cuda_stream, non_blocking, to_host))
        if self.blocking_copies or not non_blocking:
            time.sleep(max(0.0, self.current.busy_until - time.perf_counter()))


class Pinned(Tensor):
    """Host memory that notices each copy from and to it."""

    api: FakeCuda

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        (api, *_) = (arg.api for arg in args if isinstance(arg, Pinned))
        if func is Tensor.copy_:
            api.copied(kwargs.get("non_blocking", False), isinstance(args[0], Pinned))
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Pinned):
            out.api = api
        return out


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    """Makes the house's CUDA device run on the stand-in."""
    monkeypatch.setattr(house, "cuda", fake)
    monkeypatch.setattr(house, "new_pinned", fake.pinned)
    monkeypatch.setattr(house.CudaDevice, "place", torch.device("cpu"))
