"""docs/serving.md does what it says: each example is run, and no option is left out."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offline_makers import tiny_llama
from serving import served
from stepahead.serve.embeddings import EmbeddingFields
from stepahead.serve.fields import SAMPLING
from stepahead.serve.options import SERVE_ALIASES, ServeConfig
from stepahead.serve.requests import ChatFields, CompletionFields

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
HERE = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def curls() -> list[str]:
    joined = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.startswith("curl")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    parser = ("--tool-call-parser", "hermes")
    with served(str(model), "--threads", "1", "--executor", "inline", *parser) as server:
        yield server.url()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", curls())
def test_a_curl_of_the_document_is_answered(url: str, line: str) -> None:
    words = shlex.split(line.replace(HERE, url))
    done = subprocess.run([*words, "--fail"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[DONE]" in done.stdout if "-sN" in words else done.stdout.startswith("{")


@pytest.mark.parametrize("program", blocks("python"))
def test_a_program_of_the_document_runs(url: str, program: str) -> None:
    assert HERE in program
    command = [sys.executable, "-c", program.replace(HERE, url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_document_has_examples() -> None:
    assert len(curls()) >= 3
    assert len(blocks("python")) >= 2


def test_every_option_and_spelling_is_named() -> None:
    named = set(re.findall(r"`--([\w-]+)`", TEXT))
    options = {field.name for field in dataclasses.fields(ServeConfig)} | set(SERVE_ALIASES)
    assert {name.replace("_", "-") for name in options} <= named


def test_every_field_that_is_honoured_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT))
    kinds = (ChatFields, CompletionFields, EmbeddingFields)
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    assert fields | {*SAMPLING} <= named
