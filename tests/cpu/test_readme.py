"""The README's commands do what it says: each is run, on a tiny model where it names one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from offline_makers import tiny_llama

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
FEW = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--threads", "1"]
SMALL = {("bench", "MODEL"): FEW, ("trace", "record"): FEW}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[str]:
    lines = [
        line.partition("#")[0].strip() for block in blocks("bash") for line in block.split("\n")
    ]
    return [line for line in lines if line]


def stepahead_lines() -> list[str]:
    return [line for line in shell_lines() if line.startswith(".venv/bin/stepahead")]


def run(words: list[str], cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=110, check=False
    )


def test_every_line_of_the_readme_is_walked() -> None:
    known = ("make ", ".venv/bin/stepahead ", "python3 -m venv", ".venv/bin/pip ")
    assert all(line.startswith(known) for line in shell_lines())
    assert {"make demo", "make test"} <= set(shell_lines())
    assert len(stepahead_lines()) >= 4


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_knows_the_targets(target: str) -> None:
    # -n: what make would run; running it here would run this test again
    done = run(["make", "-n", target], ROOT)
    assert done.returncode == 0, done.stderr
    assert {"demo": "stepahead demo", "test": "-m pytest"}[target] in done.stdout


def stepahead_blocks() -> list[list[str]]:
    lines = [[line.partition("#")[0].strip() for line in b.split("\n")] for b in blocks("bash")]
    kept = [[line for line in block if line in stepahead_lines()] for block in lines]
    return [block for block in kept if block]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lines", stepahead_blocks(), ids=lambda lines: lines[0].split()[1])
def test_the_commands_of_the_readme_work(lines: list[str], tmp_path: Path) -> None:
    """In order, in one folder: some read what others wrote."""
    model = tiny_llama(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the sea"}\n', "utf-8")
    for line in lines:
        words = shlex.split(line)[1:]
        more = SMALL.get((words[0], words[1] if len(words) > 1 else ""), [])
        words = [str(model) if word == "MODEL" else word for word in words] + more
        if words[:2] in (["bench", "host"], ["bench", "spec"]) or words[0] == "serve":
            words.append("--help")  # minutes of measuring, or a server that stays
        elif words == ["chat"]:
            words += [str(model), "--max-tokens", "4"]
        done = run([sys.executable, "-m", "stepahead", *words], tmp_path, "hello\n")
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout or words[0] in ("run", "trace"), (line, done.stderr)
        if words[0] == "run":
            assert len((tmp_path / "answers.jsonl").read_text("utf-8").splitlines()) == 1


@pytest.mark.parametrize("source", blocks("python"))
def test_the_python_of_the_readme_works(source: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    script = tmp_path / "example.py"
    script.write_text(source.replace("path/to/model", str(model)), "utf-8")
    done = run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_the_readme_points_to_is_there() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not os.path.exists(ROOT / target)] == []
