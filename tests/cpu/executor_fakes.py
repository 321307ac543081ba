"""Runners that misbehave on request, built inside the worker by "executor_fakes:name"."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepahead.errors import ModelError, PromptTooLong, WeightError
from stepahead.plan import Plan, Result
from stepahead.runner.spec import RunnerSpec

LARGE = 3_000_000  # bytes; no pipe takes that at once


class Gate:
    """What a worker waits at, in the kernel, until the test opens it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        os.mkfifo(self.path)

    def open(self) -> None:
        """Lets one pass who waits there, or comes soon; fails when nobody does."""
        deadline_s = time.monotonic() + 30
        while True:
            try:
                return os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                assert time.monotonic() < deadline_s, "nobody waits at the gate"
            time.sleep(0.01)


def wait_at(path: str) -> None:
    """Returns when the gate is opened; keeps the interpreter's lock, as careless code does."""
    signal.alarm(40)  # ends this process when no test is left to open it
    os.close(ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY))
    signal.alarm(0)


class OddWeights(WeightError):
    """A model's own error, which the host can't import."""


@dataclass
class FakeFlight:
    plan: Plan
    ready_at_s: float
    action: str = ""

    def ready(self) -> bool:
        return time.monotonic() >= self.ready_at_s

    def land(self) -> Result:
        time.sleep(max(0.0, self.ready_at_s - time.monotonic()))
        if self.action == "late":
            raise RuntimeError("found out late")
        if self.action == "nonsense":
            return Result(self.plan.step, object())
        return Result(self.plan.step, answer(self.plan))


def answer(plan: Plan) -> np.ndarray:
    """int32[256], or LARGE bytes for a step that is a multiple of 1,000; different every step."""
    count = LARGE // 4 if plan.step and plan.step % 1000 == 0 else 256
    return np.arange(count, dtype=np.int32) + plan.step + len(plan.grants)


class FakeRunner:
    """`script` maps a step to what happens in its launch; `late_s` to when its results are there
    (of several, the last given: a list is walked through, over and over)."""

    def __init__(self, script: dict[int, str], late_s: list[float]) -> None:
        self._script = script
        self._late_s = late_s or [0.0]

    def launch(self, plan: Plan) -> FakeFlight:
        action, _, value = self._script.get(plan.step, "").partition(" ")
        if action:
            getattr(self, f"_{action}")(value)
        late_s = self._late_s[plan.step % len(self._late_s)]
        return FakeFlight(plan, time.monotonic() + late_s, action)

    def close(self) -> None:
        pass

    def _sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def _hold(self, seconds: str) -> None:
        ctypes.PyDLL(None).sleep(int(seconds))  # with the interpreter's lock

    def _gate(self, path: str) -> None:
        wait_at(path)

    def _raise(self, words: str) -> None:
        raise RuntimeError(words)

    def _memory(self, _: str) -> None:
        raise MemoryError

    def _exit(self, code: str) -> None:
        sys.exit(int(code))

    def _quit(self, code: str) -> None:
        os._exit(int(code))

    def _kill(self, name: str) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    def _fork(self, path: str) -> None:
        # a grandchild that holds every descriptor of the worker, the channel's too
        if os.fork() == 0:
            wait_at(path)
            os._exit(0)
        os._exit(3)

    def _shell(self, _: str) -> None:
        command = ["ls", "/proc/self/fd"]
        done = subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, check=True)
        if len(done.stdout.split()) > 4:  # its standard three, and the folder
            raise RuntimeError("a process started by the model holds the worker's channel")

    def _late(self, _: str) -> None:
        pass

    def _nonsense(self, _: str) -> None:
        threading.Thread(target=time.sleep, args=(60,)).start()

    def _print(self, words: str) -> None:
        print(words, flush=True)


def build(spec: RunnerSpec) -> FakeRunner:
    """Options: script, late_s, and `orphan`: undo what makes the kernel end the worker."""
    if spec.options.get("orphan"):
        ctypes.CDLL(None).prctl(1, 0)
    return FakeRunner(spec.options.get("script", {}), spec.options.get("late_s", []))


def build_slowly(spec: RunnerSpec) -> FakeRunner:
    time.sleep(60)
    return build(spec)


def build_and_die(_: RunnerSpec) -> FakeRunner:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def build_fails(spec: RunnerSpec) -> FakeRunner:
    raise {
        "weights": WeightError("model.safetensors: 'lm_head' is cut off\nat byte 7"),
        "own": OddWeights("odd"),
        "model": ModelError("no such folder"),
        "request": PromptTooLong("too long", "prompt"),
        "memory": MemoryError(),
        "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1e15 bytes"),
        "other": ValueError("what?"),
        "exit": SystemExit(4),
    }[spec.options["error"]]
