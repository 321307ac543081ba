"""Flags of vLLM and SGLang: what docs/serving.md says of each is what our parser makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pydantic  # noqa: F401  # where it is loaded cyclopts checks types by it, and sterner
import pytest
from cyclopts import App, UnknownOptionError

from stepahead.cli import serve as serve_verb
from stepahead.cli.main import run_command
from stepahead.cli.options import given
from stepahead.config import ALIASES, EngineConfig
from stepahead.errors import ConfigError
from stepahead.explain.flags import ENGINES, Flag, counterpart
from stepahead.serve.options import SERVE_ALIASES, ServeConfig, serve_config

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BEGIN, END = "<!-- begin flags -->\n", "<!-- end flags -->\n"
# values that fit where 4 does not
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
VALUES = PARSERS | {
    "dtype": "bfloat16",
    "device": "cpu",
    "loop": "serial",
    "host": "localhost",
    "quantization": "int8",
}


APP = App(result_action="return_value")
APP.default(serve_verb.serve)


def read(*words: str) -> dict[str, Any]:
    """What `stepahead serve` takes these words for."""
    _, bound, _ = APP.parse_args(words, exit_on_error=False, print_error=False)
    found = dict(bound.arguments)
    return {
        **given(found.pop("server", None)),
        **given(found.pop("engine", None)),
        **{name: str(value) for name, value in found.items() if value is not None},
    }


@cache
def taken(name: str, flag: Flag) -> bool:
    """Whether our parser takes this spelling, with such a value; then for what it means there."""
    words = [name] if flag.takes == "nothing" else [name, VALUES.get(flag.to or "", "4")]
    try:
        found = read(*words)
    except UnknownOptionError:
        return False
    assert found.keys() == {flag.to}, (name, found)
    assert not flag.why, f"{name} is taken, but means something else: {flag.why}"
    return True


def option(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def spelt(names: Iterator[tuple[str, Flag]]) -> str:
    cells = []
    for name, flag in names:
        cells.append(f"`{name}`" + (" ✓" if taken(name, flag) else ""))
        if flag.to and flag.why:
            cells[-1] += f" ({flag.why})"
    return ", ".join(cells)


def rows(key: str) -> Iterator[str]:
    """Lines of a table of flags that go together by `to` or by `why`."""
    seen = dict.fromkeys(
        getattr(flag, key)
        for table in ENGINES.values()
        for flag in table
        if (flag.to is not None) == (key == "to")
    )
    for what in seen:
        cells = [
            spelt(
                (name, flag) for flag in table if getattr(flag, key) == what for name in flag.names
            )
            for table in ENGINES.values()
        ]
        yield "| " + " | ".join([f"`{option(what)}`" if key == "to" else what, *cells]) + " |"


def tables() -> str:
    """What stands in the page; made again with `python tests/pure/test_serve_flags.py`."""
    names = " | ".join(ENGINES)
    rule = "|---" * (1 + len(ENGINES)) + "|"
    there = ["| here | " + names + " |", rule, *rows("to")]
    not_here = ["| why not | " + names + " |", rule, *rows("why")]
    between = "There is no such option here, and the server does not start with one:"
    return "\n".join([*there, "", between, "", *not_here]) + "\n"


def page() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    middle, _, after = rest.partition(END)
    return before + BEGIN, middle, END + after


def test_the_page_has_the_flags_as_the_parser_takes_them() -> None:
    assert page()[1] == tables(), "run: python tests/pure/test_serve_flags.py"


def test_every_flag_is_in_the_page_and_every_option_of_ours_in_it_exists() -> None:
    text = page()[1]
    assert {name for table in ENGINES.values() for flag in table for name in flag.names} <= set(
        re.findall(r"`(-[\w-]+)`", text)
    )
    ours = {*_fields(EngineConfig), *_fields(ServeConfig), "chat_template"}
    assert {flag.to for table in ENGINES.values() for flag in table if flag.to} <= ours


def _fields(kind: type) -> list[str]:
    return list(kind.__dataclass_fields__)


def test_the_most_used_spellings_are_taken() -> None:
    line = "m --max-num-seqs 4 --max-model-len 64 --max-num-batched-tokens 32 --port 9 --host h"
    line += " --served-model-name n --api-key k --enable-prefix-caching --dtype bfloat16"
    want = {"model": "m", "max_rows": 4, "max_model_len": 64, "max_step_tokens": 32, "port": 9}
    want |= {"host": "h", "served_name": "n", "api_key": "k", "prefix_cache": True}
    assert read(*line.split()) == want | {"dtype": "bfloat16"}
    line = "--model-path m --max-running-requests 4 --context-length 64 --chunked-prefill-size 32"
    line += (
        " --port 9 --host h --served-model-name n --api-key k --disable-radix-cache --page-size 8"
    )
    want = want | {"prefix_cache": False, "page_size": 8}
    assert read(*line.split()) == want


@pytest.mark.parametrize(("alias", "field"), [*SERVE_ALIASES.items(), *ALIASES.items()])
def test_every_alias_is_taken_by_the_server(alias: str, field: str) -> None:
    value = [] if field in ("prefix_cache", "batch_invariant") else ["4"]
    assert read("--" + alias.replace("_", "-"), *value).keys() == {field}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flag_that_is_not_taken_is_refused_with_what_to_do(engine: str) -> None:
    for flag in ENGINES[engine]:
        for name in flag.names:
            if taken(name, flag):
                continue
            said = counterpart(name)
            assert said is not None
            assert said.startswith(f"{name} is ")
            assert engine in said
            what = "leave it out" if flag.to is None else f"the option here is {option(flag.to)}"
            assert what in said


def test_what_is_refused_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    # with a port that can't be had, so that no server stays if it is taken after all
    here = ["serve", "toy", "--port", "70000"]
    for words in (["-tp", "8"], ["--gpu-memory-utilization=0.9"], ["--async-scheduling"], ["--pp"]):
        assert run_command([*here, *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"stepahead: error: {words[0].partition('=')[0]} is ")
        assert said.count("\n") == 1


def test_an_origin_in_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="give each origin as a word of its own"):
        serve_config({"allow_origins": ['["*"]']})
    assert serve_config({"allow_origins": ["*", "http://[::1]:9"]}).allow_origins is not None


def test_a_flag_is_known_however_it_is_spelt_and_by_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["run", "toy", "--input", "a", "--output", "b"], ["bench", "toy"]):
        assert run_command([*words, "--tensor_parallel_size=8"]) == 2
        said = capsys.readouterr().err
        assert "--tensor_parallel_size is vLLM's and SGLang's, and there is no such" in said
    assert counterpart("--no-such-flag") is None
    assert counterpart("word") is None
    assert run_command(["serve", "toy", "--port", "70000", "--no-such-flag"]) == 2
    assert "Unknown option" in capsys.readouterr().err


if __name__ == "__main__":
    before, _, after = page()
    PAGE.write_text(before + tables() + after, "utf-8")
