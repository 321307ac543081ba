"""Which relay a runner has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepahead.runner.relay import NoRelay, Relay
from stepahead.runner.relay.row import RowRelay
from stepahead.runner.relay.slot import SlotRelay
from stepahead.runner.spec import RunnerSpec

if TYPE_CHECKING:
    import torch


def build_relay(spec: RunnerSpec, place: torch.device) -> Relay:
    """The relay that the spec names."""
    if spec.stage:
        return NoRelay()
    if spec.relay == "row":
        return RowRelay(spec.num_slots, spec.depth, spec.check, place, spec.stages, spec.width)
    return SlotRelay(spec.num_slots, spec.check, place, spec.width)
