"""Launch n, then land and retire n-1 while the device runs n.

The input token of step n comes from step n-1 through the relay, so planning n needs nothing that
n-1 has not yet brought.
"""

from __future__ import annotations

from stepahead.loop.base import LoopCore
from stepahead.types import Outputs


def overlap_step(core: LoopCore) -> Outputs | None:
    """Launches a step if one can run, and collects the one before it; None when neither was there.

    The first step of a burst brings nothing yet: it is launched and left in the air.
    """
    if core.half_landed:
        return core.collect()
    launched = core.launch()
    if core.flights == core.depth or (core.flights and not launched):
        return core.collect()
    return None
