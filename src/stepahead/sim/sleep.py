"""A model that keeps its device busy for a set time and computes nothing.

For showing and measuring overlap where the real forward's noise would hide it: the sleeping device
leaves the cores to the host, as an accelerator would.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from stepahead.model.batch import StepInputs

_TOKEN = 3  # what it always says
_AWAKE_S = 0.0002  # of a forward, behind its logits


class SleepModel:
    """Every forward lasts `forward_ms`; every token is the same."""

    def __init__(self, forward_ms: float, vocab_size: int = 128) -> None:
        self.vocab_size = vocab_size
        self._forward_s = forward_ms / 1e3
        self._row = torch.zeros(1, vocab_size)
        self._row[0, _TOKEN] = 1.0

    def new_kv(self, num_pages: int, page_size: int) -> None:
        """It remembers nothing."""

    def __call__(self, inputs: StepInputs, kv: None) -> Tensor:
        """Sleeps; float32[T, 1]."""
        time.sleep(self._forward_s)
        return torch.zeros(len(inputs.token_ids_dev), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab], the same for every row."""
        return self._row.repeat(len(hidden), 1)


class NoiseModel:
    """As SleepModel, but what it says is noise: other logits for every row and step, so that there
    is something for a grammar to choose from.

    Logits are the last that a forward makes, so where the rows of a step decode they are copied (1
    ms or less for 32 rows of 49,152) at the end of `forward_ms`.
    """

    def __init__(
        self, forward_ms: float, vocab_size: int, seed: int = 0, max_rows: int = 32
    ) -> None:
        self.vocab_size = vocab_size
        self._forward_s = forward_ms / 1e3
        generator = torch.Generator().manual_seed(seed)
        # a step's rows begin anywhere in the first row
        self._noise = torch.randn((max_rows + 1) * vocab_size, generator=generator)
        self._logits = torch.zeros(max_rows, vocab_size)
        self._ready = 0  # rows of it that nobody has changed
        self._steps = 0
        self._copying_s = 0.0  # what the last copy of logits took
        self._states = torch.zeros(1, 1)

    def new_kv(self, num_pages: int, page_size: int) -> None:
        """It remembers nothing."""

    def __call__(self, inputs: StepInputs, kv: None) -> Tensor:
        """Sleeps; float32[T, 1]."""
        until_s = time.perf_counter() + self._forward_s
        time.sleep(max(0.0, self._forward_s - self._copying_s - _AWAKE_S))
        began_s = time.perf_counter()
        self._refresh(inputs.n_decode)
        self._copying_s = time.perf_counter() - began_s
        states = self._states.expand(len(inputs.token_ids_dev), 1)
        while time.perf_counter() < until_s:  # a device has no operating system that wakes it late
            pass
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab], the caller's to change until the next forward."""
        if self._ready != len(hidden):
            self._refresh(len(hidden))
        self._ready = 0
        return self._logits[: len(hidden)]

    def _refresh(self, rows: int) -> None:
        self._steps += 1
        first = self._steps * 7919 % self.vocab_size
        noise = self._noise[first : first + rows * self.vocab_size]
        self._logits[:rows].copy_(noise.view(rows, self.vocab_size))
        self._ready = rows


class SleepPart:
    """A stage of one: its part of the forward lasts `stage_ms`."""

    def __init__(self, stage_ms: float, stage: int, stages: int, vocab_size: int = 128) -> None:
        self.vocab_size = vocab_size
        self._whole = SleepModel(stage_ms, vocab_size)

    def new_kv(self, num_pages: int, page_size: int) -> None:
        """It remembers nothing."""

    def __call__(self, inputs: StepInputs, kv: None) -> Tensor:
        """Sleeps; float32[T, 1]."""
        return self._whole(inputs, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab], the same for every row."""
        return self._whole.logits(hidden)
