"""The benchmarks measure what they say: a small turn of each, and a table of what it found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from offline_makers import tiny_llama
from stepahead.assemble import ModelParts, model_parts
from stepahead.config import EngineConfig
from stepahead.sim import host_cost, overhead, overlap, pipeline, recorder, structured
from stepahead.sim.sleep import NoiseModel


def shown(table: Any) -> str:
    console = Console(record=True, width=100, quiet=False, file=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_host_cost_counts_steps_that_decode_every_row() -> None:
    engine, executor = host_cost.build(8)
    for prompt in host_cost.prompts(8, 32, 16):
        engine.add(prompt, host_cost.SamplingParams(temperature=0.0, max_tokens=64))
    heard = [outputs for _ in range(20) if (outputs := host_cost.step(engine))]
    assert [len(outputs.tokens) for outputs in heard[-5:]] == [8] * 5
    assert executor.bytes_sent > 0
    assert executor.spent_ns > 0


def test_host_cost_waves_end_and_its_figures_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "ROWS", (1, 32, 1024))
    monkeypatch.setattr(host_cost, "steady_us", lambda rows: 1.0 + rows / 100)
    monkeypatch.setattr(host_cost, "plan_us", lambda rows, chained: 0.8 if chained else 5.0)
    found = host_cost.measure(repeats=1)
    assert found["us_per_step"]["32"] == 1.3
    assert found["slope_us_per_row"] == pytest.approx(0.01)
    assert found["wave_256_finish_ms"] > 0
    assert found["wave_256_arrive_ms"] > 0
    assert found["plan_us"]["chained"] == {"1": 0.8, "32": 0.8, "1024": 0.8}
    assert found["plan_us"]["anew"]["1024"] == 5.0
    lines = shown(host_cost.table(found))
    assert "1024 rows" in lines
    assert "0.8 us, 5.0 us anew" in lines


def test_a_repeated_plan_costs_less_than_one_made_anew() -> None:
    # about a fifth; both are medians of the thread's own CPU time
    assert 0 < host_cost.plan_us(32, True, 40) < host_cost.plan_us(32, False, 40)


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_the_sleeping_device_is_busy_as_long_as_it_was_told(loop: str) -> None:
    found = overlap.run(loop, 3.0, 1.0, 5)
    assert found.busy_ms >= 3.0
    # serial can't be shorter than both parts; under overlap the first step may have run before
    assert found.tpot_ms >= (4.0 if loop == "serial" else 3.0 * 4 / 5)


def test_the_overlap_table_shows_ratios() -> None:
    case = {"F_ms": 10.0, "H_ms": 6.0, "serial_ms": 16.0, "overlap_ms": 10.1}
    lines = shown(overlap.table({"cases": [case]}))
    assert "1.000" in lines
    assert "1.010" in lines


def test_the_near_free_engine_runs_with_each_loop() -> None:
    for loop in ("serial", "overlap"):
        assert overhead.run(loop, 2, 3) > 0
    step = {"serial": 1.0, "overlap": 0.5}
    assert "0.5" in shown(overhead.table({"step_ms": {"1": step, "32": step, "256": step}}))


def test_two_sleeping_stages_step_no_faster_than_each_alone() -> None:
    # each step sleeps 4 ms in a stage; both at once, a step lasts no less than that
    rate = pipeline.run(stages=2, depth=3, steps=10, stage_ms=4.0, host_ms=0.0)
    assert 0 < rate < 1e3 / 4.0 * 13 / 10  # three may have been in the air before


def test_the_pipeline_table_shows_shares_of_what_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "run", lambda stages, depth, steps: 10.0 * depth)
    found = pipeline.measure(runs=1)
    by_case = {(case["stages"], case["depth"]): case for case in found["cases"]}
    assert set(by_case) == {(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3), (3, 4)}
    assert by_case[3, 4]["bound_per_s"] == 50.0  # F = 20 ms, with every stage busy
    assert by_case[3, 3]["bound_per_s"] == 45.45  # 3 / (3 F + H), H = 6 ms
    assert "0.800" in shown(pipeline.table(found))


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_known_times_are_those_of_the_books(loop: str) -> None:
    found = recorder.known_times(loop, 4.0, 2.0, 6)
    assert found["balance"] > 0
    assert {"hidden_ms", "exposed_ms", "of_H"} <= found.keys()


def test_the_recorders_cost_is_that_of_an_engine_with_one_over_one_without() -> None:
    costs = [recorder.cost(rows, 3, 8) for rows in (1, 4)]
    assert all(case["bare_us"] > 0 and case["step_us"] > 0 for case in costs)
    known = {"loop": "serial", "F_ms": 40.0, "H_ms": 20.0, "hidden_ms": 0.0}
    known |= {"exposed_ms": 20.0, "of_H": 1.0, "balance": 1.0}
    tables = recorder.tables({"known": [known], "cost": costs, "alone": {"event_ns": 300}})
    assert "1.000" in shown(tables[0])
    assert "us" in shown(tables[1])
    assert "300" in shown(tables[2])


@pytest.fixture(scope="module")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory) -> ModelParts:
    return model_parts(EngineConfig(str(tiny_llama(tmp_path_factory.mktemp("tiny")))))


def test_rows_under_grammars_are_shared_out_and_timed(
    tiny_parts: ModelParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "LOOPS", ("overlap",))
    monkeypatch.setattr(structured, "SHARES", (0.0, 0.5))
    monkeypatch.setattr(structured, "WARM", 2)
    found = structured.alternate(structured.sleeping(tiny_parts, 2.0), 1, 4)
    (none,), (half,) = found["overlap", 0.0], found["overlap", 0.5]
    assert none.grammar_ms != none.grammar_ms  # nobody's
    assert none.late == none.late_rows == 0
    assert half.free_ms > 0 < half.grammar_ms
    assert half.steps == 4
    cases = structured.summary(found)
    assert cases[0]["of_none"] == 1.0
    late = {"F_ms": 10.0, "late_steps": 3}
    tables = structured.tables({"forward_ms": 2.0, "sleeping": cases, "late_masks": late})
    assert "50%" in shown(tables[0])
    assert "late_steps" in shown(tables[1])


def test_free_rows_are_told_before_masks_that_come_late(
    tiny_parts: ModelParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "FORWARD_MS", 1.0)
    monkeypatch.setattr(structured, "WARM", 2)
    found = structured.late_masks(tiny_parts, mask_ms=100.0, steps=4)
    assert found["late_steps"] > 0
    assert found["late_rows"] == found["late_steps"] * structured.ROWS // 2
    # one step's two parts, so the order holds whatever the machine is at
    assert found["free_told_ms"] < found["grammar_told_ms"]


def test_noise_differs_by_row_and_step_and_is_the_seeds() -> None:
    def said(seed: int) -> list[torch.Tensor]:
        model = NoiseModel(0.0, 50, seed, max_rows=4)
        return [model.logits(torch.zeros(rows, 1)).clone() for rows in (4, 4, 2)]

    first, second, few = said(0)
    rows = [*first, *second, *few]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    assert all(map(torch.equal, said(0), (first, second, few)))
    assert not torch.equal(said(1)[0], first)
