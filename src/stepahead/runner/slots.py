"""What the device keeps by slot: page table and true length; and the host's shadow of lengths.

Differences are staged by the plan and applied on the forward stream, so that a slot's first write
by a new owner follows the old owner's last read by construction.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepahead.plan import Join, Plan


class SlotState:
    """Arrays by slot, on the device: `pages_dev` int64[slots, max_pages], `length_dev` int64[slots]
    (positions computed).  `computed` int64[slots] is the host's exact prediction of it."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.pages_dev = torch.zeros((num_slots, max_pages), dtype=torch.int64)
        self.length_dev = torch.zeros(num_slots, dtype=torch.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self._max_pages = max_pages

    def apply(self, joined_dev: Tensor | None, changes_dev: Tensor) -> None:
        """Enters page changes int64[2, k] as `page_changes` gives them; on the forward stream.

        The page tables of slots with new owners, `joined_dev` int64[j], are cleared first: what is
        read past an owner's pages is the padding page, not a page of somebody else.
        """
        if joined_dev is not None:
            self.pages_dev[joined_dev] = 0
        self.pages_dev.view(-1)[changes_dev[0]] = changes_dev[1]

    def page_changes(self, plan: Plan) -> np.ndarray | None:
        """int64[2, k]: (flat index, page) of each entry the plan brings; None if there is none."""
        parts = [self._joined(join) for join in plan.joins]
        if len(plan.grants):
            table = plan.grant_table.astype(np.int64)
            parts.append(np.stack([table[:, 0] * self._max_pages + table[:, 1], table[:, 2]]))
        return np.concatenate(parts, axis=1) if parts else None

    def _joined(self, join: Join) -> np.ndarray:
        index = join.slot * self._max_pages + np.arange(len(join.pages))
        return np.stack([index, join.pages.astype(np.int64)])
