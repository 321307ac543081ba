"""The benchmarks of the CPU in small: floors, parts of a step, overlap beside a model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_files import BENCHMARKS, WIDE, tiny_file
from rich.console import Console

from offline_makers import tiny_llama


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """Imports one by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))

        def named(name: str) -> Any:
            __import__(name)
            return sys.modules[name]

        yield named


def shown(*tables: Any) -> str:
    console = Console(record=True, width=300, quiet=False, file=None)
    with console.capture() as capture:
        console.print(*tables)
    return capture.get()


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("wide") / "wide.gguf", **WIDE)


def test_a_floor_is_the_longer_of_moving_and_computing(
    benchmarks: Any, wide_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_floor = benchmarks("cpu_floor")
    monkeypatch.setattr(cpu_floor, "ROWS", (1, 2))
    monkeypatch.setattr(cpu_floor, "RATE_ROWS", 4)
    monkeypatch.setattr(cpu_floor, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(cpu_floor, "TURNS", 10)
    spec = cpu_floor.read_spec(wide_file)
    weights = 2 * (128 * 64 + 64 * 64 + 3 * 64 * 48) + spec.vocab_size * 64
    assert cpu_floor.weights_of(spec) == weights
    found = cpu_floor.measure(spec, 1, 1)
    assert found.products.keys() | found.absent.keys() == cpu_floor.KERNELS.keys()
    assert found.products.keys() >= {"ours float32", "ours int8", "ours int4", "torch float32"}
    assert found.rates.keys() == {"float32 multiply-add, 1", "int16 pairs, 1"}

    def lines(gb_s: float, step_ms: float) -> list[Any]:
        one = benchmarks("peer_figures").Spread
        memory = {"read, 1": one(gb_s, gb_s, gb_s)}
        steps = {"int8": {2: one(step_ms, step_ms, step_ms)}}
        return cpu_floor.floors(spec, replace(found, memory=memory, steps=steps))

    slow, fast = lines(1e-3, 9.0), lines(1e9, 9.0)  # 1 MB a second
    first = slow[0]
    assert (first.precision, first.rows) == ("float32", 1)
    kv_mb = 2 * 2 * 32 * 192 * 4 / 1e6
    assert first.attention.mb == pytest.approx(kv_mb)
    assert first.matrices.mb >= (4 * weights + 8 * spec.vocab_size) / 1e6  # whole panels
    assert first.least_ms == pytest.approx((first.matrices.mb + kv_mb) / 1e-3)
    assert first.matrices.gflop == pytest.approx(2 * weights / 1e9)
    assert fast[0].least_ms == fast[0].matrices.computing_ms + fast[0].attention.computing_ms
    sizes = [line.matrices.mb for line in slow if line.rows == 1]
    assert sizes == sorted(sizes, reverse=True)  # float32, float16, int8, int4
    line = json.loads(json.dumps(cpu_floor.as_json(spec, found, slow)))
    steps = {(one["precision"], one["rows"]): one["step_ms"] for one in line["floor"]}
    assert (steps["int8", 2], steps["float32", 2]) == (9.0, None)
    told = shown(*cpu_floor.tables(spec, found, slow))
    assert all(name in told for name in (*found.products, *found.absent, "int4", "int16 pairs, 1"))


def test_attention_alone_is_what_its_plain_twin_makes_of_it(
    benchmarks: Any, wide_file: Path
) -> None:
    cpu_kernels = benchmarks("cpu_kernels")
    spec = benchmarks("cpu_floor").read_spec(wide_file)
    # all layers alike, because the last one's is compared
    for kind in (spec, replace(spec, sliding_window=70, windowed=(True, True))):
        with torch.inference_mode():
            attention = cpu_kernels.Attention(kind, 3, cpu_kernels.Team(1))
            assert torch.allclose(attention.ours(), attention.torch(), atol=1e-5)


def test_every_turn_of_an_instruction_is_counted(benchmarks: Any) -> None:
    cpu_kernels = benchmarks("cpu_kernels")
    for kind in cpu_kernels.INSTRUCTIONS:
        once, thrice = (
            cpu_kernels.instructions(kind, cpu_kernels.Team(threads), 10) for threads in (1, 3)
        )
        assert thrice == 3 * once > 0


def test_parts_steps_and_quality_of_every_precision_are_told(
    benchmarks: Any, wide_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_layers = benchmarks("cpu_layers")
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 12, "utf-8")
    monkeypatch.setattr(cpu_layers, "TEXTS", (text,))
    monkeypatch.setattr(cpu_layers, "ROWS", (1, 4))
    monkeypatch.setattr(cpu_layers, "ATTENTION_ROWS", (2,))
    monkeypatch.setattr(cpu_layers, "WINDOW", 64)
    found = json.loads(json.dumps(cpu_layers.measure(wide_file, 1, 1)))
    ours = ["float32", "float16", "int8", "int4"]
    assert list(found["step_ms"]) == list(found["quality"]) == [*ours, "torch"]
    assert found["products_ms"]["ours int4"].keys() == {"1", "4"}
    assert found["attention_ms"].keys() == {"ours", "torch"}
    quality = found["quality"]
    assert quality["float32"]["top1"] == quality["torch"]["top1_clear"] == 1.0
    apart = [quality[name]["largest_apart"] for name in ours]
    assert apart == sorted(apart)
    assert apart[0] == 0.0
    assert quality["torch"]["perplexity"] == pytest.approx(quality["float32"]["perplexity"], 1e-3)
    assert 300 < quality["int8"]["positions"] < 480  # all but the first one of each stretch


def test_overlap_beside_a_model_is_told_by_the_books(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_overlap = benchmarks("cpu_overlap")
    monkeypatch.setattr(cpu_overlap, "ROWS", (1, 2))
    monkeypatch.setattr(cpu_overlap, "PROMPT", 8)
    model = str(tiny_llama(tmp_path))
    prompts = [[3 + at] * 8 for at in range(2)]
    turns = cpu_overlap.alternate(model, {"threads": 1}, prompts, 2, 6)
    assert [*turns] == [(loop, rows) for loop in ("serial", "overlap") for rows in (1, 2)]
    for turn in (turn for each in turns.values() for turn in each):
        idle_ms = sum(turn.idle_ms.values())
        assert turn.step_ms == pytest.approx(turn.forward_ms + idle_ms)
        assert turn.of_forward > 1.0
    cases = cpu_overlap.summary(turns)
    assert [case["rows"] for case in cases] == [1, 2, 1, 2]
    for case in cases:
        middle, low, high = case["of_forward"]
        assert low <= middle <= high
        assert (case["of_forward"] == case["of_serial_forward"]) == (case["loop"] == "serial")
    told = shown(cpu_overlap.table("float32", cases))
    assert "of serial's" in told
    assert "overlap" in told
