"""The CPU as a device that runs beside the thread that launches, as an accelerator does.

All streams are one queue, in the order in which operations were enqueued, which is an order that
the edges between streams allow.  A thread takes from it, so that the next plan is received, staged
and queued while the model computes without the interpreter; then the model stands still for no more
than sampling, and the first lines of the next one.

Whoever waits for an event is woken late: not when it passes, but when the thread comes to a long
operation (`long_next`) or runs out of work.  Woken at once it would fight with that thread for the
interpreter in just the moment in which the next forward could begin.

Where models take no longer than threads take to wake each other, operations run where they are
enqueued, as on the EagerDevice; from step to step it is seen which of both it is to be.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Event, Graph, HostArray, Staging, Stream, Work
from stepahead.device.eager import EagerDevice
from stepahead.errors import EngineClosed
from stepahead.sync import SyncReason, Waited

LONG_NS = 2_000_000  # a model that a thread of its own is worth
_CLOSE_S = 1.0  # what a running operation is given to end


class _Point:
    """An event.  It passes whether what came before it succeeded or failed: `wait` tells."""

    __slots__ = ("_at_ns", "_failure", "_passed", "_waiting")

    def __init__(self) -> None:
        self._passed = False
        self._at_ns = 0
        self._failure: BaseException | None = None
        self._waiting = threading.Lock()  # held until whoever waits may go on
        self._waiting.acquire()

    def done(self) -> bool:
        return self._passed

    def wait(self) -> None:
        if not self._passed:
            self._waiting.acquire()
            self._waiting.release()
        if self._failure is not None:
            raise self._failure

    def at_ns(self) -> int:
        return self._at_ns

    def settle(self, failure: BaseException | None) -> int:
        """It has passed now, at the time that is given; `failure` is what went wrong before it."""
        self._failure = failure
        self._at_ns = time.perf_counter_ns()
        self._passed = True
        return self._at_ns

    def wake(self) -> None:
        """Lets those who wait go on."""
        self._waiting.release()


class _Later:
    """A download; there when an event behind it has passed."""

    def __init__(self, source: Callable[[], Tensor]) -> None:
        self._source: Callable[[], Tensor] | None = source
        self._tensor: Tensor | None = None

    def fetch(self) -> None:
        assert self._source is not None
        self._tensor = self._source()
        self._source = None  # or what it holds would live as long as the result

    def read(self) -> np.ndarray:
        assert self._tensor is not None, "read before its event has passed"
        return self._tensor.numpy()


class _Again:
    """A graph that is the functions themselves."""

    def __init__(
        self, device: BesideDevice, first: Callable[[], None], rest: Callable[[], None]
    ) -> None:
        self._device, self._first, self._rest = device, first, rest

    def launch(self, first: Work, rest: Work) -> Event:
        self._device.enqueue(Stream.FORWARD, self._first)
        between = self._device.record(Stream.FORWARD)
        self._device.enqueue(Stream.FORWARD, self._rest)
        return between


_Item = Callable[[], None] | _Point | None


class BesideDevice(EagerDevice):
    """What an operation raises in the thread is raised by the events behind it, and nothing runs
    after it.  One thread of the host at a time enqueues."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # two counters with one writer each; a single one would need a lock
        self._given = self._done = 0
        self._beside = False
        # when the newest model began, and how long it was until the first event behind it
        self._long_since_ns = self._long_ns = 0
        self._failure: BaseException | None = None
        self._asleep: deque[_Point] = deque()  # have passed, and nobody was woken
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stepahead-forward", daemon=True)
        self._thread.start()

    def stage(self, step: int) -> Staging:
        """As the EagerDevice's.  A step begins with it: in the thread if models are long, and else
        behind what that still has to do."""
        short = self._long_ns < LONG_NS and self._failure is None
        if short and self._given != self._done:
            with suppress(BaseException):  # who lands the step is told
                self.record(Stream.FORWARD).wait()
        self._beside = not short or self._failure is not None
        return super().stage(step)

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Queues `fn`, or calls it."""
        if self._beside:
            self._put(fn)
        else:
            fn()

    def record(self, stream: Stream) -> Event:
        """Passes behind all that was enqueued."""
        if not self._beside:
            event = super().record(stream)
            self._model_over(event.at_ns())
            return event
        point = _Point()
        self._put(point)
        if self._closed:  # asked after the put: closing in between would leave it behind
            self._drain()
        return point

    def sync(self, event: Event, reason: SyncReason) -> None:
        """Waits, and says so."""
        began_ns = self.now_ns()
        event.wait()
        self._waited.append(Waited(reason, began_ns, self.now_ns()))

    def download(self, source: Callable[[], Tensor], name: str) -> HostArray:
        """The tensor itself: results are never written again."""
        if not self._beside:
            return super().download(source, name)
        later = _Later(source)
        self._put(later.fetch)
        return later

    def capture(self, first: Callable[[], None], rest: Callable[[], None]) -> Graph | None:
        """The functions, called anew each time; nothing would be gained by more."""
        return _Again(self, first, rest)

    def long_next(self) -> None:
        """Wakes those whose events have passed."""
        self._wake()
        self._long_since_ns = time.perf_counter_ns()

    def close(self) -> None:
        """Drops what has not begun, and waits for the operation that has, but not for long."""
        if self._failure is None:
            self._failure = EngineClosed("the device was closed before this step was run")
        self._closed = self._beside = True
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._drain()

    def _put(self, item: _Item) -> None:
        self._given += 1
        self._queue.put(item)

    def _drain(self) -> None:
        """Lets go who waits behind an operation that does not end, or was too late."""
        with suppress(queue.Empty):
            while True:
                self._do(self._queue.get_nowait())
        self._wake()
        self._queue.put(None)  # for the thread, when it comes free

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # OpenMP has a number for each thread
        with torch.inference_mode():
            while (item := self._next()) is not None:
                self._do(item)
                self._done += 1
        self._wake()

    def _next(self) -> _Item:
        if self._asleep and self._queue.empty():
            self._wake()
        return self._queue.get()

    def _do(self, item: _Item) -> None:
        if isinstance(item, _Point):
            self._model_over(item.settle(self._failure))
            self._asleep.append(item)
        elif item is not None and self._failure is None:
            try:
                item()
            except BaseException as error:  # the thread's end would be silence
                self._failure = error

    def _wake(self) -> None:
        with suppress(IndexError):  # there are no more, or `close` takes them, too
            while True:
                self._asleep.popleft().wake()

    def _model_over(self, now_ns: int) -> None:
        if self._long_since_ns:
            self._long_ns, self._long_since_ns = now_ns - self._long_since_ns, 0
