"""One boundary cut from the events: the right one, with both lanes relative to the step's end."""

from __future__ import annotations

import numpy as np
import pytest

from stepahead.errors import StepaheadError
from stepahead.observe.books import Events, Stage
from stepahead.observe.timeline import DeviceSpan, HostSpan, boundary, typical_step


def events(runs: list[tuple[int, int]], host: list[tuple[Stage, int]] | None = None) -> Events:
    """Device runs (idle ns before, ns), numbered from 100; host segments (stage, start ns)."""
    start_ns, end_ns, now_ns = [], [], 0
    for idle_ns, busy_ns in runs:
        start_ns.append(now_ns + idle_ns)
        now_ns += idle_ns + busy_ns
        end_ns.append(now_ns)
    stages, host_start_ns = zip(*(host or [(Stage.WAIT, 0)]), strict=True)
    return Events(
        np.array(stages),
        np.array(host_start_ns),
        now_ns,
        np.arange(100, 100 + len(runs)),
        np.array(start_ns, np.int64),
        np.array(end_ns, np.int64),
    )


def test_a_boundary_is_told_from_the_end_of_its_step() -> None:
    host = [(Stage.WAIT, 0), (Stage.RETIRE, 115), (Stage.PLAN, 130), (Stage.WAIT, 200)]
    cut = boundary(events([(0, 50), (10, 50), (30, 60), (10, 40), (0, 99)], host), 101)
    assert (cut.step, cut.next_step, cut.gap_ns) == (101, 102, 30)
    assert cut.device == (
        DeviceSpan(100, -110, -60),
        DeviceSpan(101, -50, 0),
        DeviceSpan(102, 30, 90),
        DeviceSpan(103, 100, 140),
    )
    assert cut.host == (
        HostSpan(Stage.WAIT, -110, 5),
        HostSpan(Stage.RETIRE, 5, 20),
        HostSpan(Stage.PLAN, 20, 90),
        HostSpan(Stage.WAIT, 90, 239),
    )
    known = {cause: ns for cause, ns in cut.gap_idle_ns.items() if ns}
    assert known == {"copy": 5, "plan late": 25}
    assert sum(known.values()) == cut.gap_ns


def test_the_first_boundary_has_no_neighbour_before_it() -> None:
    cut = boundary(events([(7, 50), (0, 50)]), 100)
    assert cut.device == (DeviceSpan(100, -50, 0), DeviceSpan(101, 0, 50))
    assert cut.gap_ns == 0
    assert not any(cut.gap_idle_ns.values())


def test_only_a_step_that_has_a_next_one_has_a_boundary() -> None:
    known = events([(0, 50), (10, 50)])
    for step in (101, 99):
        with pytest.raises(StepaheadError, match=f"no boundary after step {step} among the last 2"):
            boundary(known, step)


def test_a_boundary_before_the_first_host_segment_is_refused() -> None:
    known = events([(0, 50), (10, 50), (10, 50)], [(Stage.PLAN, 60)])
    with pytest.raises(StepaheadError, match="no boundary after step 100"):
        boundary(known, 100)
    assert boundary(known, 101).gap_ns == 10
    assert typical_step(known) == 101
    gaps_ns = (0, 1, 2, 2, 3, 9, 0)  # 3 and 9 are steady and known; with the 2s it would be 2
    more = events([(gap_ns, 50) for gap_ns in gaps_ns], [(Stage.PLAN, 200)])
    assert typical_step(more) == 103


def test_the_typical_gap_is_the_median_of_steady_steps() -> None:
    prompt, decode = 900, 100
    runs = [
        (0, decode),  # the first step is no step to judge by
        (1, prompt),
        (2, prompt),
        (40, decode),
        (30, decode + 20),
        (55, decode),
        (20, decode - 20),
        (3, prompt),  # neither the gap before it nor the one behind it counts
        (4, decode),
        (35, decode),
        (500, decode),  # the last is none either
    ]
    # gaps between steady steps: 30, 55, 20, 35; the lower median is 30, before step 104
    assert typical_step(events(runs)) == 103


def test_without_steady_steps_any_boundary_serves() -> None:
    assert typical_step(events([(0, 10), (5, 1000)])) == 100
    assert typical_step(events([(0, 10), (5, 1000), (9, 50)])) == 100


@pytest.mark.parametrize("runs", [[], [(0, 10)]])
def test_one_step_has_no_boundary(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(StepaheadError, match=f"needs two steps, {len(runs)} are here"):
        typical_step(events(runs))
