"""What happened to requests and when: one event at a time, never one a row and step.

For one thread, the engine's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Happened(IntEnum):
    """Kinds of events, with what their `value` is."""

    ARRIVED = 0  # positions of its prompt
    ADMITTED = 1  # prompt positions found in the prefix cache
    FIRST_TOKEN = 2  # 0
    PREEMPTED = 3  # 0
    FINISHED = 4  # output tokens
    ABORTED = 5  # output tokens
    FAILED = 6  # output tokens


@dataclass(frozen=True, eq=False)
class RequestEvents:
    """Events of requests, oldest first; int64[n] each.  `what` holds values of Happened."""

    at_ns: np.ndarray
    rid: np.ndarray
    what: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.at_ns)


class RequestLog:
    """The last `keep` events."""

    def __init__(self, clock_ns: Callable[[], int], keep: int = 65536) -> None:
        self._clock_ns = clock_ns
        self._keep = keep
        self._flat = array("q")

    def add(self, rid: int, what: Happened, value: int = 0) -> None:
        """It happened now."""
        self._flat.extend((self._clock_ns(), rid, what, value))
        if len(self._flat) >= 8 * self._keep:
            del self._flat[: -4 * self._keep]

    def recent(self) -> RequestEvents:
        """The events kept."""
        flat = np.array(self._flat[-4 * self._keep :], np.int64)
        return RequestEvents(*flat.reshape(-1, 4).T)
