"""The loops on paper: how deep they run, what holds a step up, and when a token is out.

Time is scripted where it matters: a device that takes so long a step, and a host that takes so long
a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from closed_form import Toy
from engines import Variant, paper, resolved, toy_engine
from harness import Client, check
from stepahead.config import MAX_DEPTH, config_from, queue_depth
from stepahead.engine import Engine
from stepahead.loop.base import Executor, Flight
from stepahead.observe.steps import REASONS
from stepahead.plan import Plan, Result
from stepahead.sync import Sync, SyncReason
from stepahead.types import SamplingParams
from workloads import Ask, Workload, workload

OPTIONS = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": 4, "num_pages": 80}
LOOPS = [
    Variant(device="paper"),
    Variant("overlap", "paper"),
    *(Variant("batch-queue", "paper", depth=depth) for depth in (2, 3, 4)),
]
AHEAD = LOOPS[1:]


def greedy(max_tokens: int) -> SamplingParams:
    """A request that only its length ends."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def ran(variant: Variant, asks: list[Ask], **options: Any) -> Engine:
    """An engine that has answered these."""
    settings = OPTIONS | options
    engine = toy_engine(settings, variant)
    Client(engine, Workload(0, settings, tuple(asks))).play()
    return engine


# --- depth ----------------------------------------------------------------------------------


def test_the_queue_is_as_deep_as_there_are_stages_or_one_deeper() -> None:
    assert [queue_depth(1, ahead) for ahead in (False, True)] == [2, 2]
    assert [queue_depth(stages, False) for stages in (2, 4)] == [2, 4]
    assert [queue_depth(stages, True) for stages in (2, 4)] == [3, 5]
    assert config_from("toy", {"loop": "batch-queue"}).steps_ahead == queue_depth(1, True)
    assert queue_depth(MAX_DEPTH - 1, True) <= MAX_DEPTH


def sampled_rows(plan: Plan) -> int:
    """Rows of the plan that sample a token."""
    return len(plan.rows) + int(plan.chunk_table[:, 3].sum())


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("relay", ["slot", "row"])
def test_exactly_max_tokens_rows_are_launched_at_any_depth(relay: str, depth: int) -> None:
    # a guard that credits one outstanding step launches one row too many from depth 3 on
    loop = {"slot": "overlap", "row": "batch-queue"}[relay] if depth > 1 else "serial"
    variant = Variant(loop, "paper", depth=depth)
    for prompt_len in (1, 5, 9):
        for max_tokens in (1, 2, 3, 8):
            found = rows_and_deepest(variant, prompt_len, max_tokens)
            assert found == (max_tokens, min(depth, max_tokens)), prompt_len


def rows_and_deepest(variant: Variant, prompt_len: int, max_tokens: int) -> tuple[int, int]:
    """Rows that were sampled for one request, and most steps in the air."""
    seen: list[tuple[int, int]] = []

    def note(plan: Plan) -> None:
        seen.append((sampled_rows(plan), engine.scheduler.in_flight))

    engine = toy_engine(OPTIONS, variant, note)
    engine.add(list(range(2, 2 + prompt_len)), greedy(max_tokens))
    for _ in range(20):  # enough for all, and an end for those that have none
        if engine.has_work:
            engine.step()
    assert not engine.has_work
    rows, in_flight = zip(*seen, strict=True)
    return sum(rows), max(in_flight)


# --- pulls back to serial work --------------------------------------------------------------


@pytest.mark.parametrize("variant", LOOPS, ids=str)
def test_nothing_holds_up_a_steady_step_nor_the_last_ones(variant: Variant) -> None:
    # the last steps of a run have nothing to run ahead of: that is no pull back
    asks = [Ask(0, (2 + i, 3, 4), greedy(10 + i)) for i in range(4)]
    engine = ran(variant, asks)
    assert engine.scheduler.life.counters.steps == 13
    assert engine.syncs.as_dict() == {}


@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_a_drain_is_counted_for_each_landing_that_somebody_waits_for(variant: Variant) -> None:
    # one row at a time: the second request waits for the slot of the first, all of whose steps are
    # in the air
    asks = [Ask(0, (2, 3, 4), greedy(6)), Ask(0, (5, 6), greedy(6))]
    engine = ran(variant, asks, max_rows=1)
    landings = engine._core.depth - 1
    assert engine.syncs.as_dict() == {"drain": {"steps": landings, "rows": landings}}


def test_serially_nothing_is_in_the_air_to_be_drained() -> None:
    engine = ran(LOOPS[0], [Ask(0, (2, 3), greedy(3)), Ask(0, (5, 6), greedy(3))], max_rows=1)
    assert engine.syncs.as_dict() == {}


def test_a_row_left_out_for_want_of_pages_is_a_drain() -> None:
    # two rows of four pages each in a pool of six.  The younger yields: the older waits for the
    # step in the air that names it (two rows), and later the younger for the older's last step
    asks = [Ask(0, (2, 3, 4), greedy(12)), Ask(0, (5, 6, 7), greedy(12))]
    engine = ran(AHEAD[0], asks, num_pages=6, prefix_cache=False)
    assert engine.scheduler.life.counters.preemptions > 0
    assert engine.syncs.as_dict() == {"drain": {"steps": 2, "rows": 3}}


PROMPTS = [Ask(0, tuple(range(first, first + 4)), greedy(1)) for first in (2, 12, 22)]


@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_prompts_alone_wait_for_prompts_alone_if_asked_to(variant: Variant) -> None:
    # three prompts, each fills a step: the second and the third wait
    engine = ran(variant, PROMPTS, max_step_tokens=4, serial_prefill=True)
    assert engine.syncs.as_dict() == {"serial-prefill": {"steps": 2, "rows": 2}}
    assert ran(variant, PROMPTS, max_step_tokens=4).syncs.as_dict() == {}


@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_chunks_of_one_prompt_wait_for_each_other_too(variant: Variant) -> None:
    asks = [Ask(0, tuple(range(2, 14)), greedy(1))]
    engine = ran(variant, asks, max_step_tokens=4, serial_prefill=True)
    # the first two of three chunks sample nothing
    assert engine.syncs.as_dict() == {"serial-prefill": {"steps": 2, "rows": 0}}


@pytest.mark.parametrize(("length", "at", "beside"), [(12, 1, [0, 1]), (2, 2, [0, 0])])
def test_a_step_that_also_decodes_is_not_prompts_alone(
    length: int, at: int, beside: list[int]
) -> None:
    # first: behind a step of prompts alone comes one in which a row decodes, too
    # second: behind one in which a row decodes comes one of prompts alone
    plans: list[Plan] = []
    settings = OPTIONS | {"max_step_tokens": 5, "serial_prefill": True}
    engine = toy_engine(settings, AHEAD[0], plans.append)
    asks = (Ask(0, (2, 3), greedy(length)), replace(PROMPTS[0], at=at))
    Client(engine, Workload(0, settings, asks)).play()
    assert [len(plan.rows) for plan in plans if len(plan.chunks)] == beside
    assert engine.syncs.as_dict() == {}


def test_a_preempted_row_needs_steps_though_it_waits_nowhere() -> None:
    engine = toy_engine(OPTIONS, AHEAD[0])
    (rid,) = engine.add([2, 3, 4], greedy(2))
    scheduler = engine.scheduler
    for has_more in (True, False):  # the prompt's step, then the last
        scheduler.plan()
        assert scheduler.has_more == has_more
    scheduler.life.preempt(scheduler._entries[rid])
    assert not scheduler._waiting
    assert scheduler.has_more


def test_answers_are_the_same_with_prompts_held() -> None:
    held = 0

    def make(seed: int) -> Workload:
        work = workload(seed)
        return replace(work, options=work.options | {"serial_prefill": True})

    def player(work: Workload, variant: Variant) -> Any:
        nonlocal held
        engine = toy_engine(work.options, variant)
        scheduler, hold = engine.scheduler, engine.scheduler.hold

        def watched() -> SyncReason | None:
            reason = hold()
            assert reason is None or scheduler.in_flight, "put off for ever"
            return reason

        scheduler.hold = watched  # type: ignore[method-assign]
        run = Client(engine, work).play()
        held += engine.syncs.steps(SyncReason.SERIAL_PREFILL)
        return run

    for seed in range(120):
        check(seed, [AHEAD[seed % len(AHEAD)]], make, player, oracle=LOOPS[0])
    assert held > 100


class Telling:
    """An executor whose steps each say that they were held up."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def launch(self, plan: Plan) -> Flight:
        """A flight that says so."""
        return Told(self._inner.launch(plan))

    def close(self) -> None:
        """Closes the one inside."""
        self._inner.close()


@dataclass
class Told:
    """A flight whose result names two pulls back."""

    inner: Flight

    def land(self) -> Result:
        """The result, and both."""
        syncs = (Sync(SyncReason.BLOCKING_COPY, 3), Sync(SyncReason.HIDDEN_STATES, 1))
        return msgspec.structs.replace(self.inner.land(), syncs=syncs)


@pytest.mark.parametrize("variant", LOOPS, ids=str)
def test_what_a_step_says_of_itself_is_counted(variant: Variant) -> None:
    settled = resolved(OPTIONS, variant)
    engine = toy_engine(OPTIONS, variant, executor=Telling(paper(settled, Toy(64, 64))))
    engine.add([2, 3, 4], greedy(5))
    while engine.has_work:
        engine.step()
    assert engine.syncs.as_dict() == {
        "hidden-states": {"steps": 5, "rows": 5},
        "blocking-copy": {"steps": 5, "rows": 15},
    }
    before = engine.syncs.copy()
    engine.syncs.add(SyncReason.BLOCKING_COPY, 2)
    assert engine.syncs.since(before).as_dict() == {"blocking-copy": {"steps": 1, "rows": 2}}
    assert before.steps(SyncReason.BLOCKING_COPY) == 5


def test_a_step_that_is_landed_before_a_launch_tells_why() -> None:
    """So timelines and summaries show it, and not the counts alone."""
    engine = ran(AHEAD[0], PROMPTS, max_step_tokens=4, serial_prefill=True)
    told = engine.observer.steps.recent().reason.tolist()
    held = REASONS.index(SyncReason.SERIAL_PREFILL)
    assert told == [held, held, -1]
    asks = [Ask(0, (2, 3, 4), greedy(12)), Ask(0, (5, 6, 7), greedy(12))]
    engine = ran(AHEAD[0], asks, num_pages=6, prefix_cache=False)
    told = engine.observer.steps.recent().reason.tolist()
    assert told.count(REASONS.index(SyncReason.DRAIN)) == 2


# --- when a token is out --------------------------------------------------------------------


class Clocked:
    """An executor in scripted time: a step runs for `step` once the one before it has, and a plan
    takes the host `host` to launch."""

    def __init__(self, inner: Executor, step: int, host: int) -> None:
        self.now = 0
        self._inner, self._step, self._host = inner, step, host
        self._free = 0  # when the device is through with all it has
        self.landed: list[int] = []

    def launch(self, plan: Plan) -> Flight:
        """A flight that lands when its step has run."""
        self.now += self._host
        self._free = max(self._free, self.now) + self._step
        return Timed(self, self._inner.launch(plan), self._free)

    def close(self) -> None:
        """Closes the one inside."""
        self._inner.close()


@dataclass
class Timed:
    """A flight and when it is over."""

    executor: Clocked
    inner: Flight
    over: int

    def land(self) -> Result:
        """Sleeps until it is over."""
        self.executor.now = max(self.executor.now, self.over)
        result = self.inner.land()
        self.executor.landed.append(result.step)
        return result


def first_tokens(
    variant: Variant, prompts: int, step: int, host: int
) -> dict[int, tuple[int, ...]]:
    """For each request: when its first token was out, and which steps had landed by then."""
    options = OPTIONS | {"max_step_tokens": 16, "max_rows": 8, "prefix_cache": False}
    settled = resolved(options, variant)
    clock = Clocked(paper(settled, Toy(64, 64)), step, host)
    engine = toy_engine(options, variant, executor=clock)
    for first in range(prompts):  # each fills a step
        engine.add(list(range(2 + first, 18 + first)), greedy(1))
    out: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        if (outputs := engine.step()) is not None:
            for rid in outputs.first:
                out[rid] = clock.now, *clock.landed
    return out


@pytest.mark.parametrize("variant", LOOPS, ids=str)
def test_a_first_token_waits_for_no_prompt_behind_it(variant: Variant) -> None:
    # prefills of 100 each in a row: a request's token is out when its own has run, not the next
    out = first_tokens(variant, 6, step=100, host=0)
    assert out == {rid: (100 * (rid + 1), *range(rid + 1)) for rid in range(6)}


@pytest.mark.parametrize("variant", AHEAD, ids=str)
@pytest.mark.parametrize("host", [1, 30, 100])
def test_filling_the_queue_costs_a_first_token_host_time_only(variant: Variant, host: int) -> None:
    # filling comes first, as published: a step that has landed meanwhile waits for the D launches
    # of the burst, and from then on for one
    depth = toy_engine(OPTIONS, variant)._core.depth
    out = first_tokens(variant, 6, step=100, host=host)
    assert out[0][0] == max(host + 100, depth * host)
    device = [host + 100 * (rid + 1) for rid in range(6)]
    late = [out[rid][0] - device[rid] for rid in range(6)]
    assert max(late[depth:], default=0) <= host
