"""What a landed step does to the columns: tokens become known, prompts' pages are published.

Only rows that still listen are touched; a row that ended while its step was in the air (overshoot)
gives back its share of the frontiers and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepahead.scheduler.lifetime import Lifetime
from stepahead.scheduler.table import RowSet


class HeardTokens(NamedTuple):
    """Who was heard: slots int64[n], request ids int64[n], tokens int32[n], and the ids of those
    whose first token it is."""

    slots: np.ndarray
    rids: np.ndarray
    tokens: np.ndarray
    first: tuple[int, ...] = ()

    def joined(self, more: HeardTokens) -> HeardTokens:
        """These, then `more`."""
        return HeardTokens(
            np.append(self.slots, more.slots),
            np.append(self.rids, more.rids),
            np.append(self.tokens, more.tokens),
            self.first + more.first,
        )


class Settler:
    """Applies results to the table and the mirror.  Ends nobody: it says where to look."""

    def __init__(self, life: Lifetime, page_size: int) -> None:
        self.life = life
        self.table = life.table
        self.store = life.store
        self._page_size = page_size

    def rows(self, rows: RowSet, tokens: np.ndarray) -> HeardTokens:
        """Decode rows and their int32[n] tokens."""
        table, span = self.table, rows.span
        table.frontier[1:4, span] -= rows.ones
        at, slots, rids, ones = rows.at, rows.slots, rows.rids, rows.ones
        if self.life.ghosts and (deaf := table.deaf[at]).any():
            # overshoot: these rows ended while this step was in the air
            self.life.counters.overshoot_rows += int(deaf.sum())
            live = ~deaf
            tokens, rids, slots = tokens[live], rids[live], slots[live]
            at, span, ones = slots, slots, 1
        self._append(at, span, ones, slots, tokens)
        return HeardTokens(slots, rids, tokens)

    def _append(
        self,
        at: slice | np.ndarray,
        span: slice | np.ndarray,
        ones: int | np.ndarray,
        slots: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """The rows' inputs have KV now and go to the mirror; `tokens` are the new last ones."""
        table, size = self.table, self._page_size
        position = table.length[at] - 1
        turned = ((position & (size - 1)) == 0).nonzero()[0]
        if len(turned):
            turning = slots[turned]
            table.cell[turning] = table.pages[turning, position[turned] // size] * size
        self.store.mirror.by_cell[table.cell[at]] = table.last[at]
        table.last[at] = tokens
        table.cell[span] += ones
        table.length[span] += ones

    def chunks(self, chunks: np.ndarray, tokens: np.ndarray) -> HeardTokens:
        """Prompt chunks int32[c, 4] as in the plan, and int32[s] tokens of those that sample."""
        table = self.table
        slots, counts, samples = chunks[:, 0], chunks[:, 2], chunks[:, 3]
        table.in_flight[slots] -= counts
        table.pins[slots] -= 1
        table.promised[slots] -= samples
        live = ~table.deaf[slots]
        self._publish(slots[live])
        sampled = samples > 0
        heard = live[sampled]
        slots, tokens = slots[sampled][heard], tokens[heard]
        self.life.counters.overshoot_rows += int((~heard).sum())
        self._first_token(slots, tokens)
        owners = [self.life.entries[slot] for slot in slots.tolist()]
        # a request that was preempted with outputs comes back with them among its tokens
        first = tuple(e.request.rid for e in owners if e and len(e.tokens) == e.prompt_len)
        return HeardTokens(slots, table.rid[slots], tokens, first)

    def _first_token(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        table, size = self.table, self._page_size
        position = table.length[slots]
        table.last[slots] = tokens
        # where the position has no page yet, _append computes the cell when it has
        index = np.minimum(position // size, table.max_pages - 1)
        table.cell[slots] = table.pages[slots, index] * size + position % size
        table.length[slots] += 1

    def _publish(self, slots: np.ndarray) -> None:
        """HeardTokens prompt pages go to the tree, so that others find them while these run."""
        table = self.table
        held = table.held[slots].tolist()
        settled = table.planned[slots] - table.in_flight[slots]
        full = (settled // self._page_size).tolist()
        for slot, first, end in zip(slots.tolist(), held, full, strict=True):
            if first < end:
                table.held[slot] += self.store.publish(table.pages[slot], first, end)
