"""benchmarks/peers.py in small, with stand-ins for what nobody wants installed: figures, engines.

The stand-ins are vLLM and llama.cpp; ours and transformers run for real, on a tiny model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmark_files import BENCHMARKS, tiny_file
from rich.console import Console

STAND_INS = Path(__file__).with_name("peer_stand_ins")


@pytest.fixture(scope="module")
def peers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import peers

        yield peers


@pytest.fixture(scope="module")
def peer_jobs(peers: Any) -> Any:
    return sys.modules["peer_jobs"]


@pytest.fixture(scope="module")
def figures(peers: Any) -> Any:
    return sys.modules["peer_figures"]


def with_stand_in(folder: Path, name: str) -> None:
    """An environment whose Python is this one, and sees the stand-ins."""
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_INS} exec {sys.executable} "$@"\n', "utf-8")
    python.chmod(0o755)
    (folder / name / "installed").touch()


@pytest.fixture(scope="module")
def run(peers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two rounds of all peers, and of ours in float32."""
    folder = tmp_path_factory.mktemp("peers")
    with_stand_in(folder, "vllm")
    with_stand_in(folder, "llama.cpp")
    with_stand_in(folder, "transformers")
    size = peers.Size(rounds=2, rows=3, prompt_tokens=300, new_tokens=4)
    only = ["float32", "vllm", "llama.cpp"]
    return peers.measure(tiny_file(folder / "tiny.gguf"), folder, size, 1, only)


def test_engines_run_in_turns_and_those_that_fail_are_named(run: Any) -> None:
    ran = ["stepahead float32", "llama.cpp F32", "llama.cpp Q8_0"]
    ran += ["vllm float32", "transformers float32"]
    assert list(run.turns) == ran
    assert {len(turns) for turns in run.turns.values()} == {2}
    assert run.not_run.keys() == {"vllm bfloat16", "llama.cpp Q4_1"}
    assert "this machine has no bfloat16" in run.not_run["vllm bfloat16"]
    assert "can't quantise" in run.not_run["llama.cpp Q4_1"]
    assert run.versions["vllm"] == "9.9"
    assert run.versions["llama.cpp"] == "8.8"


def test_every_figure_is_positive(run: Any) -> None:
    for turns in run.turns.values():
        for turn in turns:
            assert min(dataclasses.astuple(turn)) > 0
            assert turn.first_ms_last >= turn.first_ms_median
    assert run.starts_s.keys() == run.turns.keys()


def test_transformers_reads_the_same_model_from_the_folder_made_of_the_file(
    run: Any, peers: Any
) -> None:
    ours, theirs = (peers.quality(run)[f"{name} float32"] for name in ("stepahead", "transformers"))
    assert ours["top1"] == theirs["top1"] == 1.0
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-3)
    assert peers.quality(run)["vllm float32"]["top1"] < 0.1  # the stand-in is another model


def test_the_last_line_has_what_was_asked(run: Any, peers: Any) -> None:
    line = json.loads(json.dumps(peers.as_json(run, Path("tiny.gguf"), 1)))
    assert line["bench"] == "peers"
    assert line["step_ms"]["llama.cpp Q8_0"].keys() == {"1", "32"}
    assert line["decode_tok_s_b32"].keys() == line["prefill_tok_s"].keys() == run.turns.keys()
    assert line["ratio_decode_b32_vs_best"] > 0
    assert line["ratio_prefill_vs_best"] > 0
    # ours ran in neither
    assert line["ratio_step_b1_vs_llamacpp"] == {"8bit": None, "4bit": None}
    assert line["not_run"] == run.not_run


def test_the_tables_name_every_engine_and_every_reason(run: Any, peers: Any) -> None:
    console = Console(record=True, width=300, quiet=False, file=None)
    with console.capture() as capture:
        for table in peers.tables(run):
            console.print(table)
    shown = capture.get()
    for name in (*run.turns, *run.not_run, "this machine has no bfloat16", "decode_b32_vs_best"):
        assert name in shown


def test_what_is_not_installed_is_told_with_what_to_do(peers: Any, tmp_path: Path) -> None:
    size = peers.Size(rounds=1, rows=1, prompt_tokens=8, new_tokens=4)
    run = peers.measure(tiny_file(tmp_path / "tiny.gguf"), tmp_path, size, 1, ["vllm", "llama.cpp"])
    assert run.turns == {}
    assert set(run.not_run.values()) == {
        "not installed: run with --setup vllm",
        "not installed: run with --setup llama.cpp",
    }
    (tmp_path / "vllm.setup.log").write_text("Collecting\nERROR: no such wheel\nnote: \n", "utf-8")
    assert sys.modules["peer_process"].missing(tmp_path, "vllm") == (
        "its installation failed: ERROR: no such wheel"
    )


def test_ours_is_run_in_every_precision_but_bfloat16_unless_it_is_named(
    peer_jobs: Any, tmp_path: Path
) -> None:
    model = tiny_file(tmp_path / "tiny.gguf")

    def ran(only: list[str]) -> list[str]:
        found = peer_jobs.jobs(model, tmp_path, peer_jobs.QUICK, 1, only)
        return [job.name.split()[1] for job in found if job.engine == "stepahead"]

    assert ran([]) == ran(["stepahead"]) == ["float32", "float16", "int8", "int4"]
    assert ran(["stepahead bfloat16", "int8"]) == ["bfloat16", "int8"]
    assert peer_jobs.our_precisions()["int4"] == {"quantization": "int4"}


def test_llama_cpp_runs_the_file_itself_where_that_is_what_is_asked(
    peer_jobs: Any, tmp_path: Path
) -> None:
    def asked(file_type: int | None) -> dict[str, bool]:
        path = tiny_file(tmp_path / "tiny.gguf", metadata={"general__file_type": file_type})
        found = peer_jobs.jobs(path, tmp_path, peer_jobs.QUICK, 1, ["llama.cpp"])
        return {job.precision: job.options["as_it_is"] for job in found}

    assert asked(15) == {"F32": False, "Q8_0": False, "Q4_K_M": True}
    assert asked(3) == {"F32": False, "Q8_0": False, "Q4_1": True}
    assert asked(0) == {"F32": True, "Q8_0": False, "Q4_1": False}
    assert asked(None) == {"F32": False, "Q8_0": False, "Q4_1": False}


def test_each_piece_of_the_text_begins_as_the_model_wants_it(peer_jobs: Any) -> None:
    text = peer_jobs.Text([1], list(range(100, 1000)))
    chunks, size = text.chunks(), peer_jobs.Size(1, 4, 32, 1)
    assert [len(chunk) for chunk in chunks] == [256, 256, 256, 136]
    assert [token for chunk in chunks for token in chunk[1:]] == text.ids
    prompts = text.prompts(size)
    assert {len(prompt) for prompt in prompts} == {32}
    assert {piece[0] for piece in (*chunks, *prompts)} == {1}
    assert len({prompt[1] for prompt in prompts}) == 4


def test_a_model_that_transformers_can_not_write_leaves_the_others_running(
    peers: Any, peer_jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Path, target: Path) -> None:
        raise ValueError("GGUF model with architecture tiny is not supported yet.")

    monkeypatch.setattr(peer_jobs, "make_folder", fail)
    with_stand_in(tmp_path, "vllm")
    with_stand_in(tmp_path, "llama.cpp")
    size = peers.Size(rounds=1, rows=2, prompt_tokens=16, new_tokens=4)
    model = tiny_file(tmp_path / "tiny.gguf")
    run = peers.measure(model, tmp_path, size, 1, ["vllm float32", "llama.cpp F32"])
    assert list(run.turns) == ["llama.cpp F32"]
    assert run.not_run == {
        "vllm float32": "no safetensors for it: ValueError: GGUF model with architecture tiny is "
        "not supported yet."
    }


def test_sigterm_ends_engines_that_wait_and_one_that_is_being_built(tmp_path: Path) -> None:
    with_stand_in(tmp_path, "llama.cpp")
    model = tiny_file(tmp_path / "tiny.gguf")
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--model", str(model)]
    command += ["--folder", str(tmp_path), "--only", "llama.cpp F32", "llama.cpp Q8_0"]
    env = os.environ | {"HANGS": "Q8_0", "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
    engines: list[psutil.Process] = []
    try:
        log, seen = tmp_path / "llama.cpp Q8_0.log", psutil.Process(process.pid)
        while not (log.exists() and "it hangs" in log.read_text("utf-8")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        engines = seen.children(recursive=True)
        assert len(engines) >= 2
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert not any(engine.is_running() for engine in engines)
    finally:
        for one in (process, *(engine for engine in engines if engine.is_running())):
            one.kill()


# --- figures ------------------------------------------------------------------------------------


def test_steps_with_a_prompt_in_them_are_no_decode_steps(figures: Any) -> None:
    events = [(1.0, [0]), (1.5, [0, 1]), (2.0, [0, 1]), (2.25, [1, 0]), (3.0, [0])]
    assert figures.decode_steps_s(events, 2) == [0.5, 0.25]
    assert figures.first_tokens_s(events, 2) == [1.0, 1.5]
    with pytest.raises(ValueError, match="1 of 3 prompts"):
        figures.first_tokens_s(events, 3)
    with pytest.raises(ValueError, match="no step decoded all of 2 rows"):
        figures.decode_steps_s(events[:2], 2)
    # two tokens of a row in one event stand for two steps
    assert figures.decode_steps_s([*events[:3], (9.0, [0, 0, 1, 1]), *events[3:]], 2) == [0.5]


def test_a_turn_is_made_of_three_runs(figures: Any) -> None:
    alone = [(0.1, [0]), (0.3, [0]), (0.5, [0])]
    many = [(1.0, [0]), (2.0, [0, 1]), (2.5, [0, 1]), (3.5, [0, 1])]
    turn = figures.Turn.of(alone, many, [(1.0, [0]), (2.0, [1])], [[1] * 6, [2] * 6], 9.0)
    assert turn.step_ms_1 == pytest.approx(200.0)
    assert (turn.step_ms_many, turn.decode_tok_s) == (750.0, pytest.approx(4 / 1.5))
    assert (turn.prefill_tok_s, turn.first_ms_median, turn.first_ms_last) == (6.0, 1500.0, 2000.0)


def turns_of(figures: Any, rates: dict[str, list[float]]) -> Any:
    turn = figures.Turn(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    return {
        name: [dataclasses.replace(turn, decode_tok_s=rate, step_ms_1=rate) for rate in own]
        for name, own in rates.items()
    }


def test_ratios_are_of_the_same_round_and_of_the_best_on_each_side(figures: Any) -> None:
    rates = {
        "stepahead float32": [10.0, 20.0, 40.0],
        "stepahead int8": [30.0, 10.0, 10.0],
        "vllm float32": [5.0, 40.0, 20.0],
        "vllm bfloat16": [1.0, 1.0, 1.0],
    }
    found = figures.ratios(turns_of(figures, rates))
    decode = found["ratio_decode_b32_vs_best"]
    assert (decode.ours, decode.theirs) == ("stepahead float32", "vllm float32")
    assert decode.spread == figures.Spread(2.0, 0.5, 2.0)
    assert found["ratio_step_b1_vs_llamacpp 8bit"] is None  # there is no llama.cpp
    assert found["ratio_decode_b32_int8_vs_best"].ours == "stepahead int8"
    rates |= {"llama.cpp Q8_0": [5.0, 5.0, 5.0], "llama.cpp Q4_1": [1.0, 1.0, 1.0]}
    found = figures.ratios(turns_of(figures, rates))
    eight = found["ratio_step_b1_vs_llamacpp 8bit"]
    assert (eight.ours, eight.theirs) == ("stepahead int8", "llama.cpp Q8_0")
    assert eight.spread == figures.Spread(2.0, 2.0, 6.0)
    assert found["ratio_step_b1_vs_llamacpp 4bit"] is None  # ours did not run in 4 bits
    rates |= {"stepahead int4": [3.0, 4.0, 5.0]}
    four = figures.ratios(turns_of(figures, rates))["ratio_step_b1_vs_llamacpp 4bit"]
    assert (four.ours, four.theirs) == ("stepahead int4", "llama.cpp Q4_1")
    assert four.spread == figures.Spread(4.0, 3.0, 5.0)
    plain = found["ratio_decode_b32_float32_vs_vllm"]
    assert (plain.ours, plain.theirs) == ("stepahead float32", "vllm float32")


def test_agreement_counts_where_the_reference_is_clear(figures: Any) -> None:
    reference = {"best": [1, 2, 3, 4], "margins": [1.0, 0.05, 2.0, 0.2], "logprobs": []}
    assert figures.agreement({"best": [1, 9, 3, 9]}, reference) == pytest.approx(2 / 3)
    assert figures.perplexity({"logprobs": [0.0, 0.0]}) == 1.0
