"""The command line before it does anything: quick help without torch, and misuse in one line."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

import house
from stepahead import __version__
from stepahead.cli.main import run_command
from stepahead.cli.options import ROOMS

ENVIRONMENT = os.environ | {"PYTHONPATH": str(house.PACKAGE.parent), "COLUMNS": "100"}
HELP_CPU_S = 0.4
LONG_WORDS = {
    "run": "run the same command again",
    "chat": "Ctrl-C stops an answer",
    "bench": "The last line on stdout is JSON",
    "serve": "It listens for this machine alone",
}
PROGRAM = (
    "import sys\n"
    "from stepahead.cli.main import run_command\n"
    "code = run_command(sys.argv[1:])\n"
    "heavy = {'torch', 'numpy', 'tokenizers', 'starlette', 'uvicorn'} & set(sys.modules)\n"
    "print('loaded:', *sorted(heavy), file=sys.stderr)\n"
    "sys.exit(code)\n"
)


def command(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=ENVIRONMENT | {"COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    spent: list[float] = []
    for _ in range(5):
        before_s = cpu_s()
        done = command("--help")
        spent.append(cpu_s() - before_s)
        assert done.returncode == 0
        assert done.stderr == "loaded:\n"
        assert all(verb in done.stdout for verb in ("run", "chat", "serve", "bench", "demo"))
        if spent[-1] < HELP_CPU_S:
            break
    # the best of them: what else the machine does only ever adds
    assert min(spent) < HELP_CPU_S, spent


@pytest.mark.parametrize("verb", LONG_WORDS)
def test_a_verbs_help_loads_no_torch(verb: str) -> None:
    done = command(verb, "--help")
    assert done.returncode == 0
    assert "torch" not in done.stderr
    assert "--max-num-seqs" in done.stdout
    assert "Engine options" in done.stdout
    assert LONG_WORDS[verb] in " ".join(done.stdout.split())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", ["serve", "run"])
def test_a_verbs_help_is_grouped_by_room_and_fits(verb: str, columns: int) -> None:
    lines = command(verb, "--help", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    titles = [line for line in lines if "Engine options" in line]
    assert [title.split(", ")[1].split(" ─")[0] for title in titles] == [*ROOMS]
    names = {"max_rows": "scheduler", "loop": "loop", "dtype": "runner", "device": "device"}
    for name, room in names.items():
        place = next(i for i, line in enumerate(lines) if f"│ --{name.replace('_', '-')} " in line)
        title = [line for line in lines[:place] if line.startswith("╭")][-1]
        assert f"Engine options, {room}: " in title


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "unknown command 'fly'; choose one of run, chat, serve, bench"),
        (["run", "toy", "--input", "a", "--output", "b", "--max-row", "3"], "--max-row"),
        (["run", "toy", "--input", "a"], "--output"),
        (["run", "--input", "a", "--output", "b"], "MODEL"),
        (["run", "toy", "two", "--input", "a", "--output", "b"], "two"),
        (["run", "toy", "--input", "a", "--output", "b", "--loop", "fast"], "serial"),
        (["run", "toy", "--input", "a", "--output", "b", "--max-rows", "many"], "many"),
        (["run", "toy", "--input", "a", "--output", "b", "--max-rows=3", "--max-num-seqs=4"], "m"),
        (["run", "toy", "--input", "a", "--output", "b", "--temperature", "nan"], "temperature"),
        (["run", "toy", "--input", "a", "--output", "b", "--top-p", "2"], "top_p"),
        (["run", "toy", "--input", "a", "--output", "b", "--min-tokens", "900"], "min_tokens"),
        (["chat", "toy", "--logit-bias", "3"], "--logit-bias"),
        (["chat", "toy", "--max-rows", "0"], "max_rows=0"),
        (["chat", "toy", "--chat-template", "/no/such/template"], "/no/such/template"),
        (["chat", "toy", "--return-hidden-states"], "return_hidden_states: chat shows the text"),
        (["chat", "toy", "--n", "2"], "n: chat shows the text of one answer"),
        (["chat", "toy", "--logprobs", "0"], "logprobs: chat shows the text"),
        (["chat", "toy", "--prompt-logprobs", "3"], "prompt_logprobs: chat shows the text"),
        (["bench", "toy", "--output-len", "0"], "output_len=0"),
        (["serve", "toy", "--port", "70000"], "port=70000"),
        (["serve", "toy", "--api-key", ""], "api_key is empty"),
        (["bench", "toy", "--num-pages", "3", "--kv-memory-gb", "1"], "give one of them"),
    ],
)
def test_misuse_is_one_line_and_exit_code_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*arguments, *quiet_of(arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stepahead: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def quiet_of(arguments: list[str]) -> list[str]:
    return [] if arguments[0] == "fly" else ["--quiet"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "toy", "--input", "/no/such/file", "--output", "b"], "/no/such/file: No such"),
        (["chat", "/no/such/model"], "/no/such/model"),
        (["bench", "toy", "--kv-memory-gb", "100000"], "GiB are free"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_exit_code_one(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*arguments, "--quiet"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stepahead: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from stepahead.cli.main import main; main()' run --help"
        " | head -c 0; echo ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")
