"""`stepahead run`: what is asked is answered once, whatever breaks on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offline_makers import TOY_OPTIONS, tiny_llama, toy_flags
from stepahead import LLM, SamplingParams
from stepahead.cli.main import run_command
from stepahead.model.toy import ToyModel
from stepahead.types import params_from

SRC = Path(__file__).parents[2] / "src"


def write_lines(path: Path, lines: list[Any]) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(model: str | Path, asked: Path, answers: Path, *flags: str) -> int:
    command = ["run", str(model), "--input", str(asked), "--output", str(answers)]
    return run_command([*command, *toy_flags(), *flags])


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [3 + i, 4, 5]} for i in range(count)]


def by_id(answers: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {answer["id"]: answer for answer in answers}


def test_answers_are_those_of_the_llm(tmp_path: Path) -> None:
    asked: list[Any] = prompts(20)
    asked[3] |= {"id": "three", "max_tokens": 4, "seed": 9}
    asked[4] |= {"n": 2, "temperature": 1.0, "seed": 8}
    asked[5] |= {"logprobs": 1, "prompt_logprobs": 0, "max_tokens": 2}
    asked[6] |= {"stop": ["a", "b", "c", "d"], "logit_bias": {"3": 2}}
    file = write_lines(tmp_path / "in.jsonl", asked)
    flags = ("--temperature", "0", "--max-tokens", "9", "--ignore-eos")
    assert run("toy", file, tmp_path / "out.jsonl", *flags) == 0
    answers = by_id(read_answers(tmp_path / "out.jsonl"))
    assert set(answers) == {*range(1, 4), "three", *range(5, 21)}
    shared = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
    with LLM("toy", **TOY_OPTIONS) as llm:
        for number, line in enumerate(asked, 1):
            own = {k: v for k, v in line.items() if k not in ("id", "prompt_token_ids")}
            if "logit_bias" in own:
                own["logit_bias"] = {3: 2}
            params = SamplingParams(**(shared | own))
            want = llm.generate(line["prompt_token_ids"], params)[0]
            answer = answers[line.get("id", number)]
            first = want.outputs[0]
            assert answer["line"] == number
            assert answer["text"] == first.text
            assert answer["token_ids"] == first.token_ids
            assert answer["finish_reason"] == first.finish_reason
            assert answer["stop_reason"] == first.stop_reason
            tokens = sum(len(choice.token_ids) for choice in want.outputs)
            assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": tokens}
    assert [choice["index"] for choice in answers[5]["choices"]] == [0, 1]
    assert answers[5]["choices"][0]["text"] == answers[5]["text"]
    assert answers[7]["finish_reason"] == "stop"
    row = answers[6]["logprobs"][0][0]
    assert row["token_id"] == answers[6]["token_ids"][0]
    assert set(row) == {"token_id", "token", "logprob", "rank"}
    assert answers[6]["prompt_logprobs"][0] is None
    assert answers[6]["prompt_logprobs"][1][0]["token_id"] == 4


def test_text_and_messages_go_to_a_model_with_words(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    messages = [{"role": "user", "content": "The fox"}]
    asked = write_lines(
        tmp_path / "in.jsonl", [{"prompt": "The fox"}, {"messages": messages, "id": "chat"}]
    )
    assert run(model, asked, tmp_path / "out", "--temperature", "0", "--max-tokens", "5") == 0
    answers = by_id(read_answers(tmp_path / "out"))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    with LLM(model, **TOY_OPTIONS) as llm:
        assert answers[1]["text"] == llm.generate("The fox", params)[0].outputs[0].text
        assert answers["chat"]["text"] == llm.chat(messages, params)[0].outputs[0].text
    assert "token_ids" not in answers[1]


def test_broken_lines_are_told_by_number_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = prompts(3)
    asked.insert(1, "not json")
    asked.insert(2, {"prompt_token_ids": [3], "temprature": 1})
    asked.insert(3, {"prompt_token_ids": [3], "top_p": 7, "id": "hot"})
    asked.insert(4, {"prompt_token_ids": [3] * 256})
    asked.insert(5, {"prompt_token_ids": []})
    asked.insert(6, {"messages": "hello"})
    asked.insert(7, {"prompt_token_ids": [9999]})
    file, out = write_lines(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    assert run("toy", file, out, "--quiet") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    told = captured.err.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in told] == [
        f"line {number}" for number in range(2, 9)
    ]
    answers = {answer["line"]: answer for answer in read_answers(out)}
    assert sorted(answers) == list(range(1, 11))
    assert all("error" not in answers[number] for number in (1, 9, 10))
    errors = {number: answers[number]["error"] for number in range(2, 9)}
    assert errors[3]["param"] == "temprature"
    assert errors[4]["param"] == "top_p"
    assert answers[4]["id"] == "hot"
    assert errors[5]["type"] == "PromptTooLong"
    assert "empty" in errors[6]["message"]
    assert "9999" in errors[8]["message"]


def test_settings_and_a_summary_go_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = write_lines(tmp_path / "in.jsonl", prompts(5)), tmp_path / "out.jsonl"
    assert run("toy", asked, out, "--max-tokens", "6", "--ignore-eos") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "stepahead: max_rows=8" in captured.err
    assert "every row at full length" in captured.err
    assert "5 answered, 0 failed" in captured.err
    for row in ("output tokens/s", "TTFT p50", "TPOT p50", "host hidden", "idle: plan late"):
        assert row in captured.err
    assert "device busy " in captured.err
    for probe in ("host", "results", "launches", "tokens"):
        assert f"\n  {probe:<9} " in captured.err
    assert run("toy", asked, out, "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = [line | {"id": f"q{i}"} for i, line in enumerate(prompts(30))]
    asked[7] = "broken"
    asked[20] |= {"seed": None}  # its noise was of the order in which lines were asked
    file, out = write_lines(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    assert run("toy", file, out, "--max-tokens", "12") == 1
    whole = by_id(read_answers(out))
    kept = out.read_bytes().splitlines(keepends=True)[:11]
    assert sum(b"error" in line for line in kept) <= 1
    out.write_bytes(b"".join(kept) + b'{"id":"q2')  # killed in the middle of a line
    asked[7] = prompts(30)[7] | {"id": "q7"}  # and mended meanwhile
    write_lines(file, asked)
    lengths = count_forwards(monkeypatch)
    capsys.readouterr()
    assert run("toy", file, out, "--max-tokens", "12") == 0
    assert "were there already" in capsys.readouterr().err
    assert 0 < lengths["prompt tokens"] < 30 * 3
    again = by_id(read_answers(out))
    assert len(read_answers(out)) == 30
    assert again.pop("q7")["line"] == 8
    # sampled at temperature 1, and yet the same: the noise is the line's own
    assert again == {name: answer for name, answer in whole.items() if name != 8}
    lengths["prompt tokens"] = 0
    assert run("toy", file, out, "--max-tokens", "12") == 0
    assert lengths["prompt tokens"] == 0
    assert len(read_answers(out)) == 30


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"prompt tokens": 0}
    forward = ToyModel.forward

    def counting(self: ToyModel, inputs: Any, kv: Any) -> Any:
        counts["prompt tokens"] += sum(chunk.count for chunk in inputs.chunks)
        return forward(self, inputs, kv)

    monkeypatch.setattr(ToyModel, "__call__", counting)
    return counts


def test_only_a_window_of_requests_is_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"running": 0}
    step = LLM.step

    def watching(self: LLM) -> Any:
        most["running"] = max(most["running"], len(self.engine.scheduler.running_ids()))
        return step(self)

    monkeypatch.setattr(LLM, "step", watching)
    asked = write_lines(tmp_path / "in.jsonl", prompts(300))
    assert run("toy", asked, tmp_path / "out", "--max-tokens", "2", "--quiet") == 0
    assert len(read_answers(tmp_path / "out")) == 300
    assert most["running"] == 4 * TOY_OPTIONS["max_rows"]


def test_a_failing_model_leaves_errors_that_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls = ToyModel.forward, iter(range(1000))

    def failing(self: ToyModel, *args: Any) -> Any:
        if next(calls) == 12:
            raise ZeroDivisionError("a bad day")
        return forward(self, *args)

    monkeypatch.setattr(ToyModel, "__call__", failing)
    asked, out = write_lines(tmp_path / "in.jsonl", prompts(60)), tmp_path / "out.jsonl"
    flags = ("--max-tokens", "6", "--ignore-eos")
    assert run("toy", asked, out, *flags, "--quiet") == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "a bad day" in told[0]
    assert told[0].endswith("run the same command again to do the rest")
    first = read_answers(out)
    done = [answer for answer in first if "error" not in answer]
    assert 0 < len(done) < len(first) < 60
    assert {a["error"]["type"] for a in first if "error" in a} == {"StepFailed"}
    monkeypatch.undo()
    assert run("toy", asked, out, *flags, "--quiet") == 0
    second = read_answers(out)
    assert second[: len(done)] == done
    assert sorted(by_id(second)) == list(range(1, 61))
    assert not any("error" in answer for answer in second)


def test_input_and_output_may_not_be_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = write_lines(tmp_path / "in.jsonl", prompts(1))
    before = asked.read_bytes()
    assert run("toy", asked, asked, "--quiet") == 2
    assert "name another output" in capsys.readouterr().err
    assert asked.read_bytes() == before


def test_a_pipe_is_read_once_and_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "out.jsonl", [json.dumps(line) + "\n" for line in prompts(5)]
    for count in (3, 5):
        reader, writer = os.pipe()
        os.write(writer, "".join(asked[:count]).encode())
        os.close(writer)
        assert run("toy", Path(f"/dev/fd/{reader}"), out, "--max-tokens", "3") == 0
        os.close(reader)
        assert sorted(by_id(read_answers(out))) == list(range(1, count + 1))
    assert "2 answered, 0 failed, 3 were there already" in capsys.readouterr().err


def test_what_nobody_thought_of_fails_its_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad_day(fields: dict[str, Any]) -> SamplingParams:
        if fields.get("top_k") == 7:
            raise ZeroDivisionError("a bad day")
        return params_from(fields)

    monkeypatch.setattr("stepahead.cli.run.params_from", bad_day)
    asked = prompts(3)
    asked[1]["top_k"] = 7
    file, out = write_lines(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    assert run("toy", file, out, "--quiet") == 1
    assert capsys.readouterr().err == "stepahead: line 2: ZeroDivisionError: a bad day\n"
    answers = by_id(read_answers(out))
    assert [number for number in (1, 2, 3) if "error" in answers[number]] == [2]


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_closed_streams_lose_nothing(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Their numbers would be the next files', so what is told on stderr would be in the answers."""
    asked, out = write_lines(tmp_path / "in.jsonl", [*prompts(3), "broken"]), tmp_path / "out.jsonl"
    command = ["run", "toy", "--input", str(asked), "--output", str(out)]
    program = "; ".join(f"os.close({fd})" for fd in closed)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os, sys; {program}; os.execv(sys.executable, sys.argv[1:])",
            *[sys.executable, "-m", "stepahead", *command, *toy_flags(executor="process")],
        ],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    answers = by_id(read_answers(out))
    assert [number for number in (1, 2, 3, 4) if "error" in answers[number]] == [4]


@pytest.mark.parametrize("name", ["/dev/full", "/dev/stdout", "pipe"])
def test_an_output_that_is_no_file_is_misuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    asked = write_lines(tmp_path / "in.jsonl", prompts(1))
    child = subprocess.run(
        [sys.executable, "-m", "stepahead", "run", "toy", "--input", asked, "--output", name],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 2
    assert f"--output {name} is no regular file" in child.stderr


def test_an_output_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = write_lines(tmp_path / "in.jsonl", prompts(1))
    out = tmp_path / "diary.txt"
    out.write_text("dear diary", encoding="utf-8")
    assert run("toy", asked, out, "--quiet") == 1
    assert "name another --output" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "dear diary"


# Slow once the first answers are told, or the run could end before the signal comes.
SLOW = """
import sys, time
from pathlib import Path
from stepahead import LLM
from stepahead.cli.main import main

out, step = Path(sys.argv.pop(1)), LLM.step

def step_slowly(llm):
    if out.stat().st_size:
        time.sleep(0.2)
    return step(llm)

LLM.step = step_slowly
main()
"""


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    asked, out = write_lines(tmp_path / "in.jsonl", prompts(400)), tmp_path / "out.jsonl"
    command = ["run", "toy", "--input", str(asked), "--output", str(out), "--quiet"]
    command += [*toy_flags(executor="process"), "--max-tokens", "40", "--ignore-eos"]
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(out), *command],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=60)
    assert child.returncode == 130
    answers = read_answers(out)
    assert 0 < len(answers) < 400
    cut = sum(answer["finish_reason"] == "abort" for answer in answers)
    assert told == (
        f"stepahead: interrupted; {len(answers) - cut} answers and {cut} cut short are in {out}; "
        "run the same command again to do the rest\n"
    )
    assert run_command(command) == 0
    assert sorted(by_id(read_answers(out))) == list(range(1, 401))
