"""Prompts and answers as lines of JSON: what a line asks, what is done already, what is written.

Knows files and their lines; no engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from stepahead.errors import InvalidParameter, RequestError, StepaheadError
from stepahead.types import CompletionOutput, Logprob, RequestOutput

PROMPTS = ("prompt", "messages", "prompt_token_ids")
_BEGIN = b'{"id":'


class BadAnswers(StepaheadError):
    """The output file is there and holds something else than answers."""


@dataclass(frozen=True)
class Line:
    """A line of the input: what it asks, or what is wrong with it.

    `fields` are what it says beside its id.
    """

    number: int
    id: str | int
    fields: dict[str, Any]
    error: RequestError | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of the input that are not blank, one at a time, broken ones too; OSError."""
    seen: set[str | int] = set()
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            text = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
            if not text.strip():
                continue
            line = _read_line(number, text)
            if line.id in seen and line.error is None:
                line = _broken(number, f"the id {line.id!r} is that of a line before", "id")
            if line.error is None:  # a broken line's number is nobody's id
                seen.add(line.id)
            yield line


def _broken(number: int, message: str, param: str) -> Line:
    return Line(number, number, {}, InvalidParameter(message, param))


def _read_line(number: int, text: bytes) -> Line:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _broken(number, f"not JSON: {error}", "line")
    if not isinstance(fields, dict):
        return _broken(number, f"not an object but {type(fields).__name__}", "line")
    name = fields.pop("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return _broken(number, f"id must be a string or a whole number, not {name!r}", "id")
    asked = [key for key in PROMPTS if key in fields]
    if len(asked) != 1:
        what = " and ".join(asked) or "none of them"
        message = f"give one of {', '.join(PROMPTS)}; the line has {what}"
        return Line(number, name, {}, InvalidParameter(message, asked[-1] if asked else "prompt"))
    return Line(number, name, fields)


def count_lines(path: Path) -> int:
    """Lines of a file, a last one without its end included; OSError."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


class AnswerFile:
    """The output: a line an answer, flushed at once, so that a killed run loses none it has told.

    `done` are the ids that are answered.  Lines that failed before are taken out of the file: they
    will be tried again.  So is what a killed run left of its last line.
    """

    def __init__(self, path: Path) -> None:
        """OSError, or BadAnswers when the file is something else's."""
        self.path = path
        self.done: set[str | int] = set()
        self._failed = 0
        if path.exists():
            self._read()
        self._file = path.open("ab")

    def _read(self) -> None:
        kept_bytes = 0
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    self._note(number, data)
                    kept_bytes += len(data)
                elif not (data.startswith(_BEGIN) or _BEGIN.startswith(data)):
                    raise self._not_ours(number)
        os.truncate(self.path, kept_bytes)
        if self._failed:
            self._drop_failed()

    def _note(self, number: int, data: bytes) -> None:
        answer = _answer_of(data)
        if answer is None:
            raise self._not_ours(number)
        if "error" in answer:
            self._failed += 1
        else:
            self.done.add(answer["id"])

    def _not_ours(self, number: int) -> BadAnswers:
        return BadAnswers(
            f"{self.path}: line {number} is no answer of an earlier run; name another --output, "
            "or move the file away"
        )

    def _drop_failed(self) -> None:
        rest = self.path.with_name(self.path.name + ".part")
        with self.path.open("rb") as old, rest.open("wb") as new:
            for data in old:
                answer = _answer_of(data)
                if answer is not None and "error" not in answer:
                    new.write(data)
            new.flush()
            os.fsync(new.fileno())
        rest.replace(self.path)  # at once: whoever is killed here has the one or the other

    def write(self, answer: dict[str, Any]) -> None:
        """Adds an answer; it begins with its id."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _answer_of(data: bytes) -> dict[str, Any] | None:
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    known = isinstance(answer, dict) and isinstance(answer.get("id"), str | int)
    return answer if known and "line" in answer else None


def failed(line: Line, error: Exception) -> dict[str, Any]:
    """The answer of a line that could not be answered."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RequestError):
        told["param"] = error.param
    return {"id": line.id, "line": line.number, "error": told}


def answered(line: Line, output: RequestOutput) -> dict[str, Any]:
    """The answer of a line: its first choice, and with several of them all in `choices`.

    Token ids are told to who asked with token ids, log-probabilities to who asked for them.
    """
    with_ids = "prompt_token_ids" in line.fields
    first, *others = output.outputs
    answer: dict[str, Any] = {"id": line.id, "line": line.number, **_choice(first, with_ids)}
    answer["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
    }
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [row and _ranked(row) for row in output.prompt_logprobs]
    if others:
        answer["choices"] = [
            {"index": choice.index, **_choice(choice, with_ids)} for choice in output.outputs
        ]
    return answer


def _choice(choice: CompletionOutput, with_ids: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"text": choice.text}
    if with_ids:
        told["token_ids"] = choice.token_ids
    told |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    if choice.logprobs is not None:
        told["logprobs"] = [_ranked(row) for row in choice.logprobs]
    return told


def _ranked(row: dict[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token,
            "token": found.decoded_token,
            "logprob": found.logprob,
            "rank": found.rank,
        }
        for token, found in row.items()
    ]
