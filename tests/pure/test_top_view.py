"""`top` as it is seen: a frame drawn, keys, a server that goes away; and its command line."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from rich.console import Console, RenderableType

import house
from metric_texts import state_body, state_document, vllm_text
from servers import Answers, serving
from stepahead.cli.main import run_command
from stepahead.top import live, state
from stepahead.top.fetch import Unreachable
from stepahead.top.frame import Frame
from stepahead.top.live import Screen
from stepahead.top.mock import MockSource
from stepahead.top.view import History, sparkline, view

PLACE = "http://127.0.0.1:9100"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(house.PACKAGE.parent), "COLUMNS": "100"}


def drawn(shown: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(shown)
    return [line.rstrip() for line in console.export_text().splitlines()]


def our_frame(turn: int = 1) -> Frame:
    return state.frame_of(state.parse(json.dumps(state_document(turn)).encode()), None)


GOLDEN = """\
stepahead 0.1.0 · toy · overlap, depth 2 · http://127.0.0.1:9100
device busy 90 %, host hidden 62 %, exposed 300 µs a step; it idles most for: copy (700 µs a step)

tokens/s out          4,800  ▃▅▇█
tokens/s in             640
first token       p50    50 ms   p90    90 ms   p99    99 ms
token to token    p50    10 ms   p90    11 ms   p99    31 ms
requests          ███████████████░░░░░ 48 of 64 running, 5 waiting  ████
pages             ████████░░░░░░░░░░░░ 40 % of 1,000 used
prefix hits       25 %
steps in the air  1 of at most 2
device idles for  copy 700 µs, plan late 300 µs a step
held up by        drain 3 steps"""


def test_a_frame_is_drawn_as_it_stands_here() -> None:
    history, frame = History(), our_frame()
    for quarter in (1, 2, 3, 4):
        history.add(replace(frame, out_per_s=1199.0 * quarter))
    assert drawn(view(frame, history, PLACE)) == GOLDEN.splitlines()


def test_what_a_server_does_not_tell_is_a_dash_and_said() -> None:
    frame = Frame("vLLM", verdict="device busy unknown", missing="vLLM does not export that")
    lines = drawn(view(frame, History(), PLACE))
    assert lines[0] == f"vLLM · {PLACE}"
    assert lines[1] == "device busy unknown"
    assert lines[-1] == "vLLM does not export that"
    for label in ("tokens/s out", "first token", "token to token", "pages", "prefix hits"):
        (line,) = [line for line in lines if line.startswith(label)]
        assert line.split()[-1] == "-"
    assert not any(line.startswith(("steps in the air", "device idles for")) for line in lines)


def test_a_sample_shows_drafts_by_position() -> None:
    lines = drawn(view(MockSource().look(), History(), MockSource.place))
    assert "drafts accepted   by position: 83 %  66 %  49 %" in lines


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_frame_fits_any_terminal(width: int) -> None:
    assert all(len(line) <= width for line in drawn(view(our_frame(), History(), PLACE), width))


def test_a_line_of_blocks_reaches_the_top_at_the_highest_value() -> None:
    assert sparkline([0, 1, 2, 4, 8]) == "▁▂▃▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([3]) == ""


# --- the view that goes on ------------------------------------------------------------------------


class Flaky:
    """Answers, then does not, then does again."""

    place = PLACE

    def __init__(self, looks: str) -> None:
        self._looks = iter(looks)
        self.count = 0

    def look(self) -> Frame:
        self.count += 1
        if next(self._looks, ".") == "x":
            raise Unreachable("connection refused")
        return our_frame()


class Typist:
    """Presses these keys, one a wait; a space is a wait that nobody ends."""

    def __init__(self, keys: str) -> None:
        self.there = True
        self.waits_s: list[float] = []
        self._keys = iter(keys)

    def wait(self, timeout_s: float) -> str:
        self.waits_s.append(timeout_s)
        return next(self._keys).strip()


def test_a_server_that_goes_away_is_shown_as_such_and_asked_again() -> None:
    screen = Screen(Flaky("x.x."), 1.0)
    assert drawn(screen.draw())[1] == "asking"
    screen.look()
    gone = "no answer: connection refused; asking again"
    assert drawn(screen.draw())[:2] == [PLACE, gone]
    screen.look()
    seen = drawn(screen.draw())
    assert seen[1].startswith("device busy 90 %")
    screen.look()
    old = drawn(screen.draw())
    assert old[1] == gone
    assert old[2:] == seen[2:]  # the last that was seen stays there
    screen.look()
    assert drawn(screen.draw())[1] == seen[1]


def test_keys_pause_and_change_the_pace() -> None:
    screen = Screen(Flaky(""), 1.0)
    assert screen.press("p")
    assert screen.paused
    assert drawn(screen.draw())[-1] == "paused"
    assert screen.press("p")
    assert not screen.paused
    for key, interval_s in (("+", 2.0), ("=", 4.0), ("-", 2.0), ("x", 2.0), ("", 2.0)):
        assert screen.press(key)
        assert screen.interval_s == interval_s
    assert drawn(screen.draw(with_keys=True))[-1].endswith("every 2 s")
    for _ in range(20):
        screen.press("+")
    assert screen.interval_s == live.LONGEST_S
    for _ in range(20):
        screen.press("-")
    assert screen.interval_s == live.SHORTEST_S
    assert not screen.press("q")


def test_a_pause_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock_s[0])

    class Sleeper(Typist):
        def wait(self, timeout_s: float) -> str:
            key = super().wait(timeout_s)
            clock_s[0] += 0 if key else timeout_s  # nobody pressed one: the time passes
            return key

    source, keys = Flaky(""), Sleeper("  p    p q")
    console = Console(file=io.StringIO(), width=100)
    live.watch(source, 1.0, keys, console)
    # looks at 0, 1 and 2 s; paused then, until a look at 6 s; and one at 7 s
    assert source.count == 5
    assert keys.waits_s == [1.0] * 10


# --- the command line -----------------------------------------------------------------------------


def test_once_shows_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter([1, 2])
    answers = Answers({"/state": lambda: state_body(next(turns))})
    with serving(answers) as url:
        assert run_command(["top", url, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].startswith("device busy 90 %, host hidden 62 %")
    assert shown.err == ""


@pytest.mark.parametrize("place", ["ours", "vllm", "mock"])
def test_once_json_is_one_document_with_every_field(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers({"/metrics": vllm_text().encode()})
    if place == "ours":
        answers.bodies = {"/state": state_body(4)}
    with serving(answers) as url:
        where = ["--mock"] if place == "mock" else [url.removeprefix("http://")]
        assert run_command(["top", *where, "--once", "--json", "--interval", "0.1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert list(told) == ["url", *(field.name for field in fields(Frame))]
    assert told["running"] > 0
    assert bool(told["missing"]) is (place == "vllm")
    if place != "mock":
        assert told["url"] == url
        assert told["pages_pct"] == (40.0 if place == "ours" else 25.0)


def test_nobody_there_is_exit_code_one_and_says_what_to_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(Answers()) as url:
        assert run_command(["top", url, "--once"]) == 1
        words = capsys.readouterr().err
        assert "/metrics answers with 404" in words
    assert run_command(["top", url, "--once", "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert f"nothing to see at {url}: connection refused" in shown.err
    assert "`stepahead run MODEL ... --observe 9100`" in shown.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--json"], "--json shows one frame; add --once"),
        (["--interval", "0"], "--interval 0; give 0.1 to 60 seconds"),
        (["--interval", "nan"], "--interval nan; give"),
        (["ftp://there", "--once"], "names no server"),
        (["--mock"], "the output is no terminal; add --once"),
    ],
)
def test_misuse_of_top_is_told(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["top", *flags]) == 2
    assert words in capsys.readouterr().err


def test_top_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from stepahead.cli.main import run_command\n"
        "code = run_command(['top', '--mock', '--once', '--interval', '0.1'])\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_q_ends_it_and_leaves_the_terminal_as_it_was() -> None:
    ours, theirs = pty.openpty()
    before = subprocess.run(["stty", "-a"], stdin=theirs, capture_output=True, check=True).stdout
    command = [sys.executable, "-c", "from stepahead.cli.main import main; main()", "top", "--mock"]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=ENVIRONMENT | {"TERM": "xterm", "NO_COLOR": "1"},
        start_new_session=True,
    ) as shown:
        seen = b""
        while b"q quit" not in seen:
            ready, _, _ = select.select([ours], [], [], 30)
            assert ready, seen
            seen += os.read(ours, 1 << 16)
        os.write(ours, b"q")
        while shown.poll() is None:  # what it still draws must be read, or it waits for us
            if select.select([ours], [], [], 0.05)[0]:
                seen += os.read(ours, 1 << 16)
        assert shown.returncode == 0
    after = subprocess.run(["stty", "-a"], stdin=theirs, capture_output=True, check=True).stdout
    os.close(theirs)
    os.close(ours)
    assert after == before
    assert re.search(rb"device busy \d+ %", seen)
