"""Percentiles that are values: what probes and latencies are told by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Percentiles of `count` values: the smallest value that so many percent do not exceed.

    So each is one of the values, in ns.  Negative ones occur in `results`.
    """

    count: int
    p50_ns: int
    p90_ns: int
    p99_ns: int

    def as_dict(self) -> dict[str, float]:
        """In µs."""
        return {
            "count": self.count,
            "p50_us": self.p50_ns / 1e3,
            "p90_us": self.p90_ns / 1e3,
            "p99_us": self.p99_ns / 1e3,
        }


def spread(values_ns: np.ndarray, weights: np.ndarray | None = None) -> Spread | None:
    """Of values int64[n], each counted `weights` int64[n] times, or once; None without any."""
    if weights is None:
        upto, ordered_ns = np.arange(1, len(values_ns) + 1), np.sort(values_ns)
    else:
        order = np.argsort(values_ns)
        upto, ordered_ns = np.cumsum(weights[order]), values_ns[order]
    total = int(upto[-1]) if len(upto) else 0
    if total <= 0:
        return None
    ranks = [-(-total * percent // 100) for percent in (50, 90, 99)]
    return Spread(total, *ordered_ns[np.searchsorted(upto, ranks)].tolist())
