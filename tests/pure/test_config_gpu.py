"""Memory of a GPU, as a stand-in for nvidia-smi on PATH tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepahead.config import (
    ModelFacts,
    Resolved,
    config_from,
    resolve,
)
from stepahead.errors import ConfigError, NotEnoughMemory
from stepahead.machine import gpu_memory_available, memory_available

PAGE_BYTES = 16 << 16
FACTS = ModelFacts(64, 1 << 20, (1,), kv_bytes_per_token=1 << 16, weight_bytes=1 << 30)


class Smi:
    """A program called nvidia-smi that prints what it is told, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.asked = folder / "asked"

    def says(self, out: str, error: str = "", code: int = 0) -> None:
        (self._folder / "out").write_text(out)
        (self._folder / "error").write_text(error)
        program = self._folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\nPATH=/usr/bin:/bin\ncd {self._folder}\necho "$@" > asked\n'
            f"cat out\ncat error >&2\nexit {code}\n"
        )
        program.chmod(0o755)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Smi(tmp_path)


def settled(**options: Any) -> Resolved:
    return resolve(config_from("toy", {"device": "cuda", "max_rows": 4, **options}), FACTS)


def test_the_first_gpus_free_memory_counts(smi: Smi) -> None:
    smi.says("81000\n40000\n")
    assert gpu_memory_available() == 81000 << 20
    assert smi.asked.read_text() == "--query-gpu=memory.free --format=csv,noheader,nounits\n"


@pytest.mark.parametrize(("visible", "which"), [("3", "3"), ("1,0", "1"), ("GPU-ab12", "GPU-ab12")])
def test_the_first_visible_gpu_is_asked(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, visible: str, which: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    smi.says("5000\n")
    assert gpu_memory_available() == 5000 << 20
    assert smi.asked.read_text().startswith(f"--id={which} --query-gpu=memory.free")


def test_the_pool_is_most_of_what_weights_leave(smi: Smi) -> None:
    smi.says("9216\n")  # 9 GiB, of which 1 are weights
    resolved = settled()
    tables = 9 * (1 << 16) * 12  # 9 slots of 65,536 pages, 12 bytes each
    pages = int((8 * 2**30 - tables) * 0.85) // PAGE_BYTES - 1
    assert resolved.config.num_pages == pages
    assert resolved.config.dtype == "float32"
    cause = "85 % of the GPU's free memory; a step needs some of the rest"
    assert f"num_pages={pages}: {cause}" in resolved.reasons


def test_a_pool_that_does_not_fit_the_gpu_is_refused(smi: Smi) -> None:
    smi.says("2048\n")
    with pytest.raises(NotEnoughMemory, match=r"2\.00 GiB are free"):
        settled(kv_memory_gb=1)


def test_small_pages_of_halves_are_told_what_they_miss(smi: Smi) -> None:
    smi.says("9216\n")
    for options in ({}, {"page_size": 256, "dtype": "bfloat16"}):
        assert not [reason for reason in settled(**options).reasons if "page_size" in reason]
    assert any("page_size=16: as given" in r for r in settled(dtype="bfloat16").reasons)


def test_a_gpu_that_shares_the_machines_memory(smi: Smi) -> None:
    smi.says("[N/A]\n")
    found, machine = gpu_memory_available(), memory_available()
    assert abs(found - machine) < machine / 2


def test_without_nvidia_smi_it_says_what_to_do(smi: Smi) -> None:
    with pytest.raises(ConfigError, match=r"no nvidia-smi on PATH.*device=cpu"):
        settled()


@pytest.mark.parametrize("out", ["", "\n", "No devices were found\n"])
def test_without_a_gpu_it_says_what_to_do(smi: Smi, out: str) -> None:
    smi.says(out)
    with pytest.raises(ConfigError, match=r"device=cuda, but nvidia-smi tells of no GPU.*cpu"):
        settled()


def test_what_nvidia_smi_complains_of_is_passed_on(smi: Smi) -> None:
    smi.says("", "NVIDIA-SMI has failed: no driver\nmore\n", code=9)
    with pytest.raises(ConfigError, match=r"it said: NVIDIA-SMI has failed: no driver; check"):
        settled()


def test_a_program_that_does_not_run_is_named(smi: Smi, tmp_path: Path) -> None:
    smi.says("1\n")
    (tmp_path / "nvidia-smi").chmod(0o644)
    (tmp_path / "nvidia-smi").write_text("no program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(ConfigError, match=r"nvidia-smi can't be asked.*device=cpu"):
        settled()


def test_hidden_gpus_are_named(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    smi.says("5000\n")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is empty"):
        settled()


def test_memory_that_is_given_asks_nobody(smi: Smi) -> None:
    config = config_from("toy", {"device": "cuda", "num_pages": 8})
    assert resolve(config, FACTS, bytes_available=1 << 40).pages == 9
    assert not smi.asked.exists()
