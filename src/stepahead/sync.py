"""Why a step could not run ahead: every pull back to serial work has a name here, and is counted.

A name stands for something that was waited for, or done in line, for the sake of some rows; the
counts say in how many steps and for how many rows.  What is not named here is not waited for.

Beside them, why a device stands idle: each nanosecond of it has one `Cause`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec


class SyncReason(Enum):
    """What kept a step from running ahead; the values are what people read and metrics carry."""

    SERIAL_PREFILL = "serial-prefill"  # a prefill waited until the one before it was retired
    HOST_LENGTHS = "host-lengths"  # attention that wants exact lengths on the host
    HIDDEN_STATES = "hidden-states"  # a client wants hidden states: a long copy before landing
    BLOCKING_COPY = "blocking-copy"  # the device's copies to the host block whoever asks
    STAGING = "staging"  # staging memory was still being read when it was needed again
    DRAIN = "drain"  # nothing could be planned before a flight landed
    GRAMMAR = "grammar"  # rows whose masks were not there when their logits were
    HOST_PROCESSOR = "host-processor"  # the same, of tokens on the host for a logits processor
    # Nothing could be launched before a flight landed, because every row that decodes had its token
    # still on its way through the stages.  Its rows are those whose tokens that flight brings; a
    # row that sits a plan out while others run holds nothing up, and is not counted.
    PIPELINE = "pipeline"


class Sync(msgspec.Struct, frozen=True, array_like=True):
    """One pull back, in one step, for so many rows."""

    reason: SyncReason
    rows: int


class Cause(IntEnum):
    """Why the device stands idle; `observe.causes` has the rules."""

    PLAN_LATE = 0  # the host was at something else than handing over the next step
    LAUNCH_LATE = 1  # the step was on its way: encoded, sent, received, queued on the device
    MASK_LATE = 2  # a grammar's mask was not there yet
    FENCE = 3  # a plan's writes had waited for the reads of the step before
    COPY = 4  # a copy between host and device, or results on their way home
    NO_WORK = 5  # nobody had asked for anything
    GARBAGE_COLLECTION = 6  # Python looked for cycles
    UNKNOWN = 7  # the step lay on the device and nothing says why it did not begin

    @property
    def label(self) -> str:
        """In words."""
        return self.name.lower().replace("_", " ")


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What kept the runner, or the device behind it, from going on, and when, in ns."""

    cause: Cause
    start_ns: int
    end_ns: int


class Waited(NamedTuple):
    """A wait of the host inside a device, and when, on the device's clock."""

    reason: SyncReason
    start_ns: int
    end_ns: int


class SyncCounts:
    """Steps and rows by reason; only reasons that occurred are there."""

    def __init__(self) -> None:
        self._counts: dict[SyncReason, tuple[int, int]] = {}

    def add(self, reason: SyncReason, rows: int) -> None:
        """One more step in which `rows` rows were held up."""
        steps, before = self._counts.get(reason, (0, 0))
        self._counts[reason] = steps + 1, before + rows

    def steps(self, reason: SyncReason) -> int:
        """Steps in which it occurred."""
        return self._counts.get(reason, (0, 0))[0]

    def rows(self, reason: SyncReason) -> int:
        """Rows concerned, all steps together."""
        return self._counts.get(reason, (0, 0))[1]

    def copy(self) -> SyncCounts:
        """The counts of this moment, to count from."""
        counts = SyncCounts()
        counts._counts = dict(self._counts)
        return counts

    def since(self, before: SyncCounts) -> SyncCounts:
        """What has been added to these counts since they were `before`."""
        counts = SyncCounts()
        for reason, (steps, rows) in self._counts.items():
            if steps > before.steps(reason):
                counts._counts[reason] = steps - before.steps(reason), rows - before.rows(reason)
        return counts

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{reason: {"steps": n, "rows": m}}, in the order of the enumeration."""
        return {
            reason.value: {"steps": self.steps(reason), "rows": self.rows(reason)}
            for reason in SyncReason
            if reason in self._counts
        }
