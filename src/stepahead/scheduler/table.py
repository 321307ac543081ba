"""The rows on the host: one numpy column a field, one entry a slot.  Knows no policy.

Frontiers of a slot, in positions of its sequence:

    0 ......... settled ......... planned ....... covered
      KV written |  in_flight      | pages granted |
                                   `length` known tokens; the last of them is in `last`

    settled  = planned - in_flight
    promised = output tokens that unretired plans will bring (placeholders)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowSet:
    """The slots that decode in a plan; immutable, so a flight can keep what it was launched with.

    `slots` int64[n] ascending.  `span` is the slice of columns they lie in and `ones` what to add
    there for each of them: 1, or a mask where the span has holes.  `at` selects exactly the rows.
    `wire` int32[n] are the slots as a plan carries them, `rids` int64[n] whose rows they are.
    """

    slots: np.ndarray
    wire: np.ndarray
    rids: np.ndarray
    span: slice
    ones: int | np.ndarray
    at: slice | np.ndarray

    @property
    def count(self) -> int:
        """How many rows."""
        return len(self.slots)


def row_set(slots: np.ndarray, rids: np.ndarray) -> RowSet:
    """A RowSet of ascending int64 slots and their request ids."""
    wire = slots.astype(np.int32)
    if not len(slots):
        return RowSet(slots, wire, rids, slice(0, 0), 1, slice(0, 0))
    low, high = int(slots[0]), int(slots[-1]) + 1
    span = slice(low, high)
    if high - low == len(slots):
        return RowSet(slots, wire, rids, span, 1, span)
    mask = np.zeros(high - low, np.int32)
    mask[slots - low] = 1
    return RowSet(slots, wire, rids, span, mask, slots)


class Table:
    """Columns by slot.  Slot 0 is padding.  Slots are handed out lowest first, so that the rows
    in use lie close together and columns are used as slices, not gathers."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.num_slots = num_slots
        self.max_pages = max_pages
        # one block, so that a plan or a retirement moves several columns in one operation
        self.frontier = np.zeros((5, num_slots), np.int32)
        self.planned, self.in_flight, self.promised, self.pins, self.budget = self.frontier
        self.length = np.zeros(num_slots, np.int32)
        self.covered = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)  # positions that will ever be computed
        self.last = np.zeros(num_slots, np.int32)
        self.cell = np.zeros(num_slots, np.int64)  # the mirror's cell for `last`
        self.deaf = np.zeros(num_slots, np.bool_)  # ended: what still lands is not for it
        self.watch = np.zeros(num_slots, np.uint8)  # what its stop rule looks at
        self.decoding = np.zeros(num_slots, np.bool_)
        self.held = np.zeros(num_slots, np.int32)  # leading pages that are in the prefix tree
        self.num_pages = np.zeros(num_slots, np.int32)
        self.generation = np.zeros(num_slots, np.int32)
        self.rid = np.zeros(num_slots, np.int64)
        self.pages = np.zeros((num_slots, max_pages), np.int32)
        self._free = list(range(1, num_slots))

    @property
    def free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take_slot(self) -> int:
        """The lowest free slot."""
        return heapq.heappop(self._free)

    def give_slot(self, slot: int) -> None:
        """Clears the slot and takes it back; what still names its old generation is void."""
        assert self.pins[slot] == 0, "a slot was given back while a flight names it"
        self.generation[slot] += 1
        self.frontier[:, slot] = 0
        self.deaf[slot] = self.decoding[slot] = False
        self.num_pages[slot] = self.held[slot] = self.covered[slot] = 0
        heapq.heappush(self._free, slot)

    def rows(self, slots: np.ndarray) -> RowSet:
        """A RowSet of these ascending int64 slots as they are now."""
        return row_set(slots, self.rid[slots])

    def pages_of(self, slot: int) -> np.ndarray:
        """The slot's page table, int32[num_pages] (a view)."""
        return self.pages[slot, : self.num_pages[slot]]

    def settled(self, slot: int) -> int:
        """Positions whose KV is known to be written."""
        return int(self.planned[slot] - self.in_flight[slot])
