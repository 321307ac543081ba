"""The rows on the host: one numpy column a field, one entry a slot.  Knows no policy.

Frontiers of a slot, in positions of its sequence:

    0 ......... settled ......... planned ....... covered
      KV written |  in_flight      | pages granted |
                                   `length` known tokens; the last of them is in `last`

    settled  = planned - in_flight
    promised = output tokens that unretired plans will bring (placeholders)

**The standing rows.**  In steady decode the same rows are launched and land again and again.  Of
these steps only the launches are counted and the tokens kept; nothing moves in the columns until
somebody looks at one that would have moved.  Looking is what brings them up to date (`fold`), so
there is no way to see them behind.  Rows that take turns stand side by side, a set for each turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stepahead.cache.tokens import TokenMirror

# planned, in_flight, promised, pins, budget of a row that decodes one position; under drafts a row
# has more of them in a step, and is promised one token at least
_LAUNCH = np.array([[1], [1], [1], [1], [-1]], np.int32)
_LAND = np.array([[0], [-1], [-1], [-1], [0]], np.int32)
_EACH_TOKEN = np.array([[1], [0], [0], [0], [-1]], np.int32)
# landed steps that are kept for later, at most: else a long answer would pile up where no page is
# granted and nobody looks
_MOST_KEPT = 16


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


NOBODY = row_set(np.zeros(0, np.int64), np.zeros(0, np.int64))


class _Turn:
    """Rows that stand beside others, with which they take turns; and what is not in the columns."""

    __slots__ = ("kept", "launches", "rows")

    def __init__(self, rows: RowSet) -> None:
        self.rows = rows
        self.launches = 0
        self.kept: list[np.ndarray] = []


class Table:
    """Columns by slot.  Slot 0 is padding.  Slots are handed out lowest first, so that the rows
    in use lie close together and columns are used as slices, not gathers.

    The columns that move with every step are behind properties, which fold."""

    def __init__(self, num_slots: int, max_pages: int, mirror: TokenMirror, width: int = 1) -> None:
        """`width`: positions of a decode row in a step."""
        self.num_slots = num_slots
        self.width = width
        self._places = np.arange(width)
        self._launch = _LAUNCH * np.array([[width], [width], [1], [1], [1]], np.int32)
        self._run_landed = np.array([[-width], [-width], [-1], [-1], [1]], np.int32)
        self.max_pages = max_pages
        # one block, so that a launch or a landing moves several columns in one operation
        self._frontier = np.zeros((5, num_slots), np.int32)
        self._planned, self._in_flight, self._promised, self._pins, self._budget = self._frontier
        self._length = np.zeros(num_slots, np.int32)
        self._last = np.zeros(num_slots, np.int32)
        self._mirror = mirror
        self._page_shift = mirror.page_size.bit_length() - 1  # page sizes are powers of two
        # the standing rows, and their steps that are not in the columns yet
        self._standing = NOBODY
        self._launches = 0
        self._kept: list[np.ndarray] = []  # int32[n] tokens of each landed step
        self._turns: tuple[_Turn, ...] = ()
        self.covered = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)  # positions that will ever be computed
        self.deaf = np.zeros(num_slots, np.bool_)  # ended: what still lands is not for it
        self.watch = np.zeros(num_slots, np.uint8)  # what its stop rule looks at
        self.decoding = np.zeros(num_slots, np.bool_)
        self.held = np.zeros(num_slots, np.int32)  # leading pages that are in the prefix tree
        self.num_pages = np.zeros(num_slots, np.int32)
        self.generation = np.zeros(num_slots, np.int32)
        self.rid = np.zeros(num_slots, np.int64)
        # drafts may be planned behind the last page
        self.pages = np.zeros((num_slots, max_pages + width - 1), np.int32)
        self._free = list(range(1, num_slots))

    # --- the columns that move ----------------------------------------------------------------

    @property
    def frontier(self) -> np.ndarray:
        """int32[5, slots]: planned, in_flight, promised, pins, budget."""
        self.fold()
        return self._frontier

    @property
    def planned(self) -> np.ndarray:
        """Positions scheduled."""
        self.fold()
        return self._planned

    @property
    def in_flight(self) -> np.ndarray:
        """Positions of unretired plans."""
        self.fold()
        return self._in_flight

    @property
    def promised(self) -> np.ndarray:
        """Output tokens that unretired plans will bring."""
        self.fold()
        return self._promised

    @property
    def pins(self) -> np.ndarray:
        """Flights that name the slot."""
        self.fold()
        return self._pins

    @property
    def budget(self) -> np.ndarray:
        """Outputs that are not launched yet."""
        self.fold()
        return self._budget

    @property
    def length(self) -> np.ndarray:
        """Known tokens."""
        self.fold()
        return self._length

    @property
    def last(self) -> np.ndarray:
        """The newest known token, whose KV is not written yet."""
        self.fold()
        return self._last

    def fold(self) -> None:
        """Brings the columns and the mirror up to date with the standing rows' steps."""
        for turn in self._turns:
            self._fold_turn(turn)
        if not (self._launches or self._kept):
            return
        rows, launches, kept = self._standing, self._launches, [*self._kept]
        self._launches = 0
        self._kept.clear()
        self._frontier[:, rows.span] += _moved(launches, len(kept)) * rows.ones
        if kept:
            self._append(rows.at, rows.slots, kept)

    def _fold_turn(self, turn: _Turn) -> None:
        rows, launches, kept = turn.rows, turn.launches, [*turn.kept]
        if not (launches or kept):
            return
        turn.launches = 0
        turn.kept.clear()
        self._frontier[:, rows.span] += _moved(launches, len(kept)) * rows.ones
        if kept:
            self._append(rows.at, rows.slots, kept)

    def folded(self) -> np.ndarray:
        """`frontier` as it would be, a copy.  For checks: they must not do the folding that some
        other place has left out."""
        frontier, rows = self._frontier.copy(), self._standing
        frontier[:, rows.span] += _moved(self._launches, len(self._kept)) * rows.ones
        for turn in self._turns:
            moved = _moved(turn.launches, len(turn.kept))
            frontier[:, turn.rows.span] += moved * turn.rows.ones
        return frontier

    def stand(self, rows: RowSet) -> None:
        """From now on the steps of `rows`, this very object, are counted and kept."""
        self.fold()
        self._standing = rows

    def stand_in_turn(self, rounds: Iterable[RowSet]) -> None:
        """As `stand`, for rows that take turns: from now on the steps of each of these objects."""
        self.fold()
        self._turns = tuple(map(_Turn, rounds))

    def _turn_of(self, rows: RowSet) -> _Turn | None:
        for turn in self._turns:
            if turn.rows is rows:
                return turn
        return None

    def flying(self, rows: RowSet) -> bool:
        """Whether each of them has a token on its way."""
        turn = self._turn_of(rows)
        if turn is None:
            return bool((self.promised[rows.at] > 0).all())
        return int(self._promised[rows.at].min()) + turn.launches > len(turn.kept)

    def launch(self, rows: RowSet) -> None:
        """A step in which each of `rows` decodes one position is on its way."""
        if rows is self._standing:
            self._launches += 1
        elif (turn := self._turn_of(rows)) is not None:
            turn.launches += 1
        else:
            self.frontier[:, rows.span] += self._launch * rows.ones

    def land(self, rows: RowSet, tokens: np.ndarray) -> None:
        """A step of `rows` has landed with int32[n] `tokens`, and all of them still listen."""
        if rows is not self._standing:
            self._land_turn(rows, tokens)
            return
        self._kept.append(tokens)
        if len(self._kept) == _MOST_KEPT:
            self.fold()

    def _land_turn(self, rows: RowSet, tokens: np.ndarray) -> None:
        turn = self._turn_of(rows)
        if turn is None:
            self.land_for(rows, rows.at, rows.slots, tokens)
            return
        turn.kept.append(tokens)
        if len(turn.kept) == _MOST_KEPT:
            self.fold()

    def land_for(
        self, rows: RowSet, at: slice | np.ndarray, slots: np.ndarray, tokens: np.ndarray
    ) -> None:
        """A step of `rows` has landed; int32[n] `tokens` are for `slots`, `at` in the columns."""
        # first what landed before: tokens are appended in order
        self.frontier[:, rows.span] += _LAND * rows.ones
        self._append(at, slots, [tokens])

    def _append(self, at: slice | np.ndarray, slots: np.ndarray, landed: list[np.ndarray]) -> None:
        """`landed`: int32[n] tokens of k steps.  The inputs of these steps have KV now and go to
        the mirror; what the newest brought are the new last tokens."""
        steps, mask = len(landed), self._mirror.page_size - 1
        inputs = np.empty((steps, len(slots)), np.int32)
        inputs[0] = self._last[at]
        for step, tokens in enumerate(landed[:-1], 1):
            inputs[step] = tokens
        position = self._length[at] + np.arange(-1, steps - 1)[:, None]
        page = self.pages[slots, position >> self._page_shift].astype(np.int64)
        self._mirror.by_cell[(page << self._page_shift) + (position & mask)] = inputs
        self._last[at] = landed[-1]
        self._length[at] += steps

    def land_runs(self, rows: RowSet, counts: np.ndarray, block: np.ndarray) -> None:
        """A step of `rows` has landed: of int32[n, width] `block` the first `counts`, int64[n], are
        new tokens.  What was planned beyond them is taken back."""
        at, mask = rows.at, self._mirror.page_size - 1
        self.frontier[:, at] += self._run_landed + _EACH_TOKEN * counts
        # the inputs up to the last right draft have KV now
        inputs = np.empty_like(block)
        inputs[:, 0], inputs[:, 1:] = self._last[at], block[:, :-1]
        written = self._places < counts[:, None]
        position = self._length[at][:, None] + self._places - 1
        page = self.pages[rows.slots[:, None], position >> self._page_shift].astype(np.int64)
        cell = (page << self._page_shift) + (position & mask)
        self._mirror.by_cell[cell[written]] = inputs[written]
        newest = block[np.arange(rows.count), np.maximum(counts, 1) - 1]
        self._last[at] = newest if counts.all() else np.where(counts, newest, self._last[at])
        self._length[at] += counts

    def cut(self, slot: int, count: int, last: int) -> None:
        """The newest `count` tokens of the slot are none of its output; `last` came before them."""
        self.frontier[0, slot] -= count
        self._length[slot] -= count
        self._last[slot] = last

    def newest(self, rows: RowSet) -> np.ndarray:
        """The input tokens int32[n] of the rows' next step, where all before it have landed."""
        if rows is self._standing and self._kept:
            return self._kept[-1]
        turn = self._turn_of(rows)
        if turn is not None and turn.kept:
            return turn.kept[-1]
        return self.last[rows.at].copy()

    # --- slots --------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take_slot(self) -> int:
        """The lowest free slot."""
        return heapq.heappop(self._free)

    def give_slot(self, slot: int) -> None:
        """Clears the slot and takes it back; what still names its old generation is void."""
        self.fold()
        assert self._pins[slot] == 0, "a slot was given back while a flight names it"
        self.generation[slot] += 1
        self._frontier[:, slot] = 0
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
        self.fold()
        return int(self._planned[slot] - self._in_flight[slot])


def _moved(launches: int, landings: int) -> np.ndarray:
    """int32[5, 1]: how far so many steps move a row's frontiers."""
    return _LAUNCH * launches + _LAND * landings
