"""Parts of the toy that misbehave on request, built inside the workers by "stage_fakes:part"."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from stepahead.errors import WeightError
from stepahead.parallel.pipeline import ToyPart

if TYPE_CHECKING:
    import torch


class FakePart(ToyPart):
    """Does `do` in its forward number `at`, if it is stage `who`."""

    def __init__(self, do: str, at: int, **options: Any) -> None:
        super().__init__(**options)
        self._do, self._at = do, at
        self._calls = 0

    def __call__(self, inputs: Any, kv: Any) -> torch.Tensor:
        """A forward, or what was asked for."""
        self._calls += 1
        if self._calls == self._at:
            act(self._do)
        return super().__call__(inputs, kv)


def act(do: str) -> None:
    """`raise`, `kill`, `sleep`, `hold` (with the interpreter's lock)."""
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "sleep":
        time.sleep(60)
    elif do == "hold":
        ctypes.PyDLL(None).sleep(60)
    elif do == "weights":
        raise WeightError("a tensor is missing; download it again")
    elif do == "raise":
        raise RuntimeError("the matrix is upside down")


def part(
    stage: int,
    stages: int,
    who: int = -1,
    do: str = "",
    at: int = 0,
    slow: int = -1,
    **options: Any,
) -> ToyPart:
    """A stage; stage `who` does `do`, now if `at` is 0, and stage `slow` takes its time to load."""
    if stage == slow:
        time.sleep(60)
    mine = do if stage == who else ""
    if at == 0:
        act(mine)
    return FakePart(mine, at, stage=stage, stages=stages, **options)
