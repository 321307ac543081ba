"""Garbage is collected while the host waits, and shown; the process is left as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.engine import Engine
from stepahead.observe import garbage
from stepahead.observe.garbage import Garbage, due
from stepahead.observe.observer import Observer
from stepahead.observe.stages import Stage
from stepahead.plan import Plan
from stepahead.scheduler.stop import Vocabulary
from stepahead.sim.host_cost import EOS, VOCAB, PreparedExecutor, PreparedFlight
from stepahead.types import SamplingParams

TOOK_NS = [100, 1000, 10_000]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What Python says has come up since the last collection of each generation."""
    counts = [0, 0, 0]
    monkeypatch.setattr(garbage.gc, "get_count", lambda: tuple(counts))
    monkeypatch.setattr(garbage.gc, "get_threshold", lambda: (700, 10, 10))
    return counts


def test_nothing_is_due_below_the_thresholds(counts: list[int]) -> None:
    counts[:] = 700, 10, 10
    assert due(1 << 40, TOOK_NS) is None


def test_the_oldest_generation_that_fits_the_wait_is_due(counts: list[int]) -> None:
    counts[:] = 701, 11, 11
    assert [due(ns, TOOK_NS) for ns in (199, 200, 2000, 20_000)] == [None, 0, 1, 2]


def test_what_has_been_due_for_long_waits_for_no_wait(counts: list[int]) -> None:
    counts[:] = 20 * 700, 0, 0
    assert due(0, TOOK_NS) is None
    counts[0] += 1
    assert due(0, TOOK_NS) == 0
    counts[2] = 201
    assert due(0, TOOK_NS) == 2


def test_a_generation_without_a_threshold_is_never_due(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage.gc, "get_threshold", lambda: (0, 10, 0))
    counts[:] = 1 << 20, 5, 1 << 20
    assert due(1 << 40, TOOK_NS) is None


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@contextmanager
def pauses(clock: Clock, ns: int) -> Iterator[None]:
    """Each collection takes so long."""

    def hook(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            clock.now_ns += ns

    gc.callbacks.append(hook)
    try:
        yield
    finally:
        gc.callbacks.remove(hook)


def observed() -> tuple[Observer, Clock]:
    clock = Clock()
    return Observer(clock), clock


def test_a_pause_whose_end_was_not_heard_ends_no_later_one() -> None:
    observer, clock = observed()
    observer.books.enter(Stage.DELIVER)
    observer.garbage.hear("start", {})
    observer.books.enter(Stage.PLAN)  # a finaliser let another thread run: a step, in it the end
    clock.now_ns += 5
    observer.books.enter(Stage.IDLE)
    observer.garbage.hear("start", {})
    observer.garbage.hear("stop", {"generation": 0})
    assert observer.books.stage is Stage.IDLE
    assert observer.garbage.pauses.count == 0
    observer.garbage.close()


class Fails(PreparedExecutor):
    """Says whether Python may collect while it is in a step, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.failing = False

    def launch(self, plan: Plan) -> PreparedFlight:
        self.seen.append(gc.isenabled())
        if self.failing:
            raise ValueError("a step that fails")
        return super().launch(plan)


def engine() -> tuple[Engine, Fails]:
    resolved = resolve(
        EngineConfig("none", executor="inline", max_rows=2, num_pages=64, threads=1),
        ModelFacts(VOCAB, 1024, (EOS,), 1),
        bytes_available=1 << 40,
    )
    executor = Fails()
    built = Engine(resolved, executor, Vocabulary([b"x"] * VOCAB))
    built.add([3, 4], SamplingParams(max_tokens=16))
    return built, executor


def test_in_a_step_nothing_is_collected_by_itself_and_afterwards_all_is_as_it_was() -> None:
    built, executor = engine()
    built.step()
    assert gc.isenabled()
    executor.failing = True
    with pytest.raises(ValueError, match="a step"):
        built.step()
    assert gc.isenabled()
    assert executor.seen == [False, False]


def test_collection_that_a_program_has_turned_off_stays_off_after_a_step() -> None:
    built, executor = engine()
    gc.disable()
    try:
        built.step()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert executor.seen == [False]


def test_a_program_that_collects_nothing_is_left_alone(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    monkeypatch.setattr(garbage.gc, "collect", collected.append)
    observer, _ = observed()
    counts[:] = 1 << 20, 0, 0
    observer.garbage.tidy(1 << 40)
    assert collected == []
    observer.garbage.automatic = True
    observer.garbage.tidy(1 << 40)
    assert collected == [0]


def test_a_pause_interrupts_a_stage_and_is_remembered() -> None:
    observer, clock = observed()
    books, kept = observer.books, observer.garbage.pauses
    books.enter(Stage.WAIT)
    clock.now_ns += 5
    with pauses(clock, 30):
        gc.collect(0)
    with pauses(clock, 20):
        gc.collect(1)
    assert books.stage is Stage.WAIT
    clock.now_ns += 5
    host_ns = {stage: ns for stage, ns in books.summary().host_ns.items() if ns}
    assert host_ns == {Stage.WAIT: 10, Stage.GC: 50}
    assert (kept.count, kept.total_ns, kept.longest_ns) == (2, 50, 30)
    assert kept.last_ns[:2] == [30, 20]
    told = observer.snapshot().pauses
    assert told == {"count": 2, "total_ns": 50, "longest_ns": 30}


def test_an_engine_that_rests_is_not_held_up() -> None:
    observer, clock = observed()
    with pauses(clock, 30):
        gc.collect(0)
    assert observer.books.summary().host_ns[Stage.GC] == 0
    assert observer.garbage.pauses.count == 0


def test_a_pause_of_another_thread_in_the_midst_of_a_step_is_not_the_engines() -> None:
    observer, clock = observed()
    observer.books.enter(Stage.PLAN)
    with observer.working, pauses(clock, 30):
        other = threading.Thread(target=gc.collect, args=(0,))
        other.start()
        other.join()
    assert observer.garbage.pauses.count == 0
    assert observer.books.stage is Stage.PLAN


def test_a_pause_while_the_books_are_folded_changes_nothing() -> None:
    class Busy(Clock):
        def __call__(self) -> int:
            self.now_ns += 1
            if self.now_ns % 7 == 0:
                gc.collect(0)
            return self.now_ns

    clock = Busy()
    observer = Observer(clock)
    books = observer.books
    books._batch = 16
    for stage in [Stage.PLAN, Stage.WAIT, Stage.RETIRE] * 40:
        books.rest(stage)
    summary = books.summary()
    assert sum(summary.host_ns.values()) == summary.wall_ns == clock.now_ns - 1  # begun at 1
    assert observer.garbage.pauses.count > 10


def test_what_is_there_is_frozen_until_the_engine_closes() -> None:
    observer, _ = observed()
    assert gc.get_freeze_count() == 0
    observer.garbage.freeze()
    assert gc.get_freeze_count() > 0
    second, _ = observed()
    second.garbage.freeze()
    second.garbage.close()  # the first one's stays
    assert gc.get_freeze_count() > 0
    observer.garbage.close()
    observer.garbage.close()
    assert gc.get_freeze_count() == 0


def test_a_program_that_has_frozen_keeps_what_it_froze() -> None:
    observer, _ = observed()
    gc.freeze()
    try:
        observer.garbage.freeze()
        observer.garbage.close()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def hooks() -> list[Any]:
    return [hook for hook in gc.callbacks if "garbage" in getattr(hook, "__module__", "")]


def test_nothing_is_heard_after_the_close_or_the_end_of_an_engine() -> None:
    before = hooks()
    observer, _ = observed()
    assert len(hooks()) == len(before) + 1
    observer.garbage.close()
    assert hooks() == before
    dropped: Garbage | None = observed()[0].garbage
    assert len(hooks()) == len(before) + 1
    dropped = None  # noqa: F841 - the last that names it
    assert hooks() == before
