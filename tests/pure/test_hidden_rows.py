"""Hidden states reach who asked for them, one for each token, whatever happens on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from closed_form import complete
from engines import Variant, toy_of
from harness import play
from stepahead.types import SamplingParams
from workloads import Abort, Ask, Workload

# so few pages that they yield to each other, most ending by a stop token
OPTIONS = {"vocab_size": 64, "max_model_len": 40, "page_size": 2, "max_rows": 6}
OPTIONS |= {"num_pages": 26, "max_step_tokens": 16}
VARIANTS = [
    Variant("serial", "paper"),
    Variant("overlap", "paper"),
    Variant("overlap", "paper", depth=4),
    Variant("batch-queue", "paper", depth=3),
]


def asks(seed: int) -> tuple[Ask, ...]:
    """Every other request wants hidden states, some log-probabilities too, some two choices."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(6):
        params = SamplingParams(
            temperature=1.0,
            seed=100 * seed + i,
            n=1 + i % 2,
            max_tokens=14,
            logprobs=1 if i % 3 else None,
            stop_token_ids=random.integers(2, 64, 4).tolist(),
            return_hidden_states=i in (0, 1, 3, 5),
        )
        prompt = tuple(random.integers(2, 64, 5 + i).tolist())
        made.append(Ask(i, prompt, params, Abort("token", 3) if i == 5 else None))
    return tuple(made)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_token_has_its_state_after_preemptions_stops_and_aborts(variant: Variant) -> None:
    counts: Counter[str] = Counter()
    for seed in range(12):
        work = Workload(seed, OPTIONS, asks(seed))
        run = play(work, variant)
        counts += run.counts
        for (index, choice), told in run.told.items():
            ask = work.asks[index]
            assert ask.params.seed is not None
            if not ask.params.return_hidden_states:
                assert told.hidden == []
                continue
            want = complete(toy_of(OPTIONS), [*ask.prompt], ask.params, ask.params.seed, choice)
            assert want.sure == len(want.tokens), "an unlucky seed: choose another"
            assert told.tokens == want.tokens[: len(told.tokens)]
            assert told.hidden == [(state,) for state in want.hidden[: len(told.tokens)]]
            counts["stopped"] += told.finish is not None and told.finish.reason == "stop"
    met = ["preemptions", "stopped", "aborts", "hidden states"]
    if variant.loop != "serial":
        met += ["preempted in flight", "overshoot_rows"]
    assert [name for name in met if not counts[name]] == []
