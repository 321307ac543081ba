"""A worker without torch that can be made to fail: the runner on paper, and a script.

Built inside the worker by "ends_fakes:build".  The script, {step: action}, comes as JSON in the
environment variable ENDS_SCRIPT, so that a command can be given one too.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_fakes import FakeRunner

from closed_form import Toy
from paper import PaperRunner
from stepahead.plan import Plan, Result
from stepahead.runner.spec import RunnerSpec

SCRIPT = "ENDS_SCRIPT"
VOCAB = 900  # of offline_makers' llama, whose spec does not say


@dataclass
class ScriptedFlight:
    """A step whose results may never come, or come as an error."""

    inner: Any
    action: str

    def ready(self) -> bool:
        """Never, where the copy is blocked."""
        return self.action != "blocked"

    def land(self) -> Result:
        """The results, an error, or nothing for a minute."""
        if self.action == "blocked":
            time.sleep(60)
        if self.action == "late":
            raise RuntimeError("found out late")
        return self.inner.land()


class ScriptedRunner(FakeRunner):
    """Knows FakeRunner's actions, and: blocked, late, slow (each step, in ms), touch (a file), deaf
    and unclosed."""

    def __init__(self, script: dict[int, str], inner: PaperRunner) -> None:
        super().__init__(script, [])
        self._inner = inner
        self._slow_ms = 0.0

    def launch(self, plan: Plan) -> Any:
        """Does what the script says, then carries the plan out."""
        action, _, value = self._script.get(plan.step, "").partition(" ")
        if action not in ("", "late", "blocked"):
            getattr(self, f"_{action}")(value)
        time.sleep(self._slow_ms / 1e3)
        return ScriptedFlight(self._inner.launch(plan), action)

    def close(self) -> None:
        """Fails if the script says so."""
        if "unclosed" in self._script.values():
            raise RuntimeError("can't be closed")

    def _slow(self, milliseconds: str) -> None:
        self._slow_ms = float(milliseconds)

    def _touch(self, path: str) -> None:
        Path(path).touch()

    def _unclosed(self, _: str) -> None:
        pass

    def _deaf(self, seconds: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(float(seconds))


def build(spec: RunnerSpec) -> ScriptedRunner:
    """The runner on paper, of the sizes that the spec says."""
    script = {int(k): v for k, v in json.loads(os.environ.get(SCRIPT, "{}")).items()}
    time.sleep(float(script.pop(-1, "0")))
    length = spec.max_pages * spec.page_size
    toy = Toy(spec.options.get("vocab_size", VOCAB), length)
    return ScriptedRunner(script, PaperRunner(toy, spec.num_slots, spec.num_pages, spec.page_size))
