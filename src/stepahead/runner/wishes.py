"""What the rows ask of the sampler: columns by slot, filled at a join, gathered when rows change.

Host only: it stages what a step's rows ask, and knows neither logits nor how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from stepahead.plan import Join
from stepahead.runner.ends import Ends
from stepahead.runner.hooks import HookWishes
from stepahead.runner.noise import stream_key
from stepahead.runner.sampler import Drawn, Edits, Penalised, SampleGroup
from stepahead.types import SamplingParams

Upload = Callable[[np.ndarray], Tensor]


class Wishes:
    """A slot's wishes stay until its next owner's replace all of them.

    Real numbers are kept as the bits of float64, so that they travel with integers in one upload.
    Single logits to be changed have no fixed number and are tables by slot.
    """

    def __init__(
        self,
        num_slots: int,
        eos_ids: tuple[int, ...],
        eos_dev: Tensor | None = None,
        hooks: HookWishes | None = None,
    ) -> None:
        """`eos_dev` bool[vocab]: `eos_ids` on the device; None where it need not know who ends.
        `hooks`: the same slots' other wishes, entered elsewhere; None where nobody has any."""
        self._hooks = hooks
        self._eos_ids = eos_ids
        self._eos_dev = eos_dev
        self._draws = np.zeros(num_slots, np.bool_)
        self._filters = np.zeros(num_slots, np.bool_)
        # a row of the block is a column of wishes: key, temperature, top_p, min_p, top_k
        self._drawn = np.zeros((5, num_slots), np.int64)
        self._penalised = np.zeros(num_slots, np.bool_)
        # row of counts, presence, frequency, repetition
        self._penalties = np.zeros((4, num_slots), np.int64)
        self._logprobs = np.zeros(num_slots, np.int64)  # 1 + alternatives; 0 asks for nothing
        self._edited = np.zeros(num_slots, np.bool_)
        self._bias: dict[int, np.ndarray] = {}  # int64[2, b]: token, bits
        self._bans: dict[int, np.ndarray] = {}  # int64[2, b]: token, first position it may have
        self._hidden = np.zeros(num_slots, np.bool_)
        self._heeds = np.zeros(num_slots, np.bool_)  # the ends of sequence, wherever they come
        self._ends: dict[int, np.ndarray] = {}  # int64[2, b] as in `_bans`: what else ends it
        self._own = np.zeros(num_slots, np.bool_)  # whether it is in `_ends`

    def enter(self, join: Join, counts_row: int | None) -> None:
        """A new owner's wishes; `counts_row` is where its tokens are counted, if they are."""
        slot, params = join.slot, join.params
        self._draws[slot] = not params.greedy
        if not params.greedy:
            self._filters[slot] = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
            self._drawn[0, slot] = stream_key(join.seed, join.choice)
            self._drawn[1:, slot] = _bits(
                params.temperature, params.top_p, params.min_p, max(params.top_k, 0)
            )
        self._penalised[slot] = counts_row is not None
        if counts_row is not None:
            self._penalties[0, slot] = counts_row
            self._penalties[1:, slot] = _bits(
                params.presence_penalty, params.frequency_penalty, params.repetition_penalty
            )
        self._logprobs[slot] = 0 if params.logprobs is None else 1 + params.logprobs
        self._hidden[slot] = params.return_hidden_states
        self._enter_edits(slot, params, join.prompt_len)
        self._enter_ends(slot, params, join.prompt_len)

    def _enter_ends(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        self._ends.pop(slot, None)
        plain = not params.stop_token_ids and not params.min_tokens
        self._heeds[slot] = plain and not params.ignore_eos and len(self._eos_ids) > 0
        if not plain and (stops := _stop_ids(params, self._eos_ids)):
            self._ends[slot] = np.stack(
                [stops, np.full(len(stops), prompt_len + params.min_tokens)]
            )
        self._own[slot] = slot in self._ends

    def _enter_edits(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        self._bias.pop(slot, None)
        self._bans.pop(slot, None)
        if params.logit_bias:
            tokens, values = np.array(list(params.logit_bias)), params.logit_bias.values()
            self._bias[slot] = np.stack([tokens, _bits(*values)])
        stops = _stop_ids(params, self._eos_ids)
        if params.min_tokens and stops:
            until = np.full(len(stops), prompt_len + params.min_tokens)
            self._bans[slot] = np.stack([stops, until])
        self._edited[slot] = slot in self._bias or slot in self._bans

    def group(self, slots: np.ndarray, upload: Upload) -> SampleGroup:
        """Stages the wishes of the rows to be sampled, int64[r] slots in their order."""
        widths = self._logprobs[slots]
        wanted = widths.nonzero()[0]
        hidden = self._hidden[slots].nonzero()[0]
        return SampleGroup(
            self._group_drawn(slots, upload),
            self._group_edits(slots, upload),
            self._group_penalised(slots, upload),
            wanted.astype(np.int32),
            upload(wanted) if len(wanted) else None,
            int(widths.max(initial=1)) - 1,
            hidden.astype(np.int32),
            upload(hidden) if len(hidden) else None,
            None if self._eos_dev is None else self._group_ends(slots, upload),
            None if self._hooks is None else self._hooks.group(slots, upload),
        )

    def _group_ends(self, slots: np.ndarray, upload: Upload) -> Ends | None:
        heeds, own = self._heeds[slots], self._own[slots].nonzero()[0]
        if not len(own) and not heeds.any():
            return None
        owners = list(zip(own.tolist(), slots[own].tolist(), strict=True))
        return Ends(
            self._eos_dev if heeds.any() else None,
            None if heeds.all() or not heeds.any() else upload(heeds),
            _table(owners, self._ends, upload),
        )

    def _group_drawn(self, slots: np.ndarray, upload: Upload) -> Drawn | None:
        rows = self._draws[slots].nonzero()[0]
        if not len(rows):
            return None
        owners = slots[rows]
        table = upload(np.vstack([rows, self._drawn.take(owners, 1)]))
        return Drawn(table[0], table[1], table[2:], bool(self._filters[owners].any()))

    def _group_penalised(self, slots: np.ndarray, upload: Upload) -> Penalised | None:
        rows = self._penalised[slots].nonzero()[0]
        if not len(rows):
            return None
        table = upload(np.vstack([rows, self._penalties.take(slots[rows], 1)]))
        return Penalised(table[0], table[1], table[2:])

    def _group_edits(self, slots: np.ndarray, upload: Upload) -> Edits | None:
        rows = self._edited[slots].nonzero()[0]
        if not len(rows):
            return None
        owners = list(zip(rows.tolist(), slots[rows].tolist(), strict=True))
        return Edits(_table(owners, self._bias, upload), _table(owners, self._bans, upload))


def _bits(*values: float) -> np.ndarray:
    return np.array(values, np.float64).view(np.int64)


def _stop_ids(params: SamplingParams, eos_ids: tuple[int, ...]) -> list[int]:
    ids = set(params.stop_token_ids or ())
    return sorted(ids if params.ignore_eos else ids | set(eos_ids))


def _table(
    owners: list[tuple[int, int]], by_slot: dict[int, np.ndarray], upload: Upload
) -> Tensor | None:
    """int64[3, k]: the slots' tables side by side, above each entry its row; None if empty."""
    found = [(row, by_slot[slot]) for row, slot in owners if slot in by_slot]
    if not found:
        return None
    rows = [row for row, _ in found]
    tables = [table for _, table in found]
    lengths = [table.shape[1] for table in tables]
    return upload(np.vstack([np.repeat(rows, lengths), np.concatenate(tables, 1)]))
