"""What steps in flight use stays until they have landed.

Device memory is handed out again as soon as nobody names it, and a queued operation does not count
as somebody.  So the last D steps are kept: step n's place is taken by step n + D, whose plan was
made after n was retired.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from stepahead.device.base import Device


class KeepAlive:
    """The staging blocks and tensors of the last `depth` steps, and blocks that stay for longer."""

    def __init__(self, device: Device, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._steps: deque[tuple[tuple[str, ...], Any]] = deque()
        self._uses: dict[str, int] = {}

    def make_room(self) -> None:
        """Before step n + D is staged: lets go of step n, which has landed."""
        if len(self._steps) == self._depth:
            names, _ = self._steps.popleft()
            self.drop(*names)

    def step(self, names: tuple[str, ...], tensors: Any) -> None:
        """A step uses these blocks, and whatever `tensors` holds."""
        self._steps.append((names, tensors))
        self.hold(*names)

    def also(self, names: tuple[str, ...], tensors: Any) -> None:
        """The newest step uses these, too."""
        before, kept = self._steps[-1]
        self._steps[-1] = (*before, *names), (kept, tensors)
        self.hold(*names)

    def hold(self, *names: str) -> None:
        """The blocks stay until they are dropped as often as they are held."""
        uses = self._uses
        for name in names:
            uses[name] = uses.get(name, 0) + 1

    def drop(self, *names: str) -> None:
        """Gives back those that nobody holds any more."""
        uses = self._uses
        unused: list[str] = []
        for name in names:
            uses[name] -= 1
            if not uses[name]:
                del uses[name]
                unused.append(name)
        if unused:
            self._device.free(tuple(unused))
