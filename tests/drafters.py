"""Drafters that know the answer and tell it as well as they are asked to.

A run of the oracle says what each request's outputs are (`learn`); a drafter of these then proposes
them, each draft right or wrong by a hash of slot, place and a seed: so any length of accepted run
comes up at any time, and rows of one step differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from stepahead.plan import Join
from stepahead.runner.draft import Brought, Upload
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec
from stepahead.types import SamplingParams

Key = tuple[int, int, tuple[int, ...], bytes]
_truth: dict[Key, list[int]] = {}


def key(seed: int, choice: int, prompt: Sequence[int], params: SamplingParams) -> Key:
    """What tells a request from all others of a workload, in any engine."""
    # other choices than the first's have the first no more, and no runner hears of the second
    own = msgspec.structs.replace(params, prompt_logprobs=None, structured_outputs=None)
    return seed, choice, tuple(prompt), msgspec.json.encode(own)


def learn(truth: dict[Key, list[int]]) -> None:
    """From now on these are the outputs of all requests."""
    _truth.clear()
    _truth.update(truth)


class Knowing:
    """Knows each slot's sequence to its end.  Of 16 drafts `right` are right; of 16 rows `gaps`
    have fewer drafts than they may."""

    right, gaps = 16, 0
    uses_pages = False

    def __init__(self, spec: RunnerSpec, slots: SlotState, model: object, kv: object) -> None:
        self._drafts = spec.draft_tokens
        self._length = spec.max_pages * spec.page_size + self._drafts + 1
        self._tokens_dev = torch.zeros((spec.num_slots, self._length), dtype=torch.int64)
        self._vocab = spec.options["vocab_size"]

    def stage(self, joins: Sequence[Join], upload: Upload) -> tuple[Tensor, Tensor]:
        """The slots int64[j] and their sequences int64[j, length]."""
        slots = np.array([join.slot for join in joins], np.int64)
        rows = np.zeros((len(joins), self._length), np.int64)
        for row, join in zip(rows, joins, strict=True):
            prompt = join.tokens[: join.prompt_len].tolist()
            outputs = _truth.get(key(join.seed, join.choice, prompt, join.params), [])
            whole = (prompt + outputs)[: self._length]
            row[: len(whole)] = whole
        return upload(slots), upload(rows)

    def enter(self, staged: tuple[Tensor, Tensor]) -> None:
        """As in Drafter."""
        slots_dev, rows_dev = staged
        self._tokens_dev[slots_dev] = rows_dev.view(len(slots_dev), -1)

    def propose(self, brought: Brought) -> Tensor:
        """As in Drafter."""
        ahead = torch.arange(1, self._drafts + 1)
        places = brought.ends_dev.unsqueeze(1) + ahead
        known = self._tokens_dev.index_select(0, brought.slots_dev)
        drafts = known.gather(1, places.clamp(max=self._length - 1))
        chance = (places * 0x9E3779B1 + brought.slots_dev.unsqueeze(1) * 0x85EBCA77) >> 7
        drafts = torch.where(chance % 16 < self.right, drafts, (drafts + 1) % self._vocab)
        short = ((chance[:, :1] >> 4) % 16 < self.gaps) & (ahead > (chance[:, :1] >> 8) % 4)
        return drafts.masked_fill(short, -1)


class Half(Knowing):
    """About half of what it could bring is accepted."""

    right, gaps = 12, 3


class Never(Knowing):
    """Nothing is ever accepted."""

    right, gaps = 0, 4
