"""A CUDA device: three real streams, real events, pinned copies, captured graphs.

Not yet run on a GPU: exercised on a stand-in for `torch.cuda`, and by `benchmarks/gpu_check.py` on
the first machine that has one.

- The three streams, and a fourth for marks inside graphs, come from torch's round-robin pool, so
  they are checked to be distinct: two that are one would serialise in silence.
- Nothing runs on the default stream.  What was built there before the first operation (weights,
  pools) is waited for once, by all streams.
- Events are fresh each time, sleep in the driver when the host waits, and tell when they passed.
- Where copies to the host block whoever asks for them, which is tried at the start, a thread stands
  for the copy stream.
- Device memory goes back to torch's allocator when nobody names it, which knows nothing of other
  streams; the runner keeps what a step uses until the step has landed.  Pinned memory of downloads
  is torch's caching host allocator's, which remembers the copies into it.

An error of the device shows up when an event is asked or waited for, and from then on everywhere:
`done` says true, so that nobody waits for ever, and `wait` raises it.  Knows no plan and no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, cuda

from stepahead.device.base import Event, HostArray, Stream, Work
from stepahead.device.side import SideThread
from stepahead.device.staging import LATE, RingStaging, StagingRing
from stepahead.errors import ConfigError, EngineError
from stepahead.sync import SyncReason, Waited

_DRAWS = 128  # torch's pool has 32 streams: four rounds
_PROBE_CYCLES = 20_000_000  # some 10 ms
_PROBES = 3
_ANCHOR_TRIES = 10  # the host may wake up late; the promptest counts
_ANCHOR_NS = 1_000_000_000  # up to here milliseconds in float32 are exact to 0.06 us


class _Clock:
    """When events passed, on the host's clock.

    The device tells the time from one event to another, in float32 milliseconds, by a clock that
    drifts from the host's.  So an event's time is that of an anchor plus the difference, and from
    time to time a newer event becomes the anchor.  Two things tie it to the host's clock.  Whoever
    slept for an event woke up just after it: the promptest of a second shows how far off the anchor
    is.  And no event passed before it was recorded, or after the host saw that it had.  Two threads
    may ask; the anchor is one tuple, so that they never see half of it.
    """

    def __init__(self, stream: cuda.Stream) -> None:
        tries = []
        for _ in range(_ANCHOR_TRIES):
            event, asked_ns = _new_event(), time.perf_counter_ns()
            event.record(stream)
            event.synchronize()
            heard_ns = time.perf_counter_ns()
            tries.append((heard_ns - asked_ns, heard_ns, event))
        _, heard_ns, event = min(tries, key=lambda one: one[0])
        self._anchor = event, heard_ns
        self._least_late_ns: int | None = None

    def at_ns(self, event: cuda.Event, recorded_ns: int, seen_ns: int) -> int:
        """Nanoseconds on the clock of `time.perf_counter_ns`."""
        anchor, anchor_ns = self._anchor
        later_ns = _later_ns(anchor, event)
        at_ns = min(max(anchor_ns + later_ns, recorded_ns), seen_ns)
        if later_ns > 2 * _ANCHOR_NS:  # nobody has slept for an event for a while
            self._move(event, at_ns)
        return at_ns

    def woke(self, event: cuda.Event, woke_ns: int) -> None:
        """Somebody slept until the event, and is awake."""
        anchor, anchor_ns = self._anchor
        later_ns = _later_ns(anchor, event)
        late_ns = least_ns = woke_ns - anchor_ns - later_ns
        # after a long pause what was seen before it says nothing any more
        if self._least_late_ns is not None and later_ns < 2 * _ANCHOR_NS:
            least_ns = min(self._least_late_ns, late_ns)
        self._least_late_ns = least_ns
        if later_ns > _ANCHOR_NS:
            self._move(event, anchor_ns + later_ns + least_ns)

    def _move(self, event: cuda.Event, at_ns: int) -> None:
        self._anchor = event, at_ns
        self._least_late_ns = None


def _later_ns(one: cuda.Event, two: cuda.Event) -> int:
    return round(one.elapsed_time(two) * 1e6)


class CudaEvent:
    """A point in a stream, recorded once."""

    def __init__(self, event: cuda.Event, clock: _Clock, recorded_ns: int) -> None:
        self.event = event
        self._clock = clock
        self._recorded_ns = recorded_ns
        self._seen_ns = 0
        self._error: RuntimeError | None = None

    def done(self) -> bool:
        """Whether the device has passed it, or failed before it."""
        if self._error is not None or self._seen_ns:
            return True
        try:
            passed = self.event.query()
        except RuntimeError as error:
            self._error = error
            return True
        if passed:
            self._seen_ns = time.perf_counter_ns()
        return passed

    def wait(self) -> None:
        """Sleeps until the device has passed it; raises the device's error if it failed before."""
        if self._error is not None:
            raise self._error
        asleep = not self._seen_ns and not self.event.query()
        self.event.synchronize()
        self._seen_ns = self._seen_ns or time.perf_counter_ns()
        if asleep:
            self._clock.woke(self.event, self._seen_ns)

    def at_ns(self) -> int:
        """When it passed, to some ten microseconds; the time between two events is better."""
        seen_ns = self._seen_ns or time.perf_counter_ns()
        return self._clock.at_ns(self.event, self._recorded_ns, seen_ns)


class _Download:
    """Pinned memory that a copy goes to, once it has been enqueued."""

    def __init__(self) -> None:
        self.host: Tensor | None = None

    def fill(self, stream: cuda.Stream, source: Callable[[], Tensor]) -> None:
        """Enqueues the copy."""
        with cuda.stream(stream):
            tensor = source()
            self.host = pinned_like(tensor)
            self.host.copy_(tensor, non_blocking=True)

    def read(self) -> np.ndarray:
        """The values, after an event behind the copy."""
        assert self.host is not None, "a download was read before it was enqueued"
        return self.host.numpy()


class CudaGraph:
    """Two captured parts with an event between them."""

    def __init__(
        self, device: CudaDevice, graph: cuda.CUDAGraph, between: cuda.Event | None
    ) -> None:
        self._device = device
        self._graph = graph
        self._between = between

    def launch(self, first: Work, rest: Work) -> Event:
        """Replays both parts on the forward stream.  The event passes between them; after them,
        where this torch can't record inside a graph."""
        self._device.enqueue(Stream.FORWARD, self._graph.replay)
        if self._between is None:
            return self._device.record(Stream.FORWARD)
        return self._device.mark(self._between)


class CudaDevice:
    """One GPU, for steps up to `depth` ahead."""

    def __init__(self, depth: int, index: int = 0) -> None:
        """ConfigError when there is no such GPU, EngineError when it gives no distinct streams."""
        if not cuda.is_available() or index >= cuda.device_count():
            raise ConfigError(
                f"device=cuda, but torch finds no GPU {index} (torch.cuda.is_available() is "
                f"{cuda.is_available()}); check the driver and that torch was built for CUDA, or "
                "use device=cpu"
            )
        self._index = index
        cuda.set_device(index)
        schedule, forward, copy, self._marks = distinct_streams(index, 4)
        self._streams = {Stream.SCHEDULE: schedule, Stream.FORWARD: forward, Stream.COPY: copy}
        self._begun = False
        self._waited: list[Waited] = []
        self._clock = _Clock(forward)
        self._ring = StagingRing(self, depth)
        # masks are made when the late rows before them have landed: theirs are used
        self._late_ring = StagingRing(self, 1, kind=LATE)
        self._blocks: dict[str, list[Tensor]] = {}
        self._pool: Any = None  # torch's name for the memory of graphs, which never run at once
        self._copier: SideThread | None = None
        if self._copies_block():
            self._copier = SideThread(lambda: cuda.set_device(index))

    @property
    def place(self) -> torch.device:
        """The GPU."""
        return torch.device("cuda", self._index)

    @property
    def copies_block(self) -> bool:
        """Whether copies to the host block whoever asks, so that a thread makes them."""
        return self._copier is not None

    # --- operations ---------------------------------------------------------------------------

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Calls `fn` with the stream as torch's current one: what it launches is enqueued."""
        self._begin()
        with cuda.stream(self._streams[stream]):
            fn()

    def record(self, stream: Stream) -> Event:
        """A fresh event on the stream; a mark in the thread's work where that makes the copies."""
        if stream is Stream.COPY and self._copier is not None:
            copied = self._streams[Stream.COPY]
            self._copier.do(lambda: self._record_on(copied).wait())
            return self._copier.mark()
        return self._record_on(self._streams[stream])

    def wait(self, stream: Stream, event: Event) -> None:
        """The stream waits on the device; the copy thread, where there is one, on the host."""
        if stream is Stream.COPY and self._copier is not None:
            self._copier.do(event.wait)
            return
        assert isinstance(event, CudaEvent), "nothing waits for the copy stream"
        self._streams[stream].wait_event(event.event)

    def sync(self, event: Event, reason: SyncReason) -> None:
        """Sleeps until the event."""
        began_ns = self.now_ns()
        event.wait()
        self._waited.append(Waited(reason, began_ns, self.now_ns()))

    def waited(self) -> tuple[Waited, ...]:
        """What `sync` was called for.  Copies that block wait in a thread of their own, and hold
        up nobody."""
        waited = tuple(self._waited)
        self._waited.clear()
        return waited

    def mark(self, event: cuda.Event) -> CudaEvent:
        """A fresh event that passes when one inside a graph next does.

        That one is recorded anew by every replay: whoever asked it later would hear of another
        step.  Waiting for it is bound to this replay, on a stream that does nothing else.
        """
        self._marks.wait_event(event)
        return self._record_on(self._marks)

    def _record_on(self, stream: cuda.Stream) -> CudaEvent:
        event, recorded_ns = _new_event(), time.perf_counter_ns()
        event.record(stream)
        return CudaEvent(event, self._clock, recorded_ns)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            default = cuda.default_stream(self._index)
            for stream in self._streams.values():
                stream.wait_stream(default)

    # --- copies -------------------------------------------------------------------------------

    def stage(self, step: int) -> RingStaging:
        """The step's staging block."""
        self._begin()
        return self._ring.open(step)

    def stage_late(self, step: int) -> RingStaging:
        """The step's second block."""
        return self._late_ring.open(step)

    def side(self, name: str) -> SideThread:
        """A thread whose device is this one."""
        return SideThread(lambda: cuda.set_device(self._index), name)

    def download(self, source: Callable[[], Tensor], name: str) -> HostArray:
        """A copy into fresh pinned memory, behind what the copy stream waits for."""
        download, stream = _Download(), self._streams[Stream.COPY]
        if self._copier is None:
            download.fill(stream, source)
        else:
            self._copier.do(lambda: download.fill(stream, source))
        return download

    def free(self, names: tuple[str, ...]) -> None:
        """Staging blocks go back to torch's allocator."""
        for name in names:
            self._blocks.pop(name, None)

    def pinned(self, count: int, name: str) -> Tensor:
        """Pinned host memory int64[count]."""
        return new_pinned((count,), torch.int64)

    def block(self, count: int, name: str) -> Tensor:
        """Device memory int64[count], kept until `name` is freed; the schedule stream's own, so
        that the copy into it comes after whatever that stream did with it before."""
        with cuda.stream(self._streams[Stream.SCHEDULE]):
            tensor = torch.empty(count, dtype=torch.int64, device=self.place)
        self._blocks.setdefault(name, []).append(tensor)
        return tensor

    def host_writes(self, name: str) -> None:
        """Nobody checks here."""

    def copy_in(self, target: Tensor, name: str, source: Tensor, source_name: str) -> None:
        """A copy from pinned memory, on the schedule stream."""
        with cuda.stream(self._streams[Stream.SCHEDULE]):
            target.copy_(source, non_blocking=True)

    def _copies_block(self) -> bool:
        """Whether asking for a copy that has to wait takes about as long as the wait.  Once that
        it does not is proof; that it does may be a busy host."""
        forward, copy = self._streams[Stream.FORWARD], self._streams[Stream.COPY]
        with cuda.stream(forward):
            source = torch.zeros(1, dtype=torch.int64, device=self.place)
        for cycles in (1, *[_PROBE_CYCLES] * _PROBES):  # the first time, other things are slow too
            with cuda.stream(forward):
                cuda._sleep(cycles)
            copy.wait_event(self._record_on(forward).event)
            begin_ns = time.perf_counter_ns()
            _Download().fill(copy, lambda: source)
            asked_ns = time.perf_counter_ns() - begin_ns
            self._record_on(copy).wait()
            whole_ns = time.perf_counter_ns() - begin_ns
            if cycles > 1 and asked_ns < whole_ns / 2:
                return False
        return True

    # --- graphs -------------------------------------------------------------------------------

    def capture(self, first: Callable[[], None], rest: Callable[[], None]) -> CudaGraph:
        """Both parts as one graph, after they have run once so that what torch makes on first use
        is there."""
        cuda.synchronize(self._index)
        with cuda.stream(self._marks):
            first()
            rest()
        cuda.synchronize(self._index)
        graph, between = cuda.CUDAGraph(), _graph_event()
        # thread_local: another thread's question about an event must not end the capture
        with cuda.graph(
            graph, pool=self._pool, stream=self._marks, capture_error_mode="thread_local"
        ):
            first()
            if between is not None:
                between.record(self._marks)
            rest()
        self._pool = graph.pool()
        return CudaGraph(self, graph, between)

    # --- the rest -----------------------------------------------------------------------------

    def long_next(self) -> None:
        """Nobody sleeps for its sake."""

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC, which all processes of a machine share."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """Lets go of memory and of whoever waits for copies.  Waits for no operation: a GPU that
        hangs would never let go."""
        if self._copier is not None:
            self._copier.close()
        self._blocks.clear()


def distinct_streams(index: int, count: int) -> list[cuda.Stream]:
    """Streams that are neither each other nor the default one; EngineError when torch's pool does
    not give so many."""
    taken = {cuda.default_stream(index).cuda_stream}
    streams: list[cuda.Stream] = []
    for _ in range(_DRAWS):
        stream = cuda.Stream(index)
        if stream.cuda_stream not in taken:
            taken.add(stream.cuda_stream)
            streams.append(stream)
        if len(streams) == count:
            return streams
    raise EngineError(
        f"torch's stream pool gave {len(streams)} distinct streams in {_DRAWS} draws, and {count} "
        "are needed; steps would not overlap. Update torch, or use device=cpu"
    )


def new_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that the GPU copies from and to by itself; a pageable copy blocks the host."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def pinned_like(tensor: Tensor) -> Tensor:
    """Pinned memory for a copy of the tensor."""
    return new_pinned(tuple(tensor.shape), tensor.dtype)


def _new_event() -> cuda.Event:
    # blocking: the host sleeps in `synchronize` instead of spinning on a core the engine needs
    return cuda.Event(enable_timing=True, blocking=True)


def _graph_event() -> cuda.Event | None:
    """An event that can be recorded inside a graph and waited for outside; None where torch has
    none, which is so for ROCm and for torches older than those we ask for."""
    if torch.version.hip is not None:
        return None
    try:
        return cuda.Event(external=True)
    except TypeError:
        return None
