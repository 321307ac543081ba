"""The two books: known schedules give known answers, and both sums hold to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.observe.books import REST, WORK, Books, BookSummary, Stage
from stepahead.observe.causes import tally

MS = 1_000_000
START_NS = 5 * MS


@dataclass
class Clock:
    now_ns: int = START_NS

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Host:
    """Plays a host: `does` a stage for a time, on a clock that only it moves."""

    batch: int = 2048
    keep: int = 65536
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.books = Books(self.clock, keep=self.keep, batch=self.batch)

    def does(self, stage: Stage, ns: int) -> None:
        self.books.rest(stage)
        self.clock.now_ns += ns


def assert_balanced(summary: BookSummary) -> None:
    wall_ns = summary.wall_ns
    assert summary.hidden_ns + summary.exposed_ns + summary.waiting_ns == wall_ns
    assert summary.busy_ns + sum(summary.idle_ns.values()) == wall_ns
    assert sum(summary.host_ns.values()) == wall_ns
    assert min(*summary.idle_ns.values(), *summary.host_ns.values()) >= 0


def serial(host: Host, steps: int, hand_over_ns: int = 0) -> None:
    """Forward 10 ms, host 6 ms, one after the other."""
    for step in range(steps):
        host.does(Stage.PLAN, 1 * MS)
        host.does(Stage.LAUNCH, 2 * MS)
        begin_ns = host.clock.now_ns
        host.does(Stage.WAIT, 10 * MS + hand_over_ns)
        host.books.busy(step, begin_ns, begin_ns + 10 * MS)
        host.does(Stage.RETIRE, 2 * MS)
        host.does(Stage.DELIVER, 1 * MS)


def test_serial_exposes_all_of_the_host() -> None:
    host = Host()
    serial(host, 5, hand_over_ns=MS // 2)
    summary = host.books.summary()
    assert summary.wall_ns == 5 * (16 * MS + MS // 2)
    assert (summary.hidden_ns, summary.exposed_ns) == (0, 5 * 6 * MS)
    assert summary.busy_ns == 5 * 10 * MS
    assert {cause: ns for cause, ns in summary.idle_ns.items() if ns} == {
        "plan late": (5 + 10 + 5) * MS,
        "launch late": 10 * MS,
        "copy": 5 * MS // 2,
    }
    assert summary.exposed_us_per_step == 6000.0
    assert summary.hidden_us_per_step == 0.0
    assert summary.device_idle_pct == pytest.approx(100 * 6.5 / 16.5)
    assert_balanced(summary)


def overlap(host: Host, steps: int) -> None:
    """Forward 10 ms back to back; 6 ms of host work for the step before, under it."""
    host.does(Stage.PLAN, 1 * MS)
    host.does(Stage.LAUNCH, 2 * MS)
    for step in range(steps):
        begin_ns = host.clock.now_ns
        host.does(Stage.RETIRE, 2 * MS)
        host.does(Stage.DELIVER, 1 * MS)
        host.does(Stage.PLAN, 1 * MS)
        host.does(Stage.LAUNCH, 2 * MS)
        host.does(Stage.WAIT, 4 * MS)
        host.books.busy(step, begin_ns, begin_ns + 10 * MS)


def test_overlap_hides_all_but_the_first_launch() -> None:
    host = Host()
    overlap(host, 7)
    summary = host.books.summary()
    assert summary.wall_ns == 3 * MS + 7 * 10 * MS
    assert (summary.hidden_ns, summary.exposed_ns) == (7 * 6 * MS, 3 * MS)
    assert summary.waiting_ns == 7 * 4 * MS
    assert {cause: ns for cause, ns in summary.idle_ns.items() if ns} == {
        "plan late": 1 * MS,
        "launch late": 2 * MS,
    }
    assert summary.hidden_us_per_step == 6000.0
    assert_balanced(summary)


def test_time_without_a_step_is_no_work() -> None:
    host = Host()
    host.clock.now_ns += 30  # before anything is entered
    serial(host, 1)
    host.does(Stage.IDLE, 70)
    summary = host.books.summary()
    assert summary.idle_ns["no work"] == 100
    assert summary.waiting_ns == 10 * MS + 100
    assert_balanced(summary)


def test_a_run_across_many_segments_is_cut_at_their_borders() -> None:
    host = Host()
    for stage in (Stage.PLAN, Stage.LAUNCH, Stage.WAIT, Stage.RETIRE, Stage.DELIVER):
        host.does(stage, 10)
    host.books.busy(0, START_NS + 7, START_NS + 44)  # from within the plan into the delivery
    summary = host.books.summary()
    assert summary.busy_ns == 37
    assert summary.hidden_ns == 3 + 10 + 10 + 4
    assert summary.idle_ns["plan late"] == 7 + 6
    assert_balanced(summary)


def test_a_step_that_lands_late_is_booked_where_it_ran() -> None:
    late, prompt = Host(), Host()
    for host in (late, prompt):
        host.does(Stage.LAUNCH, 10)
        host.does(Stage.WAIT, 10)
    prompt.books.busy(0, START_NS + 10, START_NS + 18)
    for host in (late, prompt):
        host.does(Stage.PLAN, 10)
        host.does(Stage.LAUNCH, 10)
    assert late.books.summary().busy_ns == 0  # not known yet: idle for now
    late.books.busy(0, START_NS + 10, START_NS + 18)
    late.books.busy(1, START_NS + 18, START_NS + 35)
    prompt.books.busy(1, START_NS + 18, START_NS + 35)
    assert late.books.summary() == prompt.books.summary()
    assert late.books.summary().busy_ns == 25


def test_intervals_that_collide_are_clipped() -> None:
    host = Host()
    host.does(Stage.WAIT, 100)
    host.books.busy(0, START_NS - 50, START_NS + 20)  # began before the books
    host.books.busy(1, START_NS + 10, START_NS + 30)  # began before the one before ended
    host.books.busy(2, START_NS + 5, START_NS + 25)  # all of it before that
    host.books.busy(3, 0, 0)  # a step that failed has no times
    host.books.busy(4, START_NS + 90, START_NS + 130)  # its clock runs a little ahead
    summary = host.books.summary()
    assert summary.busy_ns == 20 + 10 + 10
    assert summary.steps == 4
    assert_balanced(summary)
    host.clock.now_ns += 50
    assert host.books.summary().busy_ns == 20 + 10 + 40
    assert np.all(np.diff(host.books.recent().busy_end_ns) >= 0)


@pytest.mark.parametrize("batch", [8, 2048])
def test_a_mark_restricts_a_summary_to_a_run(batch: int) -> None:
    host = Host(batch=batch)
    serial(host, 40)
    host.does(Stage.IDLE, 123)
    mark = host.books.mark()
    serial(host, 30)
    summary = host.books.summary(since=mark)
    assert summary.steps == 30
    assert summary.wall_ns == 30 * 16 * MS
    assert summary.exposed_ns == 30 * 6 * MS
    assert summary.idle_ns["no work"] == 0
    assert_balanced(summary)
    assert host.books.summary().steps == 70


@pytest.mark.parametrize("batch", [8, 2048])
def test_a_step_in_flight_at_a_mark_is_split_there(batch: int) -> None:
    host = Host(batch=batch)
    host.does(Stage.LAUNCH, 10)
    host.does(Stage.WAIT, 30)
    mark = host.books.mark()
    host.clock.now_ns += 20
    host.books.busy(0, START_NS + 10, START_NS + 60)
    for _ in range(6):
        host.does(Stage.RETIRE, 1)
        host.does(Stage.IDLE, 1)
    since = host.books.summary(since=mark)
    assert (since.wall_ns, since.busy_ns, since.steps) == (32, 20, 1)
    assert host.books.summary().busy_ns == 50
    assert_balanced(since)


def test_a_mark_beyond_the_last_landing_waits_for_the_next_one() -> None:
    host = Host(batch=8)
    host.does(Stage.LAUNCH, 10)
    host.does(Stage.WAIT, 10)
    host.books.busy(0, START_NS + 10, START_NS + 20)
    for stage in (Stage.RETIRE, Stage.PLAN, Stage.LAUNCH, Stage.WAIT):
        host.does(stage, 10)  # step 1 runs since 50
    mark = host.books.mark()
    host.does(Stage.PLAN, 10)
    host.does(Stage.WAIT, 10)  # folds
    assert len(host.books._stages) < 8
    host.books.busy(1, START_NS + 50, START_NS + 75)
    assert host.books.summary(since=mark).busy_ns == 15
    for _ in range(20):
        host.does(Stage.RETIRE, 1)
    since = host.books.summary(since=mark)
    assert (since.wall_ns, since.busy_ns, since.steps) == (40, 15, 1)
    assert host.books.summary().busy_ns == 35


def test_folding_while_a_step_is_in_flight_changes_nothing() -> None:
    once = Host()
    overlap(once, 100)
    for batch in (13, 16, 64):
        batched = Host(batch=batch)
        overlap(batched, 100)
        assert batched.books.summary() == once.books.summary()


def test_a_burst_of_requests_while_a_step_is_in_flight_takes_nothing_of_its_run() -> None:
    host = Host(batch=8)
    serial(host, 1)
    host.does(Stage.LAUNCH, 1)
    begin_ns = host.clock.now_ns
    for _ in range(100):
        host.does(Stage.MAIL, 2)
        host.does(Stage.DELIVER, 1)
    host.does(Stage.WAIT, 3)
    host.books.busy(1, begin_ns, host.clock.now_ns)
    summary = host.books.summary()
    assert summary.busy_ns == 10 * MS + 303
    assert summary.under_device_ns[Stage.MAIL] == 200
    assert_balanced(summary)
    host.does(Stage.IDLE, 1)
    assert len(host.books._stages) == 1  # all folded


def test_events_stay_disjoint_across_a_fold() -> None:
    host = Host(batch=8)
    serial(host, 3)
    for _ in range(16):
        host.does(Stage.IDLE, MS)
    assert len(host.books._landed) == 0  # all folded
    host.books.busy(3, START_NS, host.clock.now_ns - MS)  # says it ran all the while
    host.books.busy(4, 0, 0)
    events = host.books.recent()
    assert events.step.tolist() == [0, 1, 2, 3, 4]
    assert np.all(events.busy_start_ns[1:] >= events.busy_end_ns[:-1])
    assert np.all(events.busy_end_ns >= events.busy_start_ns)


def test_memory_stays_bounded_and_nothing_is_lost_from_the_totals() -> None:
    host = Host(batch=64, keep=100)
    serial(host, 1000)
    events = host.books.recent()
    assert len(events.stage) == 100
    assert len(events.step) <= 100
    assert events.step[-1] == 999
    assert len(host.books._stages) < 128
    assert len(host.books._landed) < 64 * 6
    assert sum(block.shape[1] for block in host.books._host_ring) < 100 + 128
    summary = host.books.summary()
    assert (summary.steps, summary.busy_ns) == (1000, 10_000 * MS)
    assert_balanced(summary)


def test_an_engine_that_only_polls_does_not_fill_the_memory() -> None:
    host = Host(batch=64, keep=10)
    for _ in range(1000):
        host.does(Stage.PLAN, 1)
        host.does(Stage.IDLE, 9)
    assert len(host.books._stages) < 128
    serial(host, 1)
    summary = host.books.summary()
    assert summary.idle_ns["no work"] == 9000
    assert summary.busy_ns == 10 * MS
    assert_balanced(summary)


def test_recent_events_are_the_schedule() -> None:
    host = Host(batch=8)
    serial(host, 4)
    events = host.books.recent()
    assert [Stage(stage) for stage in events.stage[:6]] == [
        Stage.IDLE,
        Stage.PLAN,
        Stage.LAUNCH,
        Stage.WAIT,
        Stage.RETIRE,
        Stage.DELIVER,
    ]
    assert events.end_ns[-1] == events.until_ns == host.clock.now_ns
    assert np.array_equal(events.start_ns[1:], events.end_ns[:-1])
    assert events.step.tolist() == [0, 1, 2, 3]
    begin_ns = START_NS + 3 * MS + 16 * MS * np.arange(4)
    assert np.array_equal(events.busy_start_ns, begin_ns)
    assert np.array_equal(events.busy_end_ns, begin_ns + 10 * MS)


def test_each_step_has_its_own_books() -> None:
    host = Host()
    serial(host, 3)
    steps = host.books.per_step()
    assert steps.step.tolist() == [0, 1, 2]
    # the first window opens with the books; retiring a step falls into the next one's window
    assert steps.wall_ns.tolist() == [13 * MS, 16 * MS, 16 * MS]
    assert steps.exposed_ns.tolist() == [3 * MS, 6 * MS, 6 * MS]
    assert steps.busy_ns.tolist() == [10 * MS] * 3
    assert steps.waiting_ns.tolist() == [10 * MS] * 3
    assert steps.idle_ns["launch late"].tolist() == [2 * MS] * 3
    assert steps.idle_ns["plan late"].tolist() == [1 * MS, 4 * MS, 4 * MS]


def test_steps_whose_window_left_the_ring_have_no_books() -> None:
    host = Host(batch=16, keep=23)
    serial(host, 50)
    steps = host.books.per_step()
    assert steps.step.tolist() == [46, 47, 48, 49]
    assert steps.wall_ns.tolist() == [16 * MS] * 4
    for _ in range(23):
        host.does(Stage.IDLE, 1)
    assert host.books.per_step().wall_ns.tolist() == []
    assert Host().books.per_step().wall_ns.tolist() == []


@dataclass(frozen=True)
class Schedule:
    """Random host segments (stage, ns) and device runs (idle ns before, ns, landing delay)."""

    segments: list[tuple[Stage, int]]
    runs: list[tuple[int, int, int]]


SEGMENT = st.tuples(st.sampled_from(Stage), st.integers(1, 6))
RUN = st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 6))
SCHEDULES = st.builds(Schedule, st.lists(SEGMENT, max_size=150), st.lists(RUN))
LONG_SCHEDULES = st.builds(
    Schedule, st.lists(SEGMENT, min_size=100, max_size=200), st.lists(RUN, min_size=20)
)


def play(schedule: Schedule, batch: int) -> Books:
    """Plays a schedule; each run is told at the first segment after its end and its delay."""
    host = Host(batch=batch)
    landings: list[tuple[int, int, int]] = []
    end_ns = START_NS
    for idle_ns, busy_ns, delay_ns in schedule.runs:
        begin_ns, end_ns = end_ns + idle_ns, end_ns + idle_ns + busy_ns
        landings.append((end_ns + delay_ns, begin_ns, end_ns))
    told = 0
    for stage, ns in schedule.segments:
        host.does(stage, ns)
        while told < len(landings) and landings[told][0] <= host.clock.now_ns:
            host.books.busy(told, *landings[told][1:])
            told += 1
    return host.books


def by_hand(books: Books) -> dict[tuple[Stage, bool], int]:
    """Counts nanosecond by nanosecond."""
    events = books.recent()
    busy_at = {
        ns
        for start_ns, end_ns in zip(events.busy_start_ns, events.busy_end_ns, strict=True)
        for ns in range(start_ns, end_ns)
    }
    cells = {(stage, busy): 0 for stage in Stage for busy in (False, True)}
    for stage, start_ns, end_ns in zip(events.stage, events.start_ns, events.end_ns, strict=True):
        for ns in range(start_ns, end_ns):
            cells[Stage(stage), ns in busy_at] += 1
    return cells


@given(SCHEDULES)
def test_the_books_agree_with_counting_by_hand(schedule: Schedule) -> None:
    books = play(schedule, batch=1 << 30)
    cells, summary = by_hand(books), books.summary()
    assert summary.wall_ns == sum(ns for _, ns in schedule.segments)
    assert summary.hidden_ns == sum(cells[stage, True] for stage in WORK)
    assert summary.exposed_ns == sum(cells[stage, False] for stage in WORK)
    assert summary.waiting_ns == sum(cells[stage, busy] for stage in REST for busy in (False, True))
    assert summary.busy_ns == sum(cells[stage, True] for stage in Stage)
    assert_balanced(summary)


@given(LONG_SCHEDULES)
def test_folding_in_batches_changes_nothing(schedule: Schedule) -> None:
    # a run of 20 ns lands within 6 ns and segments last 1 ns at least: never half a batch late
    once, batched = play(schedule, batch=1 << 30), play(schedule, batch=64)
    assert batched.summary() == once.summary()
    assert np.array_equal(batched.per_step().cells, once.per_step().cells)


@given(SCHEDULES, st.integers(2, 16))
def test_both_sums_hold_even_when_steps_land_too_late_to_be_booked(
    schedule: Schedule, batch: int
) -> None:
    books = play(schedule, batch)
    summary = books.summary()
    assert summary.wall_ns == sum(ns for _, ns in schedule.segments)
    assert_balanced(summary)


@given(SCHEDULES)
def test_both_sums_hold_for_every_step(schedule: Schedule) -> None:
    books = play(schedule, batch=64)
    steps = books.per_step()
    wall_ns = steps.wall_ns
    assert np.array_equal(steps.hidden_ns + steps.exposed_ns + steps.waiting_ns, wall_ns)
    assert np.array_equal(steps.busy_ns + sum(steps.idle_ns.values()), wall_ns)
    assert steps.busy_ns.sum() == books.summary().busy_ns
    assert wall_ns.sum() == (steps.step.size and books.recent().busy_end_ns[-1] - START_NS)


@settings(max_examples=30)
@given(LONG_SCHEDULES, st.integers(0, 700))
def test_events_since_a_moment_tell_the_time_after_it_as_all_events_do(
    schedule: Schedule, since: int
) -> None:
    """Blocks that lie before it are left out: one too many, and a run or a stage that reaches into
    the time would be missing from it."""
    books = play(schedule, batch=16)
    everything = books.recent()
    since_ns = min(START_NS + since, everything.until_ns)
    cuts_ns = np.unique(np.linspace(since_ns, everything.until_ns, 9).astype(np.int64))
    events = books.recent(since_ns)
    assert events.start_ns[0] <= since_ns
    assert np.array_equal(tally(events, cuts_ns), tally(everything, cuts_ns))


def test_an_engine_at_rest_keeps_no_blocks_of_nothing() -> None:
    host = Host(batch=8)
    for _ in range(500):
        host.does(Stage.PLAN, 1)
        host.does(Stage.IDLE, 9)
    assert len(host.books._host_ring) > 100
    assert len(host.books._device_ring) == len(host.books._held_ring) == 0


def test_the_block_of_events_that_reaches_into_the_time_is_there() -> None:
    host = Host(batch=8)
    serial(host, 20)
    everything = host.books.recent()
    for since_ns in range(START_NS, host.clock.now_ns, 7 * MS // 2):
        events = host.books.recent(since_ns)
        cuts_ns = np.array([since_ns, host.clock.now_ns])
        assert events.start_ns[0] <= since_ns
        assert np.array_equal(tally(events, cuts_ns), tally(everything, cuts_ns))
    assert len(events.stage) < len(everything.stage) / 4
