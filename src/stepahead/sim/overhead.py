"""What the whole engine adds around a model that costs next to nothing.

Regime: a Llama of one layer, hidden size 64, two heads, one KV head, vocabulary 1,024, random
weights, float32, eager, a thread for each core; token ids in and out; the process executor; batch
1, 32 and 256 decoding greedily from prompts of 16 to 31 tokens.  The figure is the mean wall time
of 100 steady decode steps, forward included; the median of runs, loops alternating.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.table import Table

from stepahead.assemble import ModelParts, assemble
from stepahead.config import EngineConfig, ModelFacts
from stepahead.text.texts import ToyTexts
from stepahead.types import SamplingParams

GOALS_MS = {1: 0.4, 32: 0.6, 256: 1.5}
VOCAB = 1024


def near_free_model() -> Any:
    """The model, built where the runner lives."""
    from stepahead.model.spec import ModelSpec
    from stepahead.model.weights import random_model

    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_len=2048,
    )
    return random_model(spec, 0, "float32")


def run(loop: str, rows: int, steps: int, executor: str = "process") -> float:
    """Milliseconds of a steady step."""
    config = EngineConfig(
        "near-free",
        loop=loop,
        executor=executor,
        max_rows=rows,
        max_step_tokens=1 << 14,
        num_pages=rows * 64,
    )
    facts = ModelFacts(VOCAB, 2048, (), 1024)
    parts = ModelParts(facts, ToyTexts(VOCAB), "stepahead.sim.overhead:near_free_model")
    engine = assemble(config, parts).engine
    try:
        params = SamplingParams(temperature=0.0, max_tokens=steps + 40)
        for row in range(rows):
            engine.add([3 + row % 900] * (16 + row % 16), params)
        for _ in range(20):
            engine.step()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        return (time.perf_counter() - began) * 1e3 / steps
    finally:
        engine.close()


def measure(runs: int = 5, steps: int = 100) -> dict[str, Any]:
    """Medians of alternating runs."""
    step_ms: dict[str, dict[str, float]] = {}
    for rows in GOALS_MS:
        found: dict[str, list[float]] = {"serial": [], "overlap": []}
        for _ in range(runs):
            for loop, values in found.items():
                values.append(run(loop, rows, steps))
        step_ms[str(rows)] = {
            loop: round(statistics.median(values), 3) for loop, values in found.items()
        }
    return {"bench": "engine_overhead", "step_ms": step_ms}


def table(found: dict[str, Any]) -> Table:
    """What `measure` found, for people."""
    lines = Table("batch", "serial", "overlap", "goal", title="ms a step, near-free model")
    for batch, goal in GOALS_MS.items():
        step = found["step_ms"][str(batch)]
        lines.add_row(str(batch), str(step["serial"]), str(step["overlap"]), str(goal))
    return lines
