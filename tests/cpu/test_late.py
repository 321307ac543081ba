"""Rows that wait for masks: the others don't, masks are made in the shadow of the forward, and what
is waited for has a name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from drafters import learn
from engines import Variant, resolved, runner_spec, toy_engine
from harness import Client, differences, exactly, learn_from, play
from stepahead.device.base import Stream
from stepahead.device.hostile import HostileDevice
from stepahead.device.timing import Timing
from stepahead.engine import Engine
from stepahead.errors import InvalidParameter
from stepahead.executor.inline import InlineExecutor
from stepahead.executor.process import ProcessExecutor
from stepahead.model.batch import StepInputs
from stepahead.model.toy import ToyModel
from stepahead.plan import LATE, NO_INTS, Join, Plan, Result
from stepahead.runner.build import build_runner
from stepahead.runner.grammar import Matchers
from stepahead.runner.runner import Runner
from stepahead.runner.spec import RunnerSpec
from stepahead.structured import Grammar, StructuredOutputs
from stepahead.sync import SyncReason
from stepahead.types import SamplingParams
from structured import compiled, structured, toy_vocabulary

VOCAB = 64
OPTIONS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_model_len": 64,
    "page_size": 16,
    "max_rows": 32,
    "max_step_tokens": 128,
    "num_pages": 256,
}
MODEL, SAMPLER, CALL = 1_000_000, 10_000, 20
AHEAD = [Variant("overlap", "hostile"), Variant("batch-queue", "hostile", depth=2)]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def operation_ns(stream: Stream, writes: tuple[str, ...]) -> int:
    if stream is not Stream.FORWARD or any(name.startswith("late") for name in writes):
        return 0  # what late rows cost by themselves is not the question
    return MODEL if any(name.startswith("states") for name in writes) else SAMPLER


def steady(variant: Variant, grammars: int, spend: Callable[[int], int] = lambda step: 0) -> Engine:
    """32 rows, some with a grammar, to their end; the host works `spend(step)` before a launch."""
    spec = runner_spec(resolved(OPTIONS, variant))
    device = HostileDevice(7, spec.depth, timing=Timing(CALL, operation_ns, lambda nbytes: 0))
    runner = Runner(ToyModel(**spec.options), device, spec, VOCAB)
    executor = InlineExecutor(runner)
    engine = toy_engine(
        OPTIONS, variant, lambda plan: device.spend(spend(plan.step)), executor=executor
    )
    for row in range(32):
        grammar = compiled(VOCAB, "[abcd]{200,300}") if row < grammars else None
        engine.add([2 + row, 3, 4], ENDLESS, grammar=grammar)
    while engine.has_work:
        engine.step()
    return engine


def starts_ns(engine: Engine) -> list[int]:
    return engine.observer.steps.recent().start_ns.tolist()


@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_a_grammar_row_among_32_changes_nothing_in_the_schedule(variant: Variant) -> None:
    alone, beside = steady(variant, 0), steady(variant, 1)
    free, late = np.diff(starts_ns(alone))[2:], np.diff(starts_ns(beside))[2:]
    assert len(free) == len(late) > 30
    assert free.tolist() == late.tolist() == [MODEL + SAMPLER] * len(free)
    assert beside.books.summary().idle_ns["mask late"] == 0
    assert beside.syncs.as_dict().get("grammar") is None


@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_all_rows_under_grammars_wait_for_nothing_either(variant: Variant) -> None:
    engine = steady(variant, 32)
    assert np.diff(starts_ns(engine))[2:].tolist() == [MODEL + SAMPLER] * 37
    assert engine.syncs.as_dict().get("grammar") is None


@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_masks_that_come_late_are_counted_for_their_rows_and_drawn(variant: Variant) -> None:
    """The host is away before one launch for so long that the forward before it is over: its late
    rows get their masks when the host is back."""
    away = 3 * MODEL
    engine = steady(variant, 5, lambda step: away if step == 20 else 0)
    idle_ns = engine.books.summary().idle_ns["mask late"]
    assert away - MODEL - SAMPLER - 100 * CALL < idle_ns <= away
    assert engine.syncs.steps(SyncReason.GRAMMAR) == 1
    assert engine.syncs.rows(SyncReason.GRAMMAR) == 5
    events = engine.books.recent()
    twice = [step for step in set(events.step.tolist()) if (events.step == step).sum() == 2]
    assert twice == [19]


def test_the_serial_loop_makes_masks_in_the_forward_s_shadow() -> None:
    engine = steady(Variant("serial", "hostile"), 32)
    assert engine.syncs.as_dict().get("grammar") is None
    assert engine.books.summary().idle_ns["mask late"] == 0


# --- two parts ------------------------------------------------------------------------------


def plans(grammars: tuple[bool, ...]) -> list[Plan]:
    """A row for each, its prompt of two tokens in one chunk, then three steps."""
    grammar = compiled(VOCAB, "[ab]{20,30}")
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    joins = tuple(
        Join(
            slot,
            1,
            np.array([slot + 4, 5], np.int32),
            2,
            0,
            np.array([slot], np.int32),
            params,
            slot,
            0,
            grammar=grammar if held else None,
        )
        for slot, held in enumerate(grammars, 1)
    )
    slots = np.arange(1, len(grammars) + 1, dtype=np.int32)
    chunks = np.array([[slot, 0, 2, 1] for slot in slots], np.int32).reshape(-1)
    first = Plan(1, NO_INTS, False, chunks=chunks, joins=joins)
    return [first, Plan(2, slots, False), Plan(3, slots, True), Plan(4, slots, True)]


def spec(rows: int) -> RunnerSpec:
    return RunnerSpec(
        "stepahead.model.toy:ToyModel",
        {"vocab_size": VOCAB, "max_len": 64},
        max_rows=rows,
        num_slots=rows + 1,
        num_pages=rows + 1,
        max_pages=4,
        eos_ids=(1,),
        vocabulary=toy_vocabulary(VOCAB),
    )


def land_all(executor: InlineExecutor | ProcessExecutor, rows: tuple[bool, ...]) -> list[Result]:
    """Every part of every step, launched when the one before has landed."""
    results = []
    for plan in plans(rows):
        flight = executor.launch(plan)
        results.append(flight.land())
        if results[-1].part == "first":
            results.append(flight.land())
    executor.close()
    return results


def whole(results: list[Result]) -> list[list[int]]:
    """Each step's tokens, whatever parts they came in."""
    steps: dict[int, np.ndarray] = {}
    for result in results:
        tokens = steps.setdefault(result.step, result.tokens.copy())
        if result.part == "last":
            assert ((tokens == LATE) == (result.tokens != LATE)).all()
            tokens[tokens == LATE] = result.tokens[tokens == LATE]
    return [tokens.tolist() for tokens in steps.values()]


class Gate:
    """Matchers whose masks are made when somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        fill = Matchers.fill

        def gated(matchers: Matchers, *args: Any) -> None:
            assert self.open.wait(60)
            fill(matchers, *args)

        monkeypatch.setattr(Matchers, "fill", gated)


def test_free_rows_are_told_while_the_masks_of_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    executor = InlineExecutor(build_runner(spec(3)))
    flight = executor.launch(plans((False, True, False))[0])
    assert flight.ready()
    first = flight.land()
    assert not gate.open.is_set()
    assert (first.tokens == LATE).tolist() == [False, True, False]
    assert first.logprobs is not None
    assert first.logprobs.rows.tolist() == [0, 2]
    gate.open.set()
    last = flight.land()
    assert last.part == "last"
    assert (last.tokens == LATE).tolist() == [True, False, True]
    assert last.logprobs is not None
    assert last.logprobs.rows.tolist() == [1]
    assert [sync.reason for sync in last.syncs] == [SyncReason.GRAMMAR]
    executor.close()


def test_where_all_rows_are_late_there_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    Gate(monkeypatch).open.set()
    executor = InlineExecutor(build_runner(spec(2)))
    assert [result.part for result in land_all(executor, (True, True))] == ["whole"] * 4


@pytest.mark.parametrize("rows", [(False, True, False), (True, True), (False, False)])
def test_parts_between_processes_are_those_of_this_thread(rows: tuple[bool, ...]) -> None:
    here = land_all(InlineExecutor(build_runner(spec(len(rows)))), rows)
    there = land_all(ProcessExecutor(spec(len(rows))), rows)
    assert whole(here) == whole(there)
    free = land_all(InlineExecutor(build_runner(spec(len(rows)))), (False,) * len(rows))
    if any(rows):
        assert whole(here) != whole(free)


# --- drafts ---------------------------------------------------------------------------------


def test_drafts_that_a_grammar_forbids_are_none() -> None:
    """A drafter that knows nothing expects an end of sequence everywhere."""
    learn({})
    told = []
    for grammar in (None, compiled(VOCAB, "[abcd]{200,300}")):
        engine = toy_engine(OPTIONS, Variant("overlap", draft="drafters:Never", drafts=3))
        engine.add([2, 3, 4], ENDLESS, grammar=grammar)
        while engine.has_work:
            engine.step()
        told.append(engine.draft_counts())
        engine.close()
    free, held = told
    assert free.proposed > free.rows > 30
    assert held.proposed == 0
    assert held.rows == free.rows


class WantsLengths(ToyModel):
    """Attention that works with the host's lengths and checks that they are exact."""

    host_lengths = True

    def __call__(self, inputs: StepInputs, kv: Any) -> Any:
        """As the toy."""
        living = (inputs.cells_dev[: inputs.n_decode] > 0).numpy()  # the dead write to cell 0
        assert inputs.decode_bounds[living].tolist() == inputs.decode_lens_dev[living].tolist()
        return self.forward(inputs, kv)


@pytest.mark.parametrize("draft", ["", "drafters:Half"])
@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
def test_a_model_that_wants_exact_lengths_keeps_to_grammars(loop: str, draft: str) -> None:
    """A step's lengths are there when its last rows are sampled."""
    depth = 4 if loop == "batch-queue" else 0
    variant = Variant(loop, "hostile", 3, depth, draft=draft, drafts=3 if draft else 0)
    for seed in (3, 6):
        work = structured(seed)
        right = play(work)
        learn_from(right, work)
        spec = runner_spec(resolved(work.options, variant), draft)
        runner = Runner(
            WantsLengths(**spec.options),
            HostileDevice(seed, spec.depth),
            spec,
            spec.options["vocab_size"],
        )
        engine = toy_engine(work.options, variant, executor=InlineExecutor(runner))
        assert not differences(right, Client(engine, work).play(), exactly)


# --- races and failures ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2, 14))
def test_late_rows_race_nobody(seed: int) -> None:
    """Mixed and all structured, on a device that runs what may run in any order."""
    loops = (("overlap", 0), ("batch-queue", 3), ("serial", 0))
    loop, depth = loops[seed % 3]
    work = structured(seed * 4 + 2 + seed % 2)
    run = play(work, Variant(loop, "hostile", seed, depth))
    assert not differences(play(work), run, exactly)


def test_a_failure_amid_grammars_ends_everyone_once() -> None:
    """Whichever operation of the device fails."""
    failed = 0
    for seed in range(15):
        work = structured(4 * seed + 3)
        loop, depth = (("overlap", 0), ("batch-queue", 3), ("serial", 0))[seed % 3]
        run = play(work, Variant(loop, "hostile", seed, depth, fail_at=3 + seed * 37 % 120))
        right = play(work)
        failed += run.counts["failures"]
        right.told = {who: right.told[who] for who in run.told}
        assert not differences(right, run, exactly)
    assert failed


def test_a_matcher_that_fails_fails_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(matchers: Matchers, *args: Any) -> None:
        raise ValueError("no masks today")

    monkeypatch.setattr(Matchers, "fill", broken)
    engine = toy_engine(OPTIONS, Variant("overlap"))
    engine.add([3, 4], ENDLESS, grammar=compiled(VOCAB, "[ab]{9}"))
    finishes = []
    while engine.has_work:
        outputs = engine.step()
        finishes += outputs.finishes if outputs else ()
    assert [finish.reason for finish in finishes] == ["error"]
    assert "no masks today" in str(engine.failure)
    engine.close()


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_matchers_that_can_not_hear_fail_the_step(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has them hear: who lands the step, or the next one's masks."""

    def broken(matchers: Matchers, *args: Any) -> None:
        raise ValueError("deaf today")

    monkeypatch.setattr(Matchers, "advance", broken)
    engine = toy_engine(OPTIONS, Variant(loop))
    engine.add([3, 4], ENDLESS, grammar=compiled(VOCAB, "[ab]{9}"))
    finishes = []
    while engine.has_work:
        outputs = engine.step()
        finishes += outputs.finishes if outputs else ()
    assert [finish.reason for finish in finishes] == ["error"]
    assert "deaf today" in str(engine.failure)
    engine.close()


def test_failures_that_nobody_asks_for_are_forgotten() -> None:
    """An answer that can't even begin, aborted before its prompt has been computed."""
    variant = Variant("overlap", "hostile")
    spec = runner_spec(resolved(OPTIONS, variant))
    runner = Runner(ToyModel(**spec.options), HostileDevice(3, spec.depth), spec, VOCAB)
    engine = toy_engine(OPTIONS, variant, executor=InlineExecutor(runner))
    for _ in range(3):
        others = [engine.add([4] * 60, ENDLESS) for _ in range(2)]
        (rid,) = engine.add([3] * 50, ENDLESS, grammar=Grammar("start: nobody"))
        engine.step()
        engine.abort(rid)
        for (other,) in others:
            engine.abort(other)
        while engine.has_work:
            engine.step()
    engine.add([3, 4], ENDLESS, grammar=compiled(VOCAB, "[ab]{9}"))
    while engine.has_work:
        engine.step()
    matchers = runner._late._matchers
    assert matchers is not None
    assert not matchers._errors
    assert not runner._late._unsaid
    engine.close()


# --- what can't be ---------------------------------------------------------------------------


def test_grammars_that_can_t_be_kept_to_are_refused_by_name() -> None:
    grammar, held = compiled(VOCAB, "a"), StructuredOutputs(regex="a")
    staged = toy_engine(OPTIONS, Variant("batch-queue", stages=2, depth=2))
    with pytest.raises(InvalidParameter, match="pipeline_stages=2; ask for free text"):
        staged.add([3], ENDLESS, grammar=grammar)
    staged.close()
    engine = toy_engine(OPTIONS, Variant("overlap"))
    with pytest.raises(InvalidParameter, match="must be compiled first") as caught:
        engine.add([3], SamplingParams(structured_outputs=held))
    assert caught.value.param == "structured_outputs"
    assert not engine.has_work
    engine.close()
