"""Python's search for cycles, put where it costs nothing, and shown.

A collection that comes by itself may come anywhere, also between a step's end on the device and the
next launch, and its length grows with all that the program holds.  So

- what is there when the engine is ready is frozen: no collection looks at it again;
- within a step none comes by itself;
- what is due is collected while the host waits for a flight and the device runs, if the last wait
  was long enough for it; where the host never waits long enough, when it has been due for long;
- between steps, and while the engine rests, Python does as it ever does.

A program that has turned collection off, or has frozen itself before, is left alone; a `close`
thaws what anybody has frozen since, for Python keeps no two lists.  Every pause that falls on the
engine is a stage of its books, counted, and remembered if it is the longest.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from stepahead.observe.books import Books
from stepahead.observe.stages import Stage

_PATIENCE = 20  # times its threshold a count may reach before a collection is due in any case
_GUESS_NS = (100_000, 1_000_000, 20_000_000)  # a collection, until one has been seen


def due(spare_ns: int, took_ns: list[int]) -> int | None:
    """The oldest generation that Python would collect by its thresholds, and that is likely to be
    through in `spare_ns` by what each `took_ns`, or has been due for long; None if there is none.
    """
    counts, thresholds = gc.get_count(), gc.get_threshold()
    for generation in (2, 1, 0):
        count, threshold = counts[generation], thresholds[generation]
        if count > threshold > 0 and (
            2 * took_ns[generation] <= spare_ns or count > _PATIENCE * threshold
        ):
            return generation
    return None


@dataclass
class Pauses:
    """Collections that fell on the engine, since it was built."""

    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    # what the last one of each generation took
    last_ns: list[int] = field(default_factory=lambda: list(_GUESS_NS))

    def as_dict(self) -> dict[str, int]:
        """The count and the times, by name."""
        return {
            "count": self.count,
            "total_ns": self.total_ns,
            "longest_ns": self.longest_ns,
        }


class Garbage:
    """One engine's dealings with the collector.

    `working` is the lock that the engine holds while it writes in the books.  `automatic` is set by
    the engine when a step begins: whether Python may collect at all.
    """

    def __init__(self, books: Books, working: RLock) -> None:
        self.pauses = Pauses()
        self.automatic = False
        self._books = books
        self._working = working
        self._froze = False
        self._before: Stage | None = None  # what a pause has interrupted
        self._began_ns = 0
        self._hook = _weak_hook(self)

    def tidy(self, spare_ns: int) -> None:
        """In a step, while the device runs and the host would wait, last time for `spare_ns`."""
        if not self.automatic:
            return
        generation = due(spare_ns, self.pauses.last_ns)
        if generation is not None:
            gc.collect(generation)

    def freeze(self) -> None:
        """All that is there stays, until `close`: the model is built."""
        if not gc.get_freeze_count():
            gc.freeze()
            self._froze = True

    def close(self) -> None:
        """Undoes `freeze`, and hears of no more pauses.  Idempotent."""
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._hook in gc.callbacks:
            gc.callbacks.remove(self._hook)

    def hear(self, phase: str, info: dict[str, Any]) -> None:
        """A collection starts or stops, in any thread.

        While another thread reads the books, or the engine is in a step that this thread does not
        run, it is none of the engine's.
        """
        if not self._working.acquire(blocking=False):
            return
        try:
            if phase == "start":
                self._start()
            elif self._before is not None:
                self._stop(self._before, info["generation"])
        finally:
            self._working.release()

    def _start(self) -> None:
        # the end of the last one may have gone unheard: it is no end of this one
        self._before, stage = None, self._books.stage
        if stage is not Stage.IDLE:  # an engine that rests is not held up
            self._before, self._began_ns = stage, self._books.enter(Stage.GC)

    def _stop(self, before: Stage, generation: int) -> None:
        took_ns = self._books.enter(before) - self._began_ns
        self._before = None
        pauses = self.pauses
        pauses.count += 1
        pauses.total_ns += took_ns
        pauses.longest_ns = max(pauses.longest_ns, took_ns)
        pauses.last_ns[generation] = took_ns


def _weak_hook(garbage: Garbage) -> Any:
    """Tells it of collections for as long as it lives, and keeps it from nothing."""
    known = weakref.ref(garbage)

    def hook(phase: str, info: dict[str, Any]) -> None:
        if (still := known()) is not None:
            still.hear(phase, info)

    gc.callbacks.append(hook)
    weakref.finalize(garbage, _forget, hook).atexit = False
    return hook


def _forget(hook: Any) -> None:
    if hook in gc.callbacks:
        gc.callbacks.remove(hook)
