"""The process executor: order, failures by name, and nothing of it left behind."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from executor_fakes import LARGE, Gate, answer

from stepahead import errors
from stepahead.errors import EngineClosed, EngineError, RunnerDied, StepFailed
from stepahead.executor.process import ProcessExecutor
from stepahead.plan import NO_INTS, Plan
from stepahead.runner.spec import RunnerSpec

Start = Callable[..., ProcessExecutor]
HANG_S = 30.0  # nothing takes that long unless it hangs; what would sleeps for 60 s


@pytest.fixture(autouse=True)
def _nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    fds, threads, children = open_fds(), threading.active_count(), child_pids()
    yield
    gc.collect()
    assert child_pids() <= children
    assert open_fds() <= fds
    assert soon(lambda: threading.active_count() <= threads)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def start(_nothing_stays_behind: None) -> Iterator[Start]:
    """Starts an executor of a fake runner; closes it after the test."""
    started = []

    def start(
        script: dict[int, str] | None = None, build: str = "build", timeout_s: float = 30.0, **more
    ) -> ProcessExecutor:
        spec = RunnerSpec("unused:unused", {"script": script or {}, **more})
        started.append(ProcessExecutor(spec, timeout_s, f"executor_fakes:{build}"))
        return started[-1]

    yield start
    for executor in started:
        executor.close()
        assert gone(executor.pid)


def open_fds() -> set[str]:
    with os.scandir("/proc/self/fd") as entries:
        found = {entry.name for entry in entries}
    return {fd for fd in found if os.path.lexists(f"/proc/self/fd/{fd}")}


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def gone(pid: int) -> bool:
    try:
        # an orphan's new parent may be slow to collect it
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def plan_of(step: int, grants: np.ndarray = NO_INTS) -> Plan:
    return Plan(step, NO_INTS, True, grants=grants)


def land_all(executor: ProcessExecutor, steps: range, ahead: int) -> None:
    """Runs `steps`, each launched `ahead` steps before the oldest lands, and checks the answers."""
    flights = []
    for step in steps:
        flights.append(executor.launch(plan_of(step)))
        if len(flights) > ahead:
            check(flights.pop(0).land(), step - ahead)
    for flight in flights:
        check(flight.land(), flight.step)


def check(result: object, step: int) -> None:
    assert result.step == step
    assert np.array_equal(result.tokens, answer(plan_of(step)))


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


def test_flights_land_in_order(start: Start) -> None:
    executor = start()
    for ahead in range(3):
        land_all(executor, range(1 + 300 * ahead, 300 * (ahead + 1)), ahead)
    land_all(executor, range(998, 1003), 2)  # one of them is large


@pytest.mark.parametrize("late_s", [[0.003], [0.004, 0.0, 0.0], [0.0, 0.002]])
def test_results_keep_their_order_when_some_are_late(start: Start, late_s: list[float]) -> None:
    """A result that is there at once must not overtake one that an output thread waits for."""
    land_all(start(late_s=late_s), range(1, 60), 2)


def test_a_flight_lands_again_and_out_of_turn(start: Start) -> None:
    executor = start()
    first, second = executor.launch(plan_of(1)), executor.launch(plan_of(2))
    check(second.land(), 2)
    check(first.land(), 1)
    assert first.land() is first.land()


def test_launch_never_waits_for_a_busy_worker(start: Start, gate: Gate) -> None:
    """A plan larger than the pipe, while the model waits with the interpreter's lock.

    The worker takes no more in before the gate opens, so a send that waited would not return.
    """
    grants = np.arange(LARGE // 4, dtype=np.int32)
    executor = start({1: f"gate {gate.path}"})
    flights = [executor.launch(plan_of(1)), executor.launch(plan_of(2, grants))]
    flights.append(executor.launch(plan_of(3)))
    gate.open()
    flights[0].land()
    assert np.array_equal(flights[1].land().tokens, answer(plan_of(2, grants)))
    check(flights[2].land(), 3)


def test_close_with_a_large_plan_unsent(start: Start) -> None:
    executor = start({1: "hold 60"})
    executor.launch(plan_of(1))
    executor.launch(plan_of(2, np.zeros(LARGE // 4, np.int32)))
    executor.close()
    assert gone(executor.pid)


def test_what_the_model_starts_does_not_inherit_the_channel(start: Start) -> None:
    check(start({1: "shell"}).launch(plan_of(1)).land(), 1)


# --- the worker dies ------------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["sleep 60", "hold 60"])
def test_killed_in_a_step(start: Start, doing: str) -> None:
    executor = start({2: doing})
    check(executor.launch(plan_of(1)).land(), 1)
    flights = [executor.launch(plan_of(2)), executor.launch(plan_of(3))]
    threading.Timer(0.2, os.kill, (executor.pid, signal.SIGKILL)).start()
    for flight in flights:
        with pytest.raises(RunnerDied, match=rf"{executor.pid} was killed by SIGKILL.*memory"):
            flight.land()
    with pytest.raises(RunnerDied, match="SIGKILL"):
        executor.launch(plan_of(4))


def test_killed_between_steps(start: Start) -> None:
    executor = start()
    landed, flight = executor.launch(plan_of(1)), executor.launch(plan_of(2))
    check(landed.land(), 1)
    check(flight.land(), 2)
    os.kill(executor.pid, signal.SIGKILL)
    with pytest.raises(RunnerDied, match="SIGKILL"):  # launch or land, as the signal arrives
        executor.launch(plan_of(3)).land()
    with pytest.raises(RunnerDied, match="SIGKILL"):
        executor.launch(plan_of(4))


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        ("quit 3", "exited with code 3"),
        ("quit 0", "exited with code 0"),
        ("kill SIGSEGV", "killed by SIGSEGV"),
        ("kill SIGTERM", "killed by SIGTERM"),
        ("kill SIGRTMIN", "killed by"),
    ],
)
def test_a_death_is_named(start: Start, doing: str, words: str) -> None:
    executor = start({1: doing})
    flight = executor.launch(plan_of(1))
    with pytest.raises(RunnerDied, match=words):
        flight.land()


def test_a_grandchild_holding_the_channel_hides_no_death(start: Start, gate: Gate) -> None:
    """The pipes stay open with it, so waiting for their end alone would hang."""
    executor = start({1: f"fork {gate.path}"})
    with pytest.raises(RunnerDied, match="exited with code 3"):
        executor.launch(plan_of(1)).land()
    gate.open()  # it is still there


@pytest.mark.parametrize("late_s", [[0.0], [0.05]])
def test_a_worker_that_can_not_answer_ends(start: Start, late_s: list[float]) -> None:
    """In the main thread or the output thread, and with a thread of the model's still running,
    which would hold a Python process back from ending."""
    executor = start({1: "nonsense"}, late_s=late_s)
    started_s = time.monotonic()
    with pytest.raises(RunnerDied, match="exited with code 1"):
        executor.launch(plan_of(1)).land()
    assert time.monotonic() - started_s < HANG_S


def test_killed_while_it_builds(start: Start) -> None:
    with pytest.raises(RunnerDied, match="killed by SIGKILL"):
        start(build="build_and_die")


# --- the model raises -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        ("raise no luck", "model raised in step 2: RuntimeError: no luck"),
        ("memory", "model raised in step 2: MemoryError: memory ran out"),
        ("exit 5", "model raised in step 2: SystemExit: 5"),
        ("late", "model raised in step 2: RuntimeError: found out late"),
    ],
)
@pytest.mark.parametrize("late_s", [[0.0], [0.05]])
def test_a_failed_step_fails_all_later_ones(
    start: Start, doing: str, words: str, late_s: list[float]
) -> None:
    executor = start({2: doing}, late_s=late_s)
    flights = [executor.launch(plan_of(step)) for step in (1, 2, 3)]
    check(flights[0].land(), 1)
    for flight in [*flights[1:], executor.launch(plan_of(4))]:
        with pytest.raises(StepFailed, match=words) as caught:
            flight.land()
    assert "executor_fakes.py" in caught.value.__notes__[0]
    assert not gone(executor.pid)


# --- the runner can't be built --------------------------------------------------------------


@pytest.mark.parametrize(("error", "kind"), [("own", errors.WeightError), ("exit", EngineError)])
def test_a_build_error_is_raised_here(start: Start, error: str, kind: type[Exception]) -> None:
    with pytest.raises(errors.StepaheadError) as caught:
        start(build="build_fails", error=error)
    assert type(caught.value) is kind


def test_an_unknown_builder_is_named(start: Start) -> None:
    with pytest.raises(EngineError, match="has no attribute 'nothing'"):
        start(build="nothing")


def test_a_build_that_takes_too_long(start: Start) -> None:
    started_s = time.monotonic()
    with pytest.raises(EngineError, match=r"not built within 0\.3 s"):
        start(build="build_slowly", timeout_s=0.3)
    assert time.monotonic() - started_s < HANG_S


# --- the end --------------------------------------------------------------------------------


def test_close_is_idempotent_and_final(start: Start) -> None:
    executor = start()
    flight = executor.launch(plan_of(1))
    executor.close()
    executor.close()
    with pytest.raises(EngineClosed):
        executor.launch(plan_of(2))
    with pytest.raises(EngineClosed):
        executor.launch(plan_of(2)).land()
    del flight


@pytest.mark.parametrize("doing", ["sleep 60", "hold 60"])
def test_close_during_a_forward(start: Start, doing: str) -> None:
    executor = start({1: doing})
    executor.launch(plan_of(1))
    started_s = time.monotonic()
    executor.close()
    assert time.monotonic() - started_s < HANG_S


def test_close_from_another_thread_ends_the_wait(start: Start) -> None:
    executor = start({1: "sleep 60"})
    flight = executor.launch(plan_of(1))
    closing = threading.Timer(0.2, executor.close)
    closing.start()
    with pytest.raises(EngineClosed):
        flight.land()
    closing.join()


def test_close_after_death(start: Start) -> None:
    executor = start()
    os.kill(executor.pid, signal.SIGKILL)
    executor.close()


def test_an_executor_that_is_dropped_ends_its_worker(start: Start) -> None:
    spec = RunnerSpec("unused:unused", {"script": {1: "sleep 60"}})
    executor = ProcessExecutor(spec, 30.0, "executor_fakes:build")
    executor.launch(plan_of(1))
    pid = executor.pid

    def drop() -> None:
        nonlocal executor
        executor = None
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed"):
        drop()
    assert soon(lambda: gone(pid))


def test_it_uses_no_shared_memory_no_socket_and_two_pipes(start: Start) -> None:
    """What was never made can't stay behind."""
    executor = start()
    land_all(executor, range(1, 10), 1)
    assert "/dev/shm" not in Path(f"/proc/{executor.pid}/maps").read_text()
    with os.scandir(f"/proc/{executor.pid}/fd") as entries:
        links = [os.readlink(entry.path) for entry in entries if int(entry.name) > 2]
    assert [link.partition(":")[0] for link in links] == ["pipe", "pipe"]


def test_close_is_bounded_even_if_the_worker_can_not_be_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in the kernel; a plan that it never took must not hold close() up."""
    executor = start({1: "hold 60"})
    executor.launch(plan_of(1))
    executor.launch(plan_of(2, np.zeros(LARGE // 4, np.int32)))
    child = executor.child
    with monkeypatch.context() as patch:
        patch.setattr(child, "stop", lambda grace_s: None)
        closing = threading.Thread(target=executor.close)
        closing.start()
        closing.join(HANG_S)
    in_time = not closing.is_alive()
    child.stop(0)
    closing.join()
    assert in_time


# --- the host's surroundings ----------------------------------------------------------------


def test_the_worker_outlives_the_thread_that_started_it(start: Start) -> None:
    """The kernel's death signal follows the thread that forked, not its process."""
    started: list[ProcessExecutor] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    land_all(started[0], range(1, 5), 1)


def test_ctrl_c_does_not_reach_the_worker(start: Start) -> None:
    executor = start({1: "sleep 0.2"})
    flight = executor.launch(plan_of(1))
    os.kill(executor.pid, signal.SIGINT)
    check(flight.land(), 1)
    land_all(executor, range(2, 4), 1)


SCRIPT = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
from stepahead.executor.process import ProcessExecutor
from stepahead.plan import NO_INTS, Plan
from stepahead.runner.spec import RunnerSpec

{before}
print("main ran", flush=True)
spec = RunnerSpec("unused:unused", {options!r})
executor = ProcessExecutor(spec, 30.0, "executor_fakes:build")
flight = executor.launch(Plan(1, NO_INTS, True))
{rest}
"""


def script(
    tmp_path_factory: pytest.TempPathFactory, rest: str, before: str = "", **options: object
) -> list[str]:
    """A command that runs SCRIPT: no guard around its main part."""
    paths = [str(Path(errors.__file__).parent.parent), str(Path(__file__).parent)]
    path = tmp_path_factory.mktemp("script") / "main.py"
    path.write_text(SCRIPT.format(paths=paths, options=options, rest=rest, before=before))
    return [sys.executable, str(path)]


def test_an_unguarded_script_runs_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And what the model prints goes to stderr: stdout is for the answers."""
    rest = "print(flight.land().tokens[0])\nexecutor.close()"
    command = script(tmp_path_factory, rest, script={1: "print a model's words"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["main ran", "1", ""]
    assert done.stderr == "a model's words\n"


def test_a_script_that_forgets_to_close_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    command = script(tmp_path_factory, "print(executor.pid)", script={1: "sleep 60"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert soon(lambda: gone(int(done.stdout.split()[-1])))


@pytest.mark.parametrize(
    ("doing", "orphan"),
    [("", False), ("sleep 60", False), ("hold 60", False), ("", True), ("sleep 60", True)],
)
def test_the_parent_is_killed(
    tmp_path_factory: pytest.TempPathFactory, doing: str, orphan: bool
) -> None:
    """`hold`: only the kernel can end a worker that keeps the interpreter's lock.  `orphan`: the
    kernel's help is off, and the worker's own watch of its pipe must do."""
    rest = "print(executor.pid, flush=True)\ntime.sleep(60)"
    command = script(tmp_path_factory, rest, script={1: doing}, orphan=orphan)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "main ran\n"
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        assert not gone(worker)
        parent.kill()
    assert soon(lambda: gone(worker))


def test_ctrl_c_in_a_terminal_is_the_parents_to_decide(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The signal goes to the whole process group; here it comes in a step."""
    rest = (
        "try:\n    print('up', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pass\n"
        "print(flight.land().tokens[0])\nexecutor.close()"
    )
    command = script(tmp_path_factory, rest, script={1: "sleep 1"})
    with in_its_own_group(command) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["main ran\n", "up\n"]
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.read() == "1\n"
    assert parent.returncode == 0


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1])
def test_ctrl_c_while_the_worker_starts(
    tmp_path_factory: pytest.TempPathFactory, after_s: float
) -> None:
    """Python takes a moment before the worker can ignore it: it must be born deaf."""
    before = "signal.signal(signal.SIGINT, lambda *_: None)"
    command = script(tmp_path_factory, "print(flight.land().tokens[0])\nexecutor.close()", before)
    with in_its_own_group(command) as parent:
        assert parent.stdout.readline() == "main ran\n"
        time.sleep(after_s)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.read() == "1\n"


def in_its_own_group(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


_FORKED = """
import os, sys
from stepahead import LLM, SamplingParams

llm = LLM("toy", threads=1, max_model_len=64, max_rows=2)
params = SamplingParams(max_tokens=3, temperature=0.0)
before = llm.generate([[5, 6]], params)[0].outputs[0].token_ids
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert llm.generate([[5, 6]], params)[0].outputs[0].token_ids == before
llm.close()
print("alive")
"""


def test_a_forked_child_that_exits_leaves_the_worker_alone() -> None:
    # its copy of the engine once asked the parent's worker to shut down
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKED],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "alive\n", done.stderr


def refused_in_a_fork(act: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
        except EngineClosed as error:
            code = 0 if "a fork of it" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_hands_nothing_over(start: Start) -> None:
    # what it sent came back to its parent: both died of a broken order, or hung
    executor = start()
    assert refused_in_a_fork(partial(executor.launch, plan_of(0)))
    land_all(executor, range(2), 1)


def test_a_forked_child_takes_nothing_that_lands(start: Start) -> None:
    executor = start()
    flight = executor.launch(plan_of(0))
    assert executor._channel.wait(HANG_S)  # so that it could take it
    assert refused_in_a_fork(flight.land)
    check(flight.land(), 0)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_an_engine_starts_without_one_of_its_streams(closed: str) -> None:
    code = "from stepahead import LLM; LLM('toy', threads=1, max_model_len=64, max_rows=2).close()"
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
