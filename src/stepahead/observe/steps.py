"""One row for each landed step: what it was and when it passed each post, in columns.

What the books add up is told here step by step, for probes, timelines and metrics.  Knows how large
a plan is, not what it means.  For one thread, the loop's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from stepahead.plan import Plan, Result
from stepahead.sync import SyncReason


class Kind(IntEnum):
    """What a step computes."""

    DECODE = 0
    PREFILL = 1  # chunks of prompts alone
    MIXED = 2  # both


REASONS = tuple(SyncReason)  # what `Steps.reason` indexes


@dataclass(frozen=True, eq=False)
class Steps:
    """Landed steps, oldest first and consecutive but where flights were dropped; int64[n] each.

    rows          decode rows
    chunk_tokens  prompt positions
    samples       tokens it gave
    flights       steps in the air right after its launch, itself included
    reason        index in REASONS of the pull back to serial work for which its landing came before
                  a launch, else of the first one in it; -1 for none
    plan_ns       the host began to plan it
    launch_ns     the plan was there and the host began to hand it over
    received_ns   the runner had the plan; 0 where the executor does not say
    submitted_ns  the runner had queued its last operation on the device; 0 likewise
    start_ns      the device began with it
    end_ns        the device ended it
    land_ns       its result was on the host
    """

    step: np.ndarray
    kind: np.ndarray
    rows: np.ndarray
    chunk_tokens: np.ndarray
    samples: np.ndarray
    flights: np.ndarray
    reason: np.ndarray
    plan_ns: np.ndarray
    launch_ns: np.ndarray
    received_ns: np.ndarray
    submitted_ns: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    land_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: np.ndarray | slice) -> Steps:
        """The steps that an index, a mask or a slice of them chooses."""
        return Steps(*(getattr(self, field.name)[chosen] for field in fields(self)))


_WIDTH = len(fields(Steps))
# looked up once: members of an enumeration are slow to find
_DECODE, _PREFILL, _MIXED = (int(kind) for kind in Kind)
_INDEX = {reason: index for index, reason in enumerate(REASONS)}


class StepLog:
    """The last `keep` landed steps, and how many there ever were."""

    def __init__(self, keep: int = 16384) -> None:
        self.count = 0
        self._keep = keep
        self._most = _WIDTH * (keep + keep // 4)
        # What has come since somebody read, one row after the other, and what was read before.  To
        # make numbers of an array costs more than all else here: only who reads pays for it.
        self._newest: list[int] = []
        self._read = np.zeros((2 * keep, _WIDTH), np.int64)
        self._end = 0  # of the rows in it

    def add(
        self,
        plan: Plan,
        result: Result,
        plan_ns: int,
        launch_ns: int,
        flights: int,
        land_ns: int,
        awaited: SyncReason | None = None,
        told: int = 0,
    ) -> None:
        """A step has landed; in launch order.  `awaited`: why nothing was launched before; `told`:
        tokens of it that came in a part before `result`."""
        if awaited is None and result.syncs:
            awaited = result.syncs[0].reason
        rows, chunk_tokens, kind = len(plan.rows), 0, _DECODE
        if len(plan.chunks):
            chunk_tokens = int(plan.chunks[2::4].sum())
            kind = _MIXED if rows else _PREFILL
        newest = self._newest
        newest += (
            plan.step,
            kind,
            rows,
            chunk_tokens,
            result.samples + told,
            flights,
            -1 if awaited is None else _INDEX[awaited],
            plan_ns,
            launch_ns,
            result.received_ns,
            result.submitted_ns,
            result.device_start_ns,
            result.device_end_ns,
            land_ns,
        )
        self.count += 1
        if len(newest) > self._most:
            del newest[: -self._keep * _WIDTH]

    def recent(self, last: int | None = None) -> Steps:
        """The last `last` steps of those kept, all of them if None."""
        self._take_in()
        return self._from(self._end - min(last or self._keep, self._keep))

    def landed_after(self, at_ns: int) -> Steps:
        """Those of the kept steps that landed later than that."""
        self._take_in()
        kept = max(0, self._end - self._keep)
        land_ns = self._read[kept : self._end, -1]
        return self._from(kept + int(np.searchsorted(land_ns, at_ns, side="right")))

    def _take_in(self) -> None:
        """Makes rows of what has come since somebody read: who reads pays for that alone."""
        newest = np.array(self._newest, np.int64).reshape(-1, _WIDTH)[-self._keep :]
        self._newest.clear()
        if self._end + len(newest) > len(self._read):
            self._read[: self._keep] = self._read[self._end - self._keep : self._end]
            self._end = self._keep
        self._read[self._end : self._end + len(newest)] = newest
        self._end += len(newest)

    def _from(self, first: int) -> Steps:
        """Copies: what is read is looked at by another thread while more comes in."""
        return Steps(*self._read[max(0, first) : self._end].copy().T)
