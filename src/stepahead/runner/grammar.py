"""Where each row of a grammar stands, and which tokens it may have next.

Knows slots, tokens and bit masks; no logits but in `apply_masks`, and no users.  Calls come one at
a time, in the order of steps; the fills let go of Python's lock, so they belong on a thread of
their own beside the one that enqueues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepahead.grammar import Vocabulary
from stepahead.grammar.deep import on_deep_stack
from stepahead.grammar.vocabulary import matcher_of
from stepahead.structured import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KEPT = 32  # grammars whose automata are kept for the next request that has the same
_MAX_REASON_CHARS = 200
_BLOCK = 4  # rows whose masks are spread at a time: larger memory is the system's anew each time


class GrammarError(NamedTuple):
    """One row can't go on: its slot, whose it is, and why."""

    slot: int
    generation: int
    reason: str


class _Row:
    """One owner of a slot."""

    __slots__ = ("failed", "generation", "matcher")

    def __init__(self, generation: int, matcher: LLMatcher) -> None:
        self.generation = generation
        self.matcher = matcher
        self.failed = False


class Matchers:
    """The rows with a grammar, by slot and generation.

    `ended` bool[num_slots]: the row's answer is complete, and nothing may follow but an end of
    sequence.  `words` int32 a mask, bit t % 32 of word t // 32 for token t.
    """

    def __init__(self, vocabulary: Vocabulary, num_slots: int, threads: int | None = None) -> None:
        """`threads` fill masks at a time; None takes four fifths of the machine's."""
        self.words = vocabulary.words
        self.ended = np.zeros(num_slots, np.bool_)
        self._tokenizer = vocabulary.tokenizer()
        self._end_mask = _mask_of(vocabulary.eos_ids, self.words)
        from llguidance import LLExecutor  # not before the first grammar

        self._executor = LLExecutor(threads)
        self._rows: dict[int, _Row] = {}
        self._fresh: OrderedDict[str, LLMatcher] = OrderedDict()
        self._errors: list[GrammarError] = []
        self._step = -1
        self._taken = np.zeros(0, np.int32)

    def start(
        self, slot: int, generation: int, grammar: Grammar, known: Sequence[int] = ()
    ) -> None:
        """A new owner of `slot`, whose answer begins with the `known` tokens: 20 µs and more for
        these, or a millisecond for a grammar that is not among the last few."""
        row = self._rows[slot] = _Row(generation, self._matcher(grammar))
        self.ended[slot] = False
        self._look_for_errors((slot,))
        if known:
            self._take(slot, row, list(known))

    def leave(self, slot: int, generation: int) -> None:
        """`slot` is given up; nothing happens if it has another owner by now."""
        row = self._rows.get(slot)
        if row is not None and row.generation == generation:
            del self._rows[slot]
            self.ended[slot] = False

    def advance(
        self,
        step: int,
        slots: np.ndarray,
        generations: np.ndarray,
        tokens: np.ndarray,
        counts: np.ndarray | None = None,
    ) -> np.ndarray:
        """The tokens of step `step` have landed: int32[r] how many of each row's were taken.

        `slots`, `generations` int[r]; `tokens` int[t] are the rows' one after the other, `counts`
        int[r] of each (one each if None).  What comes behind the end of a grammar is not taken.  A
        row without a grammar takes all, a row that isn't the slot's owner any more takes none.
        Asked again for the same step it answers the same and does nothing.
        """
        if step <= self._step:
            if step < self._step:
                raise ValueError(f"step {step} lands after step {self._step}")
            return self._taken
        self._step = step
        sizes = [1] * len(slots) if counts is None else counts.tolist()
        # plain numbers: those of numpy are several times as slow one by one
        owners, given = generations.tolist(), tokens.tolist()
        self._taken = taken = np.array(sizes, np.int32)
        end = 0
        for place, slot in enumerate(slots.tolist()):
            first, end = end, end + sizes[place]
            row = self._rows.get(slot)
            if row is None:
                continue
            if row.generation != owners[place]:
                taken[place] = 0
                continue
            taken[place] = self._take(slot, row, given[first:end])
        return taken

    def fill(self, slots: Sequence[int], out: np.ndarray) -> None:
        """The masks of `slots`, row by row, in `out` int32[>= len(slots), words], in one call that
        lets go of Python's lock.  Slots without a grammar may have any token, those that have
        failed nothing but the end: what they sample is nobody's."""
        self._check_out(out, len(slots))
        work: list[tuple[LLMatcher, int]] = []
        for place, slot in enumerate(slots):
            row = self._rows.get(slot)
            if row is None or row.failed:
                out[place] = -1 if row is None else self._end_mask
            else:
                work.append((row.matcher, place))
        if work:
            self._executor.unsafe_compute_mask_ptr(
                work, out.ctypes.data, self.words * 4, out.shape[0]
            )
            self._look_for_errors(slots)

    def fill_drafts(
        self, slots: Sequence[int], drafts: Sequence[Sequence[int]], out: np.ndarray
    ) -> list[int]:
        """As `fill`, along each row's drafts: how many of them the grammar allows, in their order.

        `out` int32[rows, words] gets, slot after slot, 1 + len(drafts) rows: those behind a draft
        that is not allowed are full.  No state changes.
        """
        self._check_out(out, sum(1 + len(run) for run in drafts))
        work: list[tuple[LLMatcher, int, list[int]]] = []
        plain: list[tuple[LLMatcher, int]] = []
        legal: list[int] = []
        first = 0
        for slot, given in zip(slots, drafts, strict=True):
            row, run = self._rows.get(slot), list(given)
            out[first : first + 1 + len(run)] = -1
            if row is None or row.failed:
                legal.append(len(run) if row is None else 0)
                if row is not None:
                    out[first] = self._end_mask
            else:
                legal.append(row.matcher.validate_tokens(run) if run else 0)
                if legal[-1]:
                    work.append((row.matcher, first, run[: legal[-1]]))
                else:
                    plain.append((row.matcher, first))
            first += 1 + len(run)
        at = (out.ctypes.data, self.words * 4, out.shape[0])
        if work:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(work, *at)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *at)
        self._look_for_errors(slots)
        return legal

    def rollback(self, slot: int, count: int) -> None:
        """The last `count` tokens that `slot` took were not the answer's."""
        row = self._rows.get(slot)
        if row is not None and count and not row.failed:
            row.matcher.rollback(count)
            self.ended[slot] = row.matcher.is_stopped()
            self._look_for_errors((slot,))

    def take_errors(self) -> list[GrammarError]:
        """The rows that have failed since last asked; each is told once."""
        errors = self._errors.copy()
        self._errors.clear()
        return errors

    def _take(self, slot: int, row: _Row, run: list[int]) -> int:
        if row.failed:
            return 0
        taken = row.matcher.try_consume_tokens(run)
        self.ended[slot] = row.matcher.is_stopped()
        if taken < len(run) and not self.ended[slot]:
            self._fail(slot, row, f"token {run[taken]} is not allowed here")
        return taken

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        fresh = self._fresh.pop(grammar.text, None)
        if fresh is None:
            fresh = on_deep_stack(lambda: matcher_of(self._tokenizer, grammar.text))
        self._fresh[grammar.text] = fresh
        if len(self._fresh) > _KEPT:
            self._fresh.popitem(last=False)
        return fresh.deep_copy()

    def _look_for_errors(self, slots: Sequence[int]) -> None:
        # The library masks a dead end as the end of sequence: unseen, half an answer would pass
        # for a whole one.
        for slot in slots:
            row = self._rows.get(slot)
            if row is not None and not row.failed and row.matcher.is_error():
                self._fail(slot, row, row.matcher.get_error().partition("\n")[0])

    def _fail(self, slot: int, row: _Row, reason: str) -> None:
        row.failed = True
        self.ended[slot] = True
        words = f"the grammar can't go on: {reason[:_MAX_REASON_CHARS]}"
        self._errors.append(GrammarError(slot, row.generation, words))

    def _check_out(self, out: np.ndarray, rows: int) -> None:
        fits = out.ndim == 2 and out.shape[0] >= rows and out.shape[1] == self.words
        if out.dtype != np.int32 or not fits or not out.flags.c_contiguous:
            raise ValueError(
                f"masks of {rows} rows want int32[{rows}, {self.words}], contiguous, not "
                f"{out.dtype}{list(out.shape)}"
            )


def _mask_of(tokens: Sequence[int], words: int) -> np.ndarray:
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def as_words(masks: np.ndarray) -> np.ndarray:
    """int32[m, words] masks as the int64[m, ..] that staging takes, the same bytes."""
    if masks.shape[1] % 2:
        masks = np.pad(masks, ((0, 0), (0, 1)))
    return masks.view(np.int64)


def check_masks(masks_dev: Tensor, rows: int, vocab_size: int) -> None:
    """ValueError for what is not int32[rows, words], or does not reach to the last token."""
    count, words = masks_dev.shape
    if masks_dev.dtype != torch.int32 or count != rows:
        raise ValueError(f"{count} masks of {masks_dev.dtype} for {rows} rows; they are of int32")
    if words * 32 < vocab_size:
        raise ValueError(f"masks of {words} words for {vocab_size} logits")


def apply_masks(logits: Tensor, masks_dev: Tensor, rows_dev: Tensor | None = None) -> None:
    """Makes the logits of forbidden tokens -inf, in place.

    `logits` float[r, vocab]; `masks_dev` int32[m, words], the masks of the rows `rows_dev`
    int64[m], or of all rows if it is None.  NaN, as arithmetic makes it, stays where it is allowed
    (a signaling one stays on the CPU where it is not, too).  Raises ValueError for masks of another
    shape or type.
    """
    count, vocab_size = logits.shape
    check_masks(masks_dev, count if rows_dev is None else len(rows_dev), vocab_size)
    if rows_dev is None:
        _forbid(logits, masks_dev)
    else:
        rows = logits[rows_dev]
        _forbid(rows, masks_dev)
        logits[rows_dev] = rows


# By a mask's byte, what the logits of its eight tokens may be at most.  NaN is no bound, and what
# np.fmin makes of it and of an allowed NaN is NaN: of +inf it would make +inf, which loses to NaN
_MOST = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_MOST, np.float32(np.nan), np.float32(-np.inf))


def _forbid(logits: Tensor, masks_dev: Tensor) -> None:
    vocab_size = logits.shape[1]
    if masks_dev.device.type == "cpu":  # a tenth of what masked_fill_ takes there
        values, masks = logits.numpy(), masks_dev.numpy().view(np.uint8)
        for first in range(0, len(values), _BLOCK):
            rows = slice(first, first + _BLOCK)
            most = np.take(_MOST, masks[rows], axis=0).reshape(-1, 8 * masks.shape[1])
            # and not the minimum: a forbidden logit that is no number would stay one, and win
            np.fmin(values[rows], most[:, :vocab_size], out=values[rows])
        return
    bits_dev = torch.arange(32, dtype=torch.int32, device=masks_dev.device)
    forbidden = (masks_dev.unsqueeze(-1) >> bits_dev & 1 == 0).flatten(1)[:, :vocab_size]
    logits.masked_fill_(forbidden, -torch.inf)
