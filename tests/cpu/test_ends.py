"""The end of a life: whatever the worker is at, every request has one end, in bounded time, and
nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from ends_fakes import SCRIPT

from engines import Variant, resolved, runner_spec, toy_engine
from listener import LOOPS, OPTIONS, Listener, gone
from offline_makers import tiny_llama
from stepahead import LLM, SamplingParams
from stepahead.errors import EngineClosed, RunnerDied, StepFailed
from stepahead.executor.inline import InlineExecutor
from stepahead.executor.process import CLOSE_S, ProcessExecutor
from stepahead.plan import NO_INTS, Plan

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
BUSY_S = 5.0  # what a busy machine may add to a bound
WORKER = "ends_fakes:build"
STUCK = 6  # the step at which something happens


@pytest.fixture(autouse=True)
def _nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    assert soon(lambda: psutil.Process().children(recursive=True) == [])
    assert list(temporary.iterdir()) == []
    if shared:
        assert set(os.listdir("/dev/shm")) <= shared


def soon(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return condition()


# --- the engine and its worker --------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> dict[int, list[int]]:
    """What everyone is told when nothing ends early."""
    listener = Listener(toy_engine(OPTIONS, Variant("serial", "paper")))
    listener.listen()
    return listener.tokens


class Stage:
    """An engine whose worker follows a script, stepped by a thread of its own until it is stuck or
    has come to step STUCK."""

    def __init__(
        self,
        loop: str,
        depth: int,
        script: dict[int, str],
        patch: pytest.MonkeyPatch,
        grace_s: float = 0.3,  # less than a stuck worker gets, to save time here
    ) -> None:
        patch.setenv(SCRIPT, json.dumps(script))
        patch.setattr("stepahead.executor.process.GRACE_S", grace_s)
        variant = Variant(loop, "paper", depth=depth)
        settled = resolved(OPTIONS, variant)
        self.executor = ProcessExecutor(runner_spec(settled), 30.0, WORKER)
        self.reached = threading.Event()
        engine = toy_engine(OPTIONS, variant, self._see, self.executor)
        self.listener = Listener(engine)
        self._thread = threading.Thread(target=self.listener.listen, daemon=True)

    def _see(self, plan: Plan) -> None:
        if plan.step == STUCK:
            self.reached.set()

    def start(self) -> None:
        """Returns with step STUCK launched."""
        self._thread.start()
        assert self.reached.wait(20)
        time.sleep(0.05)

    def finish(self) -> float:
        """Closes; how long that took, with all that is told."""
        began_s = time.monotonic()
        self.listener.engine.close()
        took_s = time.monotonic() - began_s
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert gone(self.executor)
        return took_s


SCRIPTS = {
    "running": {0: "slow 2"},
    "forward stuck": {STUCK: "hold 60"},
    "copy blocked": {STUCK: "blocked"},
}


@pytest.mark.parametrize("state", SCRIPTS)
@pytest.mark.parametrize(("loop", "depth"), LOOPS[:3])
def test_close(
    loop: str, depth: int, state: str, right: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0, 1 or 2 flights in the air, wherever the stepping thread is."""
    stage = Stage(loop, depth, SCRIPTS[state], monkeypatch)
    stage.start()
    assert stage.finish() < CLOSE_S + BUSY_S
    stage.listener.check("abort", right)
    assert stage.listener.engine.failure is None


@pytest.mark.parametrize(
    ("script", "kind"),
    [({STUCK: "raise"}, StepFailed), ({STUCK: "late"}, StepFailed), ({STUCK: "hold 60"}, None)],
    ids=["launch failed", "found out late", "killed in a forward"],
)
@pytest.mark.parametrize(("loop", "depth"), LOOPS[:3])
def test_a_failed_device_or_worker_is_one_end(
    loop: str,
    depth: int,
    script: dict[int, str],
    kind: type[Exception] | None,
    right: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(loop, depth, script, monkeypatch)
    stage.start()
    if kind is None:
        os.kill(stage.executor.pid, signal.SIGTERM)
    assert soon(lambda: stage.listener.engine.failure is not None)
    assert stage.finish() < CLOSE_S + BUSY_S
    stage.listener.check("error", right)
    assert isinstance(stage.listener.engine.failure, kind or RunnerDied)
    words = {end.error for end in stage.listener.ends.values() if end.reason == "error"}
    assert len(words) == 1
    assert kind is not None or "killed by SIGTERM" in words.pop()


def test_a_worker_that_is_deaf_to_sigterm_is_killed_in_time(
    right: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage("overlap", 0, {STUCK: "deaf 60"}, monkeypatch, grace_s=1.0)
    stage.start()
    assert stage.finish() < CLOSE_S + BUSY_S
    stage.listener.check("abort", right)
    assert stage.executor.child._process.returncode == -signal.SIGKILL


def test_a_runner_that_raises_in_its_close_ends_all_the_same(
    right: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = Stage("overlap", 0, {0: "slow 2", 999: "unclosed"}, monkeypatch)
    stage.start()
    assert stage.finish() < CLOSE_S + BUSY_S
    stage.listener.check("abort", right)
    assert "the runner could not be closed" in capfd.readouterr().err


# --- the runner in the caller's own process -------------------------------------------------


class Held:
    """A runner whose launch is held until it is let go; says whether it was closed meanwhile."""

    def __init__(self, words: str = "") -> None:
        self.inside, self.let_go = threading.Event(), threading.Event()
        self.closed, self.closed_inside = 0, False
        self._words = words

    def launch(self, plan: Plan) -> Any:
        """Waits; the runner is its own flight."""
        self.inside.set()
        assert self.let_go.wait(20)
        self.closed_inside = bool(self.closed)
        return self

    def land(self) -> Any:
        """Would wait for ever: its device is gone."""
        raise AssertionError("landed on a closed device")

    def close(self) -> None:
        """Counts, and fails if it was told to."""
        self.closed += 1
        if self._words:
            raise RuntimeError(self._words)


def test_an_inline_runner_is_not_closed_under_a_launch_nor_waited_for() -> None:
    runner = Held()
    executor = InlineExecutor(runner)  # pyrefly: ignore
    flights = []
    plan = Plan(0, NO_INTS, False)
    launching = threading.Thread(target=lambda: flights.append(executor.launch(plan)), daemon=True)
    launching.start()
    assert runner.inside.wait(20)
    executor.close()
    assert runner.closed == 0
    runner.let_go.set()
    launching.join(20)
    assert (runner.closed, runner.closed_inside) == (1, False)
    executor.close()
    assert runner.closed == 1
    for late in (lambda: executor.launch(plan), flights[0].land):
        with pytest.raises(EngineClosed, match=r"after close\(\)"):
            late()


def test_an_inline_runner_that_can_not_be_closed_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = Held("the device is gone")
    with caplog.at_level(logging.WARNING, "stepahead"):
        InlineExecutor(runner).close()  # pyrefly: ignore
    assert runner.closed == 1
    assert "could not be closed" in caplog.text
    assert "the device is gone" in caplog.text


# --- a library's user -----------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """An LLM of the toy, its worker on paper; closed after the test."""
    made: list[LLM] = []
    monkeypatch.setattr(ProcessExecutor.__init__, "__defaults__", (30.0, WORKER))

    def make(script: dict[int, str]) -> LLM:
        monkeypatch.setenv(SCRIPT, json.dumps(script))
        made.append(LLM("toy", max_rows=3, max_model_len=128, threads=1, debug=True))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def ask(llm: LLM) -> Any:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    return llm.generate([[2 + i, 3, 4] for i in range(5)], params, use_tqdm=False)


def check_cut_short(error: EngineClosed, llm: LLM) -> None:
    choices = [output.outputs[0] for output in error.outputs]
    assert len(choices) == 5
    assert {choice.finish_reason for choice in choices} == {"abort"}
    assert len(choices[0].token_ids) > 2
    llm.engine.scheduler.check_at_rest()


@pytest.mark.parametrize("script", [{0: "slow 2"}, {STUCK: "blocked"}], ids=["running", "stuck"])
def test_closing_from_another_thread_during_generate(
    script: dict[int, str], toy: Callable[..., LLM]
) -> None:
    llm = toy(script)
    closing = threading.Timer(0.2, llm.close)
    closing.start()
    with pytest.raises(EngineClosed, match="while it answered") as caught:
        ask(llm)
    closing.join()
    check_cut_short(caught.value, llm)


def test_closing_from_a_handler_during_generate(toy: Callable[..., LLM]) -> None:
    llm = toy({STUCK: "blocked"})
    before = signal.signal(signal.SIGALRM, lambda *_: llm.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(EngineClosed, match="while it answered") as caught:
            ask(llm)
    finally:
        signal.signal(signal.SIGALRM, before)
    check_cut_short(caught.value, llm)


def test_a_library_leaves_sigterm_to_its_user(toy: Callable[..., LLM]) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        llm = toy({0: "slow 1"})
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with contextlib.suppress(KeyboardInterrupt):
            assert len(ask(llm)) == 5
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_an_exception_in_a_users_loop_leaves_no_worker(tmp_path: Path) -> None:
    script = """
        llm = LLM("toy", max_rows=3, max_model_len=128, threads=1)
        llm.engine.add([3, 4], SamplingParams(max_tokens=100))
        llm.step()
        print(llm.engine.scheduler.in_flight, flush=True)
        raise ZeroDivisionError("a bad day")
    """
    lines = [line.strip() for line in script.splitlines()]
    program = "\n".join([PATCHED, "from stepahead import LLM, SamplingParams", *lines])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert done.stderr.endswith("ZeroDivisionError: a bad day\n")


# --- the commands ---------------------------------------------------------------------------

PATHS = [str(SRC), str(HERE), str(HERE.parent)]
PATCHED = f"""
import sys
sys.path[:0] = {PATHS!r}
from stepahead.executor.process import ProcessExecutor
ProcessExecutor.__init__.__defaults__ = (30.0, {WORKER!r})
"""
COMMAND = f"""
{PATCHED}
import stepahead.executor.process as process
import stepahead.llm.interrupt as interrupt
process.GRACE_S = 0.3
interrupt.STEP_S = 0.5
from stepahead.cli.main import main
main()
"""
FLAGS = ["--max-model-len", "128", "--max-rows", "3", "--threads", "1", "--ignore-eos"]


def environment(script: dict[int, str]) -> dict[str, str]:
    return os.environ | {SCRIPT: json.dumps(script)}


class Command:
    """A command in a process group of its own, its worker on paper.

    `wait` waits until the worker has come to the step of its script that says "here".
    """

    def __init__(
        self, folder: Path, script: dict[int, str], arguments: Sequence[str], **more: Any
    ) -> None:
        self._here = folder / "here"
        self._here.unlink(missing_ok=True)
        script = {step: do.replace("here", f"touch {self._here}") for step, do in script.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env=environment(script),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )
        host = psutil.Process(self.process.pid)
        assert soon(lambda: bool(host.children()))
        (self.worker,) = host.children()

    def say(self, *lines: str) -> None:
        """On its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(line + "\n" for line in lines))
        self.process.stdin.flush()

    def wait(self) -> None:
        """Until the worker is where it should be, and a moment longer."""
        assert soon(self._here.exists)
        time.sleep(0.1)

    def signal(self, number: int) -> None:
        """To the whole group, as a terminal and `timeout` do."""
        os.killpg(self.process.pid, number)

    def end(self, within_s: float) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; fails unless it ends in time and its worker too."""
        began_s = time.monotonic()
        self.process.wait(30)  # with its stdin open, which `communicate` closes
        out, err = self.process.communicate()
        assert time.monotonic() - began_s < within_s
        assert soon(lambda: not alive(self.worker), 5)
        return self.process.returncode, out, err


Start = Callable[..., Command]
Run = Callable[..., Command]
Files = tuple[Path, Path]  # of prompts, of answers


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands; ends those that a test has left."""
    started: list[Command] = []

    def start(script: dict[int, str], *arguments: str, **more: Any) -> Command:
        started.append(Command(tmp_path, script, arguments, **more))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()
        command.process.communicate()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Prompts, more than are in the engine at a time, the first of them short; and the answers."""
    asked = [{"prompt_token_ids": [2 + i, 3, 4]} for i in range(40)]
    asked[0]["max_tokens"] = 2  # pyrefly: ignore
    lines = "".join(json.dumps(line) + "\n" for line in asked)
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def run(start: Start, files: Files) -> Run:
    """Starts `run` with a script; each prompt has so many tokens, but the first, which has two."""

    def run(script: dict[int, str], max_tokens: int = 100) -> Command:
        names = ["--input", str(files[0]), "--output", str(files[1])]
        return start(script, "run", "toy", *names, "--max-tokens", str(max_tokens), *FLAGS)

    return run


def answers(files: Files) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files[1].read_text(encoding="utf-8").splitlines()]


def check_each_has_one(found: list[dict[str, Any]]) -> None:
    """The first is answered, so one more than a window of 12 have a line."""
    assert sorted(answer["line"] for answer in found) == list(range(1, 14))


STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_signal_ends_a_run_in_order(number: int, code: int, run: Run, files: Files) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever started the tests ignores this signal, as nohup does")
    command = run({0: "slow 20", 9: "here"})
    command.wait()
    command.signal(number)
    returned, _, told = command.end(CLOSE_S + BUSY_S)
    assert returned == code
    found = answers(files)
    check_each_has_one(found)
    cut = [answer for answer in found if answer["finish_reason"] == "abort"]
    assert len(cut) == 12
    assert max(len(answer["token_ids"]) for answer in cut) > 2
    assert "1 answered, 0 failed, 12 cut short" in told  # the summary
    assert f"interrupted; 1 answers and 12 cut short are in {files[1]}; run the same" in told
    if number == signal.SIGTERM:
        assert run({}, max_tokens=3).end(30)[0] == 0
        reasons = {answer["line"]: answer["finish_reason"] for answer in answers(files)}
        assert reasons == dict.fromkeys(range(1, 41), "length")
        assert len(answers(files)) == 40


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (signal.SIGINT, signal.SIGINT, "hold 60"),
        (signal.SIGTERM, signal.SIGINT, "blocked"),
        (signal.SIGINT, signal.SIGTERM, "blocked"),
    ],
)
def test_a_second_signal_of_either_kind_ends_a_run_at_once(
    first: int, second: int, state: str, run: Run, files: Files
) -> None:
    command = run({STUCK - 1: "here", STUCK: state})
    command.wait()
    command.signal(first)
    time.sleep(0.1)
    assert command.process.poll() is None
    command.signal(second)
    returned, _, _ = command.end(1.0)
    assert returned == -second
    assert [answer["line"] for answer in answers(files)] == [1]


def test_a_stuck_step_is_given_up_after_a_sigterm(run: Run, files: Files) -> None:
    """Nobody may be there to send a second one."""
    command = run({STUCK - 1: "here", STUCK: "blocked"})
    command.wait()
    command.signal(signal.SIGTERM)
    returned, _, told = command.end(0.5 + CLOSE_S + BUSY_S)
    assert returned == 143
    check_each_has_one(answers(files))
    assert "12 cut short" in told


def test_a_run_whose_worker_is_killed_fails_every_request_once(run: Run, files: Files) -> None:
    command = run({STUCK - 1: "here", STUCK: "blocked"})
    command.wait()
    command.worker.terminate()
    returned, _, told = command.end(CLOSE_S + BUSY_S)
    assert returned == 1
    found = answers(files)
    check_each_has_one(found)
    assert {a["error"]["type"] for a in found if "error" in a} == {"RunnerDied"}
    assert "was killed by SIGTERM" in told


def test_a_signal_while_the_worker_is_built(run: Run, files: Files) -> None:
    command = run({-1: "60"})
    time.sleep(0.3)
    command.signal(signal.SIGTERM)
    assert command.end(CLOSE_S + BUSY_S)[0] == 143
    assert answers(files) == []


@pytest.mark.parametrize(("number", "code"), STOPS[:2])
def test_a_signal_while_a_run_waits_for_lines(
    number: int, code: int, start: Start, files: Files
) -> None:
    names = ["--input", "/dev/stdin", "--output", str(files[1])]
    command = start({0: "here"}, "run", "toy", *names, *FLAGS, stdin=subprocess.PIPE)
    # as many as are read at once: the next one is not there
    command.say(*files[0].read_text(encoding="utf-8").splitlines()[:12])
    command.wait()
    command.signal(number)
    assert command.end(CLOSE_S + BUSY_S)[0] == code


@pytest.mark.parametrize(("number", "code"), STOPS[:2])
def test_a_signal_ends_a_piped_chat_with_what_there_is_of_an_answer(
    number: int, code: int, start: Start, tmp_path: Path
) -> None:
    folder = str(tiny_llama(tmp_path / "model"))
    command = start({0: "slow 20", 5: "here"}, "chat", folder, *FLAGS[4:], stdin=subprocess.PIPE)
    command.say("fox", "dog")
    command.wait()
    command.signal(number)
    returned, out, _ = command.end(CLOSE_S + BUSY_S)
    assert returned == code
    assert out.count("\n") == 1
    assert len(out) > 1


def test_a_signal_ends_a_bench(start: Start) -> None:
    sizes = ["--num-prompts", "8", "--input-len", "8", "--output-len", "100"]
    command = start({0: "slow 20", 9: "here"}, "bench", "toy", *sizes, *FLAGS[:-1])
    command.wait()
    command.signal(signal.SIGTERM)
    returned, out, _ = command.end(CLOSE_S + BUSY_S)
    assert (returned, out) == (143, "")
