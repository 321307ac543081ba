"""The real scheduler and loops on a virtual clock: what takes how long is given, and exact.

No device and no torch.  Tokens are prepared ones; the host's work is a number charged to each plan
and each retirement, and both books run on the same clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.engine import Engine
from stepahead.executor.virtual import Timing, VirtualClock, VirtualExecutor
from stepahead.loop.base import Executor
from stepahead.observe.stages import Stage
from stepahead.plan import Plan, Result
from stepahead.scheduler.stop import Vocabulary
from stepahead.sim.host_cost import EOS, VOCAB, PreparedExecutor
from stepahead.types import Outputs, SamplingParams

MS = 1_000_000


@dataclass(frozen=True)
class LoopChoice:
    """A loop and how deep it runs ahead."""

    loop: str
    depth: int

    def __str__(self) -> str:
        return self.loop if self.loop != "batch-queue" else f"batch-queue {self.depth}"


SERIAL, OVERLAP = LoopChoice("serial", 1), LoopChoice("overlap", 2)
QUEUES = tuple(LoopChoice("batch-queue", depth) for depth in (2, 3, 4))
LOOPS = (SERIAL, OVERLAP, *QUEUES)


def _none(step: int) -> int:
    return 0


@dataclass(frozen=True)
class HostWork:
    """What a step's plan and retirement cost the host, and its masks beside the plan, in ns by the
    step's number."""

    plan_ns: Callable[[int], int]
    retire_ns: Callable[[int], int]
    mask_ns: Callable[[int], int] = _none


def constant(ns: int) -> Callable[[object], int]:
    """The same for every step."""
    return lambda _: ns


def host_work(ms: float, plan_share: float = 0.25) -> HostWork:
    """`ms` a step, so much of it in the plan and the rest in the retirement."""
    plan_ns = round(ms * plan_share * MS)
    return HostWork(constant(plan_ns), constant(round(ms * MS) - plan_ns))


@dataclass(frozen=True)
class Heard:
    """What a step of the loop brought, and when the caller had it."""

    at_ns: int
    outputs: Outputs


class Rig:
    """An engine on a virtual clock."""

    def __init__(self, engine: Engine, clock: VirtualClock) -> None:
        self.engine = engine
        self.clock = clock

    def add(self, prompt_len: int, params: SamplingParams) -> int:
        """A request of any tokens; its id."""
        return self.engine.add([3] * prompt_len, params)[0]

    def step(self) -> Heard | None:
        """Runs the loop once."""
        outputs = self.engine.step()
        return None if outputs is None else Heard(self.clock.now_ns(), outputs)

    def hear(self, count: int) -> list[Heard]:
        """Steps until so many brought something, or nothing is left to do."""
        heard: list[Heard] = []
        while len(heard) < count and self.engine.has_work:
            if (brought := self.step()) is not None:
                heard.append(brought)
        return heard

    def landings_ns(self) -> dict[int, int]:
        """When each step that has landed ended on the device."""
        events = self.engine.books.recent()
        return dict(zip(events.step.tolist(), events.busy_end_ns.tolist(), strict=True))


def rig(
    choice: LoopChoice,
    timing: Timing,
    work: HostWork,
    *,
    rows: int = 4,
    inner: Executor | None = None,
    config: EngineConfig | None = None,
) -> Rig:
    """An idle engine of `rows` rows; `inner` gives the tokens, prepared ones if None."""
    base = config or EngineConfig("none", max_step_tokens=4096, num_pages=rows * 256)
    depth = choice.depth if choice.loop == "batch-queue" else None
    settled = replace(
        base, loop=choice.loop, depth=depth, executor="inline", max_rows=rows, threads=1
    )
    resolved = resolve(settled, ModelFacts(VOCAB, 8192, (EOS,), 1), bytes_available=1 << 40)
    clock = VirtualClock()
    executor = VirtualExecutor(inner or PreparedExecutor(), clock, timing)
    engine = Engine(resolved, executor, _vocabulary(), clock.now_ns)
    charge(engine, clock, work)
    return Rig(engine, clock)


@cache
def _vocabulary() -> Vocabulary:
    return Vocabulary([b"x"] * VOCAB)


def charge(engine: Engine, clock: VirtualClock, work: HostWork) -> None:
    """From now on each plan and each retirement moves the clock."""
    scheduler = engine.scheduler
    plan, retire = scheduler.plan, scheduler.retire

    def charged_plan() -> Plan | None:
        planned = plan()
        if planned is not None:
            clock.work(work.plan_ns(planned.step))
            if (mask_ns := work.mask_ns(planned.step)) > 0:
                engine.books.enter(Stage.MASK)
                clock.work(mask_ns)
        return planned

    def charged_retire(plan: Plan, result: Result) -> Outputs:
        clock.work(work.retire_ns(plan.step))
        return retire(plan, result)

    scheduler.plan = charged_plan  # type: ignore[method-assign]
    scheduler.retire = charged_retire  # type: ignore[method-assign]


def steady(rigged: Rig, steps: int, prompt_len: int = 16) -> None:
    """Every row decodes for `steps` outputs and more; prefill and filling are past."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 64, ignore_eos=True)
    for _ in range(rigged.engine.resolved.config.max_rows):
        rigged.add(prompt_len, params)
    rigged.hear(24)


def intervals_ns(heard: Sequence[Heard]) -> list[int]:
    """Between one output and the next."""
    return [after.at_ns - before.at_ns for before, after in pairwise(heard)]
