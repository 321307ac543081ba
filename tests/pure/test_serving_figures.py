"""benchmarks/serving.py counts what it says: steps of a trace whose times are known, and tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from stepahead.observe.perfetto import chrome_trace
from stepahead.sim import shapes
from stepahead.sim.virtual import OVERLAP, host_work, rig, steady

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # by its path: the tests have a module of that name, too
    spec = importlib.util.spec_from_file_location("bench_serving", BENCHMARKS / "serving.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_serving", module)
    spec.loader.exec_module(module)
    return module


def shown(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_median_step_is_from_end_to_end(bench: ModuleType) -> None:
    rigged = rig(OVERLAP, shapes.timing(10.0, handover=0.25), host_work(6.0))
    steady(rigged, 40)
    rigged.hear(40)
    trace = chrome_trace(rigged.engine.observer.snapshot(), 0.3)
    bench.ROWS = 4
    # the device is never idle in between: 10 ms of each step are its own
    assert bench.median_step_ms(trace, only_full=True) == pytest.approx(10.0, abs=0.3)
    assert bench.median_step_ms(trace, only_full=False) == pytest.approx(10.0, abs=0.3)


def test_the_tables_show_medians_and_their_spread(bench: ModuleType) -> None:
    assert bench.spread([3.0, 1.0, 2.0]) == [2.0, 1.0, 3.0]
    crowd = {
        "streams": 256,
        "seconds": 60.0,
        "ends": {"read": 9, "leave": 3},
        "stuck": 0,
        "wrong": [],
        "balanced": True,
        "rss_mb": {"front": [80.0, 81.0]},
        "step_ms": [400.0, 390.0, 410.0],
        "gap_p99_of_step": [1.5, 1.25, 2.0],
    }
    lines = shown(bench.crowd_table(crowd))
    assert "9 read, 3 leave" in lines
    assert "1.50 (1.25 to 2.00)" in lines
    step = {"served_ms": [1, 1, 1], "offline_ms": [1, 1, 1], "served_of_offline": [1.01, 1, 1.02]}
    assert "1.010 (1.000 to 1.020)" in shown(bench.steps_table(step))
    one = {name: [20_500.0, 19_000.0, 23_000.0] for name in bench._HTTP_LINES}
    assert "20,500 (19,000 to 23,000)" in shown(bench.http_table({"64": one}))


def test_sending_a_step_costs_something(bench: ModuleType) -> None:
    assert bench.send_us(4, count=20) > 0
