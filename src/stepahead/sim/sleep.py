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
