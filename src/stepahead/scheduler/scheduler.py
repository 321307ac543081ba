"""What runs next.  Plans on predicted lengths, retires what landed; knows no torch and no clock.

In a steady step nothing here loops over rows: columns move in a few vector operations, and two
countdowns say when the next row ends by length or needs a page.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from stepahead.cache.store import PageStore
from stepahead.errors import InvalidParameter, PoolFull
from stepahead.plan import NO_INTS, Join, Plan, Result
from stepahead.scheduler.heard import Heard, Launched
from stepahead.scheduler.lifetime import Entry, Lifetime, Stage
from stepahead.scheduler.policy import Limits, output_limit, spare_pages, victim
from stepahead.scheduler.stop import StopTable
from stepahead.scheduler.table import RowSet, Table, row_set
from stepahead.types import Finish, FinishReason, Load, Outputs, Request

# positions for which pages are granted ahead: rows are looked at once in so many steps
HORIZON = 8
# planned, in_flight, promised, pins, budget of a row that decodes one position
_LAUNCH = np.array([[1], [1], [1], [1], [-1]], np.int32)
_NOBODY = row_set(np.zeros(0, np.int64), np.zeros(0, np.int64))
_FAR = 1 << 30


class Scheduler:
    """Continuous batching over slots and pages.  `plan` and `retire` alternate as the loop likes."""

    def __init__(self, limits: Limits, stops: StopTable) -> None:
        self.limits = limits
        self.table = Table(limits.num_slots, limits.max_pages)
        self.store = PageStore(limits.num_pages, limits.page_size, limits.prefix_cache)
        self.stops = stops
        self.life = Lifetime(self.table, self.store, stops)
        self.load = Load(pages_total=limits.num_pages - 1)
        self._entries: dict[int, Entry] = {}
        self._waiting: list[tuple[int, Entry]] = []  # a heap by arrival: the preempted go first
        self._prefilling: list[Entry] = []
        self._launched: deque[Launched] = deque()
        self._rows = _NOBODY
        self._sent_rows = _NOBODY
        self._until_length = self._until_grant = _FAR
        self._step = self._arrivals = 0
        self._refused: Entry | None = None  # the first in the queue, when it could not be admitted
        self._refused_offer = 0  # and how many pages it was offered then

    # --- requests come and go -------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request has not had its terminal message, or a flight is in the air."""
        return bool(self._entries or self._launched)

    def running_ids(self) -> list[int]:
        """Ids of all requests that have not had their terminal message."""
        return list(self._entries)

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet retired."""
        return len(self._launched)

    def add(self, request: Request, wait: bool = True) -> None:
        """Takes a request in.  PromptTooLong if it can never be held; with `wait=False` also
        PoolFull if it can't be held now, decided on exact counts."""
        if request.rid in self._entries:
            raise InvalidParameter(f"request id {request.rid} is already running", "rid")
        prompt_len = len(request.prompt)
        most = output_limit(self.limits, prompt_len, request.params.max_tokens)
        if not wait and not self._holds_now(prompt_len):
            raise PoolFull("the engine is full at the moment; try again later", "prompt")
        self._arrivals += 1
        entry = Entry(request, self._arrivals, most, self.stops.rule(request.params))
        self._entries[request.rid] = entry
        heapq.heappush(self._waiting, (entry.arrival, entry))

    def _holds_now(self, prompt_len: int) -> bool:
        pages = -(-prompt_len // self.limits.page_size)
        free = self.store.available - spare_pages(self.life.running)
        return not self._waiting and self.life.running < self.limits.max_rows and pages <= free

    def abort(self, rid: int) -> Finish | None:
        """Ends a request now; its terminal message, or None if it has had one."""
        entry = self._entries.get(rid)
        if entry is None:
            return None
        self.life.counters.aborts += 1
        return self._end(entry, "abort")

    def fail_all(self, error: str) -> list[Finish]:
        """The runner is lost: every request ends with `error`, and nothing is in flight any more."""
        self._launched.clear()
        self.table.frontier[1:4] = 0
        finishes = [self._end(entry, "error", error=error) for entry in [*self._entries.values()]]
        self.life.sweep()
        self._waiting.clear()
        return finishes

    def flush_cache(self) -> int:
        """Forgets cached pages that nobody uses; returns how many."""
        return self.store.flush()

    def _end(
        self,
        entry: Entry,
        reason: FinishReason,
        stop: tuple[int | str, int] | None = None,
        error: str = "",
    ) -> Finish:
        del self._entries[entry.request.rid]
        if entry.stage is Stage.PREFILL:
            self._drop_prefill(entry)
        return self.life.end(entry, reason, stop, error)

    def _drop_prefill(self, entry: Entry) -> None:
        if entry in self._prefilling:
            self._prefilling.remove(entry)

    # --- plan -----------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before a flight lands."""
        grants: list[np.ndarray] = []
        rows = self._decode_rows(grants)
        chunks, joins = self._prefill(self.limits.max_step_tokens - rows.count)
        if not rows.count and not chunks:
            return None
        tokens = self.table.last[rows.at].copy() if self.limits.from_host else None
        ending = self._advance_rows(rows) if rows.count else ()
        table = np.array(chunks, np.int32).reshape(-1, 4)
        if chunks:
            ending += self._advance_chunks(table)
        return self._emit(rows, tokens, table, joins, grants, ending)

    def _emit(
        self,
        rows: RowSet,
        tokens: np.ndarray | None,
        chunks: np.ndarray,
        joins: Sequence[Join],
        grants: list[np.ndarray],
        ending: tuple[int, ...],
    ) -> Plan:
        leaves = NO_INTS
        if self.life.leaves:
            leaves = np.array(self.life.leaves, np.int32)
            self.life.leaves.clear()
        step = self._step
        self._step += 1
        self._launched.append(Launched(step, rows, chunks, ending))
        same, self._sent_rows = rows is self._sent_rows, rows
        counters = self.life.counters
        counters.steps += 1
        counters.launched_rows += rows.count
        counters.chunks += len(chunks)
        flat_grants = np.concatenate(grants) if grants else NO_INTS
        flat_chunks = chunks.reshape(-1) if len(chunks) else NO_INTS
        return Plan(step, rows.wire, same, tokens, flat_chunks, tuple(joins), flat_grants, leaves)

    def _decode_rows(self, grants: list[np.ndarray]) -> RowSet:
        if self.life.changed:
            self._regroup()
        if self._until_grant > 0:
            return self._rows
        return self._grant(grants)

    def _regroup(self) -> None:
        table = self.table
        self.life.changed = False
        self._rows = rows = table.rows(table.decoding.nonzero()[0])
        self._until_length = int(table.budget[rows.at].min()) if rows.count else _FAR
        self._until_grant = self._next_need(rows)

    def _next_need(self, rows: RowSet) -> int:
        """Steps until a row stands before a position without a page."""
        if not rows.count:
            return _FAR
        table, at = self.table, rows.at
        ahead = table.covered[at] - table.planned[at]
        ahead[table.covered[at] >= table.limit[at]] = _FAR
        return int(ahead.min())

    def _grant(self, grants: list[np.ndarray]) -> RowSet:
        """Pages for the positions ahead, in one batch; where they are short, for the next only."""
        table, rows = self.table, self._rows
        want = np.minimum(table.planned[rows.at] + HORIZON, table.limit[rows.at])
        lack = want - table.covered[rows.at]
        index = (lack > 0).nonzero()[0]
        counts = -(-lack[index] // self.limits.page_size)
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
        table.covered[slots] += counts * self.limits.page_size
        flat = np.empty((len(owners), 3), np.int32)
        flat[:, 0], flat[:, 1], flat[:, 2] = owners, first, pages
        grants.append(flat.reshape(-1))

    def _ration(self, rows: RowSet, grants: list[np.ndarray]) -> RowSet:
        """Pages are short: a page for each row that needs one now, oldest request first.

        Rows that get none are left out of this plan; younger requests are preempted for them.
        """
        table, entries = self.table, self.life.entries
        at = rows.at
        bare = (table.planned[at] >= table.covered[at]) & (table.planned[at] < table.limit[at])
        needy = [entry for slot in rows.slots[bare] if (entry := entries[slot]) is not None]
        left_out: list[int] = []
        for entry in sorted(needy, key=lambda entry: entry.arrival):
            if not table.decoding[entry.slot]:
                continue  # preempted for an older one
            while not self.store.available and self._make_room(entry, len(left_out)):
                pass
            if self.store.available:
                self._hand_out(np.array([entry.slot]), np.array([1]), grants)
            else:
                left_out.append(entry.slot)
        keep = table.decoding.copy()
        keep[left_out] = False
        # look again at the next plan: the rows left out must not wait for a change
        self.life.changed = True
        return table.rows(keep.nonzero()[0])

    def _make_room(self, needy: Entry, owed: int) -> bool:
        """Preempts one request younger than `needy`, unless pages enough are on their way."""
        life, table = self.life, self.table
        running = [e for e in life.entries if e and e.stage in (Stage.PREFILL, Stage.DECODE)]
        finishing = [e.slot for e in running if table.budget[e.slot] == 0]
        # what marked and finishing slots hold comes back when their flights retire
        coming = sum(int(table.num_pages[slot]) for slot in (*life.ghosts, *finishing))
        if coming > owed:
            return False
        loser = victim((e for e in running if table.budget[e.slot] > 0), needy)
        if loser is None:
            return False
        if loser.stage is Stage.PREFILL:
            self._drop_prefill(loser)
        life.preempt(loser)
        return True

    def _advance_rows(self, rows: RowSet) -> tuple[int, ...]:
        table = self.table
        table.frontier[:, rows.span] += _LAUNCH * rows.ones
        self._until_grant -= 1
        self._until_length -= 1
        if self._until_length > 0:
            return ()
        ending = rows.slots[table.budget[rows.at] == 0]
        # a row certain to end by length is never launched again
        table.decoding[ending] = False
        self.life.changed = True
        return tuple(ending.tolist())

    # --- prefill --------------------------------------------------------------------------

    def _prefill(self, budget: int) -> tuple[list[tuple[int, int, int, int]], list[Join]]:
        chunks: list[tuple[int, int, int, int]] = []
        joins: list[Join] = []
        begun = 0
        for entry in self._prefilling:
            if budget <= 0:
                break
            budget -= self._chunk(entry, int(self.table.planned[entry.slot]), budget, chunks)
            begun += 1
        self._requeue()
        while budget > 0 and (join := self._admit()) is not None:
            joins.append(join)
            budget -= self._chunk(self._prefilling[-1], join.cached, budget, chunks)
        return chunks, joins

    def _requeue(self) -> None:
        for entry in self.life.requeue:
            heapq.heappush(self._waiting, (entry.arrival, entry))
        self.life.requeue.clear()

    def _admit(self) -> Join | None:
        limits, life = self.limits, self.life
        while self._waiting and self._waiting[0][1].stage is Stage.ENDED:
            heapq.heappop(self._waiting)  # aborted while it waited
        if not self._waiting or life.running >= limits.max_rows or not self.table.free_slots:
            return None
        entry = self._waiting[0][1]
        offer = self.store.available - spare_pages(life.running)
        if entry is self._refused and offer <= self._refused_offer:
            return None  # nothing has come free since it was refused
        join = life.admit(entry, spare_pages(life.running))
        if join is None:
            self._refused, self._refused_offer = entry, offer
        else:
            heapq.heappop(self._waiting)
            self._prefilling.append(entry)
        return join

    def _chunk(
        self, entry: Entry, start: int, budget: int, chunks: list[tuple[int, int, int, int]]
    ) -> int:
        rest = len(entry.tokens) - start
        count = min(rest, budget)
        chunks.append((entry.slot, start, count, int(count == rest)))
        return count

    def _advance_chunks(self, chunks: np.ndarray) -> tuple[int, ...]:
        table = self.table
        slots, counts, samples = chunks[:, 0], chunks[:, 2], chunks[:, 3]
        table.planned[slots] += counts
        table.in_flight[slots] += counts
        table.pins[slots] += 1
        table.promised[slots] += samples
        table.budget[slots] -= samples
        done = slots[samples > 0]
        for slot in done.tolist():
            entry = self.life.entries[slot]
            assert entry is not None
            self.life.start_decoding(entry)
        self._prefilling = [e for e in self._prefilling if e.stage is Stage.PREFILL]
        return tuple(done[table.budget[done] == 0].tolist())

    # --- retire ---------------------------------------------------------------------------

    def retire(self, plan: Plan, result: Result) -> Outputs:
        """Applies what a step brought; only here do tokens become known, and pages free."""
        launched = self._launched.popleft()
        assert launched.step == plan.step == result.step, "flights retire in the order of launch"
        heard = Heard(self.table, launched, result) if result.has_logprobs else None
        finishes: list[Finish] = []
        split = launched.rows.count
        rids, tokens = self._settle_rows(launched.rows, result.tokens[:split], finishes)
        first: tuple[int, ...] = ()
        if len(launched.chunks):
            chunk_rids, chunk_tokens, first = self._settle_chunks(
                launched.chunks, result.tokens[split:], finishes
            )
            rids, tokens = np.append(rids, chunk_rids), np.append(tokens, chunk_tokens)
        for slot in launched.ending:
            entry = self.life.entries[slot]
            if entry is not None and entry.stage is not Stage.ENDED:
                finishes.append(self._end(entry, "length"))
        if self.life.ghosts:
            self.life.sweep()
        self._publish_load(launched.step)
        if self.limits.debug:
            self.check()
        ends = tuple(finishes)
        if heard is None:
            return Outputs(plan.step, rids, tokens, first, ends)
        rows, prompts = heard.logprobs(result)
        return Outputs(plan.step, rids, tokens, first, ends, rows, prompts)

    def _settle_rows(
        self, rows: RowSet, tokens: np.ndarray, finishes: list[Finish]
    ) -> tuple[np.ndarray, np.ndarray]:
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
        for index in self.stops.candidates(tokens).tolist():
            self._try_stop(int(slots[index]), finishes)
        return rids, tokens

    def _append(
        self,
        at: slice | np.ndarray,
        span: slice | np.ndarray,
        ones: int | np.ndarray,
        slots: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """The rows' inputs now have KV, so they go to the mirror; `tokens` are the new last ones."""
        table, size = self.table, self.limits.page_size
        position = table.length[at] - 1
        turned = ((position & (size - 1)) == 0).nonzero()[0]
        if len(turned):
            turning = slots[turned]
            table.cell[turning] = table.pages[turning, position[turned] // size] * size
        self.store.mirror.by_cell[table.cell[at]] = table.last[at]
        table.last[at] = tokens
        table.cell[span] += ones
        table.length[span] += ones

    def _try_stop(self, slot: int, finishes: list[Finish]) -> None:
        entry = self.life.entries[slot]
        assert entry is not None
        match = self.stops.matched(entry.rule, self.life.outputs(entry))
        if match is not None:
            finishes.append(self._end(entry, "stop", match))

    def _settle_chunks(
        self, chunks: np.ndarray, tokens: np.ndarray, finishes: list[Finish]
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
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
        rids = table.rid[slots]
        for index in self.stops.candidates(tokens).tolist():
            self._try_stop(int(slots[index]), finishes)
        return rids, tokens, first

    def _first_token(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        table, size = self.table, self.limits.page_size
        position = table.length[slots]
        table.last[slots] = tokens
        # where the position has no page yet, _append computes the cell when it has
        table.cell[slots] = table.pages[slots, np.minimum(
            position // size, self.table.max_pages - 1
        )] * size + position % size
        table.length[slots] += 1

    def _publish(self, slots: np.ndarray) -> None:
        """Settled prompt pages go to the tree, so that others find them while these run."""
        table = self.table
        held = table.held[slots].tolist()
        settled = table.planned[slots] - table.in_flight[slots]
        full = (settled // self.limits.page_size).tolist()
        for slot, first, end in zip(slots.tolist(), held, full, strict=True):
            if first < end:
                table.held[slot] += self.store.publish(table.pages[slot], first, end)

    def _publish_load(self, step: int) -> None:
        store = self.store
        self.load = Load(
            step,
            self.life.running,
            len(self._entries) - self.life.running,
            store.free.count,
            len(store.tree),
            self.limits.num_pages - 1,
        )

    # --- checks ---------------------------------------------------------------------------

    def check(self) -> None:
        """AssertionError unless frontiers, pins, pages and slots add up.  For debug mode."""
        table = self.table
        names = np.zeros(table.num_slots, np.int32)
        positions = np.zeros(table.num_slots, np.int32)
        for flight in self._launched:
            np.add.at(names, flight.rows.slots, 1)
            np.add.at(positions, flight.rows.slots, 1)
            np.add.at(names, flight.chunks[:, 0], 1)
            np.add.at(positions, flight.chunks[:, 0], flight.chunks[:, 2])
        assert (table.pins == names).all(), "pins are not the flights that name a slot"
        assert (table.in_flight == positions).all(), "in_flight is not the sum over flights"
        assert (table.promised >= 0).all(), "a row was promised fewer than no tokens"
        assert (table.planned <= table.covered).all(), "a planned position has no page"
        assert (table.budget >= 0).all(), "a row was launched past its length"
        used = [slot for slot, entry in enumerate(self.life.entries) if entry is not None]
        assert table.free_slots + len(used) == table.num_slots - 1, "a slot is lost"
        owned = [table.pages_of(slot)[table.held[slot] :] for slot in used]
        self.store.check(np.concatenate([NO_INTS, *owned]))

    def check_at_rest(self) -> None:
        """AssertionError unless an idle scheduler has everything back."""
        assert not self.has_work, "not at rest"
        assert not self.table.pins.any() and not self.life.ghosts, "a pin is left"
        assert self.table.free_slots == self.table.num_slots - 1, "a slot is left"
        assert self.store.available == self.limits.num_pages - 1, "a page is left"
        assert not self.stops.counted, "a stop rule is left"
        self.check()

