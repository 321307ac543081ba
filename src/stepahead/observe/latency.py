"""How long things took, and how large they were: buckets that are exact, and the last values.

A value is taken down as two integers, it and how many had it; into buckets they go many at once.
So a step in which 256 rows waited alike costs what one row costs.  Each histogram's bounds are
those of every metric that may be made of it, so each of these metrics is exact as well.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

NS = 1_000_000_000
_PENDING = 1024  # pairs that wait to be put into buckets: 16 KiB
_KEEP = 8192  # pairs that stay as they are, for percentiles

# seconds, or tokens; by metric, then by whose metrics they are
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 900)
_GAPS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_VLLM_LONG = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    7680,
)
_VLLM_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80, 160, 640, 2560),
)
_VLLM_GAPS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40),
    80,
)
_SGLANG_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_SGLANG_GAPS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1),
    *(0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
BUCKETS: dict[str, dict[str, tuple[float, ...]]] = {
    "queue": {
        "stepahead": _SHORT,
        "vllm": _VLLM_LONG,
        "sglang": (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    },
    "prefill": {"stepahead": _SHORT, "vllm": _VLLM_LONG},
    "ttft": {"stepahead": _SHORT, "vllm": _VLLM_FIRST, "sglang": _SGLANG_FIRST},
    "itl": {"stepahead": _GAPS, "vllm": _VLLM_GAPS, "sglang": _SGLANG_GAPS},
    "decode": {"stepahead": _LONG, "vllm": _VLLM_LONG},
    "e2e": {
        "stepahead": _LONG,
        "vllm": _VLLM_LONG,
        "sglang": (*_SGLANG_FIRST, 600, 1200, 1800, 2400),
    },
    "prompt_tokens": {"stepahead": _TOKENS, "vllm": _TOKENS, "sglang": _TOKENS},
    "output_tokens": {"stepahead": _TOKENS, "vllm": _TOKENS, "sglang": _TOKENS},
}
SIZES = ("prompt_tokens", "output_tokens")  # counted in tokens; all others are durations in ns


def scale(name: str) -> int:
    """What 1 of the unit of `BUCKETS[name]` is in the values of that histogram."""
    return 1 if name in SIZES else NS


@dataclass(frozen=True, eq=False)
class Distribution:
    """A histogram as it stood.

    `counts` int64[b + 1]: values up to `bounds` int64[b], one by one, and those beyond the last.
    `recent` int64[n, 2]: the last values and how many had each.
    """

    bounds: np.ndarray
    counts: np.ndarray
    total: int
    recent: np.ndarray

    @property
    def count(self) -> int:
        """How many values."""
        return int(self.counts.sum())

    def upto(self, bounds: tuple[int, ...]) -> list[int]:
        """How many values do not exceed each of `bounds`, which are some of this histogram's."""
        at = np.searchsorted(self.bounds, bounds)
        assert np.array_equal(self.bounds[at], bounds), "not a bound of this histogram"
        return np.cumsum(self.counts)[at].tolist()


class Histogram:
    """Values and how many had them, as they come."""

    def __init__(self, name: str) -> None:
        """`name` is one of BUCKETS."""
        unit = scale(name)
        bounds = {round(bound * unit) for many in BUCKETS[name].values() for bound in many}
        self._bounds = np.array(sorted(bounds), np.int64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0
        self._recent = np.zeros((0, 2), np.int64)
        self._pending = array("q")

    def add(self, value: int, count: int = 1) -> None:
        """So many had this value."""
        self._pending.extend((value, count))
        if len(self._pending) >= 2 * _PENDING:
            self._fold()

    def add_all(self, values: np.ndarray, count: int) -> None:
        """So many had each of `values` int64[n]."""
        if len(values):
            self._put(np.stack((values, np.full(len(values), count)), axis=1))

    def _fold(self) -> None:
        pairs = np.array(self._pending, np.int64).reshape(-1, 2)
        del self._pending[:]
        self._put(pairs)

    def _put(self, pairs: np.ndarray) -> None:
        values, counts = pairs.T
        np.add.at(self._counts, np.searchsorted(self._bounds, values), counts)
        self._total += int(values @ counts)
        self._recent = np.concatenate((self._recent, pairs))[-_KEEP:]

    def taken(self) -> Distribution:
        """A copy of it all."""
        if self._pending:
            self._fold()
        return Distribution(self._bounds, self._counts.copy(), self._total, self._recent)
