"""What a step's operations leave for each other, and what the host keeps of a step in the air."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from torch import Tensor

from stepahead.device.base import Event, HostArray
from stepahead.plan import NO_INTS, PromptRows, Result
from stepahead.runner.arrival import Arrival
from stepahead.runner.hidden import HiddenDownload, PoolDownload
from stepahead.runner.logprobs import LogprobDownload, LogprobTensors
from stepahead.runner.stage import PromptScore
from stepahead.runner.verify import Asked
from stepahead.sync import Held, Sync

T = TypeVar("T")


@dataclass
class StepBox:
    """What a step's operations leave for each other on the device; filled on the forward stream.
    `arrived` holds the hidden states that another stage has left, if one had to; `asked`:
    what the model is asked under drafts."""

    arrived: list[Tensor] = field(default_factory=list)
    states_dev: Tensor | None = None
    tokens_dev: Tensor | None = None
    hidden_dev: Tensor | None = None
    sums_dev: Tensor | None = None
    lengths_dev: Tensor | None = None
    logprobs: LogprobTensors | None = None
    prompts: list[LogprobTensors] = field(default_factory=list)
    asked: Asked | None = None


def made(value: T | None) -> T:
    """What an operation before has left; AssertionError if it has not run."""
    assert value is not None, "used before the forward ran"
    return value


class Nothing:
    """The tokens of a stage that samples none."""

    def read(self) -> np.ndarray:
        return NO_INTS


@dataclass(frozen=True)
class RunnerFlight:
    """A step in the device's hands; `start` and `end` are those of its forward.

    `held` is what held the runner up, `arrival` tells what the device waited for, None if nothing.
    `runs` is told the tokens when they have landed, where a row may bring several of them.
    """

    step: int
    event: Event
    start: Event
    end: Event
    tokens: HostArray
    logprobs: LogprobDownload | None
    prompts: tuple[tuple[PromptScore, LogprobDownload], ...]
    hidden: HiddenDownload | None
    pooled: PoolDownload | None
    syncs: tuple[Sync, ...]
    held: tuple[Held, ...]
    arrival: Arrival | None
    received_ns: int
    submitted_ns: int
    width: int = 1
    runs: Callable[[np.ndarray], None] | None = None

    def ready(self) -> bool:
        """Whether `land` would return at once."""
        return self.event.done()

    def land(self) -> Result:
        """Waits for this step's results; raises what the device raised."""
        self.event.wait()
        start_ns = self.start.at_ns()
        tokens = self.tokens.read().astype(np.int32)
        if self.runs is not None:
            self.runs(tokens)
        return Result(
            self.step,
            tokens,
            start_ns,
            self.end.at_ns(),
            self.logprobs.read() if self.logprobs else None,
            tuple(PromptRows(s.slot, s.start, download.read()) for s, download in self.prompts),
            hidden=self.hidden.read() if self.hidden else None,
            syncs=self.syncs,
            received_ns=self.received_ns,
            submitted_ns=self.submitted_ns,
            held=self.held + self.arrival.held(start_ns) if self.arrival else self.held,
            pooled=self.pooled.read() if self.pooled else None,
            width=self.width,
        )
