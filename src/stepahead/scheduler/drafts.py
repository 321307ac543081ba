"""What a landed step does under drafts: each row brings a run of tokens, one at least.

A row has `width` positions in a step: its last token, and drafts.  It was planned as if all drafts
were right; what was wrong is taken back here.  So `planned` is an upper bound while a step is in
the air, and `settled` is exact.

    launch     planned += width, in_flight += width, promised += 1
    landing    planned -= width - c, in_flight -= width, promised -= 1       for c new tokens

The device ends a run at a stop token and at the row's limit.  Stop strings are found here, and what
came after one in its run is cut off: it is none of the row's output.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from stepahead.scheduler.lifetime import Entry, Lifetime
from stepahead.scheduler.settle import HeardTokens
from stepahead.scheduler.table import RowSet
from stepahead.types import DraftCounts, Finish, FinishReason

_MOST_BLOCKS = 32


class End(Protocol):
    """How a request is ended."""

    def __call__(
        self, entry: Entry, reason: FinishReason, stop: tuple[int | str, int] | None = None
    ) -> Finish:
        """Marks it ended; its one terminal message."""
        ...


class Runs(NamedTuple):
    """The runs of a landed step.  `kept` bool[n * width]: which of the result's tokens are output;
    `heard` are these; `requests` int64[m]: whose they are, each once."""

    heard: HeardTokens
    requests: np.ndarray
    kept: np.ndarray
    finishes: list[Finish]


class RunSettler:
    """Applies runs to the table, and ends who ends within one.  In steady decode nothing here looks
    at single rows but those whose token somebody watches for."""

    def __init__(self, life: Lifetime, end: End) -> None:
        width = life.table.width
        self.life = life
        self.table = life.table
        self._end = end
        self._places = np.arange(width)
        self._blocks: list[np.ndarray] = []  # of the newest steps, to be counted together
        self._rows = self._drafted = self._proposed = 0
        self._accepted_at = np.zeros(width - 1, np.int64)

    def rows(self, rows: RowSet, tokens: np.ndarray, ended: np.ndarray) -> Runs:
        """Decode rows and their int32[n * width] tokens, as in a Result; so is `ended` int32[e, 2]:
        runs that end after so many tokens."""
        block = tokens.reshape(-1, self.table.width)
        counts, room = self._new(rows, block)
        complete, most = ended[ended[:, 0] < rows.count].T
        counts[complete] = np.minimum(counts[complete], most)
        self.table.land_runs(rows, counts, block)
        kept, heard = self._heard(rows, counts, block)
        finishes = self._stopped(rows, block, counts, heard)
        if finishes:  # their runs were cut
            kept, heard = self._heard(rows, counts, block)
        finishes += self._ended(rows.slots[complete], "stop")
        full = (counts == room) & (counts > 0)
        if full.any():
            finishes += self._ended(rows.slots[full], "length")
        # the same array says that they are the same requests
        requests = rows.rids if counts.all() else rows.rids[counts > 0]
        return Runs(heard, requests, kept.reshape(-1), finishes)

    def _new(self, rows: RowSet, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n]: new tokens of each row, and the most that it may still have."""
        table, at = self.table, rows.at
        counts = (block >= 0).sum(1)
        live: slice | np.ndarray = slice(None)
        if self.life.ghosts and (deaf := table.deaf[at]).any():
            # overshoot: these rows ended while this step was in the air
            self.life.counters.overshoot_rows += int(deaf.sum())
            counts[deaf] = 0
            live = ~deaf
        assert counts[live].all(), "a row that lives got no token"
        self._blocks.append(block[live])
        if len(self._blocks) == _MOST_BLOCKS:
            self._tally()
        room = table.limit[at] + 1 - table.length[at]
        return np.minimum(counts, room), room

    def _heard(
        self, rows: RowSet, counts: np.ndarray, block: np.ndarray
    ) -> tuple[np.ndarray, HeardTokens]:
        kept = self._places < counts[:, None]
        owners = np.repeat(rows.slots, counts)
        return kept, HeardTokens(owners, owners, np.repeat(rows.rids, counts), block[kept])

    def _stopped(
        self, rows: RowSet, block: np.ndarray, counts: np.ndarray, heard: HeardTokens
    ) -> list[Finish]:
        """Ends the requests whose run completes a stop id or string, and cuts it there: `counts` is
        changed."""
        table, life = self.table, self.life
        flagged = life.stops.candidates(heard.tokens, table.watch[heard.slots])
        finishes: list[Finish] = []
        if not len(flagged):
            return finishes
        row, place = (self._places < counts[:, None]).nonzero()
        for i, at in zip(row[flagged].tolist(), place[flagged].tolist(), strict=True):
            if at >= counts[i]:
                continue  # it comes after the end
            entry = life.entries[int(rows.slots[i])]
            assert entry is not None, "a token was heard for a slot that nobody has"
            behind = int(counts[i]) - 1 - at
            count = int(table.length[entry.slot]) - entry.prompt_len - behind
            last = partial(life.last_outputs, entry, behind=behind)
            match = life.stops.matched(entry.rule, count, last)
            if match is not None:
                table.cut(entry.slot, behind, int(block[i, at]))
                counts[i] = at + 1
                finishes.append(self._end(entry, "stop", match))
        return finishes

    def _ended(self, slots: np.ndarray, reason: FinishReason) -> list[Finish]:
        """Ends the requests of these slots, unless something else has."""
        owners = (self.life.entries[slot] for slot in slots[~self.table.deaf[slots]].tolist())
        return [self._end(entry, reason) for entry in owners if entry is not None]

    def _tally(self) -> None:
        block = np.concatenate([np.zeros((0, self.table.width), np.int32), *self._blocks])
        self._blocks.clear()
        drafts = block[:, 1:]
        self._rows += len(block)
        self._accepted_at += np.count_nonzero(drafts >= 0, axis=0)
        # a row's drafts have no gap: where there is none there is none behind it
        self._drafted += int(np.count_nonzero(drafts[:, 0] >= -1))
        self._proposed += int(np.count_nonzero(drafts >= -1))

    def tallied(self) -> DraftCounts:
        """What came of drafts since the start."""
        self._tally()
        accepted_at = tuple(self._accepted_at.tolist())
        return DraftCounts(self._rows, self._drafted, self._proposed, accepted_at)


def with_chunks(runs: Runs, more: HeardTokens) -> Runs:
    """The same, then what the step's chunks brought."""
    requests = np.append(runs.requests, more.rids)
    return runs._replace(heard=runs.heard.joined(more), requests=requests)
