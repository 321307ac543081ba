"""One cause for each idle nanosecond: rule by rule, against counting, and fault by fault."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.executor.virtual import Spans, StepSize, Timing, VirtualClock
from stepahead.observe.books import Books, StepBooks
from stepahead.observe.causes import BUSY, CAUSES, Events, pieces, tally
from stepahead.observe.stages import REST, WORK, Stage
from stepahead.sim import shapes
from stepahead.sim.virtual import (
    MS,
    OVERLAP,
    QUEUES,
    SERIAL,
    HostWork,
    LoopChoice,
    Rig,
    constant,
    host_work,
    rig,
    steady,
)
from stepahead.sync import Cause, Held
from stepahead.types import SamplingParams

# --- the rules ----------------------------------------------------------------------------------


def begun(stage: Stage = Stage.IDLE) -> Books:
    """Books that began at 0, with the host in a stage; it is 200 now."""
    now_ns = 0
    books = Books(lambda: now_ns)
    books.enter(stage)
    now_ns = 200
    return books


def cause_at(
    stage: Stage, posts: tuple[int, int, int], held: tuple[Held, ...] = (), at_ns: int = 50
) -> Cause:
    """Of the moment, with the host in `stage` and the next step, handed over at `posts`, to come at
    100."""
    books = begun(stage)
    books.busy(0, 100, 150, *posts, held)
    found = pieces(books.recent(), np.array([at_ns, at_ns + 1]))
    (at,) = np.flatnonzero(found.end_ns > found.start_ns)
    return Cause(int(found.device[at]))


NOT_HANDED = (60, 70, 80)
BEFORE = {
    Stage.PLAN: Cause.PLAN_LATE,
    Stage.LAUNCH: Cause.LAUNCH_LATE,
    Stage.WAIT: Cause.COPY,
    Stage.RETIRE: Cause.PLAN_LATE,
    Stage.DELIVER: Cause.PLAN_LATE,
    Stage.IDLE: Cause.NO_WORK,
    Stage.ENCODE: Cause.LAUNCH_LATE,
    Stage.DECODE: Cause.PLAN_LATE,
    Stage.MASK: Cause.MASK_LATE,
    Stage.MAIL: Cause.PLAN_LATE,
    Stage.GC: Cause.GARBAGE_COLLECTION,
}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("posts", [NOT_HANDED, (0, 0, 0)])
def test_before_the_launch_the_host_is_the_cause(stage: Stage, posts: tuple[int, int, int]) -> None:
    assert cause_at(stage, posts) is BEFORE[stage]


@pytest.mark.parametrize("stage", Stage)
def test_on_its_way_a_launch_is_late_unless_the_host_was_held_up(stage: Stage) -> None:
    own = stage in (Stage.GC, Stage.MASK)
    sending = BEFORE[stage] if own else Cause.LAUNCH_LATE
    assert cause_at(stage, (40, 60, 80)) is sending
    assert cause_at(stage, (40, 0, 80)) is sending  # nobody says when the runner had it
    assert cause_at(stage, (40, 45, 80)) is Cause.LAUNCH_LATE  # its runner had it


@pytest.mark.parametrize("stage", Stage)
def test_what_lies_on_the_device_waits_for_reasons_unknown(stage: Stage) -> None:
    assert cause_at(stage, (20, 30, 50)) is Cause.UNKNOWN
    handing = stage in (Stage.ENCODE, Stage.LAUNCH, Stage.GC, Stage.MASK)
    silent = BEFORE[stage] if handing else Cause.UNKNOWN
    assert cause_at(stage, (20, 0, 0)) is silent


@pytest.mark.parametrize("cause", Cause)
def test_what_the_runner_says_goes_before_all_else_once_the_step_is_on_its_way(
    cause: Cause,
) -> None:
    held = (Held(cause, 45, 55),)
    for posts in ((40, 60, 80), (20, 30, 40), (20, 0, 0)):
        assert cause_at(Stage.PLAN, posts, held) is cause
        assert cause_at(Stage.PLAN, posts, held, at_ns=55) is not cause or cause in (
            Cause.LAUNCH_LATE,
            Cause.UNKNOWN,
        )
    assert cause_at(Stage.PLAN, NOT_HANDED, held) is Cause.PLAN_LATE
    assert cause_at(Stage.LAUNCH, NOT_HANDED, held) is cause  # the host is the runner


def test_a_step_that_waits_for_masks_is_idle_meanwhile_and_one_step_all_the_same() -> None:
    """It runs from 50 to 150, and from 80 to 110 its masks are not there."""
    now = iter((0, 200, 200, 200, 200))
    books = Books(lambda: next(now, 200))
    books.rest(Stage.WAIT)
    books.busy(7, 50, 150, 10, 20, 30, (Held(Cause.MASK_LATE, 80, 110),))
    summary = books.summary()
    assert summary.steps == 1
    assert summary.idle_ns["mask late"] == 30
    assert books.per_step().step.tolist() == [7]
    assert books.recent().step.tolist() == [7, 7]
    assert books.recent().busy_start_ns.tolist() == [50, 110]
    assert books.recent().busy_end_ns.tolist() == [80, 150]


def test_being_held_before_the_step_before_has_ended_is_no_business_of_a_step() -> None:
    books = begun()
    books.busy(0, 10, 40)
    books.busy(1, 60, 90, 5, 6, 7, (Held(Cause.COPY, 8, 20), Held(Cause.FENCE, 30, 50)))
    assert books.recent().held.tolist() == [[Cause.FENCE], [40], [50]]
    idle_ns = books.summary().idle_ns
    assert (idle_ns["copy"], idle_ns["fence"], idle_ns["unknown"]) == (0, 10, 10)


def test_a_hold_goes_on_into_the_time_before_the_next_step() -> None:
    books = begun(Stage.LAUNCH)
    books.busy(0, 10, 40, 1, 2, 3, (Held(Cause.COPY, 30, 55),))
    books.busy(1, 70, 200, 60, 61, 62)
    idle_ns = {cause: ns for cause, ns in books.summary().idle_ns.items() if ns}
    assert idle_ns == {"copy": 15, "launch late": 1 + 2 + 5 + 2, "unknown": 7 + 8}


# --- against counting -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A run, how long after its end it lands, its posts as ns before its start (None: nobody says)
    and what held it: (cause, start before the run's start, ns)."""

    idle_ns: int
    busy_ns: int
    delay_ns: int
    posts: tuple[int | None, int | None, int | None]
    held: tuple[tuple[Cause, int, int], ...]


POST = st.none() | st.integers(0, 12)
STEP = st.builds(
    Step,
    st.integers(0, 12),
    st.integers(0, 15),
    st.integers(0, 6),
    st.tuples(POST, POST, POST),
    st.lists(
        st.tuples(st.sampled_from(Cause), st.integers(-8, 14), st.integers(0, 9)), max_size=2
    ).map(tuple),
)
SEGMENTS = st.lists(st.tuples(st.sampled_from(Stage), st.integers(1, 6)), max_size=60)
FROM_NS = 1000


@dataclass
class Played:
    """The books of a schedule, and what they were told, in order."""

    batch: int
    now_ns: int = FROM_NS
    told: list[tuple[int, int, tuple[int, int, int], list[Held]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.books = Books(lambda: self.now_ns, batch=self.batch)


def play(segments: list[tuple[Stage, int]], steps: list[Step], batch: int = 1 << 30) -> Played:
    """Each step is told at the first segment after its end and its delay."""
    played = Played(batch)
    ends = list(accumulate((s.idle_ns + s.busy_ns for s in steps), initial=FROM_NS))[1:]
    for stage, ns in segments:
        played.books.rest(stage)
        played.now_ns += ns
        while (at := len(played.told)) < len(steps):
            step, end_ns = steps[at], ends[at]
            if end_ns + step.delay_ns > played.now_ns:
                break
            start_ns = end_ns - step.busy_ns
            posts = tuple(0 if ns is None else start_ns - ns for ns in step.posts)
            held = [Held(c, start_ns - b, start_ns - b + ns) for c, b, ns in step.held]
            played.books.busy(at, start_ns, end_ns, *posts, held)
            played.told.append((start_ns, end_ns, posts, held))  # type: ignore[arg-type]
    return played


def counted(played: Played) -> dict[tuple[int, Stage, int], int]:
    """(step whose window it is, the host's stage, BUSY or the cause): nanoseconds, one by one."""
    events, told = played.books.recent(), played.told
    stages: dict[int, Stage] = {}
    for stage, start_ns, end_ns in zip(events.stage, events.start_ns, events.end_ns, strict=True):
        stages |= dict.fromkeys(range(start_ns, end_ns), Stage(int(stage)))
    held: dict[int, Cause] = {}
    until_ns = FROM_NS
    for number, (_, _, _, spans) in enumerate(told):
        until_ns = max([until_ns, *(end_ns for _, end_ns, _, _ in told[:number])])
        for one in sorted(spans, key=lambda one: one.start_ns):
            first_ns = max(one.start_ns, until_ns)
            held |= dict.fromkeys(range(first_ns, one.end_ns), one.cause)
            until_ns = max(until_ns, one.end_ns if first_ns < one.end_ns else 0)
    cells: dict[tuple[int, Stage, int], int] = {}
    for ns in range(FROM_NS, played.now_ns):
        window = sum(end_ns <= ns for _, end_ns, _, _ in told)
        key = (window, stages[ns], at_work(ns, stages[ns], told, held.get(ns)))
        cells[key] = cells.get(key, 0) + 1
    return cells


def stretches_of(one: tuple[int, int, Any, list[Held]]) -> list[tuple[int, int]]:
    """A step, but for the time within it in which it waits for masks."""
    start_ns, end_ns, _, held = one
    cuts = []
    for hold in held:
        if hold.cause is Cause.MASK_LATE and start_ns < hold.start_ns < hold.end_ns < end_ns:
            cuts.append((start_ns, hold.start_ns))
            start_ns = hold.end_ns
    return [*cuts, (start_ns, end_ns)]


def at_work(ns: int, stage: Stage, told: list[Any], held: Cause | None) -> int:
    """What the device was at, by the rules as they are written."""
    stretches = [(*stretch, one[2]) for one in told for stretch in stretches_of(one)]
    if any(start_ns <= ns < end_ns for start_ns, end_ns, _ in stretches):
        return BUSY
    coming = [posts for start_ns, _, posts in stretches if start_ns > ns]
    launch_ns, received_ns, submitted_ns = coming[0] if coming else (0, 0, 0)
    handed = launch_ns > 0 and ns >= launch_ns
    if held is not None and (handed or stage is Stage.LAUNCH):
        return held
    if not handed:
        return BEFORE[stage]
    own = stage in (Stage.GC, Stage.MASK)
    if not submitted_ns:
        return BEFORE[stage] if own or stage in (Stage.ENCODE, Stage.LAUNCH) else Cause.UNKNOWN
    if ns >= submitted_ns:
        return Cause.UNKNOWN
    return BEFORE[stage] if own and ns < (received_ns or submitted_ns) else Cause.LAUNCH_LATE


@given(SEGMENTS, st.lists(STEP, max_size=12))
def test_every_nanosecond_has_the_stage_and_the_cause_that_counting_finds(
    segments: list[tuple[Stage, int]], steps: list[Step]
) -> None:
    played = play(segments, steps)
    cells, summary = counted(played), played.books.summary()
    per_step = played.books.per_step()
    for step, table in zip(per_step.step.tolist(), per_step.cells, strict=True):
        for stage in Stage:
            for device in range(BUSY + 1):
                assert table[stage, device] == cells.get((step, stage, device), 0)
    assert sum(cells.values()) == summary.wall_ns
    for cause, name in zip(Cause, CAUSES, strict=True):
        whole = sum(ns for (_, _, device), ns in cells.items() if device == cause)
        assert summary.idle_ns[name] == whole
    for stage in Stage:
        assert summary.host_ns[stage] == sum(ns for key, ns in cells.items() if key[1] == stage)
    work = [(key[2], ns) for key, ns in cells.items() if key[1] in WORK]
    assert summary.hidden_ns == sum(ns for device, ns in work if device == BUSY)
    assert summary.exposed_ns == sum(ns for device, ns in work if device != BUSY)
    assert summary.waiting_ns == sum(ns for key, ns in cells.items() if key[1] in REST)


def assert_each_step_balances(steps: StepBooks) -> None:
    wall_ns = steps.wall_ns
    assert np.array_equal(steps.hidden_ns + steps.exposed_ns + steps.waiting_ns, wall_ns)
    assert np.array_equal(steps.busy_ns + sum(steps.idle_ns.values()), wall_ns)


@given(st.integers(0, 1 << 32), st.lists(STEP, min_size=12))
def test_causes_are_the_same_however_the_books_are_folded(seed: int, steps: list[Step]) -> None:
    rng = np.random.default_rng(seed)
    drawn = zip(rng.integers(0, len(Stage), 200), rng.integers(1, 7, 200), strict=True)
    segments = [(Stage(int(stage)), int(ns)) for stage, ns in drawn]
    # a step of 27 ns lands within 6 ns and segments last 1 ns at least: never half a batch late
    once, batched = play(segments, steps), play(segments, steps, batch=80)
    assert len(batched.books._stages) < len(once.books._stages)
    assert batched.books.summary() == once.books.summary()
    found = batched.books.per_step()
    assert np.array_equal(found.cells, once.books.per_step().cells)
    assert_each_step_balances(found)


def test_pieces_cover_the_time_without_gap_or_overlap() -> None:
    played = play([(stage, 5) for stage in Stage] * 3, [Step(3, 9, 1, (4, 2, 1), ())] * 8)
    cut = pieces(played.books.recent(), np.array([FROM_NS, FROM_NS + 40, played.now_ns]))
    assert np.array_equal(cut.start_ns[1:], cut.end_ns[:-1])
    assert (cut.start_ns[0], cut.end_ns[-1]) == (FROM_NS, played.now_ns)


def test_lanes_without_posts_can_be_tallied() -> None:
    events = Events(
        np.array([Stage.WAIT]), np.array([0]), 100, np.array([0]), np.array([20]), np.array([50])
    )
    (cells,) = tally(events, np.array([0, 100]))
    assert (cells[Stage.WAIT, BUSY], cells[Stage.WAIT, Cause.COPY]) == (30, 70)


# --- faults, on the virtual clock -----------------------------------------------------------------

AT = 40  # the step that is hit
SLOW = 25 * MS
FORWARD, PLAN, RETIRE, HANDOVER = 10 * MS, 3 * MS // 2, 9 * MS // 2, MS // 4
CHOICES = (SERIAL, OVERLAP, QUEUES[0], QUEUES[1])
EVERY_LOOP = pytest.mark.parametrize("choice", CHOICES, ids=str)


def costs(**more: Any) -> Timing:
    return replace(shapes.timing(10.0, handover=0.25), **more)


def run(choice: LoopChoice, timing: Timing, work: HostWork | None = None) -> StepBooks:
    """Both books of each step of a steady run."""
    rigged = rig(choice, timing, work or host_work(6.0))
    return heard(rigged)


def heard(rigged: Rig) -> StepBooks:
    steady(rigged, shapes.STEPS)
    rigged.hear(AT + 20)
    steps = rigged.engine.books.per_step()
    assert_each_step_balances(steps)
    return steps


def idle_of(steps: StepBooks, step: int) -> dict[str, int]:
    """By cause, in the window that ends with the step."""
    (at,) = np.flatnonzero(steps.step == step)
    return {cause: int(ns[at]) for cause, ns in steps.idle_ns.items() if ns[at]}


def hit(value: int, other: int = 0) -> Callable[[int], int]:
    """So much in the step that is hit."""
    return lambda step: value if step == AT else other


def held_up(cause: Cause, ns: int = SLOW) -> Callable[[StepSize], Spans]:
    return lambda size: ((cause, ns),) if size.step == AT else ()


def waited(choice: LoopChoice, late_ns: int) -> int:
    """How long the device stands idle when the plan of a step begins a retirement after the step
    `depth` before it landed, and the step comes `late_ns` after that."""
    return HANDOVER + RETIRE + late_ns - FORWARD * (choice.depth - 1)


SERIAL_IDLE = {"copy": HANDOVER, "plan late": PLAN + RETIRE}


def expected(choice: LoopChoice, cause: str, late_ns: int) -> dict[str, int]:
    """Idle time where a fault after the plan takes `SLOW`."""
    if choice is SERIAL:
        return SERIAL_IDLE | {cause: late_ns}
    return {cause: waited(choice, PLAN + late_ns)}


@EVERY_LOOP
def test_without_a_fault_only_serial_lets_the_device_wait(choice: LoopChoice) -> None:
    steps = run(choice, costs())
    found = idle_of(steps, AT)
    assert found == (SERIAL_IDLE if choice is SERIAL else {})
    (at,) = np.flatnonzero(steps.step == AT)
    host = (int(steps.hidden_ns[at]), int(steps.exposed_ns[at]))
    assert host == ((0, PLAN + RETIRE) if choice is SERIAL else (PLAN + RETIRE, 0))


@EVERY_LOOP
def test_a_slow_plan_is_a_plan_that_is_late(choice: LoopChoice) -> None:
    steps = run(choice, costs(), HostWork(hit(SLOW, PLAN), constant(RETIRE)))
    if choice is SERIAL:
        assert idle_of(steps, AT) == {"copy": HANDOVER, "plan late": SLOW + RETIRE}
    else:
        assert idle_of(steps, AT) == {"plan late": waited(choice, SLOW)}


@EVERY_LOOP
def test_a_mask_that_the_host_makes_late_is_late(choice: LoopChoice) -> None:
    work = HostWork(constant(PLAN), constant(RETIRE), hit(SLOW))
    assert idle_of(run(choice, costs(), work), AT) == expected(choice, "mask late", SLOW)


@EVERY_LOOP
@pytest.mark.parametrize("cause", [Cause.MASK_LATE, Cause.COPY, Cause.FENCE])
def test_what_holds_the_runner_up_is_named(choice: LoopChoice, cause: Cause) -> None:
    steps = run(choice, costs(held=held_up(cause)))
    wanted = expected(choice, cause.label, SLOW)
    if choice is SERIAL and cause is Cause.COPY:
        wanted = {"copy": HANDOVER + SLOW, "plan late": PLAN + RETIRE}
    assert idle_of(steps, AT) == wanted


@EVERY_LOOP
def test_a_fence_that_opens_late_is_the_fence_in_every_loop(choice: LoopChoice) -> None:
    steps = run(choice, costs(arrive=held_up(Cause.FENCE, 3 * MS)))
    usual = SERIAL_IDLE if choice is SERIAL else {}
    assert idle_of(steps, AT) == usual | {"fence": 3 * MS}


@EVERY_LOOP
def test_a_slow_submit_is_a_launch_that_is_late(choice: LoopChoice) -> None:
    steps = run(choice, costs(submit_ns=12 * MS))
    shown = idle_of(steps, AT)
    if choice is SERIAL:
        assert shown == SERIAL_IDLE | {"launch late": 12 * MS}
    else:
        assert set(shown) == {"launch late"}


@EVERY_LOOP
def test_encoding_is_launching_and_decoding_puts_off_the_plan(choice: LoopChoice) -> None:
    steps = run(choice, costs(encode_ns=2 * MS, decode_ns=3 * MS))
    (at,) = np.flatnonzero(steps.step == AT)
    stages = steps.cells[at].sum(1)
    assert (stages[Stage.ENCODE], stages[Stage.DECODE]) == (2 * MS, 3 * MS)
    if choice is SERIAL:
        wanted = {"copy": HANDOVER, "plan late": PLAN + RETIRE + 3 * MS, "launch late": 2 * MS}
        assert idle_of(steps, AT) == wanted


@contextmanager
def slow_collections(clock: VirtualClock) -> Iterator[None]:
    """A collection takes its time, on the virtual clock."""

    def hook(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            clock.work(SLOW)

    gc.callbacks.append(hook)
    try:
        yield
    finally:
        gc.callbacks.remove(hook)


@EVERY_LOOP
def test_a_pause_for_garbage_is_one(choice: LoopChoice) -> None:
    rigged = rig(choice, costs(), host_work(6.0))
    plan, scheduler = rigged.engine.scheduler.plan, rigged.engine.scheduler

    def collect_and_plan() -> Any:
        if len(rigged.engine.observer.steps.recent()) + rigged.engine._core.flights == AT:
            with slow_collections(rigged.clock):
                gc.collect(0)
        return plan()

    scheduler.plan = collect_and_plan  # type: ignore[method-assign]
    steps = heard(rigged)
    if choice is SERIAL:
        assert idle_of(steps, AT) == SERIAL_IDLE | {"garbage collection": SLOW}
    else:
        pause_ns = waited(choice, SLOW)
        assert idle_of(steps, AT) == {"garbage collection": pause_ns, "plan late": PLAN}
    pauses = rigged.engine.observer.garbage.pauses
    assert (pauses.longest_ns, pauses.total_ns) == (SLOW, SLOW)


@EVERY_LOOP
def test_a_device_that_nobody_asks_has_no_work(choice: LoopChoice) -> None:
    rigged = rig(choice, costs(), host_work(6.0))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    rigged.add(16, params)
    rigged.hear(100)
    rested = len(rigged.engine.observer.steps.recent())
    rigged.clock.work(123 * MS)
    rigged.add(16, params)
    rigged.hear(100)
    steps = rigged.engine.books.per_step()
    found = idle_of(steps, rested)
    assert found == {"copy": HANDOVER, "plan late": RETIRE + PLAN, "no work": 123 * MS}
    assert_each_step_balances(steps)


def test_requests_taken_in_are_mail() -> None:
    rigged = rig(OVERLAP, costs(), host_work(6.0))
    engine, clock = rigged.engine, rigged.clock
    add, abort = engine.scheduler.add, engine.scheduler.abort

    def slow_add(*given: Any) -> None:
        clock.work(7)
        add(*given)

    def slow_abort(rid: int) -> Any:
        clock.work(5)
        return abort(rid)

    engine.scheduler.add = slow_add  # type: ignore[method-assign]
    engine.scheduler.abort = slow_abort  # type: ignore[method-assign]
    rid = rigged.add(16, SamplingParams(temperature=0.0, max_tokens=8))
    assert engine.books.stage is Stage.DELIVER
    rigged.step()
    assert engine.books.stage is Stage.DELIVER
    engine.abort(rid)
    assert engine.books.stage is Stage.DELIVER
    assert engine.books.summary().host_ns[Stage.MAIL] == 7 + 5


def test_a_caller_who_keeps_requests_from_their_step_is_no_want_of_work() -> None:
    rigged = rig(OVERLAP, costs(), host_work(6.0))
    idle_ns = rigged.engine.books.summary().idle_ns["no work"]
    rigged.add(16, SamplingParams(temperature=0.0, max_tokens=2))
    rigged.clock.work(25 * MS)
    summary = rigged.engine.books.summary()
    assert summary.idle_ns["no work"] == idle_ns
    assert summary.idle_ns["plan late"] == 25 * MS
    while rigged.engine.has_work:
        rigged.engine.step()
    assert rigged.engine.books.stage is Stage.IDLE
    rigged.clock.work(3 * MS)
    assert rigged.engine.books.summary().idle_ns["no work"] == idle_ns + 3 * MS
