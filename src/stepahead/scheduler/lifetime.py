"""From waiting to released: the one place where slots and pages change hands.

Abort, stop, preemption and error only *mark*.  A flight pins the slots it names; slot and pages
are released once, by `release`, at the retirement of the last flight that names them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from stepahead.cache.store import PageStore
from stepahead.plan import Join
from stepahead.scheduler.stop import StopRule, StopTable
from stepahead.scheduler.table import Table
from stepahead.types import Finish, FinishReason, Request, SamplingParams


class Standing(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"  # marked; goes back to waiting when its last flight retires
    ENDED = "ended"  # its terminal message is out


class Entry:
    """A request inside the scheduler.  `tokens` are those known when it last entered a slot."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "max_tokens",
        "prompt_len",
        "request",
        "rule",
        "slot",
        "standing",
        "tokens",
    )

    def __init__(self, request: Request, arrival: int, max_tokens: int, rule: StopRule) -> None:
        self.request = request
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.rule = rule
        self.tokens = request.prompt
        self.prompt_len = len(request.prompt)
        self.cached_tokens = -1  # set once, at the first admission
        self.slot = 0
        self.standing = Standing.WAITING


@dataclass(slots=True)
class Counters:
    """What happened, counted since the start."""

    steps: int = 0
    launched_rows: int = 0
    chunks: int = 0
    overshoot_rows: int = 0
    finished: int = 0
    aborts: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    slot_reuses: int = 0
    repeats: int = 0

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)


class Witness(Protocol):
    """Who is told, while a step is planned, of what no output tells."""

    def admitted(self, rid: int, cached_tokens: int) -> None:
        """A request enters a slot, with so many positions computed; again if preempted before."""
        ...

    def preempted(self, rid: int) -> None:
        """A request must wait again."""
        ...


class Lifetime:
    """Admits, ends, preempts, releases.  `changed`: the decode rows must be regrouped."""

    def __init__(
        self, table: Table, store: PageStore, stops: StopTable, witness: Witness | None = None
    ) -> None:
        self.table = table
        self.store = store
        self.stops = stops
        self._witness = witness
        self.entries: list[Entry | None] = [None] * table.num_slots
        self.counters = Counters()
        self.ghosts: set[int] = set()  # marked slots that a flight still names
        self.leaves: list[int] = []  # slots released since the last plan
        self.requeue: list[Entry] = []  # preempted entries that may be admitted again
        self.running = 0
        self.queued_pages = 0  # of the tokens of all who have no slot, or are to lose theirs
        self.changed = False

    def queue(self, entry: Entry) -> None:
        """Counts an entry that comes to wait for a slot."""
        self.queued_pages += self._pages(entry)

    def _pages(self, entry: Entry) -> int:
        return -(-len(entry.tokens) // self.store.page_size)

    def admit(self, entry: Entry, spare: int) -> Join | None:
        """Gives the entry a slot and the pages of all its tokens, or None if not now.

        `spare` pages must stay available beside them.
        """
        tokens, store = entry.tokens, self.store
        hit: list[int] = [] if _needs_all(entry.request.params) else store.match(tokens)
        needed = -(-len(tokens) // store.page_size) - len(hit)
        store.tree.hold(hit)  # before counting: a matched page is no longer evictable
        if store.available < needed + spare:
            store.tree.release(hit, (), tokens[:0])
            return None
        fresh = store.take(needed)
        pages = np.concatenate([np.array(hit, np.int32), fresh]) if hit else fresh
        return self._enter(entry, pages, len(hit))

    def _enter(self, entry: Entry, pages: np.ndarray, hits: int) -> Join:
        table, request, tokens = self.table, entry.request, entry.tokens
        slot = entry.slot = table.take_slot()
        size, cached = self.store.page_size, hits * self.store.page_size
        count, known = len(pages), len(tokens)
        self.entries[slot] = entry
        table.rid[slot] = request.rid
        table.pages[slot, :count] = pages
        table.num_pages[slot] = count
        table.covered[slot] = count * size
        table.held[slot] = hits
        table.length[slot] = known
        table.limit[slot] = entry.prompt_len + entry.max_tokens - 1
        table.planned[slot] = cached
        table.budget[slot] = entry.prompt_len + entry.max_tokens - known
        self.store.mirror.write(pages[hits:], tokens[cached:])
        table.watch[slot] = self.stops.add(entry.rule)
        entry.standing = Standing.PREFILL
        if entry.cached_tokens < 0:
            entry.cached_tokens = cached
        counters = self.counters
        counters.prefix_hits += hits > 0
        generation = int(table.generation[slot])
        counters.slot_reuses += generation > 0
        self.running += 1
        if self._witness is not None:
            self._witness.admitted(request.rid, cached)
        self.queued_pages -= self._pages(entry)
        params, seed, choice = request.params, request.seed, request.choice
        limit = int(table.limit[slot])
        own = (params, seed, choice, limit, request.grammar)
        return Join(slot, generation, tokens, entry.prompt_len, cached, pages, *own)

    def start_decoding(self, slots: np.ndarray) -> None:
        """All tokens of these slots are scheduled; from the next plan on those that have outputs
        left decode."""
        for slot in slots.tolist():
            entry = self.entries[slot]
            assert entry is not None
            entry.standing = Standing.DECODE
        more = slots[self.table.budget[slots] > 0]
        if len(more):
            self.table.decoding[more] = True
            self.changed = True

    def known_tokens(self, entry: Entry) -> np.ndarray:
        """The entry's prompt and outputs so far, int32[n]."""
        return self._tokens(entry, 0)

    def outputs(self, entry: Entry) -> np.ndarray:
        """The entry's outputs so far, int32[n]."""
        return self._tokens(entry, entry.prompt_len)

    def last_outputs(self, entry: Entry, count: int, behind: int = 0) -> np.ndarray:
        """The last `count` outputs of an entry that has so many and a slot, int32[count], but for
        the `behind` newest ones."""
        tokens = self._tokens(entry, int(self.table.length[entry.slot]) - count - behind)
        return tokens[:count]

    def _tokens(self, entry: Entry, start: int) -> np.ndarray:
        length = int(self.table.length[entry.slot]) if entry.slot else len(entry.tokens)
        if length == len(entry.tokens):
            return entry.tokens[start:]
        pages = self.table.pages_of(entry.slot)
        read = self.store.mirror.read(pages, start, length - 1)
        return np.append(read, self.table.last[entry.slot])

    def end(
        self,
        entry: Entry,
        reason: FinishReason,
        stop: tuple[int | str, int] | None = None,
        error: str = "",
    ) -> Finish:
        """Marks the entry ended and returns its one terminal message."""
        tokens = self.outputs(entry)
        told, behind = stop if stop else (None, 0)
        if isinstance(told, int) and told not in entry.rule.reported:
            told = None  # the model's own end of sequence is no news
        if entry.standing in (Standing.WAITING, Standing.PREEMPTED):
            self.queued_pages -= self._pages(entry)
        slot = entry.slot
        if slot:
            self.table.deaf[slot] = True
            self._mark(entry, Standing.ENDED)
        entry.standing = Standing.ENDED
        self.counters.finished += 1
        return Finish(
            entry.request.rid, reason, tokens, told, behind, max(0, entry.cached_tokens), error
        )

    def preempt(self, entry: Entry) -> None:
        """Marks the entry to be computed again; what is in flight for it still counts."""
        self.counters.preemptions += 1
        if self._witness is not None:
            self._witness.preempted(entry.request.rid)
        self.queue(entry)
        self._mark(entry, Standing.PREEMPTED)

    def _mark(self, entry: Entry, standing: Standing) -> None:
        slot = entry.slot
        if self.table.decoding[slot]:
            self.table.decoding[slot] = False
            self.changed = True
        if entry.standing in (Standing.PREFILL, Standing.DECODE):
            self.running -= 1
        entry.standing = standing
        self.ghosts.add(slot)
        self.release(slot)

    def sweep(self) -> None:
        """Releases every marked slot that no flight names any more."""
        for slot in list(self.ghosts):
            self.release(slot)

    def release(self, slot: int) -> None:
        """Gives slot and pages back if the slot is marked and no flight names it.  Idempotent."""
        if slot not in self.ghosts or self.table.pins[slot]:
            return
        self.ghosts.discard(slot)
        table, entry = self.table, self.entries[slot]
        assert entry is not None
        if entry.standing is Standing.PREEMPTED:
            self.queued_pages -= self._pages(entry)  # it was counted without what has come since
            entry.tokens = self.known_tokens(entry)
            self.queue(entry)
        # the last token's KV was never written, so it is not among the settled ones
        written = min(table.settled(slot), int(table.length[slot]) - 1)
        full = written // self.store.page_size
        self.store.release(table.pages_of(slot), int(table.held[slot]), full)
        self.stops.remove(entry.rule)
        self.entries[slot] = None
        entry.slot = 0
        table.give_slot(slot)
        self.leaves.append(slot)
        if entry.standing is Standing.PREEMPTED:
            entry.standing = Standing.WAITING
            self.requeue.append(entry)


def _needs_all(params: SamplingParams) -> bool:
    """Whether every position of the prompt must be computed, whoever has computed it before."""
    return params.prompt_logprobs is not None or params.pooling == "mean"
