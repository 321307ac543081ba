"""Prompts and answers as lines of JSON: what a line asks, what is done already, what is written.

Knows files and their lines; no engine.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from stepahead.errors import ConfigError, InvalidParameter, RequestError, StepaheadError
from stepahead.types import CompletionOutput, Logprob, RequestOutput

PROMPTS = ("prompt", "messages", "prompt_token_ids")
# what is longer is no line of ours, and an endless one must not fill the memory
_LINE_BYTES = 1 << 26
_ANSWER_BYTES = 1 << 30
# how `write` begins an answer, as far as a killed run must have come for its line to be known
_BEGINS = (b'{"id":', b'{"line":')
_HEAD = re.compile(
    rb'\{(?:"id":(?:-?\d+|"(?:[^"\\]|\\.)*"),"line":\d+|"line":\d+,"id":\d+),"(?:text|error)":'
)
# what Python's json writes for floats that JSON has no numbers for
_SPELT_NUMBER = re.compile(rb"[:,\[]\s*-?(?:NaN|Infinity)\b")
_NOT_A_NUMBER = "; NaN and Infinity are no JSON: give a number, or leave the field out"
Key = str | int | tuple[str, int]


class BadAnswers(StepaheadError):
    """The output file holds something else than answers, or another run is writing it."""


@dataclass(frozen=True)
class Line:
    """A line of the input: what it asks, or what is wrong with it.

    `fields` are what it says beside its id, which is its number unless it is `named`.
    """

    number: int
    id: str | int
    fields: dict[str, Any]
    error: RequestError | None = None
    named: bool = True

    @property
    def key(self) -> Key:
        """What its answer is found by: a number that is an id is no line's number."""
        return self.id if self.named else ("line", self.number)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of the input that are not blank, one at a time, broken ones too; OSError."""
    seen: set[Key] = set()
    with path.open("rb") as file:
        for number, data in enumerate(_bounded(file, _LINE_BYTES), 1):
            text = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
            if not text.strip():
                continue
            line = _read_line(number, text)
            if line.key in seen and line.error is None:
                line = _broken(number, f"the id {line.id!r} is that of a line before", "id")
            if line.error is None:  # what is refused must not make a later line fail
                seen.add(line.key)
            yield line


def _bounded(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """Lines with their ends; of one that is longer than `limit` bytes, `limit` + 1 and no end."""
    while data := file.readline(limit + 1):
        rest = data
        while len(data) > limit and rest and not rest.endswith(b"\n"):
            rest = file.readline(1 << 20)
        yield data[: limit + 1]


def _broken(number: int, message: str, param: str) -> Line:
    return Line(number, number, {}, InvalidParameter(message, param), named=False)


def _read_line(number: int, text: bytes) -> Line:
    if len(text) > _LINE_BYTES:
        return _broken(number, f"longer than {_LINE_BYTES:,} bytes", "line")
    try:
        fields = msgspec.json.decode(text)
    except RecursionError:
        return _broken(number, "nested too deeply", "line")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = _NOT_A_NUMBER if _SPELT_NUMBER.search(text) else ""
        return _broken(number, f"not JSON: {error}{why}", "line")
    if not isinstance(fields, dict):
        return _broken(number, f"not an object but {type(fields).__name__}", "line")
    named = "id" in fields
    name = fields.pop("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return _broken(number, f"id must be a string or a whole number, not {name!r}", "id")
    asked = [key for key in PROMPTS if key in fields]
    if len(asked) != 1:
        what = " and ".join(asked) or "none of them"
        message = f"give one of {', '.join(PROMPTS)}; the line has {what}"
        error = InvalidParameter(message, asked[-1] if asked else "prompt")
        return Line(number, name, {}, error, named)
    return Line(number, name, fields, named=named)


def count_lines(path: Path) -> int | None:
    """Lines of a file, a last one without its end included; None for a pipe; OSError."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None  # what is counted of a pipe is gone
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


class AnswerFile:
    """The output: a line an answer, flushed at once, so that a killed run loses none it has told.

    `done` are the keys of lines that are answered.  Lines that failed before, or were cut short,
    are taken out of the file: they will be tried again.  So is what a killed run left of its last
    line.
    """

    def __init__(self, path: Path) -> None:
        """OSError, ConfigError for what is no file, BadAnswers for one that is not ours alone."""
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"--output {path} is no regular file, and answers are read again to go on after "
                "an interruption; name a file"
            )
        self.path = path
        self.done: set[Key] = set()
        self._file: BinaryIO = path.open("ab")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        locked = _try_lock(self._file)
        # whoever waited for us to drop what failed has a file without a name
        if not locked or not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
            raise BadAnswers(
                f"{self.path}: another run is writing it; wait for its end, or name another "
                "--output"
            )

    def _read(self) -> None:
        kept_bytes = undone = 0
        with self.path.open("rb") as file:
            for number, data in enumerate(_bounded(file, _ANSWER_BYTES), 1):
                if _is_torn(data, first=number == 1):
                    break
                answer = _answer_of(data)
                if answer is None:
                    raise BadAnswers(
                        f"{self.path}: line {number} is no answer of an earlier run; name another "
                        "--output, or move the file away"
                    )
                kept_bytes += len(data)
                if _is_undone(answer):
                    undone += 1
                else:
                    self.done.add(_key_of(answer))
        self._file.truncate(kept_bytes)
        if undone:
            self._drop_undone()

    def _drop_undone(self) -> None:
        home = self.path.resolve()  # a link to the answers stays one
        handle, part = tempfile.mkstemp(".part", "answers.", home.parent)
        new = os.fdopen(handle, "ab")
        try:
            with home.open("rb") as old:
                for data in old:
                    if not _is_undone(_answer_of(data) or {}):
                        new.write(data)
            new.flush()
            os.fsync(new.fileno())
            shutil.copymode(home, part)
            _try_lock(new)  # before it has the name, or another run could come first
            os.replace(part, home)  # at once: whoever is killed here has the one or the other
        except BaseException:
            os.unlink(part)
            new.close()
            raise
        self._file.close()
        self._file = new

    def write(self, answer: dict[str, Any]) -> None:
        """Adds an answer, as `answered` or `failed` makes it; OSError names the file."""
        try:
            self._file.write(msgspec.json.encode(answer) + b"\n")
            self._file.flush()
        except OSError as error:  # a write does not know what it writes to
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:  # it tries again to write what could not be written, which has been told
            if error is None:
                raise


def _try_lock(file: BinaryIO) -> bool:
    """Locks it until it is closed, also by a kill; False when another run has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _decoded(data: bytes) -> Any:
    """What the JSON says; None if it is none."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _answer_of(data: bytes) -> dict[str, Any] | None:
    """The answer that a whole line holds; None if it holds none."""
    answer = _decoded(data) if data.endswith(b"\n") else None
    return answer if isinstance(answer, dict) and _is_answer(answer) else None


def _is_answer(answer: dict[str, Any]) -> bool:
    name, number, choices = answer.get("id"), answer.get("line"), answer.get("choices", [])
    return (
        isinstance(name, str | int)
        and not isinstance(name, bool)
        and type(number) is int
        and isinstance(choices, list)
        and all(isinstance(choice, dict) for choice in choices)
        and ("text" in answer or "error" in answer)
    )


def _is_undone(answer: dict[str, Any]) -> bool:
    """Whether its line failed, or a signal cut one of its choices short."""
    choices = answer.get("choices", [answer])  # the first of them is told twice
    return "error" in answer or any(choice.get("finish_reason") == "abort" for choice in choices)


def _is_torn(data: bytes, first: bool) -> bool:
    """Whether `data` is what a killed run left of its last line: only that may be cut off."""
    if data.endswith(b"\n") or len(data) > _ANSWER_BYTES:
        return False
    if _HEAD.match(data):
        return True
    # shorter than its head, which could be anything's: it is ours where all before it is
    begun = any(begin.startswith(data) or data.startswith(begin) for begin in _BEGINS)
    return not first and begun and _decoded(data) is None


def _begin(line: Line) -> dict[str, Any]:
    """An answer's first fields: first of all what its line is called by, read by `_key_of`."""
    name, number = {"id": line.id}, {"line": line.number}
    return name | number if line.named else number | name


def _key_of(answer: dict[str, Any]) -> Key:
    return ("line", answer["line"]) if next(iter(answer)) == "line" else answer["id"]


def failed(line: Line, error: Exception) -> dict[str, Any]:
    """The answer of a line that could not be answered."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RequestError):
        told["param"] = error.param
    return {**_begin(line), "error": told}


def answered(line: Line, output: RequestOutput) -> dict[str, Any]:
    """The answer of a line: its first choice, and with several of them all in `choices`.

    Token ids are told to who asked with token ids, log-probabilities, hidden states and the
    pooled one to who asked for them, the message where the answer has calls or reasoning in it.
    """
    with_ids = "prompt_token_ids" in line.fields
    first, *others = output.outputs
    answer: dict[str, Any] = {**_begin(line), **_choice(first, with_ids)}
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
    if choice.message is not None:
        told["message"] = choice.message
    if with_ids:
        told["token_ids"] = choice.token_ids
    told |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    if choice.logprobs is not None:
        told["logprobs"] = [_ranked(row) for row in choice.logprobs]
    if choice.hidden_states is not None:
        # as float64, whose shortest digits give the very float32 back
        told["hidden_states"] = choice.hidden_states.tolist()
    if choice.pooled is not None:
        told["embedding"] = choice.pooled.tolist()
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
