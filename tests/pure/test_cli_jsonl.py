"""Lines in and answers out: what a broken line is called, and what a killed run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepahead.cli.jsonl import AnswerFile, BadAnswers, count_lines, failed, read_lines
from stepahead.errors import InvalidParameter


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


def test_an_id_that_another_line_has_by_its_number_is_refused(tmp_path: Path) -> None:
    lines = list(read_lines(write(tmp_path / "in", b'{"id": 2, "prompt": "a"}\n{"prompt": "b"}')))
    assert lines[0].error is None
    assert "the id 2" in str(lines[1].error)


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


@pytest.mark.parametrize(
    "data", [b"my diary", b"my diary\n", b'{"prompt": "a"}\n', WHOLE + b"3\n" + SECOND, b"{}\n{}"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "out.jsonl", data)
    with pytest.raises(BadAnswers, match=r"out\.jsonl: line \d is no answer"):
        AnswerFile(path)
    assert path.read_bytes() == data
