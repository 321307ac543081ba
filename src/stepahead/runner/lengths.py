"""Exact context lengths on the host, for attention that can't do without.

The host's own prediction is exact for rows that live, so most models need none of this.  Where one
does, a step that decodes waits for the forward before it: that is serial work, and counted.
"""

from __future__ import annotations

import numpy as np

from stepahead.device.base import Device, Event, HostArray
from stepahead.sync import SyncReason


class HostLengths:
    """Follows the slots' lengths from step to step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._after: tuple[Event, HostArray] | None = None

    def follow(self, event: Event, lengths: HostArray) -> None:
        """The step just launched leaves `lengths` int64[slots]; they are there after its event."""
        self._after = event, lengths

    def fetch(self, computed: np.ndarray) -> None:
        """Waits for the newest copy, which becomes `computed` int64[slots]."""
        assert self._after is not None, "a step decodes before any other has run"
        event, array = self._after
        self._device.sync(event, SyncReason.HOST_LENGTHS)
        computed[:] = array.read()
