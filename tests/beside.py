"""The CPU's device with a thread, which uses that for steps that a seed chooses, and not for long
models."""

from __future__ import annotations

import random

from stepahead.device.base import Staging
from stepahead.device.beside import LONG_NS, BesideDevice

_SHARE = 0.8


class ChangingDevice(BesideDevice):
    """Most steps run in the thread, whatever their models take."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def stage(self, step: int) -> Staging:
        """As the device's, behind a model that seems to have been long or short."""
        self._long_ns = LONG_NS if self._random.random() < _SHARE else 0
        return super().stage(step)
