"""Who proposes tokens, and what a drafter is told.  Knows no model and no sampler.

A drafter lives on the device: it is told what a step has brought, on the forward stream, and says
what it expects next.  What it says never changes a token: a draft counts only where the model has
sampled just that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from stepahead.plan import Join
from stepahead.runner.inputs import StagedStep
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec

Upload = Callable[[np.ndarray], Tensor]
NONE = -1  # in the place of a draft: there is none


@dataclass(frozen=True)
class Brought:
    """What a step has brought, for m slots: its n decode rows, then the chunks that sample.

    slots_dev      int64[m]
    ends_dev       int64[m], the position of each slot's newest token
    owners_dev     int64[r], the slot of each sampled position, r = n * width + chunks
    positions_dev  int64[r], where the token sampled there stands
    tokens_dev     int64[r], that token; negative where it does not count
    step           what the host staged: rows, chunks, bounds
    states_dev     [T, hidden] of the step's positions, the decode rows' first
    """

    slots_dev: Tensor
    ends_dev: Tensor
    owners_dev: Tensor
    positions_dev: Tensor
    tokens_dev: Tensor
    step: StagedStep
    states_dev: Tensor


class Drafter(Protocol):
    """`stage` runs on the host, plan by plan; the others on the forward stream.

    uses_pages  `propose` reads page tables, and reads and writes the KV pool
    """

    uses_pages: bool

    def stage(self, joins: Sequence[Join], upload: Upload) -> Any:
        """What `enter` must know of slots with new owners, of which there is one at least."""
        ...

    def enter(self, staged: Any) -> None:
        """Slots have new owners: whatever was known of the old ones is void."""
        ...

    def propose(self, brought: Brought) -> Tensor:
        """What may come next in each slot, int64[m, k]; NONE from where on there is no guess.
        Called for every step: m is 0 where it has only prompt positions, and not the last ones."""
        ...


def build_drafter(spec: RunnerSpec, slots: SlotState, model: Any, kv: Any) -> Drafter:
    """The drafter that the spec names; it may share the slots' page tables, model and pool."""
    module, function = spec.drafter.split(":")
    return getattr(import_module(module), function)(spec, slots, model, kv)


class Rejections:
    """Wrong drafts, as they land: by so much the host's bounds of lengths were too high.

    `note` may be called by whoever lands flights, in the order of launch; `settle` by whoever
    stages.  A slot is given to a new owner after all flights of the old one have landed.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._landed: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def note(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A step of slots `rows` int64[n] has landed with int `tokens`, those of rows first."""
        block = tokens[: len(rows) * self._width].reshape(-1, self._width)
        self._landed.append((rows, self._width - np.count_nonzero(block >= 0, axis=1)))

    def settle(self, computed: np.ndarray) -> None:
        """Takes off `computed` int64[slots] what was wrong in the steps landed since."""
        while self._landed:
            rows, wrong = self._landed.popleft()
            computed[rows] -= wrong
