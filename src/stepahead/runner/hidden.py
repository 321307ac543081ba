"""Hidden states on their way to the host, for the rows whose clients want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stepahead.device.base import Device
from stepahead.types import HiddenRows

if TYPE_CHECKING:
    from torch import Tensor


class HiddenDownload:
    """float32[r, hidden] for the rows `rows` int32[r]; `source` gives it after the forward."""

    def __init__(
        self, device: Device, source: Callable[[], Tensor], rows: np.ndarray, name: str
    ) -> None:
        self._rows = rows
        self._values = device.download(source, name)

    def read(self) -> HiddenRows:
        """Valid once an event recorded after it has passed."""
        values = self._values.read()
        return HiddenRows(self._rows, values.shape[-1], values.astype(np.float32).reshape(-1))
