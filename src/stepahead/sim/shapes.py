"""The shape of each loop, measured on the virtual clock: exact, and the same on every machine.

F is what a forward takes, H what a step's planning and retirement take, h the hand-over from the
flight's end to the host.  All times in and out are milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stepahead.config import EngineConfig
from stepahead.executor.virtual import StepSize, Timing
from stepahead.observe.books import Stage
from stepahead.plan import Plan, Result
from stepahead.sim.virtual import (
    LOOPS,
    MS,
    OVERLAP,
    QUEUES,
    SERIAL,
    HostWork,
    LoopChoice,
    Rig,
    constant,
    host_work,
    intervals_ns,
    rig,
    steady,
)
from stepahead.types import Outputs, SamplingParams

HANDOVER_MS = 0.2
FORWARD_MS, HOST_MS = 10.0, 6.0  # where one case must do
STEPS = 96  # a multiple of every depth here: a depth's steps repeat after so many
PUBLISHED = {
    SERIAL: "SGLang's normal loop, vLLM's `step`",
    OVERLAP: "SGLang's overlap loop",
    QUEUES[0]: "vLLM's batch queue with async scheduling",
    QUEUES[1]: "vLLM's batch queue, two pipeline stages",
    QUEUES[2]: "vLLM's batch queue, three pipeline stages",
}


def formula_ms(depth: int, forward: float, host: float, handover: float = HANDOVER_MS) -> float:
    """Time of a steady step.  The device repeats after F, the host after H; and a step's plan can't
    come before the step `depth` earlier was planned, computed, handed over and retired."""
    return max(forward, host, (forward + host + handover) / depth)


def timing(
    forward: float, launch: float = 0.0, submit: float = 0.0, handover: float = 0.0
) -> Timing:
    """Constant costs."""
    return Timing(
        constant(round(forward * MS)), round(launch * MS), round(submit * MS), round(handover * MS)
    )


def tpot_ms(choice: LoopChoice, costs: Timing, work: HostWork, steps: int = STEPS) -> float:
    """Mean time of a steady decode step."""
    rigged = rig(choice, costs, work)
    steady(rigged, steps)
    return sum(intervals_ns(rigged.hear(1 + steps))) / steps / MS


# --- TPOT against F and H ---------------------------------------------------------------------


def grid(forwards: Sequence[float], hosts: Sequence[float]) -> list[dict[str, Any]]:
    """TPOT of every loop for each F and H."""
    return [
        {
            "loop": str(choice),
            "F_ms": forward,
            "H_ms": host,
            "tpot_ms": tpot_ms(choice, timing(forward, handover=HANDOVER_MS), host_work(host)),
        }
        for forward in forwards
        for choice in LOOPS
        for host in hosts
    ]


# --- what a deeper queue is for ---------------------------------------------------------------


def jitter(steps: int = 960) -> list[dict[str, Any]]:
    """TPOT of every loop where F or H varies from step to step, by the same draws for all."""
    rng = np.random.default_rng(0)
    flat = np.ones(4096)
    even = rng.uniform(0.4, 1.6, 4096)
    # one step in sixteen takes five times as long as the others; the mean is 1
    rare = np.where(rng.random(4096) < 1 / 16, 5.0, 1.0) / (1 + 4 / 16)
    cases: tuple[tuple[str, np.ndarray, np.ndarray, float], ...] = (
        ("none", flat, flat, HOST_MS),
        ("H between 0.4 and 1.6 of its mean", flat, even, HOST_MS),
        ("F between 0.4 and 1.6 of its mean", even, flat, HOST_MS),
        ("H five times as long in one step of sixteen", flat, rare, HOST_MS),
        ("the same, mean H = 9 ms", flat, rare, 9.0),
        ("both between 0.4 and 1.6, mean H = 9 ms", even, even[::-1], 9.0),
    )
    return [
        {"spread": name, "H_ms": mean}
        | {
            str(choice): tpot_ms(choice, _spread_timing(forward), _spread_work(mean, host), steps)
            for choice in LOOPS
        }
        for name, forward, host, mean in cases
    ]


def _spread_timing(factors: np.ndarray) -> Timing:
    draw = _drawn(FORWARD_MS, factors)
    return Timing(lambda size: draw(size.step), handover_ns=round(HANDOVER_MS * MS))


def _spread_work(mean: float, factors: np.ndarray) -> HostWork:
    return HostWork(_drawn(mean * 0.25, factors), _drawn(mean * 0.75, factors))


def _drawn(mean: float, factors: np.ndarray) -> Callable[[int], int]:
    values = np.round(mean * MS * factors).astype(np.int64).tolist()
    return lambda step: values[step % len(values)]


def submit_stage() -> list[dict[str, Any]]:
    """TPOT where the runner's own submit takes long: a third stage between host and device."""
    return [
        {"submit_ms": submit}
        | {
            str(choice): tpot_ms(
                choice,
                timing(FORWARD_MS, handover=HANDOVER_MS, submit=submit),
                host_work(HOST_MS),
            )
            for choice in LOOPS
        }
        for submit in (0.0, 2.0, 4.0, 8.0)
    ]


def depth_costs() -> list[dict[str, Any]]:
    """What depth costs: a newcomer's first token, and how long an aborted request holds its slot.

    Both asked right after a step's outputs, the others decoding.
    """
    found = []
    for choice in LOOPS:
        rigged = _deciding_rig(choice)
        asked_ns = rigged.clock.now_ns()
        rid = rigged.add(16, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        first_ns = _until(rigged, lambda outputs, rid=rid: rid in outputs.rids.tolist())
        free = rigged.engine.scheduler.table.free_slots
        aborted_ns = rigged.clock.now_ns()
        rigged.engine.abort(rid)
        told_ns = _until(rigged, lambda outputs: bool(outputs.finishes))
        table = rigged.engine.scheduler.table
        freed_ns = (
            told_ns
            if table.free_slots > free
            else _until(rigged, lambda _, free=free, table=table: table.free_slots > free)
        )
        found.append(
            {
                "loop": str(choice),
                "first_token_ms": (first_ns - asked_ns) / MS,
                "abort_told_ms": (told_ns - aborted_ns) / MS,
                "slot_back_ms": (freed_ns - aborted_ns) / MS,
            }
        )
    return found


def _deciding_rig(choice: LoopChoice) -> Rig:
    rigged = rig(choice, timing(FORWARD_MS, handover=HANDOVER_MS), host_work(HOST_MS), rows=5)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for _ in range(4):
        rigged.add(16, params)
    rigged.hear(24)
    return rigged


def _until(rigged: Rig, met: Callable[[Outputs], bool]) -> int:
    """The time at which a step's outputs first were as asked."""
    while True:
        (heard,) = rigged.hear(1)
        if met(heard.outputs):
            return heard.at_ns


# --- queue shapes -----------------------------------------------------------------------------


def queue_shapes() -> list[dict[str, Any]]:
    """For each loop: flights in the air at each point, rows wasted by each kind of end, and how
    long a landed token waits until the caller has it."""
    slow = 100.0  # a submit this long, on a forward of half of it
    return [
        {"loop": str(choice), "published_as": PUBLISHED[choice], "depth": choice.depth}
        | _in_the_air(choice)
        | {f"waste_{kind}": waste(choice, params) for kind, params in _ends(choice).items()}
        | {
            "publication_ms": publication_ms(choice, timing(FORWARD_MS, handover=HANDOVER_MS)),
            "publication_submit_aside_ms": publication_ms(
                choice, timing(slow / 2, handover=HANDOVER_MS, submit=slow)
            ),
            "publication_submit_in_line_ms": publication_ms(
                choice, timing(slow / 2, handover=HANDOVER_MS, launch=slow)
            ),
        }
        for choice in LOOPS
    ]


def _in_the_air(choice: LoopChoice) -> dict[str, int]:
    """Steps launched and not retired: while the host plans, waits and retires, and between steps.

    The step being retired has landed and is not counted any more.
    """
    rigged = rig(choice, timing(FORWARD_MS, handover=HANDOVER_MS), host_work(HOST_MS))
    steady(rigged, STEPS)
    scheduler = rigged.engine.scheduler
    plan, retire = scheduler.plan, scheduler.retire
    seen: dict[str, int] = {}

    def seen_plan() -> Plan | None:
        seen["air_plan"] = scheduler.in_flight
        return plan()

    def seen_retire(planned: Plan, result: Result) -> Outputs:
        seen["air_wait"] = scheduler.in_flight
        seen["air_retire"] = scheduler.in_flight - 1
        return retire(planned, result)

    scheduler.plan = seen_plan  # type: ignore[method-assign]
    scheduler.retire = seen_retire  # type: ignore[method-assign]
    rigged.hear(8)
    return seen | {"air_between": scheduler.in_flight}


def _ends(choice: LoopChoice) -> dict[str, SamplingParams]:
    """Three ways to end at the twelfth token."""
    said = _first_token(choice)
    return {
        "length": SamplingParams(temperature=0.0, max_tokens=12),
        "stop_token": SamplingParams(
            temperature=0.0, max_tokens=64, stop_token_ids=[said], min_tokens=11
        ),
        "stop_string": SamplingParams(temperature=0.0, max_tokens=64, stop="x" * 12),
    }


def _first_token(choice: LoopChoice) -> int:
    rigged = rig(choice, timing(FORWARD_MS), host_work(HOST_MS), rows=1)
    rigged.add(16, SamplingParams(temperature=0.0, max_tokens=1))
    (heard,) = rigged.hear(1)
    return int(heard.outputs.tokens[0])


def waste(choice: LoopChoice, params: SamplingParams) -> int:
    """Decode rows launched for one request beyond those whose token it got."""
    rigged = rig(choice, timing(FORWARD_MS), host_work(HOST_MS), rows=1)
    rigged.add(16, params)
    told = sum(len(heard.outputs.tokens) for heard in rigged.hear(1000))
    assert not rigged.engine.has_work, "the request did not end"
    # the prompt's last chunk brought the first token
    return rigged.engine.scheduler.life.counters.launched_rows - (told - 1)


def publication_ms(choice: LoopChoice, costs: Timing) -> float:
    """At most, from a step's end on the device to the caller having its tokens; steady decode."""
    rigged = rig(choice, costs, host_work(HOST_MS))
    steady(rigged, STEPS)
    heard = rigged.hear(STEPS)
    ended_ns = rigged.landings_ns()
    return max(each.at_ns - ended_ns[each.outputs.step] for each in heard) / MS


# --- cadence ----------------------------------------------------------------------------------


def cadence() -> list[dict[str, Any]]:
    """Times between outputs: the first after filling, the middle ones, the last while draining.

    All rows begin and end together.  `steady_ms`: the different lengths met in between.
    """
    found = []
    for host in (HOST_MS, FORWARD_MS, 14.0):
        for choice in LOOPS:
            rigged = rig(choice, timing(FORWARD_MS, handover=HANDOVER_MS), host_work(host))
            params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
            for _ in range(4):
                rigged.add(16, params)
            spaces = [ns / MS for ns in intervals_ns(rigged.hear(1000))]
            found.append(
                {
                    "loop": str(choice),
                    "H_ms": host,
                    "fill_ms": spaces[:3],
                    "steady_ms": sorted(set(spaces[8:-8])),
                    "drain_ms": spaces[-3:],
                }
            )
    return found


# --- the picture ------------------------------------------------------------------------------


def timeline(choice: LoopChoice, steps: int = 8) -> dict[str, list[tuple[str, int, float, float]]]:
    """The first steps as (what, step, from ms, to ms), the host's and the device's."""
    rigged = rig(choice, timing(FORWARD_MS, handover=HANDOVER_MS), host_work(HOST_MS))
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    rigged.add(16, params)
    rigged.hear(steps)
    events = rigged.engine.books.recent()
    count = {Stage.PLAN: 0, Stage.RETIRE: 0}
    host = []
    for number, start_ns, end_ns in zip(
        events.stage.tolist(), events.start_ns.tolist(), events.end_ns.tolist(), strict=True
    ):
        if (stage := Stage(number)) in count:
            host.append((stage.name.lower(), count[stage], start_ns / MS, end_ns / MS))
            count[stage] += 1
    device = [
        ("forward", step, start_ns / MS, end_ns / MS)
        for step, start_ns, end_ns in zip(
            events.step.tolist(),
            events.busy_start_ns.tolist(),
            events.busy_end_ns.tolist(),
            strict=True,
        )
    ]
    return {"host": host, "device": device}


# --- two long prefills --------------------------------------------------------------------------


def two_prefills(chunked: bool, prompt_len: int = 2048) -> list[dict[str, Any]]:
    """First tokens of two long prompts that arrive together; a position costs 0.02 ms.

    Unchunked each takes a step of its own; chunked, four.
    """
    budget = prompt_len // 4 if chunked else prompt_len
    config = EngineConfig("none", max_step_tokens=budget, num_pages=1024, prefix_cache=False)

    def forward_ns(size: StepSize) -> int:
        return round((2 + 0.02 * size.chunk_tokens) * MS)

    found = []
    for choice in LOOPS:
        costs = Timing(forward_ns, handover_ns=round(HANDOVER_MS * MS))
        rigged = rig(choice, costs, host_work(HOST_MS), rows=2, config=config)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        rids = [rigged.add(prompt_len, params) for _ in range(2)]
        first_ms: dict[int, float] = {}
        for heard in rigged.hear(1000):
            for rid in heard.outputs.rids.tolist():
                first_ms.setdefault(rid, heard.at_ns / MS)
        earlier, later = (first_ms[rid] for rid in rids)
        found.append({"loop": str(choice), "earlier_ms": earlier, "later_ms": later})
    return found
