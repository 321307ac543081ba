"""Where the model is cut into stages: hidden states go on to the next one, sampled tokens go back.

A stage's forward takes the hidden states that the one before it has left, and leaves its own.  The
last one samples, and leaves the tokens for all others: the first needs them as inputs, and all must
know which rows are dead.  They are due S steps later, for no row is planned again before that; a
step in between neither waits for them nor sees them.  Where the host brings all tokens (no more
than S steps in the air) nothing goes back, and no row ends with a step of its own in the air.

    stage 0   [ step n ]  [ n+1 ]  [ n+2 ] < tokens of n
    stage 1             \\ [ n   ]  [ n+1 ]

Knows links and no processes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, Event, Stream
from stepahead.plan import Plan
from stepahead.runner.ends import Ends, ended
from stepahead.runner.relay import Relay
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.stage import Staged


class Link(Protocol):
    """A way from one stage to another, for one tensor a step; as deep as the steps ahead."""

    def memory(self, step: int) -> str:
        """The name of the memory that the step's tensor lies in, the same for both sides."""
        ...

    def put(self, step: int, tensor: Tensor) -> None:
        """Leaves the step's tensor; on the sender's forward stream."""
        ...

    def sent(self, step: int, event: Event) -> None:
        """The sender's host: the tensor is there when the event has passed."""
        ...

    def fail(self, step: int, text: str) -> None:
        """The step has failed, and there will be no tensor of it; taking it raises."""
        ...

    def wait(self, step: int, device: Device) -> None:
        """The receiver's host: what is enqueued on its forward stream from now on may take it."""
        ...

    def take(self, step: int) -> Tensor:
        """The step's tensor; on the receiver's forward stream.  Blocks where `wait` can't order
        the streams.  Valid until the step has landed."""
        ...


@dataclass(frozen=True)
class Links:
    """What a stage is linked with; the first has no states coming in, the last none going out."""

    states_in: Link | None = None
    states_out: Link | None = None
    tokens_in: Link | None = None
    tokens_out: tuple[Link, ...] = ()


@dataclass(eq=False)
class Sampled:
    """The rows that a step sampled, on a stage that does not see their tokens yet.

    `slots` int64 numpy[r] and on the device; `positions_dev` int64[r], filled by the step's
    forward; `lost` bool numpy[r]: the slot has had another owner since.
    """

    step: int
    slots: np.ndarray
    slots_dev: Tensor
    ends: Ends | None
    blocks: tuple[str, ...]
    lost: np.ndarray = field(init=False)
    positions_dev: Tensor | None = None

    def __post_init__(self) -> None:
        self.lost = np.zeros(len(self.slots), np.bool_)


class HandOver:
    """One stage's side of all its links.  Steps come in order."""

    def __init__(
        self, device: Device, spec: RunnerSpec, links: Links, slots: SlotState, relay: Relay
    ) -> None:
        self.is_last = spec.stage == spec.stages - 1
        self._device = device
        self._links = links
        self._slots = slots
        self._relay = relay
        self._stages = spec.stages
        self._due: deque[Sampled] = deque()  # steps whose tokens are still on their way

    # --- before the model -------------------------------------------------------------------

    def arrive(self, plan: Plan, staged: Staged, arrived: list[Tensor]) -> Sampled | None:
        """Enqueues what the step's forward needs of other stages.

        The hidden states [T, hidden] will be the only element of `arrived`; none come to the first
        stage.  Returns the earlier step whose tokens come back before this one: what that was
        staged in is read once more.
        """
        due = None
        if self._links.tokens_in is not None:
            due = self._take_back(self._links.tokens_in, plan, staged)
        link, step = self._links.states_in, staged.step
        if link is not None:
            link.wait(step, self._device)
            self._device.enqueue(
                Stream.FORWARD,
                lambda: arrived.append(link.take(step)),
                (link.memory(step),),
                (f"arrived {step}",),
            )
        return due

    def _take_back(self, link: Link, plan: Plan, staged: Staged) -> Sampled | None:
        joined = [join.slot for join in plan.joins]
        for sampled in self._due if joined else ():
            sampled.lost |= np.isin(sampled.slots, joined)
        due = self._due.popleft() if len(self._due) == self._stages else None
        if due is not None and len(due.slots):
            self._enqueue_tokens(link, due)
        step, ends = staged.inputs, staged.first.group.ends
        self._due.append(Sampled(staged.step, step.slots, step.slots_dev, ends, staged.blocks))
        return due

    def _enqueue_tokens(self, link: Link, due: Sampled) -> None:
        link.wait(due.step, self._device)
        self._device.enqueue(
            Stream.FORWARD,
            partial(self._apply, link, due),
            (*due.blocks, link.memory(due.step), f"sampled {due.step}", "slots", "relay"),
            ("slots", "relay"),
        )

    def _apply(self, link: Link, due: Sampled) -> None:
        with torch.inference_mode():
            tokens = link.take(due.step).clone()  # the relay has them for longer than the link
            self._relay.stash(due.slots_dev, tokens)
            if due.ends is None or due.lost.all():
                return
            assert due.positions_dev is not None
            dead = ended(due.ends, tokens, due.positions_dev)
            if due.lost.any():  # a slot's new owner has not sampled these tokens
                dead &= torch.from_numpy(~due.lost).to(dead.device)
            self._slots.bury(due.slots_dev, dead)

    # --- after the model --------------------------------------------------------------------

    @property
    def newest(self) -> Sampled | None:
        """The rows of the step that was launched last; None where no tokens come back."""
        return self._due[-1] if self._due else None

    def pass_on(self, step: int, sampled: Sampled | None, states: Tensor) -> None:
        """Runs on the forward stream, when the slots have advanced: leaves the hidden states.
        `sampled` was the `newest` when the step was launched."""
        link = self._links.states_out
        assert link is not None
        link.put(step, states)
        if sampled is not None:
            sampled.positions_dev = self._slots.length_dev.index_select(0, sampled.slots_dev)

    def touched(self, step: int) -> tuple[str, ...]:
        """The names of what `pass_on` writes."""
        link = self._links.states_out
        return (link.memory(step), f"sampled {step}") if link is not None else ()

    def give_back(self, step: int, tokens: Tensor) -> None:
        """Runs on the forward stream, on the last stage: leaves the sampled tokens, int64[r]."""
        for link in self._links.tokens_out:
            link.put(step, tokens)

    def given(self, step: int) -> tuple[str, ...]:
        """The names of what `give_back` writes."""
        return tuple(link.memory(step) for link in self._links.tokens_out)

    def sent(self, staged: Staged, end: Event) -> None:
        """What the step leaves for other stages is there when `end` has passed."""
        if self._links.states_out is not None:
            self._links.states_out.sent(staged.step, end)
        for link in self._links.tokens_out if len(staged.inputs.slots) else ():
            link.sent(staged.step, end)
