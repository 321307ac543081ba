"""What a flight was launched with, and which of its results somebody still waits for."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from stepahead.plan import Result
from stepahead.scheduler.table import RowSet, Table
from stepahead.types import HiddenRows, LogprobRows, PromptLogprobs, StateSums


@dataclass(frozen=True)
class Launched:
    """What a flight was launched with; retiring sees exactly this, whatever was planned since."""

    rows: RowSet
    chunks: np.ndarray  # int32[c, 4] as in the plan
    ending: tuple[int, ...]  # slots whose last output, by length, this step brings
    generations: np.ndarray  # int32[n + c] of `slots` in debug mode, else empty
    whole: Launched | None = None  # where it is a part of a flight: all of that

    @property
    def slots(self) -> np.ndarray:
        """int64[n + c]: every slot that the flight names, rows first."""
        return np.concatenate([self.rows.slots, self.chunks[:, 0]])


class Heard:
    """The live rows of a flight, read before its retirement changes who is live."""

    def __init__(self, table: Table, launched: Launched) -> None:
        slots = launched.chunks[:, 0]
        sampling = slots[launched.chunks[:, 3] > 0]
        self._live = ~table.deaf[np.concatenate([launched.rows.slots, sampling])]
        # what is told of prompts comes with the first part, whoever else does
        prompts = (launched.whole or launched).chunks[:, 0]
        self._rids = {
            slot: int(table.rid[slot]) for slot in prompts.tolist() if not table.deaf[slot]
        }

    def spread(self, kept: np.ndarray, rows: int) -> None:
        """Under drafts: of the tokens of the `rows` decode rows bool[rows * width] are output."""
        self._live = np.append(kept, self._live[rows:])

    def logprobs(self, result: Result) -> tuple[LogprobRows | None, tuple[PromptLogprobs, ...]]:
        """The result's log-probabilities, renumbered as the outputs of the live rows are."""
        prompts = tuple(
            PromptLogprobs(self._rids[rows.slot], rows.start, rows.values)
            for rows in result.prompt_logprobs
            if rows.slot in self._rids
        )
        return self._rows(result.logprobs), prompts

    def _rows(self, values: LogprobRows | None) -> LogprobRows | None:
        if values is None or self._live.all():
            return values
        keep, rows = self._renumbered(values.rows)
        width = values.width
        return msgspec.structs.replace(
            values,
            rows=rows,
            chosen=values.chosen[keep],
            rank=values.rank[keep],
            top_ids=values.top_ids.reshape(len(keep), width)[keep].reshape(-1),
            top=values.top.reshape(len(keep), width)[keep].reshape(-1),
        )

    def hidden(self, result: Result) -> HiddenRows | None:
        """The result's hidden states, renumbered as the outputs of the live rows are."""
        values = result.hidden
        if values is None or self._live.all():
            return values
        keep, rows = self._renumbered(values.rows)
        states = values.values.reshape(len(keep), values.width)[keep]
        return HiddenRows(rows, values.width, states.reshape(-1))

    def pooled(self, result: Result) -> StateSums | None:
        """The result's sums of prompt states, those of the live slots, under their request ids."""
        found = result.pooled
        if found is None:
            return None
        keep = np.array([slot in self._rids for slot in found.owners.tolist()])
        rids = [self._rids[slot] for slot in found.owners[keep].tolist()]
        sums = found.sums.reshape(len(keep), found.width)[keep].reshape(-1)
        owners, starts, counts = np.array(rids, np.int64), found.starts[keep], found.counts[keep]
        return StateSums(owners, starts, counts, found.width, sums)

    def _renumbered(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `rows`, int32[r] of the result's tokens, are live: bool[r]; and these among the
        live ones only, int32."""
        keep = self._live[rows]
        place = np.cumsum(self._live) - 1
        return keep, place[rows[keep]].astype(np.int32)
