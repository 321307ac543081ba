"""`stepahead explain` at the terminal: quick, without torch, the same text and JSON every time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType
from test_cli_help import ENVIRONMENT

import house
from stepahead.cli.main import run_command
from stepahead.explain.build import explain_command, explain_model
from stepahead.explain.memory import CacheSize, Fit, Memory, WeightSize
from stepahead.explain.render import command_text, model_text
from stepahead.explain.report import ChoiceReport, CommandReport, Entry, Finding, ModelReport

GOLDEN = Path(__file__).parent / "golden"
WIDTH = 100
VLLM = ["vllm", "serve", "zai-org/GLM-5.3", "-tp", "8", "--pipeline-parallel-size", "4"]


def out(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command(["explain", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def text(renderable: RenderableType, width: int = WIDTH) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def golden_texts() -> dict[str, str]:
    """By file; made again with `python tests/pure/test_explain_cli.py`, to be read before kept."""
    options = {"loop": "batch-queue", "depth": 3, "threads": 1}
    vllm = [*VLLM, "--async-scheduling", "--max-num-seqs", "64", "--no-such-flag", "x"]
    sglang = "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 python -m sglang.launch_server"
    sglang += " --model-path m --pp-size 2 --disable-radix-cache --speculative-algorithm NGRAM"
    return {
        "explain_glm.txt": text(model_text(explain_model("glm-5.3", options, 32 * 2**30))),
        "explain_toy.txt": text(model_text(explain_model("toy", {"threads": 1}, 2**30))),
        "explain_vllm.txt": text(command_text(explain_command(vllm))),
        "explain_sglang.txt": text(command_text(explain_command([sglang]))),
    }


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("explain_*.txt")))
def test_the_text_is_the_one_that_was_read(name: str) -> None:
    assert golden_texts()[name] == (GOLDEN / name).read_text("utf-8")


def test_every_text_has_been_kept() -> None:
    assert {path.name for path in GOLDEN.glob("explain_*.txt")} == golden_texts().keys()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_off_at_any_width(width: int) -> None:
    report = explain_command(VLLM)
    shown = "".join(text(command_text(report), width).split())
    assert "…" not in shown
    model = text(model_text(explain_model("toy", {"threads": 1}, 2**30)), width)
    assert "…" not in model


def test_the_page_of_usage_shows_what_is_printed() -> None:
    page = (house.ROOT / "docs" / "usage.md").read_text("utf-8")
    section = page.partition("## What a configuration does")[2].partition("\n## ")[0]
    printed = {line for text in golden_texts().values() for line in text.splitlines()}
    shown = [line for block in section.split("```")[1::2] for line in block.strip().splitlines()]
    commands = ("...", "$ stepahead explain", "      --pp-size 2 --disable-radix-cache")
    assert [line for line in shown if line not in printed and not line.startswith(commands)] == []
    assert len(shown) > 60


# a field is added, never renamed and never taken away: scripts read these
FIELDS: dict[type[msgspec.Struct], str] = {
    ModelReport: "model architecture facts refused settings memory choices kind",
    CommandReport: "engine version model overlap depth findings command translated no_counterpart "
    "not_looked_at memory kind",
    Entry: "name value words",
    ChoiceReport: "name title here now overlap watch reasons",
    Finding: "rule effect given words see reasons source",
    Memory: "parameters active_parameters weights cache usable_share fits",
    WeightSize: "dtype bytes",
    CacheSize: "dtype bytes_per_token draft_bytes_per_token longest_bytes",
    Fit: "weights gpu gpus weight_bytes_per_gpu cache_tokens cache_tokens_dp_ep",
}


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_the_fields_of_the_json_stand(kind: type[msgspec.Struct]) -> None:
    assert set(FIELDS[kind].split()) == set(kind.__struct_fields__)


def test_a_model_as_json_is_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(["glm-5.3", "--loop", "batch-queue", "--depth", "3", "--json"], capsys)
    assert shown.count("\n") == 1
    report = msgspec.json.decode(shown, type=ModelReport)
    assert report.kind == "model"
    assert {entry.name: entry.value for entry in report.settings}["depth"] == 3
    assert {entry.name for entry in report.refused} == {"NotEnoughMemory"}
    assert set(json.loads(shown)) == set(FIELDS[ModelReport].split())


@pytest.mark.parametrize("line", [["--", *VLLM], ["--", " ".join(VLLM)], ["--", "A=1", *VLLM]])
def test_a_command_line_behind_the_dashes_reaches_its_reader_whole(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = msgspec.json.decode(out(["--json", *line], capsys), type=CommandReport)
    assert (report.kind, report.engine, report.version) == ("command", "vLLM", "0.32")
    assert (report.overlap, report.depth, report.model) == ("on", 5, "zai-org/GLM-5.3")
    assert [entry.name for entry in report.no_counterpart[:1]] == ["-tp 8"] or "A=1" in line


def test_json_of_the_other_command_line_is_not_taken_for_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = out(["--", *VLLM, "--json"], capsys)
    assert "Not looked at" in shown
    assert "--json" in shown


def test_a_name_with_a_space_that_is_there_is_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    assert "Other" in out([str(folder)], capsys)


MISUSE: list[tuple[list[str], str]] = [
    ([], "name a MODEL"),
    (["--", "trtllm-serve", "m"], "no command that can be read"),
    (["--loop", "serial", "--", *VLLM], "loop: a command line of another engine brings its own"),
    (["glm-5.3", "--depth", "many"], "many"),
    (["glm-5.3", "--loop", "fast"], "serial"),
    (["--", "vllm", "serve", "m", "-pp"], "-pp: its value is missing"),
]


@pytest.mark.parametrize(("arguments", "words"), MISUSE)
def test_an_explanation_asked_for_wrongly_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stepahead: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_model_that_is_nowhere_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", "no/such-model"]) == 1
    assert "glm-5.3 and toy are known by name" in capsys.readouterr().err


PROGRAM = (
    "import sys\n"
    "from stepahead.cli.main import run_command\n"
    "code = run_command(sys.argv[1:])\n"
    "print(*sorted({'torch', 'tokenizers', 'transformers', 'jinja2', 'gguf'} & set(sys.modules)),\n"
    "      file=sys.stderr)\n"
    "sys.exit(code)\n"
)


@pytest.mark.parametrize("arguments", [["glm-5.3"], ["--", *VLLM], ["--help"]])
def test_an_explanation_loads_nothing_heavy(arguments: list[str]) -> None:
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-c", PROGRAM, "explain", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stderr == "\n"


if __name__ == "__main__":
    for name, words in golden_texts().items():
        (GOLDEN / name).write_text(words, "utf-8")
