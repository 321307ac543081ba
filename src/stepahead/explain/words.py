"""A command line of SGLang or vLLM as its words say it: program, variables, flags, the rest.

Reads the shapes that their own parsers accept; knows flags from the tables and no rule.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import msgspec

from stepahead.errors import ConfigError
from stepahead.explain.flags import SGLANG, VLLM, Flag

READABLE = (
    "`vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server ...`, "
    "`sglang serve ...` and `python -m sglang.launch_server ...`, with VAR=value before them"
)
_PROGRAMS = {
    ("vllm", "serve"): "vllm",
    ("sglang", "serve"): "sglang",
    ("-m", "vllm.entrypoints.openai.api_server"): "vllm",
    ("-m", "sglang.launch_server"): "sglang",
}
_TABLES = {"vllm": VLLM, "sglang": SGLANG}
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*")
_JOINED = ("&&", "||", ";", "|", "&")
_SCALES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


@dataclass(frozen=True)
class Given:
    """A flag as it was written, and the table's line for it; None where the table has none."""

    text: str
    flag: Flag | None


@dataclass
class Words:
    """A command line.  `values` are by a flag's first spelling: a number, a text, a list, a
    mapping, or True; of a flag that is there twice the last one counts, as with them."""

    engine: str
    variables: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)

    def number(self, name: str, default: int = 1) -> int:
        """A flag's whole number, or `default` where it is not there."""
        return int(self.values.get(name, default))

    def text(self, name: str) -> str:
        """A flag's value as it stands, or nothing."""
        return str(self.values.get(name, ""))

    def on(self, name: str) -> bool:
        """Whether a flag, or a variable that is not switched off, is there."""
        if name in self.values:
            return True
        return self.variables.get(name, "0").lower() not in ("0", "", "false", "no", "off")

    def written(self, *names: str) -> list[str]:
        """How the user wrote these flags and variables."""
        flags = [g.text for g in self.given if g.flag is not None and g.flag.names[0] in names]
        return flags + [f"{n}={self.variables[n]}" for n in names if n in self.variables]

    @property
    def model(self) -> str | None:
        """The model's name, if it was found."""
        name = self.values.get("--model" if self.engine == "vllm" else "--model-path")
        return None if name is None else str(name)


def read_words(tokens: Sequence[str]) -> Words:
    """A command line from its words, or from one word that holds all of it.

    ConfigError where it is of no program that can be read, or where a value is missing or wrong.
    """
    if len(tokens) == 1 and " " in tokens[0].strip():
        tokens = _split(tokens[0])
    rest = list(tokens)
    variables = _take_variables(rest)
    engine = _take_program(rest)
    if joined := [word for word in rest if word in _JOINED]:
        raise ConfigError(f"{joined[0]!r}: one command at a time can be read; give one of them")
    words = Words(engine, variables)
    _read_flags(words, rest)
    return words


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"the command line can't be taken apart: {error}") from error


def _take_variables(rest: list[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    if rest and rest[0] == "env":
        rest.pop(0)
    while rest and (match := _VARIABLE.fullmatch(rest[0])):
        variables[match[1]] = match[2]
        rest.pop(0)
    return variables


def _take_program(rest: list[str]) -> str:
    first = PurePath(rest[0]).name if rest else ""
    if _PYTHON.fullmatch(first):
        rest.pop(0)
        first = rest[0] if rest else ""
    engine = _PROGRAMS.get((first, rest[1])) if len(rest) > 1 else None
    if engine is None:
        said = " ".join(rest[:2]) or "nothing"
        raise ConfigError(f"{said!r} is no command that can be read; these are: {READABLE}")
    del rest[:2]
    return engine


def _read_flags(words: Words, rest: list[str]) -> None:
    table = {name: flag for flag in _TABLES[words.engine] for name in flag.names}
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            _positional(words, word, table)
            continue
        name, equals, value = word.partition("=")
        name, _, inner = _spelt(words.engine, name).partition(".")
        flag = table.get(name)
        if flag is None:
            taken = list(_take_many(rest)) if not equals else []
            words.given.append(Given(shlex.join([word, *taken]), None))
        else:
            _known(words, flag, word, [value] if equals else None, inner, rest)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _is_number(word)


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _spelt(engine: str, name: str) -> str:
    # vLLM takes --max_num_seqs for --max-num-seqs; SGLang doesn't
    return name.replace("_", "-") if engine == "vllm" and name.startswith("--") else name


def _take_many(rest: list[str]) -> Iterator[str]:
    while rest and not _is_flag(rest[0]):
        yield rest.pop(0)


def _positional(words: Words, word: str, table: dict[str, Flag]) -> None:
    # the first word without a dash is the model, any further one is not known
    if words.model is None:
        flag = table["--model"]
        words.values[flag.names[0]] = word
        words.given.append(Given(word, flag))
    else:
        words.given.append(Given(shlex.quote(word), None))


def _known(
    words: Words, flag: Flag, word: str, values: list[str] | None, inner: str, rest: list[str]
) -> None:
    if values is None:
        values = []
        if flag.takes == "many":
            values = list(_take_many(rest))
        elif flag.takes != "nothing" and rest and not _is_flag(rest[0]):
            values = [rest.pop(0)]
        written = shlex.join([word, *values])
    else:
        written = shlex.quote(word)
    words.given.append(Given(written, flag))
    if flag.takes == "nothing":
        if values:
            raise ConfigError(f"{word}: takes no value")
        words.values[flag.names[0]] = True
    elif not values:
        raise ConfigError(f"{word}: its value is missing")
    else:
        _keep(words, flag, word, values, inner)


def _keep(words: Words, flag: Flag, word: str, values: list[str], inner: str) -> None:
    name, value = flag.names[0], values[0]
    if flag.takes == "json":
        known = words.values.get(name, {}) if inner else {}
        words.values[name] = known | (_set(inner, value) if inner else _mapping(word, value))
    elif flag.takes == "number":
        words.values[name] = _number(word, value)
    else:
        words.values[name] = values if flag.takes == "many" else value


def _set(inner: str, value: str) -> dict[str, Any]:
    """`--flag.key value`, a way to write one key of a JSON value."""
    try:
        return {inner.replace("-", "_"): msgspec.json.decode(value)}
    except msgspec.DecodeError:
        return {inner.replace("-", "_"): value}


def _mapping(word: str, value: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{word}: {value!r} is not a JSON object ({error}); mind the quotes"
        ) from error


def _number(word: str, value: str) -> int:
    """A count; 8k is 8,000 and 8K is 8,192, as both engines read it."""
    match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kKmMgG])", value)
    if match is None:
        raise ConfigError(f"{word}: {value!r} is not a whole number")
    return int(match[1]) if match[1] else int(float(match[2]) * _SCALES[match[3]])
