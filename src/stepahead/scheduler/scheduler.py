"""What runs next.  Plans on predicted lengths, retires what landed; knows no torch and no clock.

In a steady step nothing here looks at rows.  Two countdowns say when the next of them ends by
length or needs a page; until then, and while nobody comes or goes, a plan repeats the last one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from stepahead.cache.store import PageStore
from stepahead.errors import InvalidParameter, PoolFull
from stepahead.plan import NO_INTS, Join, Plan, Result
from stepahead.scheduler.check import check, check_at_rest
from stepahead.scheduler.drafts import RunSettler, with_chunks
from stepahead.scheduler.heard import Heard, Launched
from stepahead.scheduler.lifetime import Entry, Lifetime, Standing, Witness
from stepahead.scheduler.parts import split
from stepahead.scheduler.policy import Limits, output_limit, spare_pages
from stepahead.scheduler.rows import DecodeRows
from stepahead.scheduler.settle import HeardTokens, Settler
from stepahead.scheduler.stop import StopTable
from stepahead.scheduler.table import NOBODY, RowSet, Table
from stepahead.scheduler.turns import Turns
from stepahead.sync import SyncReason
from stepahead.types import (
    DraftCounts,
    Finish,
    FinishReason,
    Load,
    Outputs,
    Request,
    SamplingParams,
)


class Scheduler:
    """Continuous batching over slots and pages.  The loop says when to plan and when to retire."""

    def __init__(self, limits: Limits, stops: StopTable, witness: Witness | None = None) -> None:
        self.limits = limits
        self.store = PageStore(limits.num_pages, limits.page_size, limits.prefix_cache)
        self.table = Table(limits.num_slots, limits.max_pages, self.store.mirror, limits.width)
        self.stops = stops
        self.life = Lifetime(self.table, self.store, stops, witness)
        self.load = Load(pages_total=limits.num_pages - 1)
        self._entries: dict[int, Entry] = {}
        self._waiting: list[tuple[int, Entry]] = []  # a heap by arrival: the preempted go first
        self._prefilling: list[Entry] = []
        self._launched: deque[Launched] = deque()
        lag = limits.stages if limits.relay == "row" else None
        self._turns = Turns(self.life, limits.turns, lag) if limits.turns > 1 else None
        self._decode = DecodeRows(self.life, limits.page_size, self._turns)
        self._settler = Settler(self.life, limits.page_size)
        self._runs = RunSettler(self.life, self._end) if limits.width > 1 else None
        # of the newest plans, one for each stage: a plan is compared with that of S plans before
        self._sent_rows = deque([NOBODY] * limits.stages, limits.stages)
        self._again: Launched | None = None  # the last step, unless there were prompts in it
        self._step = self._arrivals = 0
        # who stood first in the queue and could not be admitted, and the state of things then
        self._refused = (-1, -1, -1)

    # --- requests come and go -------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request has not had its terminal message, or a flight is in the air."""
        return bool(self._entries or self._launched)

    def running_ids(self) -> list[int]:
        """Ids of all requests that have not had their terminal message."""
        return list(self._entries)

    @property
    def waiting(self) -> int:
        """Requests that have no slot, or are to lose theirs; exact, at any time."""
        return len(self._entries) - self.life.running

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet retired."""
        return len(self._launched)

    def add(self, requests: Sequence[Request], wait: bool = True) -> None:
        """Takes requests in, all or none.

        PromptTooLong if one can never be held; with `wait=False` also PoolFull if they can't all
        be held now, decided on exact counts.
        """
        for request in requests:
            if request.rid in self._entries:
                raise InvalidParameter(f"request id {request.rid} is already running", "rid")
        most = [
            output_limit(self.limits, len(request.prompt), _most_tokens(request.params))
            for request in requests
        ]
        if not wait and self.would_wait([len(request.prompt) for request in requests]):
            raise PoolFull("the engine is full at the moment; try again later", "prompt")
        for request, max_tokens in zip(requests, most, strict=True):
            self._arrivals += 1
            rule = self.stops.rule(request.params)
            entry = Entry(request, self._arrivals, max_tokens, rule)
            self._entries[request.rid] = entry
            self.life.queue(entry)
            heapq.heappush(self._waiting, (entry.arrival, entry))

    def would_wait(self, prompt_lens: Sequence[int]) -> int:
        """How many requests would wait for a row or for pages if these came too, all of a length.

        From exact counts, in O(1) of what runs and waits.  Where pages are short it is the most it
        could be: all who have no row, though some of them may get one with the next plan.
        """
        count = len(prompt_lens)
        rows = len(self._entries) + count
        over = max(0, rows - self.limits.max_rows)
        held = count - min(count, over)
        asked = sum(-(-length // self.limits.page_size) for length in prompt_lens[:held])
        spare = spare_pages(
            rows - over - 1, self.limits
        )  # when the last of them is admitted, the others run
        short = self.life.queued_pages + asked + spare > self.store.available
        return self.waiting + count if short else over

    def abort(self, rid: int) -> Finish | None:
        """Ends a request now; its terminal message, or None if it has had one."""
        entry = self._entries.get(rid)
        if entry is None:
            return None
        self.life.counters.aborts += 1
        return self._end(entry, "abort")

    def drop_all(self, reason: FinishReason, error: str = "") -> list[Finish]:
        """Every request ends, and flights are as if they had never been: nothing of them lands."""
        self._launched.clear()
        # what was in the air was not written: its pages must not be found by others
        frontier = self.table.frontier
        frontier[0] -= frontier[1]
        frontier[1:4] = 0
        finishes = [self._end(entry, reason, error=error) for entry in [*self._entries.values()]]
        self.life.sweep()
        self._waiting.clear()
        self._prefilling.clear()
        self.life.requeue.clear()
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
        return self.life.end(entry, reason, stop, error)

    # --- plan -----------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before a flight lands."""
        if (again := self._again) is not None and self._repeats(again):
            return self._repeat(again)
        grants: list[np.ndarray] = []
        rows = self._decode.select(grants, self._step)
        chunks, joins = self._prefill(self.limits.max_step_tokens - rows.count * self.limits.width)
        if not rows.count and not chunks:
            return None
        tokens = self._host_tokens(rows)
        ending = self._decode.advance(rows) if rows.count else ()
        table = np.array(chunks, np.int32).reshape(-1, 4)
        if chunks:
            ending += self._advance_chunks(table)
        return self._emit(rows, tokens, table, joins, grants, ending)

    def hold(self) -> SyncReason | None:
        """Why a flight should land before the next step is planned; None where nothing is in the
        air.  A row that decodes but lacks a page counts as one that decodes; a prompt for which
        there is no page counts as one that waits."""
        if self._turns is not None and self._turns.waiting(self._step) and not self._has_prompts():
            return SyncReason.PIPELINE
        if not self.limits.serial_prefill or not self._decode.idle:
            return None
        alone = any(not flight.rows.count for flight in self._launched)
        return SyncReason.SERIAL_PREFILL if alone and self._has_prompts() else None

    @property
    def has_more(self) -> bool:
        """Whether any request needs a step that is not launched yet."""
        # after the first question whoever waits is somebody who has not ended
        if self._has_prompts() or self._waiting or not self._decode.idle:
            return True
        marked = (self.life.entries[slot] for slot in self.life.ghosts)
        return any(entry and entry.standing is Standing.PREEMPTED for entry in marked)

    def _has_prompts(self) -> bool:
        """Whether a prompt has positions to compute, and nothing but pages could be in its way."""
        return any(e.standing is Standing.PREFILL for e in self._prefilling) or (
            self._next_waiting() is not None
        )

    def _repeats(self, again: Launched) -> bool:
        """Whether the next plan is the last one again: nobody came, left, ended or waits to be let
        in, and no row needs a page or brings its last output.  In O(1), whatever the batch."""
        relay = self.limits.relay
        # the newest flight in the air is of these rows, so each has a sample in the relay by row
        tokens_there = relay == "slot" or (relay == "row" and bool(self._launched))
        return (
            tokens_there
            and self._decode.repeats(again.rows)
            and not self.life.leaves
            and self._next_waiting() is None
        )

    def _repeat(self, again: Launched) -> Plan:
        rows, step = again.rows, self._step
        self._step += 1
        self._decode.advance(rows)
        self._launched.append(again)
        counters = self.life.counters
        counters.steps += 1
        counters.repeats += 1
        counters.launched_rows += rows.count
        return Plan(step, rows.wire, True)

    def _host_tokens(self, rows: RowSet) -> np.ndarray | None:
        """Input tokens the plan must bring, int32[n], -1 for the relay's; None if it has all."""
        if self.limits.relay == "slot" or not rows.count:
            return None
        table, at = self.table, rows.at
        if self.limits.relay == "host":
            return table.newest(rows)
        if self._turns is not None and table.flying(rows):
            return None
        # a row without a sample in flight was left out for a while: the ring may not reach back
        known = table.promised[at] == 0
        return np.where(known, table.last[at], -1).astype(np.int32) if known.any() else None

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
        slots = np.append(rows.slots, chunks[:, 0]) if self.limits.debug else NO_INTS
        generations = self.table.generation[slots]
        launched = Launched(rows, chunks, ending, generations)
        self._launched.append(launched)
        if self._turns is not None:
            self._turns.took(rows, chunks[chunks[:, 3] > 0, 0] if len(chunks) else NO_INTS, step)
        else:
            self._again = None if len(chunks) else launched
        same = rows is self._sent_rows[0]
        self._sent_rows.append(rows)
        counters = self.life.counters
        counters.steps += 1
        counters.launched_rows += rows.count
        counters.chunks += len(chunks)
        flat_grants = np.concatenate(grants) if grants else NO_INTS
        flat_chunks = chunks.reshape(-1) if len(chunks) else NO_INTS
        return Plan(step, rows.wire, same, tokens, flat_chunks, tuple(joins), flat_grants, leaves)

    # --- prefill --------------------------------------------------------------------------

    def _prefill(self, budget: int) -> tuple[list[tuple[int, int, int, int]], list[Join]]:
        chunks: list[tuple[int, int, int, int]] = []
        joins: list[Join] = []
        # some may have ended, been preempted or come to their last chunk since
        self._prefilling = [e for e in self._prefilling if e.standing is Standing.PREFILL]
        for entry in self._prefilling:
            if budget <= 0:
                break
            budget -= self._chunk(entry, int(self.table.planned[entry.slot]), budget, chunks)
        while budget > 0 and (join := self._admit()) is not None:
            joins.append(join)
            budget -= self._chunk(self._prefilling[-1], join.cached, budget, chunks)
        return chunks, joins

    def _next_waiting(self) -> Entry | None:
        """Who may be let in if there are pages; None if nobody can be, or nothing has changed
        since pages were short for it."""
        waiting, life = self._waiting, self.life
        for entry in life.requeue:
            heapq.heappush(waiting, (entry.arrival, entry))
        life.requeue.clear()
        while waiting and waiting[0][1].standing is Standing.ENDED:
            heapq.heappop(waiting)  # aborted while it waited
        if not waiting or life.running >= self.limits.max_rows or not self.table.free_slots:
            return None
        entry = waiting[0][1]
        return None if self._state(entry) == self._refused else entry

    def _state(self, entry: Entry) -> tuple[int, int, int]:
        return entry.arrival, self.store.changes, self.life.running

    def _admit(self) -> Join | None:
        if (entry := self._next_waiting()) is None:
            return None
        join = self.life.admit(entry, spare_pages(self.life.running, self.limits))
        if join is None:
            self._refused = self._state(entry)
        else:
            heapq.heappop(self._waiting)
            self._prefilling.append(entry)
        return join

    def _chunk(
        self, entry: Entry, start: int, budget: int, chunks: list[tuple[int, int, int, int]]
    ) -> int:
        rest = len(entry.tokens) - start
        count = min(rest, budget)
        samples = count == rest and entry.request.params.pooling is None
        chunks.append((entry.slot, start, count, int(samples)))
        return count

    def _advance_chunks(self, chunks: np.ndarray) -> tuple[int, ...]:
        table = self.table
        slots, counts, samples = chunks[:, 0], chunks[:, 2], chunks[:, 3]
        table.planned[slots] += counts
        table.in_flight[slots] += counts
        table.pins[slots] += 1
        table.promised[slots] += samples
        # whoever pools its prompt ends with it: that is its budget of one
        done = slots[table.planned[slots] == table.length[slots]]
        table.budget[done] -= 1
        self.life.start_decoding(done)
        return tuple(done[table.budget[done] == 0].tolist())

    # --- retire ---------------------------------------------------------------------------

    def retire(self, plan: Plan, result: Result) -> Outputs:
        """Applies what a step brought, or a part of it; only here do tokens become known, and pages
        free."""
        oldest = self._step - len(self._launched)  # plans are numbered in a row
        assert oldest == plan.step == result.step, "flights retire in the order of launch"
        launched = self._launched[0]
        if result.part == "whole":
            self._launched.popleft()
        else:
            launched, result = self._part(launched, result)
        failed = self._failed(launched, result) if result.failed else []
        heard = Heard(self.table, launched) if result.has_extras else None
        news, requests, finishes = self._apply(launched, result, heard)
        finishes = [*failed, *finishes]
        if result.ended:
            finishes += self._complete(launched, result)
        for slot in launched.ending:
            entry = self.life.entries[slot]
            if entry is not None and entry.standing is not Standing.ENDED:
                finishes.append(self._end(entry, "length"))
        if self.life.ghosts:
            self.life.sweep()
        self.load = self.measure_load(oldest)
        if self.limits.debug:
            check(self.life, self._launched, self._entries.values())
        rows, prompts = heard.logprobs(result) if heard else (None, ())
        hidden, pooled = (heard.hidden(result), heard.pooled(result)) if heard else (None, None)
        _, _, rids, tokens, first = news
        ended = tuple(finishes)
        told = (rows, prompts, hidden, pooled, requests)
        return Outputs(plan.step, rids, tokens, first, ended, *told)

    def _part(self, launched: Launched, result: Result) -> tuple[Launched, Result]:
        """The flight goes on with whom the part leaves out."""
        whole = launched.whole or launched
        launched, rest, result = split(whole, result)
        if result.part == "last":
            self._launched.popleft()
        else:
            self._launched[0] = rest
        return launched, result

    def _live(self, launched: Launched, row: int) -> Entry | None:
        """Who waits for a sampled row of a flight, if anybody does."""
        count, chunks = launched.rows.count, launched.chunks
        slot = launched.rows.slots[row] if row < count else chunks[chunks[:, 3] > 0][row - count, 0]
        entry = self.life.entries[int(slot)]
        return None if entry is None or entry.standing is Standing.ENDED else entry

    def _failed(self, launched: Launched, result: Result) -> list[Finish]:
        """Ends the requests that can't go on, before their void tokens are heard."""
        owners = ((self._live(launched, failure.row), failure.error) for failure in result.failed)
        return [self._end(entry, "error", error=error) for entry, error in owners if entry]

    def _complete(self, launched: Launched, result: Result) -> list[Finish]:
        """Ends the requests whose grammar is complete, unless something else has."""
        owners = (self._live(launched, row) for row in result.ended_table[:, 0].tolist())
        return [self._end(entry, "stop") for entry in owners if entry]

    def _apply(
        self, launched: Launched, result: Result, heard: Heard | None
    ) -> tuple[HeardTokens, np.ndarray | None, list[Finish]]:
        """Who was heard, each of them once where they may have several tokens, and who ended."""
        rows, chunks = launched.rows, launched.chunks
        split = rows.count * self.limits.width
        assert result.width == self.limits.width, "the runner has another number of drafts"
        if self._runs is None:
            news = self._settler.rows(rows, result.tokens[:split])
            if len(chunks):
                news = news.joined(self._settler.chunks(chunks, result.tokens[split:]))
            return news, None, self._stopped(news)
        runs = self._runs.rows(rows, result.tokens[:split], result.ended_table)
        if heard is not None:
            heard.spread(runs.kept, rows.count)
        finishes = runs.finishes
        if len(chunks):
            more = self._settler.chunks(chunks, result.tokens[split:])
            finishes += self._stopped(more)
            runs = with_chunks(runs, more)
        self._decode.landed(rows)
        return runs.heard, runs.requests, finishes

    def _stopped(self, news: HeardTokens) -> list[Finish]:
        """Ends the requests whose new token completes a stop id or string."""
        finishes = []
        life, table = self.life, self.table
        for index in self.stops.candidates(news.tokens, table.watch[news.at]).tolist():
            entry = life.entries[int(news.slots[index])]
            assert entry is not None, "a token was heard for a slot that nobody has"
            count = int(table.length[entry.slot]) - entry.prompt_len
            match = self.stops.matched(entry.rule, count, partial(life.last_outputs, entry))
            if match is not None:
                finishes.append(self._end(entry, "stop", match))
        return finishes

    def draft_counts(self) -> DraftCounts:
        """What came of drafts since the start; nothing where there are none."""
        return DraftCounts() if self._runs is None else self._runs.tallied()

    def measure_load(self, step: int = -1) -> Load:
        """What there is to do and to do it with, now; `step` is the last one retired."""
        store = self.store
        return Load(
            step,
            self.life.running,
            len(self._entries) - self.life.running,
            store.free.count,
            len(store.tree),
            store.tree.evictable,
            self.limits.num_pages - 1,
        )

    def check_at_rest(self) -> None:
        """AssertionError unless an idle scheduler has every slot, page and pin back."""
        assert not self.has_work, "not at rest"
        check_at_rest(self.life)


def _most_tokens(params: SamplingParams) -> int | None:
    return params.max_tokens if params.pooling is None else 1
