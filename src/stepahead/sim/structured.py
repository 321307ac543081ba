"""What grammars cost a step, and whether rows without one wait for those with one.

Regime: the process executor, 32 rows decoding greedily past their prefill, some of them held to an
endless JSON array of small objects, SmolLM2's 49,152 tokens.  Two models: the real one, and one
that sleeps F ms a step and says noise (`sim.sleep.NoiseModel`), so that the cores are the host's as
beside an accelerator.  What samplers and masks compute behind a forward is the CPU's here, in the
thread that launches, so a step is told against F, against the device's busy time, which these are
part of, and against the step without grammars.

An engine a loop lives through all turns; loops and shares take turns.  A turn is the mean wall time
of its steady steps, a figure the median of the turns.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from stepahead.assemble import ModelParts, assemble, model_parts
from stepahead.config import EngineConfig
from stepahead.engine import Engine
from stepahead.grammar import GrammarCompiler
from stepahead.grammar.vocabulary import Vocabulary
from stepahead.plan import Plan, Result
from stepahead.structured import Grammar, StructuredOutputs
from stepahead.sync import Cause, SyncReason
from stepahead.types import Outputs, SamplingParams

LOOPS = ("serial", "overlap", "batch-queue")
SHARES = (0.0, 0.1, 0.5, 1.0)
ROWS = 32
FORWARD_MS = 10.0
GOAL = 1.05  # of F, at 100 %
WARM = 8  # outputs
_MAX_LEN = 1024
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": _ITEM, "minItems": _MAX_LEN}


@dataclass(frozen=True)
class Turn:
    """Milliseconds a step, of them the device's busy time, and those that it stood for masks.

    `free_ms`, `grammar_ms`: between two tokens of such rows, NaN without any.  `late` steps of
    `steps` had masks that were waited for, `late_rows` in all.
    """

    step_ms: float
    busy_ms: float
    stood_ms: float
    free_ms: float
    grammar_ms: float
    steps: int
    late: int
    late_rows: int


def slow_model(mask_ms: float, **options: Any) -> Any:
    """The sleeping model, in a process where the masks of a step take `mask_ms` more."""
    from stepahead.runner.grammar import Matchers
    from stepahead.sim.sleep import NoiseModel

    fill = Matchers.fill

    def slow(self: Matchers, slots: list[int], out: np.ndarray) -> None:
        time.sleep(mask_ms / 1e3)
        fill(self, slots, out)

    # reaches in, so that no runner carries a hook that only a benchmark needs
    Matchers.fill = slow  # type: ignore[method-assign,assignment]
    return NoiseModel(**options)


def build(parts: ModelParts, loop: str, rows: int = ROWS) -> Engine:
    """An engine with room for its rows' whole lives."""
    config = EngineConfig(
        "structured",
        loop=loop,
        max_rows=rows,
        max_step_tokens=1024,
        max_model_len=min(_MAX_LEN, parts.facts.max_len),
        threads=1,
        prefix_cache=False,
    )
    return assemble(config, parts).engine


def sleeping(parts: ModelParts, forward_ms: float, mask_ms: float = 0.0) -> ModelParts:
    """The sleeping model with the vocabulary of a real one."""
    facts = replace(parts.facts, kv_bytes_per_token=1, weight_bytes=0)
    options = {"forward_ms": forward_ms, "vocab_size": facts.vocab_size, "mask_ms": mask_ms}
    return ModelParts(facts, parts.texts, "stepahead.sim.structured:slow_model", options)


def endless(parts: ModelParts) -> Grammar:
    """One that no row comes to the end of."""
    facts = parts.facts
    vocabulary = Vocabulary.of(parts.texts, facts.vocab_size, facts.eos_ids)
    return GrammarCompiler(vocabulary).compile(StructuredOutputs(json=ENDLESS))


class Watch:
    """When tokens of free rows and of the others came, from an engine's outputs."""

    def __init__(self, free: set[int]) -> None:
        self._free = np.array(sorted(free), np.int64)
        self.came_ns: tuple[list[int], list[int]] = [], []

    def take(self, outputs: Outputs) -> None:
        """What a step has just brought."""
        now_ns = time.perf_counter_ns()
        free = int(np.isin(outputs.rids, self._free).sum())
        if free:
            self.came_ns[0].append(now_ns)
        if len(outputs.rids) > free:
            self.came_ns[1].append(now_ns)

    def gaps_ms(self) -> list[float]:
        """Mean time between two tokens of free rows, and of the others."""
        return [
            (came[-1] - came[0]) / 1e6 / (len(came) - 1) if len(came) > 1 else float("nan")
            for came in self.came_ns
        ]


def fill(engine: Engine, grammar: Grammar, share: float) -> tuple[list[int], Watch]:
    """Rows that decode until they are aborted, past their prefill; every so many with a grammar."""
    rows = engine.resolved.config.max_rows
    held = round(rows * share) if share else 0
    params = SamplingParams(temperature=0.0, max_tokens=engine.resolved.model_len, ignore_eos=True)
    rids: list[int] = []
    free: set[int] = set()
    for row in range(rows):
        # spread over the rows
        own = grammar if row * held // rows != (row + 1) * held // rows else None
        (rid,) = engine.add([3 + row % 8] * 16, params, grammar=own)
        rids.append(rid)
        if own is None:
            free.add(rid)
    watch, came = Watch(free), 0
    while came < WARM * rows:
        outputs = engine.step()
        came += 0 if outputs is None else len(outputs.rids)
    return rids, watch


def turn(engine: Engine, grammar: Grammar, share: float, steps: int) -> Turn:
    """Steady steps, and then nobody is left."""
    rids, watch = fill(engine, grammar, share)
    rows = engine.resolved.config.max_rows
    before, late, late_rows = engine.books.summary(), *_late(engine)
    began_ns, came = time.perf_counter_ns(), 0
    while came < steps * rows:
        outputs = engine.step()
        if outputs is not None:
            watch.take(outputs)
            came += len(outputs.rids)
    elapsed_ms = (time.perf_counter_ns() - began_ns) / 1e6
    after, late_after, late_rows_after = engine.books.summary(), *_late(engine)
    for rid in rids:
        engine.abort(rid)
    while engine.has_work:
        engine.step()
    cause = Cause.MASK_LATE.label
    stood_ns = after.idle_ns[cause] - before.idle_ns[cause]
    busy_ns = after.busy_ns - before.busy_ns
    free_ms, grammar_ms = watch.gaps_ms()
    return Turn(
        elapsed_ms / steps,
        busy_ns / 1e6 / steps,
        stood_ns / 1e6 / steps,
        free_ms,
        grammar_ms,
        steps,
        late_after - late,
        late_rows_after - late_rows,
    )


def _late(engine: Engine) -> tuple[int, int]:
    """Steps and rows that have waited for masks."""
    return engine.syncs.steps(SyncReason.GRAMMAR), engine.syncs.rows(SyncReason.GRAMMAR)


def alternate(parts: ModelParts, runs: int, steps: int) -> dict[tuple[str, float], list[Turn]]:
    """Turns by loop and share, in turn."""
    found: dict[tuple[str, float], list[Turn]] = {}
    grammar = endless(parts)
    with ExitStack() as open_engines:
        engines = {}
        for loop in LOOPS:
            engines[loop] = build(parts, loop)
            open_engines.callback(engines[loop].close)
        for _ in range(runs):
            for loop, engine in engines.items():
                for share in SHARES:
                    found.setdefault((loop, share), []).append(turn(engine, grammar, share, steps))
    return found


def summary(
    found: dict[tuple[str, float], list[Turn]], forward_ms: float | None = None
) -> list[dict[str, Any]]:
    """Medians, loop by loop and share by share.

    `of_F`: of the time that the device was asked to take, None for a real one; `of_busy`: of the
    time that it took, samplers and masks on the CPU included; `of_none`: of the step in the same
    loop without grammars, turn by turn.
    """
    cases = []
    for (loop, share), turns in found.items():
        none = found[loop, 0.0]
        busy_ms = statistics.median(t.busy_ms for t in turns)
        step_ms = statistics.median(t.step_ms for t in turns)
        ratios = [t.step_ms / o.step_ms for t, o in zip(turns, none, strict=True)]
        rate = statistics.median(1e3 * ROWS / t.step_ms for t in turns)
        cases.append(
            {
                "loop": loop,
                "share": share,
                "step_ms": round(step_ms, 3),
                "lowest_ms": round(min(t.step_ms for t in turns), 3),
                "highest_ms": round(max(t.step_ms for t in turns), 3),
                "busy_ms": round(busy_ms, 3),
                "of_F": None if forward_ms is None else round(step_ms / forward_ms, 3),
                "of_busy": round(step_ms / busy_ms, 3),
                "of_none": round(statistics.median(ratios), 3),
                "tokens_per_s": round(rate, 1),
                "free_tpot_ms": _median_of(turns, "free_ms"),
                "grammar_tpot_ms": _median_of(turns, "grammar_ms"),
                "stood_ms": _median_of(turns, "stood_ms"),
                "late_steps": sum(t.late for t in turns),
                "steps": sum(t.steps for t in turns),
            }
        )
    return cases


def _median_of(turns: list[Turn], name: str) -> float | None:
    value = statistics.median(getattr(t, name) for t in turns)
    return None if np.isnan(value) else round(value, 3)


def late_masks(
    parts: ModelParts, mask_ms: float = 1.5 * FORWARD_MS, steps: int = 30
) -> dict[str, Any]:
    """Half of the rows under grammars whose masks take longer than the forward: when the others
    are told, from the end of their part of the forward, and how often that was counted."""
    engine = build(sleeping(parts, FORWARD_MS, mask_ms), "overlap")
    try:
        told = tell(engine)
        found = turn(engine, endless(parts), 0.5, steps)
        free, held = (statistics.median(values) for values in zip(*told, strict=True))
    finally:
        engine.close()
    return {
        "F_ms": FORWARD_MS,
        "mask_ms": mask_ms,
        "free_told_ms": round(free, 3),
        "grammar_told_ms": round(held, 3),
        "step_ms": round(found.step_ms, 3),
        "stood_ms": round(found.stood_ms, 3),
        "late_steps": found.late,
        "late_rows": found.late_rows,
        "steps": found.steps,
    }


def tell(engine: Engine) -> list[tuple[float, float]]:
    """From now on the list grows by a pair a step that stood for masks: ms from the end of the
    forward's first part until free rows were retired, and until the others were."""
    scheduler, told = engine.scheduler, list[tuple[float, float]]()
    first_ns = 0

    def timed(plan: Plan, result: Result) -> Outputs:
        nonlocal first_ns
        outputs = type(scheduler).retire(scheduler, plan, result)
        now_ns = time.perf_counter_ns()
        ends_ns = [held.start_ns for held in result.held if held.cause == Cause.MASK_LATE]
        if result.part == "first":
            first_ns = now_ns
        elif result.part == "last" and ends_ns:
            told.append(((first_ns - ends_ns[0]) / 1e6, (now_ns - ends_ns[0]) / 1e6))
        return outputs

    # reaches in, so that no engine carries a hook that only a benchmark needs
    scheduler.retire = timed  # type: ignore[method-assign]
    return told


def measure(model: str, runs: int = 7, steps: int = 40, real_steps: int = 12) -> dict[str, Any]:
    """All of it with a model's vocabulary, and with that model; `real_steps` a turn of the real
    one, none to leave it out."""
    parts = model_parts(EngineConfig(model))
    found: dict[str, Any] = {
        "bench": "structured",
        "rows": ROWS,
        "forward_ms": FORWARD_MS,
        "sleeping": summary(alternate(sleeping(parts, FORWARD_MS), runs, steps), FORWARD_MS),
        "late_masks": late_masks(parts),
    }
    if real_steps:
        found["real"] = summary(alternate(parts, runs, real_steps))
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    """What `measure` found, for people."""
    titles = {"sleeping": f"sleeping device, F = {found['forward_ms']} ms", "real": "real model"}
    shown = [_cases(found[name], title) for name, title in titles.items() if name in found]
    late = Table("what", "", title="masks later than the forward, half of the rows")
    for name, value in found["late_masks"].items():
        late.add_row(name, str(value))
    return [*shown, late]


def _cases(cases: list[dict[str, Any]], title: str) -> Table:
    names = ("step_ms", "of_F", "of_busy", "of_none", "tokens_per_s")
    names += ("free_tpot_ms", "grammar_tpot_ms")
    lines = Table("loop", "grammars", *names, "waited", title=title)
    for case in cases:
        figures = ("" if case[name] is None else str(case[name]) for name in names)
        waited = f"{case['late_steps']} of {case['steps']}"
        lines.add_row(case["loop"], f"{case['share']:.0%}", *figures, waited)
    return lines
