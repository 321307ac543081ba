"""The toy, long enough for a thread of its own beside the one that launches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepahead.model.toy import ToyKV, ToyModel

if TYPE_CHECKING:
    from torch import Tensor

    from stepahead.model.batch import StepInputs


class SlowToy(ToyModel):
    """As the toy, and a while later."""

    def __call__(self, inputs: StepInputs, kv: ToyKV) -> Tensor:
        """As the toy's."""
        time.sleep(4e-3)
        return self.forward(inputs, kv)
