"""A whole runner on a device whose values nobody has: nothing mixes places, nothing is looked at.

Under FakeTensorMode torch's "meta" is such a device: an operation on tensors of two places raises,
and so does whatever needs a value on the host.  On a GPU the one would fail, and the other would
make the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engines import ORACLE, Variant, resolved, runner_spec, toy_engine
from stepahead.device.eager import EagerDevice
from stepahead.executor.inline import InlineExecutor
from stepahead.model.batch import StepInputs
from stepahead.model.spec import ModelSpec
from stepahead.model.toy import ToyModel
from stepahead.model.weights import random_model
from stepahead.runner.runner import Runner
from stepahead.types import SamplingParams

OPTIONS: dict[str, Any] = {
    "vocab_size": 64,
    "max_model_len": 64,
    "max_rows": 4,
    "max_step_tokens": 16,
    "page_size": 4,
    "num_pages": 64,
}
LLAMA = ModelSpec("LlamaForCausalLM", 64, 32, 32, 2, 4, 2, 8, 64)
EVERYTHING = [
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=5, logprobs=3),
    SamplingParams(
        temperature=0.0, max_tokens=6, presence_penalty=0.5, repetition_penalty=1.2, logprobs=0
    ),
    SamplingParams(
        temperature=0.0, max_tokens=4, logit_bias={3: 5.0}, stop_token_ids=[9], min_tokens=2
    ),
    SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, return_hidden_states=True),
]


class Zeros:
    """A download of a tensor that has no values."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tuple(tensor.shape)
        self._dtype = tensor.dtype

    def read(self) -> np.ndarray:
        floats = self._dtype.is_floating_point
        return np.zeros(self._shape, np.float32 if floats else np.int64)


class Staged:
    """Staging whose tensors arrive elsewhere."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, array: np.ndarray) -> Tensor:
        return torch.zeros(array.shape, dtype=torch.int64, device="meta")

    def send(self) -> None:
        return


class Elsewhere(EagerDevice):
    """A device that is not the CPU."""

    place = torch.device("meta")

    def stage(self, step: int) -> Staged:
        return Staged(f"staging {step}")

    def download(self, source: Callable[[], Tensor], name: str) -> Zeros:
        tensor = source()
        assert tensor.device.type == "meta", f"{name} is on the host already"
        return Zeros(tensor)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # what stands in for a look at values on an accelerator has no meta kernel
    monkeypatch.setattr(torch, "_assert_async", lambda ok, message: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def make_toy() -> Any:
    return ToyModel(64, 64, device="meta")


def make_llama() -> Any:
    model = random_model(LLAMA, 0, "float32", "meta")
    assert model.can_capture(4, 16)
    return model


def make_uncaptured() -> Any:
    model = make_toy()
    model.can_capture = lambda page_size, max_pages: False
    return model


@pytest.mark.parametrize("make", [make_toy, make_llama, make_uncaptured])
@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
@pytest.mark.usefixtures("pretended")
def test_nothing_is_looked_at(make: Callable[[], Any], loop: str) -> None:
    hold_to_looking_away(make, Variant(loop))


@pytest.mark.parametrize("make", [make_llama, make_uncaptured])
@pytest.mark.parametrize("loop", ["overlap", "batch-queue"])
@pytest.mark.usefixtures("pretended")
def test_no_draft_is_looked_at(make: Callable[[], Any], loop: str) -> None:
    hold_to_looking_away(make, Variant(loop, draft="ngram", drafts=2))


def hold_to_looking_away(make: Callable[[], Any], variant: Variant) -> None:
    spec = runner_spec(resolved(OPTIONS, variant), variant.draft)
    runner = Runner(make(), Elsewhere(), spec, 64)
    engine = toy_engine(OPTIONS, variant, executor=InlineExecutor(runner))
    for number, params in enumerate(EVERYTHING * 2):
        engine.add([2 + number] * (3 + 5 * number % 23), params)
    ends = []
    while engine.has_work:
        outputs = engine.step()
        ends += [finish.reason for finish in outputs.finishes] if outputs else []
    engine.close()
    assert ends == ["length"] * len(EVERYTHING) * 2


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("fault", ["looks", "mixes"])
def test_a_model_that_looks_or_mixes_is_caught(fault: str) -> None:
    class Faulty(ToyModel):
        def can_capture(self, page_size: int, max_pages: int) -> bool:
            return False

        def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
            if fault == "looks":
                inputs.positions_dev.tolist()
            return self.forward(inputs, kv) + torch.zeros(1, dtype=torch.int64)

    spec = runner_spec(resolved(OPTIONS, ORACLE))
    runner = Runner(Faulty(64, 64, device="meta"), Elsewhere(), spec, 64)
    engine = toy_engine(OPTIONS, ORACLE, executor=InlineExecutor(runner))
    engine.add([2, 3, 4], EVERYTHING[0])
    (finish,) = engine.step().finishes
    assert finish.reason == "error"
    engine.close()
