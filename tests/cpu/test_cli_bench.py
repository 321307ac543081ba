"""`stepahead bench MODEL`: a table for people, and a last line for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_makers import tiny_llama, toy_flags
from stepahead.cli.main import run_command
from stepahead.config import CHOICES

SIZES = ["--num-prompts", "6", "--input-len", "20", "--output-len", "8"]
FIGURES = {
    "tokens_per_s",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "host_hidden_us",
    "host_exposed_us",
    "device_idle_pct",
    "syncs",
}


def test_each_loop_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "toy", *SIZES, *toy_flags()]) == 0
    captured = capsys.readouterr()
    *told, last = captured.out.splitlines()
    line = json.loads(last)
    assert {name: line[name] for name in ("bench", "model", "prompts")} == {
        "bench": "offline",
        "model": "toy",
        "prompts": 6,
    }
    assert (line["input_len"], line["output_len"]) == (20, 8)
    for loop in CHOICES["loop"]:
        figures = line[loop]
        assert set(figures) == FIGURES
        assert figures["tokens_per_s"] > 0
        assert 0 < figures["tpot_ms_p50"] <= figures["tpot_ms_p99"]
        assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"]
        assert figures["host_exposed_us"] > 0
        assert 0 < figures["device_idle_pct"] < 100
        assert line["probes"][loop]["loop"] == loop
        assert line["probes"][loop]["steps"] >= 8
    table = "\n".join(told)
    assert "ms, p50/p90/p99" in table
    for words in ("host works", "launched ahead", "decode step", "token to token"):
        assert words in table
    assert sum(words.startswith(f"{loop}: device busy ") for words in told) == 1
    assert "6 prompts of 20 tokens, 8 out" in table
    assert "6 in" in table
    assert "48" in table  # output tokens


def test_one_loop_is_measured_if_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SIZES, *toy_flags(loop="serial"), "--quiet"]
    assert run_command(["bench", "toy", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "serial" in json.loads(captured.out)
    assert "overlap" not in json.loads(captured.out)


def test_what_held_steps_up_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    # two rows at a time: who waits is let in when the last steps of the two before have landed
    assert run_command(["bench", "toy", *SIZES, *toy_flags(max_rows=2)]) == 0
    *told, last = capsys.readouterr().out.splitlines()
    line = json.loads(last)
    assert line["serial"]["syncs"] == {}
    assert line["overlap"]["syncs"] == {"drain": {"steps": 2, "rows": 4}}
    (row,) = [words for words in told if "sync: drain" in words]
    assert row.count("2 steps, 4 rows") == 2  # the queue is as deep
    assert "sync: serial-prefill" not in "".join(told)


@pytest.mark.parametrize(
    ("verb", "module"), [("host", "host_cost"), ("overlap", "overlap"), ("engine", "overhead")]
)
def test_parts_of_the_engine_have_verbs(
    verb: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # the measurements take minutes, and have tests of their own
    found = {"bench": module, "us": 1.5}
    monkeypatch.setattr(f"stepahead.sim.{module}.measure", lambda: found)
    monkeypatch.setattr(f"stepahead.sim.{module}.table", lambda found: f"table of {found['us']}")
    assert run_command(["bench", verb]) == 0
    table, last = capsys.readouterr().out.splitlines()
    assert table == "table of 1.5"
    assert json.loads(last) == found


def test_a_load_longer_than_the_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # its answers were shorter than what the last line said
    flags = ["--input-len", "20", "--output-len", "5000", *toy_flags(loop="serial"), "--quiet"]
    assert run_command(["bench", "toy", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "output_len=5000 are 5020 tokens; the model takes" in captured.err


def test_drafts_are_held_against_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_llama(tmp_path, max_len=2048))
    flags = ["--rounds", "2", "--output-len", "12", "--draft-tokens", "2"]
    flags += toy_flags(max_model_len=2048)
    assert run_command(["bench", "spec", model, *flags]) == 0
    *told, last = capsys.readouterr().out.splitlines()
    line = json.loads(last)
    assert (line["bench"], line["draft"], line["drafts"]) == ("spec", "ngram", 2)
    for workload in ("summarise", "edit code"):
        figures = line[workload]
        assert figures["same_tokens"] is True
        assert figures["rounds"] == 2
        assert figures["tpot_ms_plain"] > 0 < figures["tpot_ms_drafts"]
        first, second = figures["accepted_at"]
        assert first >= second
        # 11 tokens after the first of each of two answers, in each of two rounds
        assert figures["rows"] + first + second == 2 * 2 * 11
        whole = 1 + (first + second) / figures["rows"]
        assert figures["tokens_per_forward"] == pytest.approx(whole, abs=1e-3)
    table = "\n".join(told)
    for words in ("TPOT with drafts", "times faster", "draft 2 accepted", "same tokens"):
        assert words in table


def test_a_comparison_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "spec", "toy", "--draft", "none"]) != 0
    assert "bench spec compares drafts with none" in capsys.readouterr().err
