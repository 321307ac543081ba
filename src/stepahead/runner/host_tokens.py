"""The tokens of rows whose logits processor wants them on the host.

Kept beside the thread that launches, where tokens are heard as they land; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class HostTokens:
    """Prompt and outputs by slot, of the slots that asked for it."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def enter(self, slot: int, tokens: np.ndarray) -> None:
        """A new owner, with what is known of it."""
        self._tokens[slot] = tokens.tolist()

    def leave(self, slot: int) -> None:
        """The slot is given up, whether or not its owner had asked."""
        self._tokens.pop(slot, None)

    def hear(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """A step has landed: `counts` int[m] tokens of each slot, one slot's after the other's."""
        ends = counts.cumsum()
        for slot, count, end in zip(slots.tolist(), counts.tolist(), ends.tolist(), strict=True):
            if slot in self._tokens:
                self._tokens[slot] += tokens[end - count : end].tolist()

    def along(
        self, slots: Sequence[int], widths: Iterable[int], drafts: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """int32 tokens before each sampled position, `widths` of each slot, with the drafts that
        stand between; none for slots that didn't ask."""
        found: list[np.ndarray] = []
        for slot, width, run in zip(slots, widths, drafts, strict=True):
            known = np.array([*self._tokens.get(slot, ()), *run], np.int32)
            settled = len(known) - len(run)
            found += [known[: settled + ahead] for ahead in range(width)]
        return found
