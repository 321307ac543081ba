"""Stages on paper: who takes which turn, what holds a step up, and that clients hear the same.

The runner on paper refuses a row whose token is younger than there are stages, unless the host
brings it; so each of these is a proof of the cadence, too.
"""

from __future__ import annotations

from collections import Counter

import pytest

from engines import Variant, toy_engine
from harness import Client, check
from stepahead.config import ModelFacts, config_from, resolve
from stepahead.engine import Engine
from stepahead.errors import ConfigError
from stepahead.plan import Plan
from stepahead.types import SamplingParams
from workloads import Ask, Workload

OPTIONS = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": 12, "num_pages": 240}
SERIAL = Variant(device="paper")
DEPTHS = [(stages, depth) for stages in (2, 3, 4) for depth in (1, 2, stages, stages + 1, 8)]
STAGED = [
    *(Variant("batch-queue", "paper", stages=stages) for stages in (2, 3, 4, 7)),
    *(Variant("batch-queue", "paper", depth=depth, stages=3) for depth in (2, 3, 6)),
    *(Variant(loop, "paper", stages=stages) for loop in ("serial", "overlap") for stages in (2, 3)),
]


def staged(stages: int, depth: int = 0) -> Variant:
    """A queue over so many stages; as deep as it asks for itself unless told."""
    if depth == 1:
        return Variant("serial", "paper", stages=stages)
    return Variant("batch-queue", "paper", depth=depth, stages=stages)


def greedy(max_tokens: int) -> SamplingParams:
    """A request that only its length ends."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


class Watch:
    """An engine and the rows of each plan: those of the steps in the air are the newest."""

    def __init__(self, variant: Variant, **options: int) -> None:
        self.plans: list[Plan] = []
        self.sampled: list[set[int]] = []
        self.flights: list[int] = []
        self.engine: Engine = toy_engine(OPTIONS | options, variant, self._see)

    def _see(self, plan: Plan) -> None:
        self.plans.append(plan)
        table = plan.chunk_table
        self.sampled.append({*plan.rows.tolist(), *table[table[:, 3] > 0, 0].tolist()})
        self.flights.append(self.engine.scheduler.in_flight)

    def play(self, asks: list[Ask]) -> Watch:
        """Answers these."""
        Client(self.engine, Workload(0, OPTIONS, tuple(asks))).play()
        return self


@pytest.mark.parametrize("shard", range(4))
def test_every_client_hears_the_same_over_any_stages_at_any_depth(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * 150, (shard + 1) * 150):
        counts += check(seed, [STAGED[seed % len(STAGED)]], oracle=SERIAL)[1]
    met = ("preempted in flight", "aborts", "slot_reuses", "prefix_hits", "overshoot_rows")
    assert [name for name in met if not counts[name]] == []


@pytest.mark.parametrize(("stages", "depth"), DEPTHS)
def test_over_stages_too_exactly_max_tokens_rows_are_launched(stages: int, depth: int) -> None:
    for max_tokens in (1, 2, 3, 8):
        asks = [Ask(0, (2 + i, 3), greedy(max_tokens)) for i in range(5)]
        watch = Watch(staged(stages, depth)).play(asks)
        assert sum(map(len, watch.sampled)) == 5 * max_tokens


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_steady_round_takes_each_row_once_and_is_sent_once(stages: int) -> None:
    rows = 3 * stages - 1
    watch = Watch(staged(stages))
    for row in range(rows):
        watch.engine.add([2 + row, 3], greedy(40))
    for _ in range(12 * stages):
        watch.engine.step()
    steady = watch.plans[6 * stages : 12 * stages]
    assert all(plan.same_rows for plan in steady)
    for first in range(len(steady) - stages):
        turn = [plan.rows.tolist() for plan in steady[first : first + stages]]
        assert sorted(slot for slots in turn for slot in slots) == list(range(1, rows + 1))
        assert max(map(len, turn)) == -(-rows // stages)
    # with each launch the queue is as full as it may be, and nothing is waited for
    assert set(watch.flights[6 * stages :]) == {stages + 1}
    before = watch.engine.syncs.copy()
    for _ in range(8):
        watch.engine.step()
    assert watch.engine.syncs.since(before).as_dict() == {}
    watch.engine.close()


@pytest.mark.parametrize(("stages", "depth"), [(2, 0), (3, 0), (3, 3), (3, 2)])
def test_in_a_steady_round_nothing_moves_in_the_columns(stages: int, depth: int) -> None:
    watch = Watch(staged(stages, depth), page_size=64)
    for row in range(2 * stages):
        watch.engine.add([2 + row, 3], greedy(40))
    for _ in range(6 * stages):
        watch.engine.step()
    table = watch.engine.scheduler.table
    table.fold()
    before = table._frontier.copy()
    for _ in range(2 * stages):
        watch.engine.step()
    assert (table._frontier == before).all()
    moved = (table.folded()[0] - before[0])[1 : 2 * stages + 1].tolist()
    turns = min(stages, watch.engine._core.depth)
    assert moved == [2 * stages // turns] * 2 * stages
    watch.engine.close()


@pytest.mark.parametrize(("stages", "rows"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_fewer_rows_than_stages_wait_for_their_tokens_and_are_counted(
    stages: int, rows: int
) -> None:
    # each row's prompt in a step of its own, so that they are spread from the beginning
    watch = Watch(staged(stages), max_rows=rows, max_step_tokens=4)
    steps = 10
    for row in range(rows):
        watch.engine.add([2 + row, 3, 4, 5], greedy(steps))
    while watch.engine.has_work:
        watch.engine.step()
    counts = watch.engine.syncs.as_dict()
    # every launch but those of the first round waits for a landing, which brings one row's token
    waits = rows * steps - rows
    assert counts == {"pipeline": {"steps": waits, "rows": waits}}


def test_a_prompt_is_not_held_up_by_tokens_on_their_way() -> None:
    watch = Watch(staged(2), max_step_tokens=12)
    watch.engine.add([2, 3], greedy(6))
    watch.engine.add(list(range(2, 34)), greedy(2))  # three chunks
    while watch.engine.has_work:
        watch.engine.step()
    chunked = [bool(len(plan.chunks)) for plan in watch.plans]
    assert chunked[:3] == [True, True, True]
    assert not len(watch.plans[1].rows)  # the first row's token is on its way
    assert len(watch.plans[2].rows) == 1


@pytest.mark.parametrize(("stages", "depth"), [(2, 3), (2, 5), (2, 8), (3, 4), (3, 7)])
def test_a_stop_wastes_a_row_for_each_round_that_is_in_the_air(stages: int, depth: int) -> None:
    options = OPTIONS | {"max_rows": stages}
    oracle = toy_engine(options, SERIAL)
    asks = [Ask(0, (2 + i, 3), greedy(20)) for i in range(stages)]
    told = Client(oracle, Workload(0, options, tuple(asks))).play().told
    stop = told[0, 0].tokens[9]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20, stop_token_ids=[stop])
    asks[0] = Ask(0, asks[0].prompt, params)
    watch = Watch(staged(stages, depth), max_rows=stages).play(asks)
    counters = watch.engine.scheduler.life.counters
    assert counters.overshoot_rows == (depth - 1) // stages


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("depth", [0, 8])
def test_short_of_pages_for_those_whose_turn_it_is_the_others_go_on(
    stages: int, depth: int
) -> None:
    # the youngest, whom nobody yields to, may be the one who has waited longest
    for num_pages in range(11, 20):
        short = {"page_size": 1, "num_pages": num_pages, "max_rows": stages}
        asks = [Ask(0, (2 + i, 3), greedy(10)) for i in range(stages)]
        watch = Watch(staged(stages, depth), **short).play(asks)
        assert watch.engine.scheduler.life.counters.preemptions > 0
        assert sum(map(len, watch.sampled)) == 10 * stages


# --- options --------------------------------------------------------------------------------

FACTS = ModelFacts(64, 128, (1,), 8, num_layers=4, state_bytes=16)


@pytest.mark.parametrize(
    ("options", "depth", "relay"),
    [
        ({"loop": "serial"}, 1, "host"),
        ({"loop": "overlap"}, 2, "host"),
        ({"loop": "batch-queue"}, 4, "row"),
        ({"loop": "batch-queue", "depth": 2}, 2, "host"),
        ({"loop": "batch-queue", "depth": 3}, 3, "host"),
        ({"loop": "batch-queue", "depth": 7}, 7, "row"),
    ],
)
def test_over_three_stages_each_loop_has_its_depth_and_relay(
    options: dict[str, object], depth: int, relay: str
) -> None:
    config = config_from("toy", {"pipeline_stages": 3, "max_rows": 2, **options})
    assert (config.steps_ahead, config.relay) == (depth, relay)
    settled = resolve(config, FACTS, 1 << 34)
    assert (settled.config.depth, settled.config.relay) == (depth, relay)
    told = [reason for reason in settled.reasons if reason.startswith("depth=")]
    given = "depth" in options or options["loop"] != "batch-queue"
    assert told == (
        [] if given else ["depth=4: a step for each stage, and one that waits for the first"]
    )
    assert any("shared by 3 stages" in reason for reason in settled.reasons)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "inline"}, "pipeline_stages=2: each stage is a process of its own; use exec"),
        ({"device": "cuda"}, "pipeline_stages=2 with device=cuda: stages run on device=cpu only"),
        ({"pipeline_stages": 8}, "pipeline_stages=8; at most 7"),
    ],
)
def test_stages_where_they_can_not_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from("toy", {"pipeline_stages": 2, **options})


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_stages=5, but the model has 4 layers and each"):
        resolve(config_from("toy", {"pipeline_stages": 5}), FACTS, 1 << 34)
