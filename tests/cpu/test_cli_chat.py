"""`stepahead chat`: by pipe and by terminal; Ctrl-C stops the answer and not the program."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offline_makers import tiny_llama
from stepahead import LLM, SamplingParams
from stepahead.cli.chat import Conversation
from stepahead.cli.main import run_command

SRC = Path(__file__).parents[2] / "src"
FLAGS = ["--executor", "inline", "--threads", "1", "--quiet", "--max-tokens", "6"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llama(folder: Path) -> Any:
    with LLM(folder, executor="inline", max_rows=1, threads=1) as llm:
        yield llm


def said(*words: str) -> list[dict[str, str]]:
    """A conversation, the user first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(words)]


def answer(llm: LLM, *words: str) -> str:
    return llm.chat(said(*words), GREEDY)[0].outputs[0].text


def test_each_line_of_a_pipe_gets_a_line(
    folder: Path, llama: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("fox\n\ndog\n/reset\ndog\n/exit\nnever\n"))
    assert run_command(["chat", str(folder), *FLAGS]) == 0
    fox = answer(llama, "fox")
    answers = [fox, answer(llama, "fox", fox, "dog"), answer(llama, "dog")]
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [" ".join(text.split()) for text in answers]
    assert answers[1] != answers[2]


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_bytes_that_are_no_text_are_replaced(folder: Path, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepahead", "chat", str(folder), *FLAGS],
        env=os.environ | {"PYTHONPATH": str(SRC), "PYTHONIOENCODING": encoding},
        input="fox é\n".encode() + b"\xff\xfe dog\ncat\n",
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 3


def test_a_question_too_long_is_refused_and_forgotten(
    folder: Path, llama: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("fox " * 600 + "\ndog\n"))
    assert run_command(["chat", str(folder), *FLAGS]) == 1
    captured = capsys.readouterr()
    assert "the model takes 512" in captured.err
    assert captured.out.splitlines() == ["", " ".join(answer(llama, "dog").split())]


def test_a_model_without_a_template_says_so_before_the_first_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "chat_template.jinja").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("fox\n"))
    assert run_command(["chat", str(folder), *FLAGS]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--chat-template FILE" in captured.err
    assert captured.err.count("\n") == 1


def test_the_pieces_of_an_answer_are_the_answer(llama: LLM) -> None:
    conversation = Conversation(llama, GREEDY)
    pieces: list[str] = []
    text = conversation.ask("The fox", pieces.append)
    assert text == "".join(pieces) == answer(llama, "The fox")
    assert len(pieces) > 1
    assert conversation.messages == said("The fox", text)


def test_an_interrupted_answer_is_kept_as_far_as_it_came(llama: LLM) -> None:
    conversation = Conversation(llama, SamplingParams(max_tokens=200, ignore_eos=True, seed=1))
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    text = conversation.ask("The fox", interrupt)
    assert text == "".join(pieces)
    assert len(pieces) < 10
    assert conversation.messages == said("The fox", text)
    assert not llama.engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Terminal:
    """A chat with a person: a child on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._master, slave = pty.openpty()
        command = ["chat", str(folder), *FLAGS[:-1], "400", "--ignore-eos"]
        self.child = subprocess.Popen(
            [sys.executable, "-c", "from stepahead.cli.main import main; main()", *command],
            env=os.environ | {"PYTHONPATH": str(SRC), "TERM": "dumb"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Reads until `text` has come; what comes after it stays."""
        self._read_until(lambda: text in self.seen, repr(text))
        self.seen = self.seen.partition(text)[2]

    def wait_for_more(self, count: int) -> None:
        """Reads until so many characters have come."""
        self._read_until(lambda: len(self.seen) >= count, f"{count} characters")

    def _read_until(self, come: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + 60
        while not come():
            assert time.monotonic() < deadline_s, f"no {what} in {self.seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 4096).decode(errors="replace")

    def type(self, line: str) -> None:
        os.write(self._master, line.encode() + b"\n")

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)


def test_a_person_at_a_terminal(folder: Path) -> None:
    terminal = Terminal(folder)
    try:
        terminal.wait_for("leaves.")
        terminal.wait_for("> ")
        time.sleep(0.5)  # readline shows its prompt a little before it waits, and looks only then
        terminal.child.send_signal(signal.SIGINT)  # at the prompt: a reminder
        terminal.wait_for("/exit or Ctrl-D leaves.")
        terminal.wait_for("> ")
        terminal.type("/fly away")
        terminal.wait_for("/fly is not known")
        terminal.wait_for("> ")
        terminal.type("The fox")
        terminal.wait_for("The fox")  # the terminal's echo
        terminal.wait_for_more(30)
        terminal.child.send_signal(signal.SIGINT)  # the answer ends, and the prompt comes
        terminal.wait_for("\n> ")
        terminal.type("/exit")
        assert terminal.child.wait(timeout=30) == 0
    finally:
        terminal.close()
