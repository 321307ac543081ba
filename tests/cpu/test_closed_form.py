"""The oracle has an oracle: `serial` gives the toy's closed form, which shares no code with it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from closed_form import Answer, complete, log_softmax
from engines import ORACLE, toy_of
from harness import Row, Told, play
from stepahead.types import SamplingParams
from workloads import Ask, Workload, workload

SHARDS = 4
WORKLOADS = 100  # a shard
# float32 log-probabilities of about -10
CLOSE = 3e-6


def answers(work: Workload) -> list[tuple[Ask, Told, Answer]]:
    """What each client of the serial loop was told, beside what it must be told."""
    toy, rows = toy_of(work.options), []
    for (index, choice), told in play(work, ORACLE).told.items():
        ask = work.asks[index]
        if not told.refused:
            answer = complete(toy, list(ask.prompt), ask.params, told.seed, choice)
            rows.append((ask, told, answer))
    return rows


def hold(ask: Ask, told: Told, answer: Answer) -> None:
    """Tokens up to the first that is not sure, with what came beside them; then, if all were, the
    end."""
    sure = answer.sure
    assert told.tokens[:sure] == answer.tokens[: min(sure, len(told.tokens))]
    for row, logits, token in zip(told.logprobs, answer.logits[:sure], told.tokens, strict=False):
        hold_logprob(row, logits, token)
    if ask.params.return_hidden_states:
        # the state before the first token that is not sure is certain too
        states = [(state,) for state in answer.hidden[: sure + 1]]
        assert len(told.hidden) == len(told.tokens)
        assert told.hidden[: sure + 1] == states[: len(told.tokens)]
    for at, logits in enumerate(answer.prompt_logits, 1):
        if not told.aborted or at in told.prompt_logprobs:
            hold_logprob(told.prompt_logprobs[at], logits, ask.prompt[at])
    if sure == len(answer.tokens) and not told.aborted:
        assert told.finish is not None
        assert len(told.tokens) == len(answer.tokens)
        end = told.finish.reason, told.finish.stop_reason, told.finish.stop_end_bytes
        assert end == (answer.reason, answer.stop_reason, answer.stop_end_bytes)


def hold_logprob(row: Row, logits: np.ndarray, token: int) -> None:
    """Chosen, its rank, and the best beside it, of the raw distribution."""
    chosen, rank, ids, best = row
    values = log_softmax(logits)
    assert abs(chosen - values[token]) < CLOSE
    assert (values > values[token] + CLOSE).sum() < rank <= (values > values[token] - CLOSE).sum()
    assert len(ids) == len(best) == len({*ids})
    assert np.abs(np.sort(values)[::-1][: len(best)] - best).max(initial=0) < CLOSE
    assert np.abs(values[list(ids)] - best).max(initial=0) < CLOSE


@pytest.mark.parametrize("shard", range(SHARDS))
def test_serial_gives_the_closed_form(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * WORKLOADS, (shard + 1) * WORKLOADS):
        for ask, told, answer in answers(workload(seed)):
            try:
                hold(ask, told, answer)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {ask}: {told} is not {answer}") from error
            counts["tokens"] += len(answer.tokens)
            counts["sure"] += answer.sure
            counts[answer.reason] += 1
            counts["strings"] += isinstance(answer.stop_reason, str)
            counts["inside a token"] += answer.stop_end_bytes > 0
            counts["hidden states"] += len(told.hidden)
    # else the comparison above would compare little
    assert counts["sure"] > 0.98 * counts["tokens"] > 1000
    met = ("stop", "length", "strings", "inside a token", "hidden states")
    assert min(counts[name] for name in met) > 3


def one(params: SamplingParams, prompt: tuple[int, ...] = (5, 9, 2)) -> Told:
    """What a lone request is told."""
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "max_rows": 2}
    work = Workload(0, options | {"num_pages": 16}, (Ask(0, prompt, params),))
    return play(work).told[0, 0]


def test_the_closed_form_notices_another_prompt_and_another_seed() -> None:
    # a reference that said the same of everything would prove nothing
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    told = one(params)
    toy = toy_of({"vocab_size": 64, "max_model_len": 32})
    assert told.tokens == complete(toy, [5, 9, 2], params, 3).tokens
    assert told.tokens != complete(toy, [5, 9, 3], params, 3).tokens
    assert told.tokens != complete(toy, [5, 9, 2], params, 4).tokens
    assert told.tokens != complete(toy, [5, 9, 2], params, 3, choice=1).tokens


def test_a_choice_is_stopped_at_the_end_of_the_model() -> None:
    told = one(SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True), (7,) * 20)
    assert told.finish is not None
    assert (told.finish.reason, len(told.tokens)) == ("length", 12)


def test_requests_without_a_seed_follow_the_engines() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    options = {"vocab_size": 64, "max_model_len": 32, "page_size": 4, "num_pages": 16}

    def told(seed: int) -> list[list[int]]:
        asks = (Ask(0, (5, 9, 2), params), Ask(0, (5, 9, 2), params))
        run = play(Workload(0, options | {"seed": seed}, asks))
        return [one.tokens for one in run.told.values()]

    assert told(1) == told(1)
    assert told(1) != told(2)
    assert told(1)[0] != told(1)[1]


def test_a_page_may_be_much_larger_than_a_request() -> None:
    # it was an error in the middle of a step
    options = {"vocab_size": 64, "max_model_len": 24, "page_size": 16384, "max_rows": 2}
    ask = Ask(0, (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=6))
    for asked, told, answer in answers(Workload(0, options | {"num_pages": 2}, (ask, ask))):
        assert len(told.tokens) == len(answer.tokens)
        hold(asked, told, answer)
