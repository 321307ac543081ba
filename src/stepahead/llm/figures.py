"""What a run was like in numbers: throughput, latencies, the two books, what held steps up.

Knows finished requests; no engine, no output.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stepahead.observe.books import BookSummary
from stepahead.sync import SyncCounts
from stepahead.types import RequestOutput


@dataclass(frozen=True)
class Figures:
    """Rates are over the whole run; latencies in ms, 0 where nothing was measured.

    Host figures are µs a step, hidden under a busy device or exposed while it idles.  `syncs` are
    the pulls back to serial work.
    """

    tokens_per_s: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    host_hidden_us: float
    host_exposed_us: float
    device_idle_pct: float
    syncs: SyncCounts

    def rounded(self) -> dict[str, Any]:
        """By name, to what can be told apart, for a line of JSON; `syncs` by reason."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        syncs = values.pop("syncs").as_dict()
        return {name: round(value, 3) for name, value in values.items()} | {"syncs": syncs}


class RunTally:
    """Adds finished requests up; 16 bytes each, so a run may have millions."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self._ttft_ms = array("d")  # from arrival to the first token
        self._tpot_ms = array("d")  # between two tokens after it, mean of a request

    def add(self, output: RequestOutput) -> None:
        """Counts a finished request; one that failed counts for what it brought."""
        self.requests += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        lengths = [len(choice.token_ids) for choice in output.outputs]
        self.output_tokens += sum(lengths)
        metrics = output.metrics
        if metrics is None or metrics.first_token_s is None:
            return
        self._ttft_ms.append((metrics.first_token_s - metrics.arrival_s) * 1e3)
        if (longest := max(lengths)) > 1:
            between_s = (metrics.finished_s - metrics.first_token_s) / (longest - 1)
            self._tpot_ms.append(between_s * 1e3)

    def figures(self, wall_s: float, books: BookSummary, syncs: SyncCounts) -> Figures:
        """The run's figures; `books` and `syncs` are those of the same stretch of time."""
        return Figures(
            self.output_tokens / wall_s if wall_s else 0.0,
            *_percentiles(self._tpot_ms),
            *_percentiles(self._ttft_ms),
            books.hidden_us_per_step,
            books.exposed_us_per_step,
            books.device_idle_pct,
            syncs,
        )


def _percentiles(values: array[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    middle, high = np.percentile(np.asarray(values), (50, 99)).tolist()
    return middle, high
