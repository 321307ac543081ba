"""A runner on paper: carries plans out over pages of token ids, in numpy, and trusts nothing.

It keeps only what a plan gave it: page tables, lengths, the relay.  Each next token is the closed
form of the whole sequence as read back through the page table, so a wrong page, length, slot or
lost token changes the answer; and a plan that breaks a rule of `plan.py` is an AssertionError.
Without torch, so the scheduler and the loops are proven where there is none, at any depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from closed_form import Place, Toy, choose, hidden_of, log_softmax, logits_of, signed, state_of
from stepahead.plan import Join, Plan, PromptRows, Result, decode_plan, encode_plan
from stepahead.types import HiddenRows, LogprobRows, StateSums

EMPTY = -1


@dataclass
class _Owner:
    """A slot in use."""

    join: Join
    pages: list[int]
    length: int  # positions whose tokens are in the pages
    relay: int = EMPTY
    sampled: int = 0  # the step that left it


@dataclass(frozen=True)
class PaperFlight:
    """A step that is done already; `land` is when the host hears of it."""

    result: Result

    def land(self) -> Result:
        """The result."""
        return self.result


class PaperRunner:
    """An executor: `launch` and `close`.  `on_plan` sees each plan first, with rows in full."""

    def __init__(
        self,
        toy: Toy,
        num_slots: int,
        num_pages: int,
        page_size: int,
        on_plan: Callable[[Plan], None] = lambda plan: None,
        stages: int = 1,
        width: int = 1,
    ) -> None:
        """`width` positions of a row in a step: of its drafts any number may be right."""
        self.toy = toy
        self.width = width
        self.cells = np.full((num_pages, page_size), EMPTY, np.int64)
        self.generations = [0] * num_slots
        self.owners: dict[int, _Owner] = {}
        self.page_size = page_size
        self._rows: list[int] = []
        self._last_rows: deque[list[int]] = deque([[]] * stages, stages)
        self._stages = stages
        self._on_plan = on_plan
        self._steps = 0

    def close(self) -> None:
        """Nothing to end."""

    def launch(self, plan: Plan) -> PaperFlight:
        """Carries the plan out at once, as it would arrive over a wire."""
        self._on_plan(plan)
        plan = decode_plan(encode_plan(plan))
        assert plan.step == self._steps, "steps are not numbered in a row"
        self._steps += 1
        self._change(plan)
        self._rows = self._last_rows[0]
        if not plan.same_rows:
            self._rows = plan.rows.tolist()
            assert self._rows == sorted(set(self._rows)), "rows are not ascending"
        self._last_rows.append(self._rows)
        assert plan.tokens is None or len(plan.tokens) == len(self._rows)
        for i, slot in enumerate(self._rows):
            token = self._take_relay(slot)
            if plan.tokens is not None and plan.tokens[i] >= 0:
                assert plan.tokens[i] == token, "the host brings another token than was sampled"
            else:
                age = plan.step - self.owners[slot].sampled
                assert age >= self._stages, "a row's token is still on its way through the stages"
            self._write_row(slot, token)
        for slot, start, count, _ in plan.chunk_table.tolist():
            owner = self.owners[slot]
            assert start == owner.length, "a chunk does not begin where its slot ends"
            self._write(slot, owner.join.tokens[start : start + count].tolist())
        return PaperFlight(self._results(plan))

    def _change(self, plan: Plan) -> None:
        for slot in plan.leaves.tolist():
            del self.owners[slot]
            self.generations[slot] += 1
        for join in plan.joins:
            assert join.slot not in self.owners, "a slot was given twice"
            assert 0 < join.slot < len(self.generations), "no such slot"
            assert join.generation == self.generations[join.slot], "a stale generation"
            owner = _Owner(join, join.pages.tolist(), join.cached)
            self.owners[join.slot] = owner
            held = self._read(owner)
            assert held == join.tokens[: join.cached].tolist(), "a prefix hit on other content"
        for slot, index, page in plan.grant_table.tolist():
            assert index == len(self.owners[slot].pages), "a grant leaves a gap"
            self.owners[slot].pages.append(page)
        for owner in self.owners.values():
            assert 0 not in owner.pages, "the padding page was handed out"

    def _take_relay(self, slot: int) -> int:
        owner = self.owners[slot]
        token, owner.relay = owner.relay, EMPTY
        assert token != EMPTY, "a token was taken that no step had left"
        return token

    def _write_row(self, slot: int, token: int) -> None:
        owner = self.owners[slot]
        reach = min(owner.length + self.width, owner.join.limit)
        assert reach <= len(owner.pages) * self.page_size, "a draft has no page"
        if owner.length < owner.join.limit:
            self._write(slot, [token])
        else:  # it has all its outputs, and the host has not heard of it
            assert self.width > 1, "a row was launched past its length"
            owner.relay = token

    def _write(self, slot: int, tokens: list[int]) -> None:
        owner = self.owners[slot]
        for token in tokens:
            page = owner.pages[owner.length // self.page_size]
            users = [s for s, other in self.owners.items() if page in other.pages]
            assert users == [slot], f"slot {slot} writes a page that slots {users} use"
            self.cells[page, owner.length % self.page_size] = token
            owner.length += 1

    def _read(self, owner: _Owner) -> list[int]:
        cells = self.cells[owner.pages].reshape(-1) if owner.pages else self.cells[0]
        read = cells[: owner.length].tolist()
        assert EMPTY not in read, "a cell was read before it was written"
        return read

    # --- results ----------------------------------------------------------------------------

    def _results(self, plan: Plan) -> Result:
        chunks = plan.chunk_table.tolist()
        places = [(slot, self.width) for slot in self._rows]
        places += [(slot, 1) for slot, _, _, samples in chunks if samples]
        tokens, rows, states = [], [], []
        for slot, width in places:
            owner = self.owners[slot]
            run = [] if owner.relay != EMPTY else self._run(slot, width, plan.step)
            for index, (state, logits, token) in enumerate(run, len(tokens)):
                if owner.join.params.logprobs is not None:
                    rows.append((index, token, logits, owner.join.params.logprobs))
                if owner.join.params.return_hidden_states:
                    states.append((index, hidden_of(state)))
            tokens += [token for *_, token in run] + [EMPTY] * (width - len(run))
        pools = [pool for slot, *part in chunks if (pool := self._pool(slot, *part[:2]))]
        prompts = [self._prompt(slot, start, count) for slot, start, count, _ in chunks]
        return Result(
            plan.step,
            np.array(tokens, np.int32),
            logprobs=scored(rows) if rows else None,
            prompt_logprobs=tuple(filter(None, prompts)),
            hidden=hidden_rows(states) if states else None,
            pooled=state_sums(pools) if pools else None,
            width=self.width,
        )

    def _run(self, slot: int, width: int, step: int) -> list[tuple[int, np.ndarray, int]]:
        """State, logits and token of each place in the row, as far as its drafts are right."""
        owner = self.owners[slot]
        want = 1 + (owner.length * 0x9E3779B1 + slot * 0x85EBCA77 >> 7) % width
        run = []
        while True:
            state = state_of(np.array(self._read(owner)))
            logits = logits_of(state, self.toy.vocab_size)
            token = self._next(owner, logits)
            run.append((state, logits, token))
            if len(run) == want or owner.length == owner.join.limit:
                owner.relay, owner.sampled = token, step
                return run
            self._write(slot, [token])

    def _next(self, owner: _Owner, logits: np.ndarray) -> int:
        read, join = self._read(owner), owner.join
        split = join.prompt_len
        named = join.params.stop_token_ids or ()
        ends = frozenset(named) | (frozenset() if join.params.ignore_eos else {self.toy.eos})
        place = Place(join.seed, join.choice, read[:split], read[split:], ends)
        return choose(logits, join.params, place)[0]

    def _pool(self, slot: int, start: int, count: int) -> tuple[int, int, int, float] | None:
        owner = self.owners[slot]
        kind, read = owner.join.params.pooling, self._read(owner)
        end = start + count
        if kind is None or (kind == "last" and end < owner.join.prompt_len):
            return None
        if kind == "last":
            start = end - 1
        states = [signed(state_of(np.array(read[: at + 1]))) for at in range(start, end)]
        return slot, start, end - start, float(np.array(states, np.float64).sum())

    def _prompt(self, slot: int, start: int, count: int) -> PromptRows | None:
        owner = self.owners[slot]
        width, split = owner.join.params.prompt_logprobs, owner.join.prompt_len
        read = self._read(owner)
        targets = range(start + 1, min(start + count + 1, split))
        if width is None or not targets:
            return None
        logits = [logits_of(state_of(np.array(read[:at])), self.toy.vocab_size) for at in targets]
        rows = [
            (i, int(owner.join.tokens[at]), values, width)
            for i, (at, values) in enumerate(zip(targets, logits, strict=True))
        ]
        return PromptRows(slot, start + 1, scored(rows))


def hidden_rows(states: list[tuple[int, float]]) -> HiddenRows:
    """HiddenRows of (index, state): one number each."""
    indices, values = zip(*states, strict=True)
    return HiddenRows(np.array(indices, np.int32), 1, np.array(values, np.float32))


def state_sums(pools: list[tuple[int, int, int, float]]) -> StateSums:
    """StateSums of (slot, start, count, sum): one number each."""
    slots, starts, counts, sums = zip(*pools, strict=True)
    whole = (np.array(column, np.int64) for column in (slots, starts, counts))
    return StateSums(*whole, 1, np.array(sums, np.float64))


def scored(rows: list[tuple[int, int, np.ndarray, int]]) -> LogprobRows:
    """LogprobRows of (index, token, raw logits, alternatives wanted); as wide as the widest."""
    width = max(wanted for *_, wanted in rows)
    values = [log_softmax(logits).astype(np.float32) for _, _, logits, _ in rows]
    best = [np.argsort(-v, kind="stable")[:width] for v in values]
    chosen = [v[token] for v, (_, token, _, _) in zip(values, rows, strict=True)]
    return LogprobRows(
        np.array([index for index, *_ in rows], np.int32),
        np.array(chosen, np.float32),
        np.array([(v > c).sum() + 1 for v, c in zip(values, chosen, strict=True)], np.int32),
        width,
        np.concatenate(best).astype(np.int32),
        np.concatenate([v[b] for v, b in zip(values, best, strict=True)]).astype(np.float32),
    )
