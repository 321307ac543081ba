"""The same shapes on this machine: a device that sleeps, a host that keeps its core busy.

Regime as in `overlap`: the process executor, 32 rows decoding, greedy; F is slept, H is worked off
in the retirement.  All loops of one F stand side by side and take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stepahead.engine import Engine
from stepahead.sim.overlap import WARM, sleeping_engine, slow_down, start
from stepahead.sim.virtual import LOOPS, LoopChoice

# Steps without host work before each turn: while the others took theirs, all flights landed, and a
# host that finds them there would be faster than its device for a while.
_SETTLE = 8
_ENTER = 3  # steps with the new H until outputs come at its pace: the first is late by H


def measure(
    forwards: Sequence[float],
    hosts: Sequence[float],
    rounds: int,
    steps: int,
    cadence: tuple[float, int],
) -> dict[str, list[dict[str, Any]]]:
    """TPOT of every loop for each F and H, the median of `rounds` turns of `steps` steps each.

    Then, with the last F and `cadence` = (H, steps): how far apart outputs are.
    """
    found: dict[str, list[dict[str, Any]]] = {"tpot": [], "cadence": []}
    for forward in forwards:
        turns = len(hosts) * rounds
        total = (steps + _SETTLE + _ENTER) * turns + cadence[1] + _SETTLE + _ENTER
        engines = {choice: _started(choice, forward, total) for choice in LOOPS}
        try:
            found["tpot"] += _column(engines, forward, hosts, rounds, steps)
            if forward == forwards[-1]:
                found["cadence"] = [
                    {"loop": str(choice)} | _spaces(engine, *cadence)
                    for choice, engine in engines.items()
                ]
        finally:
            for engine in engines.values():
                engine.close()
    return found


def _column(
    engines: dict[LoopChoice, Engine],
    forward: float,
    hosts: Sequence[float],
    rounds: int,
    steps: int,
) -> list[dict[str, Any]]:
    turns: dict[tuple[LoopChoice, float], list[float]] = {}
    for _ in range(rounds):
        for host in hosts:
            for choice, engine in engines.items():
                turns.setdefault((choice, host), []).append(_turn_ms(engine, host, steps))
    return [
        {
            "loop": str(choice),
            "F_ms": forward,
            "H_ms": host,
            "device_busy_ms": _busy_ms(engines[choice]),
            "tpot_ms": statistics.median(values),
            "lowest_ms": min(values),
            "highest_ms": max(values),
        }
        for (choice, host), values in turns.items()
    ]


def _started(choice: LoopChoice, forward: float, steps: int) -> Engine:
    depth = choice.depth if choice.loop == "batch-queue" else None
    engine = sleeping_engine(choice.loop, forward, 0.0, depth=depth)
    start(engine, steps + WARM)
    return engine


def _turn_ms(engine: Engine, host: float, steps: int) -> float:
    """Milliseconds a step over `steps` outputs with this H."""
    _settle(engine, host)
    began_s = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - began_s) * 1e3 / steps


def _busy_ms(engine: Engine) -> float:
    """What the device was really busy for, a step: the median of those kept."""
    events = engine.books.recent()
    return float(np.median(events.busy_end_ns - events.busy_start_ns)) / 1e6


def _settle(engine: Engine, host: float) -> None:
    slow_down(engine, 0.0)
    for _ in range(_SETTLE):
        engine.step()
    slow_down(engine, host)
    for _ in range(_ENTER):
        engine.step()


def _spaces(engine: Engine, host: float, steps: int) -> dict[str, float]:
    """Between one output and the next in steady decode: the median, and the middle nine tenths."""
    _settle(engine, host)
    at_ms = []
    for _ in range(steps):
        engine.step()
        at_ms.append(time.perf_counter() * 1e3)
    low, middle, high = np.percentile(np.diff(at_ms), (5, 50, 95)).tolist()
    return {"p5_ms": low, "p50_ms": middle, "p95_ms": high}
