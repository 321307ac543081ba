"""Engines around the toy: any loop and depth, on the cpu, beside it, on the hostile device, or on
paper.

Loads no torch until an engine on a real device is asked for.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from closed_form import Toy, pieces
from stepahead.config import ModelFacts, Resolved, config_from, resolve
from stepahead.engine import Engine
from stepahead.loop.base import Executor, Flight
from stepahead.plan import Plan
from stepahead.scheduler.stop import Vocabulary

if TYPE_CHECKING:
    from stepahead.runner.spec import RunnerSpec


# ways to be hostile, as keywords of HostileModes
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "slow-host": {"slow_host": True},
    "slow-device": {"slow_device": True},
    "blocking-copies": {"blocking_copies": True},
}


@dataclass(frozen=True)
class Variant:
    """How to run a workload: the loop, what stands for the device, a depth unless the loop's, the
    fence, how hostile the device is, the operation of it that fails (0 for none), whether the toy's
    decode steps are captured (model=captured), into how many stages it is cut, and who drafts how
    many tokens: ngram, or a class of `drafters`."""

    loop: str = "serial"
    device: str = "cpu"
    device_seed: int = 0
    depth: int = 0
    fence: str = "fine"
    mode: str = "plain"
    fail_at: int = 0
    model: str = "toy"
    stages: int = 1
    draft: str = ""
    drafts: int = 0

    def __str__(self) -> str:
        flags = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        told = {n: v for n, v in flags.items() if n == "loop" or v != getattr(ORACLE, n)}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in told.items())


ORACLE = Variant()


def toy_of(options: dict[str, Any]) -> Toy:
    """The toy that a workload's options describe."""
    return Toy(options["vocab_size"], options["max_model_len"])


def resolved(options: dict[str, Any], variant: Variant) -> Resolved:
    """The effective configuration of a workload's options on a variant."""
    settings = {name: value for name, value in options.items() if name != "vocab_size"}
    device = "cpu" if variant.device in ("paper", "beside") else variant.device
    config = config_from(
        "toy",
        settings
        | {
            "loop": variant.loop,
            "device": device,
            "device_seed": variant.device_seed,
            "fence": variant.fence,
            "executor": "inline",
            "threads": 1,
            "debug": True,
        }
        | ({"draft": "ngram", "draft_tokens": variant.drafts} if variant.draft else {}),
    )
    facts = ModelFacts(options["vocab_size"], options["max_model_len"], (1,), 8)
    settled = resolve(config, facts, bytes_available=1 << 40)
    if not variant.depth and variant.stages == 1:
        return settled
    # behind the back of `resolve`, which lets only the queue choose its depth, and gives each stage
    # a process
    free = dataclasses.replace(settled.config, depth=None, pipeline_stages=variant.stages)
    deep = dataclasses.replace(free, depth=variant.depth or free.steps_ahead)
    return dataclasses.replace(settled, config=deep)


class Tap:
    """An executor that shows each plan to `on_plan` before it hands it on."""

    def __init__(self, executor: Executor, on_plan: Callable[[Plan], None]) -> None:
        self._executor = executor
        self._on_plan = on_plan

    def launch(self, plan: Plan) -> Flight:
        """Shows, then launches."""
        self._on_plan(plan)
        return self._executor.launch(plan)

    def close(self) -> None:
        """Closes the executor inside."""
        self._executor.close()


def toy_engine(
    options: dict[str, Any],
    variant: Variant = ORACLE,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    executor: Executor | None = None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Engine:
    """An engine around the toy on cpu, hostile, or paper (no torch), unless `executor` is given."""
    settled = resolved(options, variant)
    toy = toy_of(options)
    if executor is None:
        on_paper = variant.device == "paper"
        executor = paper(settled, toy) if on_paper else inline(settled, variant)
    vocabulary = Vocabulary(pieces(toy.vocab_size), toy.specials)
    clock_ns = getattr(executor, "now_ns", clock_ns)  # the device's, where it runs in line
    return Engine(settled, Tap(executor, on_plan), vocabulary, clock_ns)


def paper(settled: Resolved, toy: Toy) -> Executor:
    """The runner on paper."""
    from paper import PaperRunner

    config = settled.config
    sizes = config.num_slots, settled.pages, config.page_size
    return PaperRunner(toy, *sizes, stages=config.pipeline_stages, width=config.step_width)


def runner_spec(settled: Resolved, draft: str = "") -> RunnerSpec:
    """The RunnerSpec of the toy for a configuration; `draft` as in Variant."""
    from stepahead.runner.spec import RunnerSpec
    from structured import toy_vocabulary

    config, length = settled.config, settled.model_len
    return RunnerSpec(
        "stepahead.model.toy:ToyModel",
        {"vocab_size": settled.facts.vocab_size, "max_len": length},
        device=config.device,
        device_seed=config.device_seed,
        max_rows=config.max_rows,
        num_slots=config.num_slots,
        num_pages=settled.pages,
        page_size=config.page_size,
        max_pages=-(-length // config.page_size),
        eos_ids=settled.facts.eos_ids,
        relay=config.relay,
        depth=config.steps_ahead,
        fence=config.fence,
        check=True,
        stages=config.pipeline_stages,
        drafter="stepahead.runner.ngram:NgramDrafter" if draft == "ngram" else draft,
        draft_tokens=config.step_width - 1,
        processor=config.logits_processor or "",
        vocabulary=toy_vocabulary(settled.facts.vocab_size),
    )


def inline(settled: Resolved, variant: Variant = ORACLE) -> Executor:
    """The real runner in this thread, around the toy."""
    from captured import CapturedToy
    from stepahead.device.hostile import HostileDevice, HostileModes
    from stepahead.executor.inline import InlineExecutor
    from stepahead.model.toy import ToyModel
    from stepahead.runner.build import build_runner
    from stepahead.runner.runner import Runner

    spec = runner_spec(settled, variant.draft)
    if variant.stages > 1:
        from stages import stage_devices, stages_runner

        modes = HostileModes(**MODES[variant.mode], fail_at=variant.fail_at or None)
        devices = stage_devices(spec, variant.device == "hostile", modes)
        return InlineExecutor(stages_runner(spec, devices))
    if variant.device == "beside":
        from beside import ChangingDevice

        toy = ToyModel(**spec.options)
        return InlineExecutor(
            Runner(toy, ChangingDevice(variant.device_seed), spec, toy.vocab_size)
        )
    if variant.device != "hostile":
        return InlineExecutor(build_runner(spec))
    modes = HostileModes(**MODES[variant.mode], fail_at=variant.fail_at or None)
    device = HostileDevice(spec.device_seed, spec.depth, modes)
    model = (CapturedToy if variant.model == "captured" else ToyModel)(**spec.options)
    runner = Runner(model, device, spec, model.vocab_size)
    if variant.model == "captured" and runner._verifier is not None:
        runner._verifier.skips = False  # as on an accelerator
    return InlineExecutor(runner)


class Shapes:
    """Counts what plans are like."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._places: dict[int, int] = {}

    def see(self, plan: Plan) -> None:
        """The next plan of an engine."""
        places = {slot: i for i, slot in enumerate(plan.rows.tolist())}
        before = self._places
        moved = sum(before.get(slot, place) != place for slot, place in places.items())
        table = plan.chunk_table
        self.counts["joins"] += len(plan.joins)
        self.counts["joins beside rows"] += bool(len(plan.joins) and len(places))
        self.counts["leaves"] += len(plan.leaves)
        self.counts["rows moved"] += moved
        self.counts["grants"] += len(plan.grant_table)
        self.counts["chunks that go on"] += int((table[:, 3] == 0).sum())
        self._places = places
