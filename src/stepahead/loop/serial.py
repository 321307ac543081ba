"""The oracle: launch n, land n, retire n.  The host knows everything whenever it plans."""

from __future__ import annotations

from stepahead.loop.base import LoopCore
from stepahead.types import Outputs


def serial_step(core: LoopCore) -> Outputs | None:
    """Runs one step to its end; None when there is nothing to run."""
    return core.collect() if core.half_landed or core.launch() else None
