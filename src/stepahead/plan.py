"""The three messages between host and runner, and how they travel: Plan, Result, Control.

Nothing else crosses.  All are immutable, made of integers and numpy arrays, and serialise as
typed structs whose arrays travel raw.  Knows no torch, no queue, no policy.

A plan carries *differences*.  In steady decode `same_rows` is true and everything else is empty:
a handful of integers, whatever the batch.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from stepahead.structured import Grammar
from stepahead.sync import Held, Sync
from stepahead.types import HiddenRows, LogprobRows, SamplingParams, StateSums
from stepahead.wire import decoder, encode

NO_INTS = np.zeros(0, np.int32)
NO_INTS.setflags(write=False)


class Join(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A request enters a slot (again, after a preemption).

    `tokens` int32[n]: its prompt and the outputs already known; `prompt_len` of them are prompt.
    `cached` positions have their KV in `pages` already (a prefix hit).  `pages` int32[p] is the
    slot's page table so far.  `seed` and `choice` key the sampling noise.  `limit` positions of it
    will ever be computed.  Its outputs, the known ones among `tokens` too, keep to `grammar`.
    """

    slot: int
    generation: int
    tokens: np.ndarray
    prompt_len: int
    cached: int
    pages: np.ndarray
    params: SamplingParams
    seed: int
    choice: int
    limit: int = 1 << 40
    grammar: Grammar | None = None


class Plan(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """What the host decided for one step.

    rows     int32[n]  slots that decode one position, ascending.  Sent only when they changed.
    same_rows          `rows` equals that of the plan before; with S stages, of S plans before.
    tokens   int32[n]  the rows' input tokens that the host brings, -1 where the relay has them;
                       None when it has all of them.
    chunks   int32[4c] flat (slot, start, count, samples): prompt positions start..start+count of
                       the slot; `samples` is 1 on a prompt's last chunk, if a token is to follow.
    grants   int32[3g] flat (slot, index, page): page-table entries that are new.
    leaves   int32[l]  slots given up; a later join may reuse them.
    """

    step: int
    rows: np.ndarray
    same_rows: bool
    tokens: np.ndarray | None = None
    chunks: np.ndarray = NO_INTS
    joins: tuple[Join, ...] = ()
    grants: np.ndarray = NO_INTS
    leaves: np.ndarray = NO_INTS

    @property
    def chunk_table(self) -> np.ndarray:
        """`chunks` as int32[c, 4]."""
        return self.chunks.reshape(-1, 4)

    @property
    def grant_table(self) -> np.ndarray:
        """`grants` as int32[g, 3]."""
        return self.grants.reshape(-1, 3)


class PromptRows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Log-probabilities of the prompt tokens at positions `start`.. of the request in `slot`."""

    slot: int
    start: int
    values: LogprobRows


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """The request of a sampled row, the `row`th of its step, can't go on; its token is void."""

    row: int
    error: str


Part = Literal["whole", "first", "last"]
LATE = -3  # among a part's tokens: this row is in the other part


class Result(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """What one step gave, or a part of it.

    Rows may wait for a mask when others don't: then those others come as the `first` part, and the
    `last` one brings the rest.  Each has LATE as the tokens of rows that are not in it.

    `tokens` int32[n * width + s]: `width` for each decode row in the plan's order, then one for
    each chunk that samples.  Under drafts the width is more than 1: a row's new tokens, then -1 for
    each draft that was wrong, and -2 where there was none.  Times are monotonic nanoseconds: when
    the runner had the plan, when it had queued the step's last operation, when the device began and
    ended; 0 where nobody says.  A non-empty `error` means the step failed as a whole and nothing in
    it counts.  `syncs`: where the runner could not run ahead.  `held`: what kept it, or the device,
    from going on; in steady decode nothing does.  `ended` flat (row, count): grammars
    that are complete with the first `count` tokens that the row has brought here; what comes behind
    is no output.  `failed`: rows whose grammar, or logits processor, can't go on.
    """

    step: int
    tokens: np.ndarray
    device_start_ns: int = 0
    device_end_ns: int = 0
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[PromptRows, ...] = ()
    error: str = ""
    hidden: HiddenRows | None = None
    syncs: tuple[Sync, ...] = ()
    received_ns: int = 0
    submitted_ns: int = 0
    held: tuple[Held, ...] = ()
    pooled: StateSums | None = None
    width: int = 1
    part: Part = "whole"
    # no array: those cost a call of Python on either side of a wire, in each step
    ended: tuple[int, ...] = ()
    failed: tuple[RowFailure, ...] = ()

    @property
    def samples(self) -> int:
        """New tokens."""
        tokens = self.tokens
        if self.width == 1 and self.part == "whole":
            return len(tokens)
        return int(np.count_nonzero(tokens >= 0))

    @property
    def ended_table(self) -> np.ndarray:
        """`ended` as int32[e, 2]."""
        return np.array(self.ended, np.int32).reshape(-1, 2)

    @property
    def has_extras(self) -> bool:
        """Whether there is more than tokens for any row: log-probabilities or hidden states."""
        extras = (self.logprobs, self.hidden, self.pooled)
        return bool(self.prompt_logprobs) or extras != (None, None, None)


class Control(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A message outside the flow of steps."""

    kind: Literal["shutdown"]


_PLANS = decoder(Plan)
_RESULTS = decoder(Result)
_CONTROLS = decoder(Control)


def encode_plan(plan: Plan) -> bytes:
    """The plan as bytes; rows the other side already has are left out."""
    if plan.same_rows:
        plan = msgspec.structs.replace(plan, rows=NO_INTS)
    return encode(plan)


def decode_plan(data: bytes) -> Plan:
    """The inverse of encode_plan, but for `rows` under `same_rows`, which come out empty."""
    return _PLANS.decode(data)


def encode_result(result: Result) -> bytes:
    """The result as bytes."""
    return encode(result)


def decode_result(data: bytes) -> Result:
    """The inverse of encode_result."""
    return _RESULTS.decode(data)


def encode_control(control: Control) -> bytes:
    """The control message as bytes."""
    return encode(control)


def decode_control(data: bytes) -> Control:
    """The inverse of encode_control."""
    return _CONTROLS.decode(data)
