"""Lines in and answers out: what a broken line is called, and what a killed run leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from stepahead.cli import jsonl
from stepahead.cli.jsonl import (
    AnswerFile,
    BadAnswers,
    answered,
    count_lines,
    failed,
    read_lines,
)
from stepahead.errors import ConfigError, InvalidParameter
from stepahead.types import CompletionOutput, RequestOutput


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_each_line_says_what_it_asks_or_what_is_wrong(tmp_path: Path) -> None:
    file = write(
        tmp_path / "in.jsonl",
        b'\xef\xbb\xbf{"prompt": "a"}\n'
        b"\n"
        b'{"id": "x", "messages": [], "top_k": 3}\r\n'
        b"{broken\n"
        b"[1]\n"
        b'{"id": true, "prompt": "a"}\n'
        b'{"id": "y"}\n'
        b'{"id": "x", "prompt": "a"}\n'
        b'{"id": 9, "prompt": "a"}\n'
        b'{"prompt": "\xff"}\n'
        b'{"prompt_token_ids": [1], "prompt": "a"}\n'
        b'{"prompt_token_ids": [1]}',
    )
    lines = list(read_lines(file))
    assert count_lines(file) == 12
    told = [(line.number, line.id, str(line.error) if line.error else None) for line in lines]
    assert [number for number, _, _ in told] == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    good = [(number, name) for number, name, error in told if error is None]
    assert good == [(1, 1), (3, "x"), (9, 9), (12, 12)]
    assert lines[0].fields == {"prompt": "a"}
    assert lines[1].fields == {"messages": [], "top_k": 3}
    wrong = {number: error for number, _, error in told if error}
    assert wrong[4].startswith("not JSON: ")
    assert wrong[5] == "not an object but list"
    assert wrong[6] == "id must be a string or a whole number, not True"
    assert wrong[7].startswith("give one of prompt, messages, prompt_token_ids")
    assert wrong[8] == "the id 'x' is that of a line before"
    assert wrong[10].startswith("not JSON: ")
    assert wrong[11].endswith("the line has prompt and prompt_token_ids")
    assert next(line.id for line in lines if line.number == 7) == "y"


def test_an_id_is_no_lines_number(tmp_path: Path) -> None:
    """A line without an id is never called a duplicate, nor found by the answer of an id."""
    file = write(
        tmp_path / "in",
        b'{"id": 2, "prompt": ""}\n{"prompt": ""}\n{"prompt": ""}\n{"id": 3, "prompt": ""}\n'
        b'{"id": 5, "prompt": ""}\n{"prompt": ""}\n',
    )
    lines = list(read_lines(file))
    assert [(line.id, line.error) for line in lines] == [(i, None) for i in (2, 2, 3, 3, 5, 6)]
    for told in ([0, 2, 4], [1, 3, 5]):
        path = tmp_path / f"out{told[0]}"
        output = RequestOutput("0", None, [5], [CompletionOutput(0, "x", [6])])
        with AnswerFile(path) as answers:
            for place in told:
                answers.write(answered(lines[place], output))
        with AnswerFile(path) as answers:
            found = [place for place, line in enumerate(lines) if line.key in answers.done]
        assert found == told


def test_hidden_states_come_back_to_the_bit(tmp_path: Path) -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 32, 600, np.uint32).view(np.float32)
    states = np.append(bits[np.isfinite(bits)][:397], np.float32([0.1, -0.0, 1e-45])).reshape(
        4, 100
    )
    asked = CompletionOutput(0, "x", [6, 7, 8, 9], hidden_states=states)
    other = CompletionOutput(1, "y", [6], hidden_states=states[1:2])
    (line,) = read_lines(write(tmp_path / "in", b'{"prompt": "a", "return_hidden_states": true}'))
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as answers:
        answers.write(answered(line, RequestOutput("0", None, [5], [asked, other])))
        answers.write(answered(line, RequestOutput("0", None, [5], [CompletionOutput(0, "", [])])))
    with_states, without = map(json.loads, path.read_bytes().splitlines())
    assert np.array(with_states["hidden_states"], np.float32).tobytes() == states.tobytes()
    assert np.array(with_states["hidden_states"]).shape == (4, 100)
    of_choices = [choice["hidden_states"] for choice in with_states["choices"]]
    assert of_choices == [states.tolist(), states[1:2].tolist()]
    assert "hidden_states" not in without


def test_lines_that_nest_or_never_end_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_LINE_BYTES", 300_000)
    file = write(
        tmp_path / "in",
        b"\n".join(
            [
                b'{"prompt_token_ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
                b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
                b'{"prompt": "' + b"x" * 5_000_000 + b'"}',
                b'{"prompt": "' + b"x" * 200_000 + b'"}',
                b'{"prompt": "' + b"x" * 300_000,
            ]
        ),
    )
    lines = list(read_lines(file))
    deep, long = "nested too deeply", "longer than 300,000 bytes"
    told = [str(line.error) if line.error else None for line in lines]
    assert told == [deep, deep, long, None, long]
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]


def test_a_pipe_is_not_counted_and_keeps_its_lines(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt": "a"}\n{"prompt": "b"}\n')
    os.close(writer)
    pipe = Path(f"/dev/fd/{reader}")
    assert count_lines(pipe) is None
    assert [line.fields["prompt"] for line in read_lines(pipe)] == ["a", "b"]
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        count_lines(tmp_path)


def test_a_broken_lines_number_is_nobodys_id(tmp_path: Path) -> None:
    """It once was, and a sound line that had it for an id was called a duplicate."""
    file = write(
        tmp_path / "in",
        b'{broken\n{"id": "a", "prompt": ""}\n{"id": "a", "prompt": ""}\n'
        b'{"id": 1, "prompt": ""}\n{"id": 3, "prompt": ""}\n{"id": 1, "prompt": ""}\n',
    )
    good = [(line.number, line.id) for line in read_lines(file) if line.error is None]
    assert good == [(2, "a"), (4, 1), (5, 3)]


def test_answers_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as answers:
        assert answers.done == set()
        answers.write({"id": "a", "line": 1, "text": "é"})
        assert json.loads(path.read_bytes()) == {"id": "a", "line": 1, "text": "é"}
        answers.write({"id": 2, "line": 2, "text": ""})
    with AnswerFile(path) as answers:
        assert answers.done == {"a", 2}


def test_a_full_disk_is_told_with_the_files_name(tmp_path: Path) -> None:
    # closing the file tried again to write, and its error, which names nothing, took the other's
    # place
    path = tmp_path / "out.jsonl"

    def fill() -> None:
        with AnswerFile(path) as answers:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, answers._file.fileno())
            os.close(full)
            answers.write({"id": "a", "line": 1, "text": "x"})

    with pytest.raises(OSError, match="No space left on device") as caught:
        fill()
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_what_json_has_no_number_for_is_said(tmp_path: Path, number: str) -> None:
    path = tmp_path / "in.jsonl"
    asked = f'{{"prompt": "NaN", "temperature": {number}}}\n{{"prompt": "NaN", "top_p" 1}}'
    first, second = read_lines(write(path, asked.encode()))
    assert str(first.error).endswith(
        "NaN and Infinity are no JSON: give a number, or leave the field out"
    )
    assert "Infinity" not in str(second.error)


WHOLE = b'{"id":"a","line":1,"text":"x"}\n'
SECOND = b'{"id":7,"line":2,"text":"yy"}\n'


@pytest.mark.parametrize("cut", range(len(SECOND)))
def test_what_a_killed_run_left_of_its_last_line_is_repaired(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "out.jsonl", WHOLE + SECOND[:cut])
    with AnswerFile(path) as answers:
        assert answers.done == {"a"}
        answers.write({"id": 7, "line": 2, "text": "yy"})
    assert path.read_bytes() == WHOLE + SECOND


def test_lines_that_failed_are_taken_out_to_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    (line,) = read_lines(write(tmp_path / "in", b'{"prompt": "a"}'))
    error = InvalidParameter("too hot", "temperature")
    with AnswerFile(path) as answers:
        answers.write(failed(line, error))
        answers.write({"id": "a", "line": 2, "text": "x"})
    first = json.loads(path.read_bytes().splitlines()[0])
    assert first == {
        "id": 1,
        "line": 1,
        "error": {"type": "InvalidParameter", "message": "too hot", "param": "temperature"},
    }
    with AnswerFile(path) as answers:
        assert answers.done == {"a"}
    assert [json.loads(data)["id"] for data in path.read_bytes().splitlines()] == ["a"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out.jsonl"]


def test_answers_that_were_cut_short_are_taken_out_to_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole, cut = ({"text": "x", "finish_reason": reason} for reason in ("stop", "abort"))
    with AnswerFile(path) as answers:
        answers.write({"id": "a", "line": 1, **cut})
        answers.write({"id": "b", "line": 2, **whole, "choices": [whole, cut]})
        answers.write({"id": "c", "line": 3, **whole, "choices": [whole, whole]})
    with AnswerFile(path) as answers:
        assert answers.done == {"c"}
    assert [json.loads(data)["id"] for data in path.read_bytes().splitlines()] == ["c"]


UNNAMED = b'{"line":1,"id":1,"text":"x"}\n'


@pytest.mark.parametrize("whole", [WHOLE, UNNAMED])
def test_a_first_line_is_cut_off_only_when_it_is_known_for_ours(
    tmp_path: Path, whole: bytes
) -> None:
    for cut in range(1, len(whole)):
        data = whole[:cut]
        path = write(tmp_path / "out.jsonl", data)
        if b'"text":' in data:
            with AnswerFile(path) as answers:
                assert answers.done == set()
            assert path.read_bytes() == b""
        else:
            with pytest.raises(BadAnswers, match="line 1 is no answer"):
                AnswerFile(path)
            assert path.read_bytes() == data


@pytest.mark.parametrize("name", ["out.jsonl", "link.jsonl"])
def test_dropping_failed_lines_touches_nothing_else(tmp_path: Path, name: str) -> None:
    """Not the link to the file, its mode, or files that happen to have a name we could take."""
    home = tmp_path / "home"
    home.mkdir()
    path = write(home / "out.jsonl", b'{"id":"b","line":2,"error":{}}\n' + WHOLE)
    path.chmod(0o640)
    (home / "link.jsonl").symlink_to("out.jsonl")
    others = [write(home / f"{part}.part", b"mine") for part in ("out.jsonl", "link.jsonl")]
    with AnswerFile(home / name) as answers:
        answers.write({"id": 7, "line": 2, "text": "yy"})
    assert path.read_bytes() == WHOLE + SECOND
    assert path.stat().st_mode & 0o777 == 0o640
    assert (home / "link.jsonl").is_symlink()
    assert [other.read_bytes() for other in others] == [b"mine"] * 2
    assert len(list(home.iterdir())) == 4


@pytest.mark.parametrize("name", ["/dev/full", "/dev/null", ".", "fifo"])
def test_only_a_regular_file_is_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with pytest.raises(ConfigError, match=f"{name} is no regular file"):
        AnswerFile(Path(name))


@pytest.mark.parametrize("before", [b"", WHOLE, b'{"id":"b","line":2,"error":{}}\n'])
def test_two_runs_may_not_have_one_output(tmp_path: Path, before: bytes) -> None:
    path = write(tmp_path / "out.jsonl", before)
    with AnswerFile(path), pytest.raises(BadAnswers, match=r"out\.jsonl: another run is writing"):
        AnswerFile(path)
    with AnswerFile(path):
        pass


def test_a_file_of_one_endless_line_is_refused_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_ANSWER_BYTES", 1000)
    long = WHOLE.replace(b"x", b"x" * 2000)
    for data in (bytes(5000), long, long[:-1]):
        path = write(tmp_path / "out.jsonl", data)
        with pytest.raises(BadAnswers, match="line 1 is no answer"):
            AnswerFile(path)
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    "data",
    [
        b"my diary",
        b"my diary\n",
        b'{"prompt": "a"}\n',
        WHOLE + b"3\n" + SECOND,
        b"{}\n{}",
        b"{",
        b'{"id": 1, "prompt": "precious"}',
        b'{"id":1,"prompt":"precious","line":3}',
        b'{"id":1,"line":1,"prompt":"precious"}\n',
        WHOLE + b'{"id":1,"prompt":"precious","line":3}',
        b'{"id":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
        b'{"id":1,"line":1,"text":"x","choices":5}\n',
        b'{"id":1,"line":1,"text":"x","choices":["a"]}\n',
        b'{"line":[1],"id":1,"text":"x"}\n',
        b'{"id":true,"line":1,"text":"x"}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "out.jsonl", data)
    with pytest.raises(BadAnswers, match=r"out\.jsonl: line \d is no answer"):
        AnswerFile(path)
    assert path.read_bytes() == data
