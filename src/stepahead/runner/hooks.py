"""Which tokens rows may have, and who else changes their logits: on the device, for those that ask.

`HookWishes` is the host's side: columns and tables by slot, as in `wishes.py`.  `Hooks` is what a
step's rows have of them, and runs on the forward stream.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepahead.plan import Join
from stepahead.runner.grammar import apply_masks
from stepahead.runner.history import TokenHistory
from stepahead.runner.processor import AskingRows, Loaded

Upload = Callable[[np.ndarray], Tensor]
_ANY = -1  # in the place of a token: whichever
_WORD_BITS = 64


class RowError(NamedTuple):
    """A row that can't be sampled for, and why."""

    row: int
    words: str


@dataclass(frozen=True)
class Allowed:
    """Rows that may have some tokens only: `rows_dev` int64[m], None for all; `masks_dev`
    int64[m, words], bit t % 64 of word t // 64 for token t."""

    rows_dev: Tensor | None
    masks_dev: Tensor

    def apply(self, logits: Tensor) -> None:
        """Forbids all other tokens."""
        apply_masks(logits, self.masks_dev.view(torch.int32), self.rows_dev)


@dataclass(frozen=True)
class BadWords:
    """`table_dev` int64[4 + p, w], a column for each word of each row: the row, its place in the
    history, the word's last token, the position of the row's first output; then the word's tokens
    before the last, newest first, _ANY where it has no more."""

    table_dev: Tensor
    history: TokenHistory

    def apply(self, logits: Tensor, positions_dev: Tensor) -> None:
        """Forbids each word's last token where those before it have just been output."""
        row, place, token, first = self.table_dev[:4]
        before = self.table_dev[4:]
        barred = torch.ones_like(row, dtype=torch.bool)
        if len(before):
            back = torch.arange(1, len(before) + 1, device=row.device).unsqueeze(1)
            where = positions_dev[row] - back
            found = (self.history.read(place, where) == before) & (where >= first)
            barred = (found | (before == _ANY)).all(0)
        # added up, for a token may be the last one of several words
        value = torch.zeros_like(barred, dtype=logits.dtype).masked_fill_(barred, -torch.inf)
        logits.index_put_((row, token), value, accumulate=True)


@dataclass(frozen=True)
class Kept:
    """The rows whose tokens are remembered: `rows_dev` int64[m], and their places in the
    history."""

    rows_dev: Tensor
    places_dev: Tensor
    history: TokenHistory

    def write_drafts(self, positions_dev: Tensor, before_dev: Tensor) -> None:
        """As far as drafts stand right before the tokens to be sampled."""
        drafts = before_dev[self.rows_dev]
        counts = (drafts >= 0).sum(1)
        newest = drafts.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        at = positions_dev[self.rows_dev] - 1
        at = torch.where(counts > 0, at, self.history.nowhere(at))
        self.history.write(self.places_dev, at, newest)

    def write(self, positions_dev: Tensor, tokens_dev: Tensor) -> None:
        """What was sampled for all rows of the step."""
        rows = self.rows_dev
        self.history.write(self.places_dev, positions_dev[rows], tokens_dev[rows])


@dataclass(frozen=True)
class Processed:
    """The rows that ask for the user's processor: `rows` int64 numpy[m]; `table_dev` int64[3, m]
    has row, place in the history and length of the prompt; `args` as in `AskingRows`."""

    rows: np.ndarray
    table_dev: Tensor
    args: tuple[dict[str, Any], ...]
    loaded: Loaded
    history: TokenHistory

    def apply(
        self, logits: Tensor, positions_dev: Tensor, known: Sequence[np.ndarray]
    ) -> list[RowError]:
        """Lets it change the logits of these rows; what was forbidden stays so.  If it raises they
        stay as they are, and all of these rows have an error."""
        rows, places, prompt_lens = self.table_dev
        own = logits[rows]
        forbidden = own == -torch.inf
        on_host = tuple(known[row] for row in self.rows.tolist()) if known else None
        where = (positions_dev[rows], prompt_lens, on_host)
        asking = AskingRows(self.args, *where, self.history, places)
        if words := self.loaded.apply(own, asking):
            return [RowError(row, words) for row in self.rows.tolist()]
        logits[rows] = own.masked_fill_(forbidden, -torch.inf)
        return []


@dataclass(frozen=True)
class Hooks:
    """What a step's rows ask for beyond numbers."""

    allowed: Allowed | None
    words: BadWords | None
    kept: Kept | None
    processed: Processed | None

    def edit(
        self,
        logits: Tensor,
        positions_dev: Tensor,
        before_dev: Tensor | None,
        known: Sequence[np.ndarray] = (),
    ) -> list[RowError]:
        """Changes logits float32[r, vocab] in place, before penalties; arguments as `sample`'s,
        `known` the tokens so far of all r rows, for a processor that wants them on the host.
        Whose processor has raised."""
        if self.kept is not None and before_dev is not None:
            self.kept.write_drafts(positions_dev, before_dev)
        if self.allowed is not None:
            self.allowed.apply(logits)
        if self.words is not None:
            self.words.apply(logits, positions_dev)
        if self.processed is None:
            return []
        return self.processed.apply(logits, positions_dev, known)

    def keep(self, positions_dev: Tensor, tokens_dev: Tensor) -> None:
        """Remembers what was sampled."""
        if self.kept is not None:
            self.kept.write(positions_dev, tokens_dev)


class HookWishes:
    """By slot, who asks for what.  A slot's wishes stay until its next owner's replace them."""

    def __init__(
        self, num_slots: int, vocab_size: int, history: TokenHistory, loaded: Loaded | None
    ) -> None:
        self._vocab_size = vocab_size
        self._history = history
        self._loaded = loaded
        self._asks = np.zeros(num_slots, np.bool_)
        self._places = np.full(num_slots, -1, np.int64)  # in the history; -1 for none
        self._prompt_lens = np.zeros(num_slots, np.int64)
        self._allowed: dict[int, np.ndarray] = {}  # int64[words]
        self._words: dict[int, np.ndarray] = {}  # int64[1 + p, w]: last token, those before it
        self._args: dict[int, dict[str, Any]] = {}

    def enter(self, join: Join) -> int | None:
        """A new owner's wishes; the row of the history that is to start with its tokens, if any."""
        slot, params = join.slot, join.params
        tables = (self._allowed, self._words, self._args)
        for table in tables:
            table.pop(slot, None)
        if params.allowed_token_ids is not None:
            self._allowed[slot] = _mask_of(params.allowed_token_ids, self._vocab_size)
        if params.bad_word_ids:
            self._words[slot] = _backwards(params.bad_word_ids)
        if params.extra_args and self._loaded is not None:
            self._args[slot] = params.extra_args
        self._asks[slot] = any(slot in table for table in tables)
        self._prompt_lens[slot] = join.prompt_len
        self._places[slot] = -1
        if not params.remembers:
            return None
        place = self._places[slot] = self._history.places.take(slot)
        return int(place)

    def leave(self, slot: int) -> None:
        """The slot is given up."""
        self._history.places.give(slot)

    def group(self, slots: np.ndarray, upload: Upload) -> Hooks | None:
        """Stages what the rows to be sampled ask for, int64[r] slots in their order."""
        rows = self._asks[slots].nonzero()[0]
        if not len(rows):
            return None
        owners = list(zip(rows.tolist(), slots[rows].tolist(), strict=True))
        return Hooks(
            self._group_allowed(owners, len(slots), upload),
            self._group_words(owners, upload),
            self._group_kept(rows, slots[rows], upload),
            self._group_processed(owners, upload),
        )

    def _group_allowed(
        self, owners: list[tuple[int, int]], count: int, upload: Upload
    ) -> Allowed | None:
        found = [(row, self._allowed[slot]) for row, slot in owners if slot in self._allowed]
        if not found:
            return None
        rows, masks = zip(*found, strict=True)
        rows_dev = None if len(rows) == count else upload(np.array(rows))
        return Allowed(rows_dev, upload(np.stack(masks)))

    def _group_words(self, owners: list[tuple[int, int]], upload: Upload) -> BadWords | None:
        found = [(row, slot, self._words[slot]) for row, slot in owners if slot in self._words]
        if not found:
            return None
        deepest = max(len(words) for _, _, words in found)
        parts = []
        for row, slot, words in found:
            part = np.full((3 + deepest, words.shape[1]), _ANY)
            part[0], part[1] = row, max(0, self._places[slot])
            part[2], part[3] = words[0], self._prompt_lens[slot]
            part[4 : 3 + len(words)] = words[1:]
            parts.append(part)
        return BadWords(upload(np.concatenate(parts, 1)), self._history)

    def _group_kept(self, rows: np.ndarray, slots: np.ndarray, upload: Upload) -> Kept | None:
        places = self._places[slots]
        kept = places >= 0
        if not kept.any():
            return None
        both = upload(np.stack([rows[kept], places[kept]]))
        return Kept(both[0], both[1], self._history)

    def _group_processed(self, owners: list[tuple[int, int]], upload: Upload) -> Processed | None:
        found = [(row, slot) for row, slot in owners if slot in self._args]
        if not found or self._loaded is None:
            return None
        rows, slots = (np.array(column) for column in zip(*found, strict=True))
        table = upload(np.stack([rows, self._places[slots], self._prompt_lens[slots]]))
        args = tuple(self._args[slot] for _, slot in found)
        return Processed(rows, table, args, self._loaded, self._history)


def _mask_of(tokens: Any, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int64)


def _backwards(words: Any) -> np.ndarray:
    """int64[longest, w]: each word from its last token to its first, then _ANY."""
    table = np.full((max(map(len, words)), len(words)), _ANY, np.int64)
    for column, word in enumerate(words):
        table[: len(word), column] = word[::-1]
    return table
