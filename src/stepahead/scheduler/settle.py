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
    """Who was heard: `at` selects their columns, slots int64[n], request ids int64[n], tokens
    int32[n], and the ids of those whose first token it is."""

    at: slice | np.ndarray
    slots: np.ndarray
    rids: np.ndarray
    tokens: np.ndarray
    first: tuple[int, ...] = ()

    def joined(self, more: HeardTokens) -> HeardTokens:
        """These, then `more`."""
        slots = np.append(self.slots, more.slots)
        return HeardTokens(
            slots,
            slots,
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
        table = self.table
        if self.life.ghosts and (deaf := table.deaf[rows.at]).any():
            # overshoot: these rows ended while this step was in the air
            self.life.counters.overshoot_rows += int(deaf.sum())
            live = ~deaf
            tokens, rids, slots = tokens[live], rows.rids[live], rows.slots[live]
            table.land_for(rows, slots, slots, tokens)
            return HeardTokens(slots, slots, rids, tokens)
        table.land(rows, tokens)
        return HeardTokens(rows.at, rows.slots, rows.rids, tokens)

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
        table.last[slots] = tokens
        table.length[slots] += 1
        owners = [self.life.entries[slot] for slot in slots.tolist()]
        # a request that was preempted with outputs comes back with them among its tokens
        first = tuple(e.request.rid for e in owners if e and len(e.tokens) == e.prompt_len)
        return HeardTokens(slots, slots, table.rid[slots], tokens, first)

    def _publish(self, slots: np.ndarray) -> None:
        """Settled prompt pages go to the tree, so that others find them while these run."""
        table = self.table
        held = table.held[slots].tolist()
        settled = table.planned[slots] - table.in_flight[slots]
        full = (settled // self._page_size).tolist()
        for slot, first, end in zip(slots.tolist(), held, full, strict=True):
            if first < end:
                table.held[slot] += self.store.publish(table.pages[slot], first, end)
