"""Who decodes in which plan, where the model is cut into stages.

A row's token is known to the first stage when it has come through all of them: S plans later, or
when it has been retired and the host brings it.  Only then is the row planned again (its cadence).
So that the stages are busy meanwhile, the rows are spread over the plans in the air: a plan takes
those that have waited longest, and no more than its share.

While nobody comes or goes, the plans of one round repeat in turn, and nothing here looks at rows.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from stepahead.scheduler.lifetime import Lifetime
from stepahead.scheduler.table import NOBODY, RowSet


class Turns:
    """`turns` plans take all rows once.  `lag`: so many plans after it was sampled a token is in
    the relay; None where the host brings all tokens."""

    def __init__(self, life: Lifetime, turns: int, lag: int | None) -> None:
        self._life = life
        self._table = life.table
        self._turns = turns
        self._lag = lag
        self._sampled = np.zeros(life.table.num_slots, np.int64)  # the last step that named the row
        self._count = 0  # rows that decode
        self._round: deque[RowSet] = deque(maxlen=turns)  # the newest plans' rows, oldest first
        self.steady = False  # the round has all rows, each once: the next ones are the same again

    def rows(self, step: int) -> RowSet:
        """Those whose turn it is in plan `step`; nobody where all their tokens are on the way."""
        self._follow()
        if self.steady:
            return self._round[0]
        ready = self._ready(step)
        share = -(-self._count // self._turns)
        if len(ready) > share:
            longest = np.argsort(self._sampled[ready], kind="stable")[:share]
            ready = np.sort(ready[longest])
        return self._table.rows(ready) if len(ready) else NOBODY

    def everybody(self, step: int) -> RowSet:
        """All rows that may decode in plan `step`, whoever's turn it is."""
        self._break_round()
        return self._table.rows(self._ready(step))

    def waiting(self, step: int) -> bool:
        """Whether rows are there to decode, and the token of each is still on its way."""
        return not self.rows(step).count and self._count > 0

    @property
    def count(self) -> int:
        """Rows that have outputs left to decode."""
        self._follow()
        return self._count

    def took(self, rows: RowSet, sampling: np.ndarray, step: int) -> None:
        """Plan `step` decodes `rows` and ends the prompts in the slots `sampling` int[s]."""
        self._sampled[rows.slots] = step
        self._sampled[sampling] = step
        if not rows.count:
            return
        repeats = self.steady and rows is self._round[0]
        self._round.append(rows)
        whole = len(self._round) == self._turns
        steady = whole and sum(turn.count for turn in self._round) == self._count
        if steady and not repeats:
            self._table.stand_in_turn(self._round)
        self.steady = steady

    def _follow(self) -> None:
        if self._life.changed:
            self._life.changed = False
            self._break_round()
            self._count = int(self._table.decoding.sum())

    def _break_round(self) -> None:
        self._round.clear()
        self.steady = False
        self._table.stand_in_turn(())

    def _ready(self, step: int) -> np.ndarray:
        """int64[r], ascending."""
        table = self._table
        slots = table.decoding.nonzero()[0]
        ready = table.promised[slots] == 0
        if self._lag is not None:
            ready |= step - self._sampled[slots] >= self._lag
        return slots[ready]
