"""What the device keeps by slot: page table, true length, where its rows sit; and the host's shadow
of lengths.

The page table is written on the schedule stream, behind the fence.  All else changes on the forward
stream, so that a slot's first write by a new owner follows the old owner's last.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepahead.plan import Join, Plan


class SlotState:
    """Arrays by slot, on the device: `pages_dev` int64[slots, max_pages]; `length_dev` int64[slots]
    (positions computed); `seat_dev` int64[slots] (whose table and length its rows go by: its own,
    or those of slot 0, the padding, once its stop token has been sampled, so that the steps it
    still has in the air write nothing); `limit_dev` int64[slots] (positions that will ever be
    computed, kept where there are drafts).  `computed` int64[slots] is the host's prediction of
    lengths: exact for rows that live, more for the dead, and under drafts an upper bound."""

    def __init__(self, num_slots: int, max_pages: int, place: torch.device) -> None:
        self.pages_dev = torch.zeros((num_slots, max_pages), dtype=torch.int64, device=place)
        self.length_dev = torch.zeros(num_slots, dtype=torch.int64, device=place)
        self.seat_dev = torch.arange(num_slots, device=place)
        self.limit_dev = torch.zeros(num_slots, dtype=torch.int64, device=place)
        self.computed = np.zeros(num_slots, np.int64)
        self._max_pages = max_pages

    def apply(self, joined_dev: Tensor | None, changes_dev: Tensor) -> None:
        """Enters page changes int64[2, k] as `page_changes` gives them; on the schedule stream.

        The page tables of slots with new owners, `joined_dev` int64[j], are cleared first: what is
        read past an owner's pages is the padding page, not a page of somebody else.
        """
        if joined_dev is not None:
            self.pages_dev[joined_dev] = 0
        self.pages_dev.view(-1)[changes_dev[0]] = changes_dev[1]

    def revive(self, joined_dev: Tensor) -> None:
        """Slots int64[j] have new owners, who live; on the forward stream."""
        self.seat_dev.index_copy_(0, joined_dev, joined_dev)

    def bury(self, slots_dev: Tensor, ended_dev: Tensor) -> None:
        """Rows of slots int64[r] where `ended_dev` bool[r] write nothing any more; on the forward
        stream.  The dead stay dead, whatever they go on to sample."""
        seats = self.seat_dev.index_select(0, slots_dev)
        self.seat_dev.index_copy_(0, slots_dev, seats.masked_fill_(ended_dev, 0))

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
