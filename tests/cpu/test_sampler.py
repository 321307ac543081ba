"""The sampler against a naive one, row by row; and the noise as a source of random numbers.

The distribution tests use fixed seeds, so they pass or fail for good: each bound is one that a
perfect generator would break in one of a million choices of seed (`ODDS`).
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from statistics import NormalDist
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from closed_form import Place, choose, filtered, log_softmax, noise
from stepahead.plan import NO_INTS, Join
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.logprobs import describe, describe_hidden
from stepahead.runner.noise import gumbel, row_keys, stream_key
from stepahead.runner.sampler import SampleGroup, sample
from stepahead.runner.wishes import Wishes
from stepahead.types import SamplingParams

ODDS = 1e-6
EOS = (1,)

CPU = torch.device("cpu")


def upload(array: np.ndarray) -> torch.Tensor:
    """As the eager device does."""
    return torch.from_numpy(array.astype(np.int64))


class Row:
    """A row to sample: its logits, parameters, and the tokens before."""

    def __init__(
        self, logits: np.ndarray, params: SamplingParams, seed: int = 0, choice: int = 0
    ) -> None:
        self.logits, self.params, self.seed, self.choice = logits, params, seed, choice
        self.prompt: list[int] = [0]
        self.outputs: list[int] = []

    def naive(self) -> tuple[int, bool]:
        """The closed form's token, and whether it is sure."""
        params = self.params
        ends = frozenset({*(params.stop_token_ids or ()), *(() if params.ignore_eos else EOS)})
        place = Place(self.seed, self.choice, self.prompt, self.outputs, ends)
        return choose(self.logits.astype(np.float64), params, place)


def tokens_of(rows: list[Row]) -> list[int]:
    """What the sampler gives these rows in one step."""
    vocab = len(rows[0].logits)
    counts, wishes = PenaltyCounts(vocab, CPU), Wishes(len(rows) + 1, EOS)
    for slot, row in enumerate(rows, 1):
        counts_row = counts.take(slot) if row.params.penalised else None
        wishes.enter(join_of(slot, row), counts_row)
        if counts_row is not None:
            counts.start(counts_row, upload(np.array(row.prompt)), _outputs(row))
    group = wishes.group(np.arange(1, len(rows) + 1), upload)
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    positions = upload(np.array([len(row.prompt) + len(row.outputs) for row in rows]))
    return sample(logits, group, positions, counts).tolist()


def join_of(slot: int, row: Row) -> Join:
    """The row's join; a sampler looks at neither tokens nor pages."""
    at = len(row.prompt)
    return Join(slot, 0, NO_INTS, at, 0, NO_INTS, row.params, row.seed, row.choice)


def _outputs(row: Row) -> torch.Tensor:
    return upload(np.array(row.outputs, np.int64))


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 3},
    "top_k of more than there are": {"top_k": 1000},
    "top_k off": {"top_k": -1},
    "top_p": {"top_p": 0.5},
    "top_p of nearly nothing": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p of one": {"min_p": 1.0},
    "all filters": {"min_p": 0.01, "top_k": 20, "top_p": 0.9},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "presence as a bonus": {"temperature": 0.0, "presence_penalty": -1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.6},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "repetition as a bonus": {"temperature": 0.0, "repetition_penalty": 0.4},
    "bias": {"temperature": 0.0, "logit_bias": {3: 2.5, 7: -100.0, 0: 0.5}},
    "a bias that decides": {"logit_bias": {4: 100.0}},
    "min_tokens": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [2, 5]},
    "min_tokens without eos": {"min_tokens": 4, "stop_token_ids": [2], "ignore_eos": True},
    "everything": {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 30,
        "min_p": 0.001,
        "min_tokens": 5,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 1.0, 6: -1.0},
    },
}


ALWAYS_THE_BEST = {"greedy", "top_p of nearly nothing", "min_p of one"}


def random_row(rnd: random.Random, feature: str, vocab: int) -> Row:
    """A row of this feature after random tokens."""
    logits = np.array([rnd.gauss(0.0, 2.0) for _ in range(vocab)], np.float32)
    row = Row(logits, SamplingParams(**FEATURES[feature]), rnd.choice((0, -5, 1 << 62)), 2)
    row.prompt = [rnd.randrange(vocab) for _ in range(rnd.randint(1, 6))]
    likely = np.argsort(-logits)[:6].tolist()
    row.outputs = [rnd.choice(likely) for _ in range(rnd.randint(0, 6))]
    return row


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_gives_the_naive_token(feature: str) -> None:
    rnd = random.Random(feature)
    rows = [random_row(rnd, feature, 61) for _ in range(64)]
    wanted = [row.naive() for row in rows]
    got = tokens_of(rows)
    unlike = [
        (i, t, w)
        for i, (t, (w, sure)) in enumerate(zip(got, wanted, strict=True))
        if sure and t != w
    ]
    assert unlike == []
    assert sum(sure for _, sure in wanted) > 60
    plain = [int(row.logits.argmax()) for row in rows]
    # the feature did something, or the test above shows nothing
    assert (got == plain) == (feature in ALWAYS_THE_BEST)


def test_a_token_does_not_depend_on_its_batch() -> None:
    rnd = random.Random(1)
    rows = [random_row(rnd, name, 61) for name in FEATURES for _ in range(3)]
    alone = [tokens_of([row])[0] for row in rows]
    assert tokens_of(rows) == alone
    order = list(range(len(rows)))
    rnd.shuffle(order)
    assert tokens_of([rows[i] for i in order]) == [alone[i] for i in order]


def test_min_tokens_end_the_ban_at_their_position() -> None:
    logits = np.array([0.0, 9.0, 1.0], np.float32)  # eos is best by far
    row = Row(logits, SamplingParams(temperature=0.0, min_tokens=3))
    row.prompt = [0] * 5
    got = []
    for count in range(5):
        row.outputs = [2] * count
        got += tokens_of([row])
    assert got == [2, 2, 2, 1, 1]


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    # 1e-50 is zero in float32: 0 / 0 was NaN, and NaN is the largest of all
    logits = np.array([0.0, 3.0, -1.0], np.float32)
    rows = [Row(logits, SamplingParams(temperature=t)) for t in (1e-50, 1e-38, 1e-6)]
    assert tokens_of(rows) == [1, 1, 1]


def test_of_equal_logits_greedy_takes_the_first() -> None:
    logits = np.array([0.0, 2.0, 2.0, 2.0], np.float32)
    assert tokens_of([Row(logits, SamplingParams(temperature=0.0))] * 3) == [1, 1, 1]


def told(group: SampleGroup) -> list[object]:
    """All that a group says, to be compared."""
    parts = [group.drawn, group.edits, group.penalised]
    values = [value for part in parts if part is not None for value in vars(part).values()]
    values += [group.logprob_rows, group.logprob_rows_dev, group.logprob_width]
    return [v.tolist() if isinstance(v, (torch.Tensor, np.ndarray)) else v for v in values]


@pytest.mark.parametrize("new", FEATURES)
def test_a_new_owner_inherits_no_wish(new: str) -> None:
    old = FEATURES["everything"] | {"logprobs": 3}
    used, fresh = Wishes(3, EOS), Wishes(3, EOS)
    used.enter(join_of(2, Row(np.zeros(9), SamplingParams(**old), 7, 1)), 4)
    join = join_of(2, Row(np.zeros(9), SamplingParams(**FEATURES[new])))
    counts_row = 1 if join.params.penalised else None
    used.enter(join, counts_row)
    fresh.enter(join, counts_row)
    slots = np.array([2])
    assert told(used.group(slots, upload)) == told(fresh.group(slots, upload))


def test_plain_greedy_rows_upload_nothing_and_cost_no_operation() -> None:
    def never(array: np.ndarray) -> torch.Tensor:
        raise AssertionError("uploaded something")

    wishes = Wishes(9, EOS)
    for slot in range(1, 9):
        wishes.enter(join_of(slot, Row(np.zeros(4), SamplingParams(temperature=0.0))), None)
    group = wishes.group(np.arange(1, 9), never)
    assert (group.drawn, group.edits, group.penalised, group.logprob_rows_dev) == (None,) * 4


@pytest.mark.parametrize(
    ("eos_ids", "params", "any_end"),
    [
        (EOS, SamplingParams(), True),
        ((), SamplingParams(), False),
        (EOS, SamplingParams(ignore_eos=True), False),
        ((), SamplingParams(stop_token_ids=[1]), True),
    ],
)
def test_where_no_token_ends_a_row_the_device_looks_for_none(
    eos_ids: tuple[int, ...], params: SamplingParams, any_end: bool
) -> None:
    wishes = Wishes(2, eos_ids, torch.zeros(4, dtype=torch.bool))
    wishes.enter(join_of(1, Row(np.zeros(4), params)), None)
    group = wishes.group(np.array([1]), upload)
    assert (group.ends is not None) == any_end


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs, in all that it calls."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal seen
        seen += 1
        return trace

    before = sys.gettrace()
    gc.disable()  # hypothesis listens to collections, in lines of Python
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return seen


def test_python_works_for_no_row_that_only_draws() -> None:
    # wishes were gathered row by row once: a step that changed rows took 1 ms longer at 1,024
    def lines_at(count: int) -> int:
        wishes = Wishes(count + 1, EOS)
        params = SamplingParams(temperature=0.7, top_p=0.9, logprobs=2, presence_penalty=0.5)
        for slot in range(1, count + 1):
            wishes.enter(join_of(slot, Row(np.zeros(4), params, slot)), slot)
        return lines_run(lambda: wishes.group(np.arange(1, count + 1), upload))

    assert 0 < lines_at(4) == lines_at(400)


def test_counts_follow_the_samples_without_the_host() -> None:
    # three steps of one group: each sampled token is penalised in the next, nobody told the host
    counts, wishes = PenaltyCounts(4, CPU), Wishes(2, EOS)
    row = Row(np.zeros(4), SamplingParams(temperature=0.0, presence_penalty=2.0))
    counts_row = counts.take(1)
    counts.start(counts_row, upload(np.array([3])), upload(np.zeros(0, np.int64)))
    wishes.enter(join_of(1, row), counts_row)
    group = wishes.group(np.array([1]), upload)
    base = torch.tensor([[3.0, 2.5, 2.0, 0.0]])
    got = [sample(base.clone(), group, torch.tensor([1 + i]), counts).item() for i in range(4)]
    assert got == [0, 1, 2, 0]


def test_counts_of_a_new_owner_start_anew_and_growing_keeps_the_others() -> None:
    counts = PenaltyCounts(6, CPU)
    first = counts.take(1)
    counts.start(first, upload(np.array([2])), upload(np.array([4, 4])))
    for slot in range(2, 9):
        counts.start(counts.take(slot), upload(np.array([slot % 6])), upload(np.array([0])))
    assert counts.outputs_dev[first].tolist() == [0, 0, 0, 0, 2, 0]
    counts.give(1)
    again = counts.take(11)
    assert again == first, "the row is not used again"
    counts.start(again, upload(np.array([5])), upload(np.zeros(0, np.int64)))
    assert counts.outputs_dev[again].sum() == 0
    assert counts.prompt_dev[again].tolist() == [False] * 5 + [True]


def test_described_logprobs_are_those_of_the_raw_logits() -> None:
    rnd = np.random.default_rng(0)
    logits = rnd.normal(0.0, 3.0, (16, 61)).astype(np.float32)
    tokens = rnd.integers(0, 61, 16)
    found = describe(torch.from_numpy(logits), torch.from_numpy(tokens), 5)
    for i, token in enumerate(tokens):
        values = log_softmax(logits[i].astype(np.float64))
        order = np.argsort(-values)
        assert found.rank_dev[i] == list(order).index(token) + 1
        assert found.ids_dev[i].tolist() == order[:5].tolist()
        assert abs(float(found.chosen_dev[i]) - values[token]) < 1e-5
        np.testing.assert_allclose(found.best_dev[i].numpy(), values[order[:5]], atol=1e-5)


def test_many_rows_are_described_a_few_at_a_time() -> None:
    # 150 rows at a vocabulary of 150,000 would be 90 MB of logits, and as much again twice
    rnd, most = torch.Generator().manual_seed(0), 0
    hidden = torch.randn(150, 8, generator=rnd)
    head = torch.randn(8, 61, generator=rnd)
    tokens = torch.randint(0, 61, (150,), generator=rnd)

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(rows))
        return rows @ head

    found = describe_hidden(logits_of, hidden, tokens, 5)
    assert most == 64
    at_once = describe(hidden @ head, tokens, 5)
    assert found.rank_dev.tolist() == at_once.rank_dev.tolist()
    assert found.ids_dev.tolist() == at_once.ids_dev.tolist()
    torch.testing.assert_close(found.chosen_dev, at_once.chosen_dev)
    torch.testing.assert_close(found.best_dev, at_once.best_dev)


def test_more_logprobs_than_tokens_are_cut_to_the_vocabulary() -> None:
    found = describe(torch.zeros(2, 3), torch.tensor([0, 1]), 20)
    assert found.ids_dev.shape == (2, 3)


# --- noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, (1 << 63) - 1, -(1 << 63)])
def test_the_noise_is_the_documented_hash(seed: int) -> None:
    places = [(choice, position) for choice in (0, 1, 127) for position in (0, 1, 4095)]
    keys = upload(np.array([stream_key(seed, choice) for choice, _ in places]))
    rows = row_keys(keys, upload(np.array([position for _, position in places])))
    got = gumbel(rows, 61).numpy()
    wanted = np.stack([noise(seed, choice, position, 61) for choice, position in places])
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_the_noise_is_always_finite() -> None:
    # the hash's extremes: a uniform of 0 or 1 would be an infinite noise
    values = gumbel(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32), 256)
    assert bool(values.isfinite().all())
    assert 16.0 < float(values.max()) < 17.0
    assert -2.9 < float(values.min()) < -2.7


def bound(freedom: int) -> float:
    """The chi-square that a perfect generator exceeds once in 1 / ODDS (Wilson and Hilferty)."""
    z, part = NormalDist().inv_cdf(1 - ODDS), 2 / (9 * freedom)
    return float(freedom * (1 - part + z * part**0.5) ** 3)


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """Of observed counts against expected shares."""
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def drawn(logits: np.ndarray, params: SamplingParams, seed: int, choice: int, n: int) -> np.ndarray:
    """Tokens at positions 0..n of one request whose logits never change."""
    counts, wishes = PenaltyCounts(len(logits), CPU), Wishes(2, EOS)
    wishes.enter(join_of(1, Row(logits, params, seed, choice)), None)
    group = wishes.group(np.ones(n, np.int64), upload)
    table = torch.from_numpy(logits.astype(np.float32)).repeat(n, 1)
    return sample(table, group, torch.arange(n), counts).numpy()


PLAIN = SamplingParams(temperature=1.0)
DRAWS = 20_000


@pytest.mark.parametrize("seed", [0, 1, 2, 1 << 40, -9])
def test_equal_logits_are_drawn_equally_often(seed: int) -> None:
    counts = np.bincount(drawn(np.zeros(32), PLAIN, seed, 0, DRAWS), minlength=32)
    assert chi_square(counts, np.full(32, 1 / 32)) < bound(31)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}])
def test_the_draws_follow_the_softmax(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    logits = np.linspace(-1.0, 2.0, 12)
    counts = np.bincount(drawn(logits, params, 3, 0, DRAWS), minlength=12)
    kept = filtered(logits / params.temperature, params)[0]
    weights = np.exp(logits[kept] / params.temperature)
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], weights / weights.sum()) < bound(int(kept.sum()) - 1)


@pytest.mark.parametrize("other", [(0, 1), (0, 2), (1, 0), (17, 0)])
def test_choices_and_seeds_are_drawn_independently(other: tuple[int, int]) -> None:
    one = drawn(np.zeros(8), PLAIN, 0, 0, DRAWS)
    two = drawn(np.zeros(8), PLAIN, *other, DRAWS)
    joint = np.bincount(one * 8 + two, minlength=64)
    assert chi_square(joint, np.full(64, 1 / 64)) < bound(63)


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_positions_are_drawn_independently(lag: int) -> None:
    tokens = drawn(np.zeros(8), PLAIN, 5, 0, DRAWS)
    joint = np.bincount(tokens[:-lag] * 8 + tokens[lag:], minlength=64)
    assert chi_square(joint, np.full(64, 1 / 64)) < bound(63)


def test_many_choices_of_one_seed_all_differ() -> None:
    # 128 answers of 16 tokens out of 64: two alike by chance once in 10^24
    answers = {tuple(drawn(np.zeros(64), PLAIN, 7, choice, 16)) for choice in range(128)}
    assert len(answers) == 128
