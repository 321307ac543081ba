"""A model may leave unfinished what a step does not ask for: nobody reads it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from test_pooling import pooling

from engines import Variant, resolved, runner_spec, toy_engine
from harness import Client, differences, exactly, play
from stepahead.device.eager import EagerDevice
from stepahead.executor.inline import InlineExecutor
from stepahead.model.batch import StepInputs
from stepahead.model.toy import ToyModel
from stepahead.runner.runner import Runner
from workloads import workload

if TYPE_CHECKING:
    from torch import Tensor

WORKLOADS = 80
SPOILT = -12345


class Sparing(ToyModel):
    """Spoils the states that nobody asks for."""

    spared = 0

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """As the toy."""
        states = self.forward(inputs, kv)
        if inputs.wanted_dev is None:
            return states
        kept = states[inputs.wanted_dev]
        states.fill_(SPOILT)
        self.spared += len(states) - len(kept)
        return states.index_copy_(0, inputs.wanted_dev, kept)


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_nobody_reads_states_that_were_not_asked_for(loop: str) -> None:
    """Log-probabilities of prompts, pools and hidden states among the rest."""
    counts: Counter[str] = Counter()
    for seed in range(WORKLOADS):
        work, variant = (pooling if seed % 2 else workload)(seed), Variant(loop)
        settled = resolved(work.options, variant)
        spec = runner_spec(settled)
        model = Sparing(**spec.options)
        runner = Runner(model, EagerDevice(), spec, model.vocab_size)
        engine = toy_engine(work.options, variant, executor=InlineExecutor(runner))
        run = Client(engine, work).play()
        assert not differences(play(work), run, exactly), seed
        counts["spared"] += model.spared
        for ask in work.asks:
            counts["prompt log-probabilities"] += ask.params.prompt_logprobs is not None
            counts["pools"] += bool(ask.params.pooling)
    assert min(counts.values()) > WORKLOADS // 8, counts
    assert len(counts) == 3
