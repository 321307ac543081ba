"""benchmarks/gpu_check.py in small, on the stand-in for CUDA: it measures what it says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.set_num_threads(1)
    fake = FakeCuda()
    install(monkeypatch, fake)
    monkeypatch.setattr(torch.cuda, "_sleep", fake._sleep)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    return gpu_check


def small(gpu_check: Any) -> Any:
    model = replace(gpu_check.TINY, vocab_size=64, hidden_size=32, intermediate_size=32, max_len=64)
    return gpu_check.Sizes(
        place="cpu",
        cycles=40_000_000,
        toy_seeds=1,
        tiny=replace(model, max_len=128),
        large=model,
        rows=6,
        prompt=12,
        tokens=20,
        repeats=1,
    )


def test_every_check_passes_and_reports(gpu_check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = small(gpu_check)
    found = gpu_check.measure(sizes)
    assert found["failed"] == [], capsys.readouterr().err
    assert found["device"]["copies_block"] is False
    assert all(0.3 < half < 0.7 for half in found["device"]["event_in_graph_at"])
    assert found["toy"]["workloads"] == 6
    assert found["toy"]["steps"] > 100
    assert set(found["attention"]) > {"bfloat16 pages of 256", "float32 pages of 16"}
    assert found["float32"]["overlap fine"] == {"equal": 12, "close": 0, "wrong": 0}
    assert set(found["speed"]) > {"serial graphs", "overlap graphs", "serial plain"}
    speed = found["speed"]["overlap plain"]
    assert speed["step_us"] >= speed["forward_us"] > 0
    assert speed["tokens_per_s"] > 0
    assert 0 <= speed["copies_inside"] <= 1
    shown = capsys.readouterr().out
    assert "overlap graphs" in shown
    assert "tokens_per_s" in shown


def test_a_check_that_fails_is_named_and_the_others_go_on(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(sizes: Any) -> dict[str, Any]:
        raise AssertionError("streams are not distinct: [1, 1, 2]")

    def short(*args: Any) -> dict[str, Any]:
        return {"ran": True}

    for name in ("toy", "float32", "speed", "bfloat16"):
        monkeypatch.setattr(gpu_check, f"check_{name}", short)
    monkeypatch.setattr(gpu_check, "check_device", fails)
    found = gpu_check.measure(small(gpu_check))
    assert found["failed"] == ["device"]
    assert found["device"]["error"] == "AssertionError: streams are not distinct: [1, 1, 2]"
    assert found["bfloat16"]["ran"]


def test_differences_tell_close_from_wrong(gpu_check: Any) -> None:
    def ran(*rows: list[int]) -> Any:
        return gpu_check.Ran([gpu_check.Told(row, [0.5, 0.001, 0.5]) for row in rows], [], 1.0)

    right = ran([1, 2, 3], [1, 2, 3], [1, 2, 3])
    other = ran([1, 2, 3], [1, 9, 9], [1, 2, 9])
    assert gpu_check.differences(right, other, 0.01) == {"equal": 1, "close": 1, "wrong": 1}


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "gpu_check needs a GPU" in done.stderr
    assert done.stdout == ""
