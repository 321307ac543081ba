"""Which rows decode in a plan, and the pages for where they go.  Two countdowns say when to look.

In a steady step nothing here looks at single rows.  `until_length`: launches until the next row
ends by length; `until_grant`: launches until a row stands before a position without a page.
"""

from __future__ import annotations

import numpy as np

from stepahead.scheduler.lifetime import Entry, Lifetime, Standing
from stepahead.scheduler.policy import victims
from stepahead.scheduler.table import NOBODY, RowSet
from stepahead.scheduler.turns import Turns

# positions for which pages are granted ahead: rows are looked at once in so many steps
HORIZON = 8
_FAR = 1 << 30


class Room:
    """Makes room for needy rows of one plan by preempting the youngest, as few as will do."""

    def __init__(self, life: Lifetime) -> None:
        table = life.table
        running = [
            e for e in life.entries if e and e.standing in (Standing.PREFILL, Standing.DECODE)
        ]
        finishing = [e.slot for e in running if table.budget[e.slot] <= 0]
        self._life = life
        # what marked and finishing slots hold comes back when their flights retire; some of it may
        # be shared and stay, which puts a row off once more and no longer
        self._coming = sum(int(table.num_pages[slot]) for slot in (*life.ghosts, *finishing))
        self._losers = victims(e for e in running if table.budget[e.slot] > 0)

    def make(self, needy: Entry, promised: int, owed: int) -> bool:
        """Whether a page beyond `promised` can be had now; `owed` of the coming ones are spoken
        for."""
        life, store = self._life, self._life.store
        while store.available <= promised:
            if self._coming > owed or not self._losers:
                return False
            if self._losers[-1].arrival <= needy.arrival:
                return False
            loser = self._losers.pop()
            pages = int(life.table.num_pages[loser.slot])
            life.preempt(loser)
            # without a flight that names it, its pages are back already
            self._coming += pages if loser.slot else 0
        return True


class DecodeRows:
    """The decode rows of the next plan: all of them, unless they take `turns`."""

    def __init__(self, life: Lifetime, page_size: int, turns: Turns | None = None) -> None:
        self.life = life
        self.table = life.table
        self.store = life.store
        self._page_size = page_size
        self._ahead = HORIZON * self.table.width
        self._turns = turns
        self._rows = NOBODY
        self._until_length = self._until_grant = _FAR
        self._countdowns: dict[int, tuple[int, int]] = {}  # of a round's rows, by their set

    def select(self, grants: list[np.ndarray], step: int) -> RowSet:
        """The rows that can decode in plan `step`; what pages they were given is added to
        `grants`."""
        if self._turns is not None:
            return self._take_turn(self._turns, grants, step)
        if self.life.changed:
            self._regroup()
        if self._until_grant > 0:
            return self._rows
        return self._grant(grants)

    def _take_turn(self, turns: Turns, grants: list[np.ndarray], step: int) -> RowSet:
        self._look_again(turns.rows(step), turns.steady)
        rows = self._rows if self._until_grant > 0 else self._grant(grants)
        if rows.count or not self._rows.count:
            return rows
        # pages are short for all whose turn it is: then it is anybody's, or nobody would get ahead
        self._look_at(turns.everybody(step))
        return self._grant(grants)

    def repeats(self, rows: RowSet) -> bool:
        """Whether the next plan decodes just these rows again, and none needs a page or ends."""
        return (
            rows is self._rows
            and not self.life.changed
            and self._until_grant > 0
            and self._until_length > 1
        )

    @property
    def idle(self) -> bool:
        """Whether no row is there to decode, pages or not."""
        if self._turns is not None:
            return not self._turns.count
        return not (self.table.decoding.any() if self.life.changed else self._rows.count)

    def _regroup(self) -> None:
        table = self.table
        self.life.changed = False
        rows = table.rows(table.decoding.nonzero()[0])
        if table.width == 1:  # else each step moves each row by what came of its drafts
            table.stand(rows)
        self._look_at(rows)

    def _look_again(self, rows: RowSet, steady: bool) -> None:
        """As `_look_at`, but for the rows of a steady round, whose countdowns have gone on."""
        if not steady:
            self._countdowns.clear()
        if (found := self._countdowns.get(id(rows))) is None:
            self._look_at(rows)
        else:
            self._rows = rows
            self._until_length, self._until_grant = found

    def _look_at(self, rows: RowSet) -> None:
        self._rows = rows
        self._until_length = int(self.table.budget[rows.at].min()) if rows.count else _FAR
        self._until_grant = self._next_need(rows)

    def _next_need(self, rows: RowSet) -> int:
        """Steps until a row stands before a position without a page."""
        if not rows.count:
            return _FAR
        table, at = self.table, rows.at
        ahead = (table.covered[at] - table.planned[at]) // table.width
        ahead[table.covered[at] >= table.limit[at]] = _FAR
        return int(ahead.min())

    def _grant(self, grants: list[np.ndarray]) -> RowSet:
        """Pages for the positions ahead, in one batch; where they are short, for the next only."""
        table, rows = self.table, self._rows
        want = np.minimum(table.planned[rows.at] + self._ahead, table.limit[rows.at])
        lack = want - table.covered[rows.at]
        index = (lack > 0).nonzero()[0]
        counts = -(-lack[index] // self._page_size)
        if int(counts.sum()) <= self.store.available:
            self._hand_out(rows.slots[index], counts, grants)
            self._until_grant = self._next_need(rows)
            return rows
        return self._ration(rows, grants)

    def _hand_out(self, slots: np.ndarray, counts: np.ndarray, grants: list[np.ndarray]) -> None:
        table = self.table
        if not len(slots):
            return
        pages = self.store.take(int(counts.sum()))
        owners = slots
        first = table.num_pages[slots]
        if counts.max() > 1:
            owners = np.repeat(slots, counts)
            within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
            first = np.repeat(first, counts) + within
        table.pages[owners, first] = pages
        table.num_pages[slots] += counts
        table.covered[slots] += counts * self._page_size
        flat = np.empty((len(owners), 3), np.int32)
        flat[:, 0], flat[:, 1], flat[:, 2] = owners, first, pages
        grants.append(flat.reshape(-1))

    def _ration(self, rows: RowSet, grants: list[np.ndarray]) -> RowSet:
        """Pages are short: those of the next step for each row that lacks them, oldest first.

        Rows that get none are left out of this plan; younger requests are preempted for them.
        """
        table, entries = self.table, self.life.entries
        at = rows.at
        lack = np.minimum(table.planned[at] + table.width, table.limit[at]) - table.covered[at]
        pages = dict(zip(rows.slots.tolist(), (-(-lack // self._page_size)).tolist(), strict=True))
        needy = [entry for slot in rows.slots[lack > 0] if (entry := entries[slot]) is not None]
        room = Room(self.life)
        granted: list[int] = []
        left_out: list[int] = []
        promised = owed = 0
        for entry in sorted(needy, key=lambda entry: entry.arrival):
            if not table.decoding[entry.slot]:
                continue  # preempted for an older one
            more = pages[entry.slot] - 1  # beside the page that is asked for
            if room.make(entry, promised + more, owed + more):
                granted.append(entry.slot)
                promised += pages[entry.slot]
            else:
                left_out.append(entry.slot)
                owed += pages[entry.slot]
        counts = np.array([pages[slot] for slot in granted], np.int64)
        self._hand_out(np.array(granted, np.int64), counts, grants)
        if not left_out and not self.life.changed:
            self._until_grant = self._next_need(rows)
            return rows  # all have a page for now; only those for later are short
        keep = table.decoding[rows.slots] & ~np.isin(rows.slots, left_out)
        # the countdown stays at zero, so the next plan looks again
        return table.rows(rows.slots[keep])

    def advance(self, rows: RowSet) -> tuple[int, ...]:
        """Moves the rows' frontiers one step; the slots whose last output that will bring, under
        drafts nobody: what it brings is seen when it lands."""
        table = self.table
        table.launch(rows)
        self._until_grant -= 1
        self._until_length -= 1
        if self._turns is not None:
            self._countdowns[id(rows)] = self._until_length, self._until_grant
        if self._until_length > 0:
            return ()
        ending = rows.slots[table.budget[rows.at] <= 0]
        # a row certain to end by length is never launched again
        table.decoding[ending] = False
        self.life.changed = True
        return tuple(ending.tolist()) if table.width == 1 else ()

    def landed(self, rows: RowSet) -> None:
        """Under drafts: a step of `rows` has brought more tokens than were promised, so that some
        may be certain to end by now."""
        table, slots = self.table, rows.slots
        if rows is self._rows and not self.life.changed:
            self._until_length = int(table.budget[rows.at].min(initial=_FAR))
            if self._until_length > 0:
                return
        certain = slots[(table.budget[slots] <= 0) & table.decoding[slots]]
        if len(certain):
            table.decoding[certain] = False
            self.life.changed = True
        elif not self.life.changed and self._rows.count:
            self._until_length = int(table.budget[self._rows.at].min())
