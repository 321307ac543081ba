"""A queue of flights as deep as asked: launch until it is full, then land and retire the oldest.

Filling comes first; when nothing more can run, the queue is drained.
"""

from __future__ import annotations

from stepahead.loop.base import LoopCore
from stepahead.types import Outputs


def batch_queue_step(core: LoopCore) -> Outputs | None:
    """Fills the queue and collects its oldest flight; None when nothing was in the air."""
    while core.flights < core.depth and not core.half_landed and core.launch():
        pass
    return core.collect() if core.flights else None
