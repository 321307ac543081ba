"""`stepahead bench spec`: what drafts bring, against the same engine without them.

Both engines stand side by side and answer in turn, so that a machine that gets slower or faster
does so for both.  Greedy, and every answer of the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from stepahead.llm.offline import LLM
from stepahead.types import DraftCounts, RequestOutput, SamplingParams

Prompts = Sequence[list[int]]


@dataclass(frozen=True)
class SpecFigures:
    """Of one workload: TPOT in ms of each round, without drafts and with them; what came of the
    drafts; and whether all answers were the same."""

    plain_ms: tuple[float, ...]
    drafted_ms: tuple[float, ...]
    counts: DraftCounts
    same: bool

    @property
    def ratios(self) -> list[float]:
        """How many times faster drafts are, round by round."""
        return [a / b for a, b in zip(self.plain_ms, self.drafted_ms, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        counts = self.counts
        return {
            "tpot_ms_plain": round(median(self.plain_ms), 3),
            "tpot_ms_drafts": round(median(self.drafted_ms), 3),
            "faster": round(median(self.ratios), 3),
            "faster_min_max": [round(min(self.ratios), 3), round(max(self.ratios), 3)],
            "rounds": len(self.plain_ms),
            "tokens_per_forward": round(counts.tokens_per_row, 3),
            "accepted_at": list(counts.accepted_at),
            "rows": counts.rows,
            "drafted": counts.drafted,
            "proposed": counts.proposed,
            "same_tokens": self.same,
        }


def measure_spec(
    plain: LLM, drafted: LLM, workloads: Mapping[str, Prompts], output_len: int, rounds: int
) -> dict[str, SpecFigures]:
    """Each workload `rounds` times by either engine in turn, after a short one that is not
    counted."""
    found = {}
    for name, prompts in workloads.items():
        for llm in (plain, drafted):
            _answers(llm, prompts, 4)
        before, same = drafted.engine.draft_counts(), True
        times_ms: dict[LLM, list[float]] = {plain: [], drafted: []}
        for turn in range(rounds):
            order = (plain, drafted) if turn % 2 == 0 else (drafted, plain)
            answers = {llm: _answers(llm, prompts, output_len) for llm in order}
            for llm, outputs in answers.items():
                times_ms[llm].append(_tpot_ms(outputs))
            same &= _tokens(answers[plain]) == _tokens(answers[drafted])
        counts = _since(drafted.engine.draft_counts(), before)
        found[name] = SpecFigures(tuple(times_ms[plain]), tuple(times_ms[drafted]), counts, same)
    return found


def _answers(llm: LLM, prompts: Prompts, output_len: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return llm.generate(list(prompts), params, use_tqdm=False)


def _tpot_ms(outputs: list[RequestOutput]) -> float:
    """From a request's first token to its end, for each token after it; mean of all requests."""
    each = []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_s is not None
        tokens = len(output.outputs[0].token_ids)
        each.append(1e3 * (metrics.finished_s - metrics.first_token_s) / max(1, tokens - 1))
    return sum(each) / len(each)


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def _since(now: DraftCounts, before: DraftCounts) -> DraftCounts:
    pairs = zip(now.accepted_at, before.accepted_at, strict=True)
    return DraftCounts(
        now.rows - before.rows,
        now.drafted - before.drafted,
        now.proposed - before.proposed,
        tuple(a - b for a, b in pairs),
    )


def spec_table(found: Mapping[str, SpecFigures]) -> Table:
    """The figures for people."""
    table = Table("", *found)
    figures = list(found.values())

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("TPOT without drafts, ms", *(f"{median(one.plain_ms):.1f}" for one in figures))
    row("TPOT with drafts, ms", *(f"{median(one.drafted_ms):.1f}" for one in figures))
    row("times faster", *(_spread(one.ratios) for one in figures))
    row("tokens per forward", *(f"{one.counts.tokens_per_row:.2f}" for one in figures))
    row("rows with drafts", *(_share(one.counts.drafted, one.counts.rows) for one in figures))
    for place in range(max(len(one.counts.accepted_at) for one in figures)):
        cells = (_share(one.counts.accepted_at[place], one.counts.rows) for one in figures)
        row(f"draft {place + 1} accepted", *cells)
    row("same tokens", *("yes" if one.same else "no" for one in figures))
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f} %"


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
