"""From events to figures, and from rounds to medians and ratios.  Knows no engine, starts nothing.

An engine is named with its precision, "llama.cpp Q8_0"; ours begin with "stepahead".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "stepahead"
CLEAR = 0.1  # positions whose best token is told by less say nothing about a precision
Event = tuple[float, list[int]]


@dataclass(frozen=True)
class Turn:
    """What one engine did in one round; times in ms, memory in MB of all its processes."""

    step_ms_1: float
    step_ms_many: float
    decode_tok_s: float
    prefill_tok_s: float
    first_ms_median: float
    first_ms_last: float
    memory_mb: float

    @classmethod
    def of(
        cls,
        alone: list[Event],
        many: list[Event],
        prefill: list[Event],
        prompts: Sequence[list[int]],
        memory_mb: float,
    ) -> Turn:
        """Of one prompt alone, of all `prompts`, of these with one new token each."""
        rows = len(prompts)
        steps_s = decode_steps_s(many, rows)
        first_s = first_tokens_s(many, rows)
        tokens = sum(map(len, prompts))
        return cls(
            step_ms_1=statistics.median(decode_steps_s(alone, 1)) * 1e3,
            step_ms_many=statistics.median(steps_s) * 1e3,
            decode_tok_s=rows * len(steps_s) / sum(steps_s),
            prefill_tok_s=tokens / max(first_tokens_s(prefill, rows)),
            first_ms_median=statistics.median(first_s) * 1e3,
            first_ms_last=max(first_s) * 1e3,
            memory_mb=memory_mb,
        )


def first_tokens_s(events: list[Event], rows: int) -> list[float]:
    """When each row had its first token."""
    first: dict[int, float] = {}
    for at_s, places in events:
        for place in places:
            first.setdefault(place, at_s)
    if len(first) != rows:
        raise ValueError(f"{rows - len(first)} of {rows} prompts were not answered")
    return list(first.values())


def decode_steps_s(events: list[Event], rows: int) -> list[float]:
    """How long those steps took that brought every row one token more than one before them did, so
    that no prompt was computed in them."""
    full = [len(places) == rows == len(set(places)) for _, places in events]
    # between two whole steps: a row's first token ends a step that had its prompt
    begun = [at for at, whole in enumerate(full) if whole and at and full[at - 1]]
    if not begun:
        raise ValueError(f"no step decoded all of {rows} rows and nothing else")
    return [events[at][0] - events[at - 1][0] for at in begun]


# --- quality ------------------------------------------------------------------------------------


def perplexity(score: dict[str, list[Any]]) -> float:
    """Of the scored text."""
    return math.exp(-statistics.fmean(score["logprobs"]))


def agreement(score: dict[str, list[Any]], reference: dict[str, list[Any]]) -> float:
    """Share of positions with the reference's most likely token, of those where it is clear."""
    clear = [margin > CLEAR for margin in reference["margins"]]
    pairs = zip(score["best"], reference["best"], clear, strict=True)
    return statistics.fmean(ours == theirs for ours, theirs, counts in pairs if counts)


# --- rounds -------------------------------------------------------------------------------------

Turns = dict[str, list[Turn]]  # by engine, one a round
Figure = Callable[[Turn], float]


@dataclass(frozen=True)
class Spread:
    """Median of the rounds, lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True)
class Ratio:
    """One of ours to one of theirs, of the same rounds."""

    ours: str
    theirs: str
    spread: Spread


def spreads(turns: Turns, figure: Figure) -> dict[str, Spread]:
    """The figure of each engine."""
    return {name: Spread.of([figure(turn) for turn in own]) for name, own in turns.items()}


def is_ours(name: str) -> bool:
    return name.split()[0] == OURS


def bits(name: str) -> int:
    """Of the weights, by the precision's first number: 8 of "Q8_0" and "int8"."""
    digits = "".join(c if c.isdigit() else " " for c in name.rpartition(" ")[2])
    return int(digits.split()[0])


def ratio(turns: Turns, figure: Figure, ours: str, theirs: str) -> Ratio:
    """Of two engines."""
    pairs = zip(turns[ours], turns[theirs], strict=True)
    return Ratio(ours, theirs, Spread.of([figure(mine) / figure(other) for mine, other in pairs]))


def ratio_of_best(
    turns: Turns,
    figure: Figure,
    best: Callable[..., str],
    chosen: Callable[[str], bool] = lambda name: True,
) -> Ratio | None:
    """Our best to the peers' best, each by its median; `best` is max or min.  None where one side
    did not run.  `chosen` says which engines count."""
    middle = {name: one.median for name, one in spreads(turns, figure).items() if chosen(name)}
    ours = [name for name in middle if is_ours(name)]
    theirs = [name for name in middle if not is_ours(name)]
    if not ours or not theirs:
        return None
    return ratio(turns, figure, best(ours, key=middle.get), best(theirs, key=middle.get))


def ratios(turns: Turns) -> dict[str, Ratio | None]:
    """All that is asked, by its name in the JSON; where lower is better, lower than 1 is good."""

    def same_bits(width: int) -> Callable[[str], bool]:
        return lambda name: bits(name) == width and name.split()[0] in (OURS, "llama.cpp")

    def plain(name: str) -> bool:
        return name in (f"{OURS} float32", "vllm float32")

    def int8(name: str) -> bool:
        return not is_ours(name) or name == f"{OURS} int8"

    return {
        "ratio_decode_b32_vs_best": ratio_of_best(turns, lambda one: one.decode_tok_s, max),
        "ratio_decode_b32_int8_vs_best": ratio_of_best(
            turns, lambda one: one.decode_tok_s, max, int8
        ),
        "ratio_decode_b32_float32_vs_vllm": ratio_of_best(
            turns, lambda one: one.decode_tok_s, max, plain
        ),
        "ratio_prefill_vs_best": ratio_of_best(turns, lambda one: one.prefill_tok_s, max),
        "ratio_first_token_median_vs_best": ratio_of_best(
            turns, lambda one: one.first_ms_median, min
        ),
        "ratio_first_token_last_vs_best": ratio_of_best(turns, lambda one: one.first_ms_last, min),
        "ratio_memory_vs_best": ratio_of_best(turns, lambda one: one.memory_mb, min),
        **{
            f"ratio_step_b1_vs_llamacpp {width}bit": ratio_of_best(
                turns, lambda one: one.step_ms_1, min, same_bits(width)
            )
            for width in (8, 4)
        },
    }
