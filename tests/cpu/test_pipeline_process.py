"""Stages in processes of their own: the same answers, failures by name, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_executor_process import child_pids, gone, open_fds, soon
from tiny_models import make_reference, save

from engines import ORACLE, Variant, resolved, runner_spec, toy_engine
from harness import Client, differences, exactly
from listener import OPTIONS, Listener
from stepahead.assemble import ModelParts, assemble, toy_parts
from stepahead.config import ModelFacts, config_from
from stepahead.engine import Engine
from stepahead.errors import ConfigError, EngineError, RunnerDied, StepaheadError, WeightError
from stepahead.executor.pipeline import PipelineExecutor
from stepahead.llm.offline import LLM
from stepahead.text.texts import ToyTexts
from stepahead.types import SamplingParams
from workloads import Workload, workload

HANG_S = 30.0
Start = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _nothing_of_a_stage_stays_behind() -> Iterator[None]:
    fds, children = open_fds(), child_pids()
    yield
    gc.collect()
    assert child_pids() <= children
    assert open_fds() <= fds
    assert soon(lambda: not [t for t in threading.enumerate() if t.name.startswith("stepahead-w")])


@pytest.fixture
def start(_nothing_of_a_stage_stays_behind: None) -> Iterator[Start]:
    """Starts an engine over stages of the toy; closes it after the test."""
    started: list[Engine] = []

    def start(variant: Variant, options: dict[str, Any] = OPTIONS, **fake: Any) -> Engine:
        settled = resolved(options, variant)
        spec = runner_spec(settled)
        spec = replace(
            spec,
            factory="stage_fakes:part",
            options=spec.options | fake,
            step_tokens=settled.config.max_step_tokens,
            state_bytes=16,
        )
        started.append(toy_engine(options, variant, executor=PipelineExecutor(spec)))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def queue(stages: int) -> Variant:
    """A queue as deep as it asks for itself."""
    return Variant("batch-queue", stages=stages)


def stages_of(engine: Engine) -> PipelineExecutor:
    """The executor inside."""
    executor = engine._core._executor._executor  # type: ignore[attr-defined]
    assert isinstance(executor, PipelineExecutor)
    return executor


# --- answers --------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("variant", "seed"),
    [
        (queue(2), 3),
        (queue(3), 8),
        (Variant("overlap", stages=2), 5),
        (Variant("batch-queue", depth=6, stages=2), 14),
    ],
    ids=str,
)
def test_over_processes_every_client_hears_the_same(
    start: Start, variant: Variant, seed: int
) -> None:
    work = busy(seed)
    right = Client(toy_engine(work.options, ORACLE), work).play()
    run = Client(start(variant, work.options), work).play()
    assert not differences(right, run, exactly)


def busy(seed: int) -> Workload:
    """The requests of a few seeds together, by the first one's options."""
    first = workload(seed)
    options = first.options | {"vocab_size": 64, "max_model_len": 64, "num_pages": 200}
    asks = [ask for more in range(seed, seed + 6) for ask in workload(more).asks]
    asks = [ask for ask in asks if max(ask.prompt, default=0) < 64]
    return Workload(seed, options, tuple(sorted(asks, key=lambda ask: ask.at)))


@pytest.mark.timeout(240)
def test_over_processes_a_llama_from_its_files_says_the_same(tmp_path: Path) -> None:
    save(make_reference("llama", num_hidden_layers=3, vocab_size=64), tmp_path)
    facts = ModelFacts(64, 128, (), 1024, num_layers=3, state_bytes=4 * 32)
    options = {"path": str(tmp_path), "dtype": "float32"}
    part = "stepahead.parallel.pipeline:load_part"
    parts = ModelParts(facts, ToyTexts(64), "stepahead.model.load:load", options, part)
    prompts = [[2 + i, *range(5, 5 + 3 * i)] for i in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    settings = {"max_rows": 4, "threads": 1, "debug": True}
    for loop, executor, stages in (
        ("serial", "inline", 1),
        ("batch-queue", "process", 2),
        ("batch-queue", "process", 3),
    ):
        more = {"loop": loop, "executor": executor, "pipeline_stages": stages}
        config = config_from("llama", settings | more)
        engine = assemble(config, parts).engine
        try:
            rids = [rid for prompt in prompts for rid in engine.add(prompt, params)]
            ends = {}
            while engine.has_work:
                if (outputs := engine.step()) is not None:
                    ends |= {end.rid: end.tokens.tolist() for end in outputs.finishes}
            engine.scheduler.check_at_rest()
            answers.append([ends[rid] for rid in rids])
        finally:
            engine.close()
    assert answers[1:] == answers[:1] * 2
    assert {len(tokens) for tokens in answers[0]} == {12}


def test_an_llm_takes_stages_by_either_name_and_tells_what_it_settled() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)
    prompts = [[3 + i, 4, 5] for i in range(4)]
    options = {"loop": "batch-queue", "max_rows": 4, "num_pages": 40, "max_model_len": 64}
    with LLM("toy", executor="inline", **options) as llm:
        right = llm.generate(prompts, params)
    with LLM("toy", pipeline_parallel_size=2, **options) as llm:
        assert "pipeline_stages=2" in llm.settings
        assert "depth=3: a step for each stage, and one that waits for the first" in llm.settings
        told = llm.generate(prompts, params)
    for one, other in zip(right, told, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason


# --- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "who"), [(2, 0), (2, 1), (3, 1)])
def test_a_step_that_a_stage_fails_ends_everyone_and_names_it(
    start: Start, stages: int, who: int
) -> None:
    engine = start(queue(stages), who=who, do="raise", at=6)
    listener = Listener(engine)
    listener.listen()
    words = f"stage {who + 1} of {stages}: model raised in step 5: RuntimeError: the matrix is"
    assert str(engine.failure).startswith(words)
    notes = "".join(getattr(engine.failure, "__notes__", []))
    assert "stage_fakes.py" in notes  # where it was raised
    assert {end.reason for end in listener.ends.values()} == {"error"}
    assert any(listener.tokens.values())  # what came before it counts
    engine.close()
    assert all(map(gone, stages_of(engine).pids))


@pytest.mark.parametrize(("stages", "who"), [(2, 0), (2, 1), (3, 0)])
def test_a_stage_that_is_killed_is_named_and_takes_the_others_along(
    start: Start, stages: int, who: int
) -> None:
    engine = start(queue(stages), who=who, do="kill", at=6)
    listener = Listener(engine)
    listener.listen()
    assert isinstance(engine.failure, RunnerDied)
    pid = stages_of(engine).pids[who]
    words = f"stage {who + 1} of {stages}: the runner's process {pid} was killed by SIGKILL"
    assert str(engine.failure).startswith(words)
    assert {end.reason for end in listener.ends.values()} == {"error"}
    assert soon(lambda: all(map(gone, stages_of(engine).pids)))


@pytest.mark.parametrize("who", [0, 1])
def test_a_stage_killed_from_outside_while_another_is_stuck_is_named(
    start: Start, who: int
) -> None:
    # the one that is stuck holds the interpreter's lock and can notice nothing
    engine = start(queue(2), who=1 - who, do="hold", at=3)
    victim = stages_of(engine).pids[who]
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    began = time.monotonic()
    Listener(engine).listen()
    assert f"stage {who + 1} of 2: the runner's process {victim} was" in str(engine.failure)
    assert time.monotonic() - began < HANG_S
    assert soon(lambda: all(map(gone, stages_of(engine).pids)))


@pytest.mark.parametrize("who", [0, 1])
def test_a_stage_that_can_not_be_built_is_named_while_the_other_still_loads(
    start: Start, who: int
) -> None:
    with pytest.raises(WeightError, match=f"^stage {who + 1} of 2: a tensor is missing"):
        start(queue(2), who=who, do="weights", slow=1 - who)


def test_a_stage_that_raises_while_it_is_built_is_named(start: Start) -> None:
    with pytest.raises(EngineError, match=r"^stage 2 of 3: the runner could not be built: Runtime"):
        start(queue(3), who=1, do="raise")


def test_a_stage_that_dies_while_it_is_built_is_named(start: Start) -> None:
    with pytest.raises(RunnerDied, match=r"^stage 1 of 2: the runner's process .* by SIGKILL"):
        start(queue(2), who=0, do="kill", slow=1)


def test_stages_that_take_too_long_to_load_are_given_up() -> None:
    settled = resolved(OPTIONS, queue(2))
    spec = replace(runner_spec(settled), factory="stage_fakes:part", state_bytes=16, step_tokens=8)
    spec = replace(spec, options=spec.options | {"slow": 1})
    with pytest.raises(StepaheadError, match=r"stage . of 2: the runner was not built within 2 s"):
        PipelineExecutor(spec, start_timeout_s=2)


def test_a_model_without_parts_can_not_be_cut() -> None:
    parts = replace(toy_parts(), part="")
    with pytest.raises(ConfigError, match="pipeline_stages=2, but this model can't be cut"):
        assemble(config_from("toy", {"pipeline_stages": 2, "num_pages": 9}), parts)


# --- the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("do", ["", "sleep", "hold"])
def test_close_with_flights_in_all_stages_takes_no_longer_than_one(start: Start, do: str) -> None:
    engine = start(queue(3), who=1, do=do, at=3)
    listener = Listener(engine)
    steps = threading.Thread(target=listener.listen)
    steps.start()
    assert soon(lambda: engine.scheduler.in_flight == 4 or not do)
    began = time.monotonic()
    engine.close()
    took_s = time.monotonic() - began
    steps.join(HANG_S)
    assert not steps.is_alive()
    assert all(map(gone, stages_of(engine).pids))
    assert {end.reason for end in listener.ends.values()} <= {"abort", "length"}
    assert len(listener.ends) == len(listener.prompts)
    listener.check_at_rest()
    assert took_s < HANG_S


def test_stages_leave_with_an_executor_that_is_dropped() -> None:
    settled = resolved(OPTIONS, queue(2))
    spec = replace(runner_spec(settled), factory="stage_fakes:part", state_bytes=16, step_tokens=8)
    executor: PipelineExecutor | None = PipelineExecutor(spec)
    assert executor is not None
    pids = executor.pids

    def drop() -> None:
        nonlocal executor
        executor = None
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed"):
        drop()
    assert soon(lambda: all(map(gone, pids)))


def test_only_the_two_ends_hold_a_link(start: Start) -> None:
    engine = start(queue(3))
    pids = stages_of(engine).pids
    held = [open_links_of(pid) for pid in pids]
    # states on from the first, in and on, in; tokens back to two
    assert [(len(pipes), len(memory)) for pipes, memory in held] == [(4, 2), (5, 3), (5, 3)]
    assert open_links_of(os.getpid())[1] == set()
    engine.close()


def open_links_of(pid: int) -> tuple[set[str], set[str]]:
    """Pipes and nameless memory that a process has open, the standard three left out."""
    links = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        if int(entry.name) > 2:
            links.add(os.readlink(entry.path) + f" {entry.name}")
    pipes = {link for link in links if link.startswith("pipe:")}
    return pipes, {link for link in links if "stepahead-link" in link}


def test_no_process_of_ours_is_left(start: Start) -> None:
    before = child_pids()
    engine = start(queue(2))
    assert len(child_pids() - before) == 2
    engine.close()
    assert soon(lambda: child_pids() <= before)
    assert all(not psutil.pid_exists(pid) for pid in stages_of(engine).pids)
