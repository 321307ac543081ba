"""benchmarks/peers.py in small, with stand-ins for what nobody wants installed: figures, engines.

The stand-ins are vLLM and llama.cpp; ours and transformers run for real, on a tiny model.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_models import gguf_tensors, make_reference, write_gguf

from text_makers import byte_level_json

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STAND_INS = Path(__file__).with_name("peer_stand_ins")


@pytest.fixture(scope="module")
def peers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import peers

        yield peers


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


def tiny_file(path: Path) -> Path:
    """A llama of random weights with a byte-level tokenizer, as a .gguf file."""
    parsed = json.loads(byte_level_json())
    vocab: dict[str, int] = parsed["model"]["vocab"]
    model = make_reference("llama", vocab_size=len(vocab), max_position_embeddings=512)
    tokenizer = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "smollm",
        "tokenizer__ggml__tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer__ggml__token_type": [1] * len(vocab),
        "tokenizer__ggml__merges": [" ".join(merge) for merge in parsed["model"]["merges"]],
    }
    write_gguf(path, model, gguf_tensors(model), **tokenizer)
    return path


@pytest.fixture(scope="module")
def run(peers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two rounds of all engines, but for our bfloat16 and an absent transformers."""
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
    assert line["ratio_step_b1_vs_llamacpp"] == {"8bit": None, "4bit": None}  # ours has neither
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


def test_ours_is_run_in_every_precision_that_the_config_offers(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"float32", "bfloat16"} <= peers.our_precisions().keys()
    monkeypatch.setitem(peers.CHOICES, "quantization", ("none", "int8"))
    assert peers.our_precisions()["int8"] == {"quantization": "int8"}
    assert "none" not in peers.our_precisions()


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
    rates |= {"llama.cpp Q8_0": [5.0, 5.0, 5.0], "llama.cpp Q4_1": [1.0, 1.0, 1.0]}
    found = figures.ratios(turns_of(figures, rates))
    eight = found["ratio_step_b1_vs_llamacpp 8bit"]
    assert (eight.ours, eight.theirs) == ("stepahead int8", "llama.cpp Q8_0")
    assert eight.spread == figures.Spread(2.0, 2.0, 6.0)
    assert found["ratio_step_b1_vs_llamacpp 4bit"] is None  # ours has no 4 bits
    plain = found["ratio_decode_b32_float32_vs_vllm"]
    assert (plain.ours, plain.theirs) == ("stepahead float32", "vllm float32")


def test_agreement_counts_where_the_reference_is_clear(figures: Any) -> None:
    reference = {"best": [1, 2, 3, 4], "margins": [1.0, 0.05, 2.0, 0.2], "logprobs": []}
    assert figures.agreement({"best": [1, 9, 3, 9]}, reference) == pytest.approx(2 / 3)
    assert figures.perplexity({"logprobs": [0.0, 0.0]}) == 1.0


# --- floors -------------------------------------------------------------------------------------


def test_a_floor_is_the_longer_of_moving_and_computing(
    peers: Any, figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cpu_floor

    monkeypatch.setattr(cpu_floor, "ROWS", (1, 2))
    monkeypatch.setattr(cpu_floor, "RATE_ROWS", 4)
    monkeypatch.setattr(cpu_floor, "BLOCK_BYTES", 1 << 12)
    spec = cpu_floor.read_spec(tiny_file(tmp_path / "tiny.gguf"))
    weights = 2 * (64 * 32 + 32 * 32 + 3 * 32 * 48) + spec.vocab_size * 32
    assert sum(rows * columns for rows, columns in cpu_floor.shapes(spec)) == weights
    memory, (linear, absent) = cpu_floor.memory_rates(1), cpu_floor.linear_layers(spec, 1)
    assert "F.linear float32" in linear
    assert linear.keys() | absent.keys() == cpu_floor.KERNELS.keys()
    step = {"float32": {1: figures.Spread(9.0, 9.0, 9.0)}}
    known = {"F.linear float32": {rows: figures.Spread(2.0, 2.0, 2.0) for rows in (1, 2, 4)}}
    first, second = cpu_floor.floors(spec, 0.001, known, step)  # 1 MB a second
    assert first.need.mb == pytest.approx(
        (4 * weights + 2 * 2 * 2 * 8 * 192 * 4 + 8 * spec.vocab_size) / 1e6
    )
    assert first.least == pytest.approx(first.need.mb / 0.001)
    (fast, _) = cpu_floor.floors(spec, 1e9, known, step)
    assert fast.least == pytest.approx(fast.need.gflop / (2 * weights * 4 / 2e-3 / 1e9) * 1e3)
    assert (first.step, second.step) == (step["float32"][1], None)
    line = cpu_floor.as_json(memory, linear, absent, [first, second])
    assert [one["step_ms"] for one in json.loads(json.dumps(line))["floor"]] == [9.0, None]
    assert len(cpu_floor.tables(memory, linear, absent, [first, second])) == 2
