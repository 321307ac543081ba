"""The runner by hand-made plans: what it reads, whose pages a row sees, which joins it believes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from closed_form import log_softmax, logits_of, state_of
from stepahead.device.base import Staging, Stream
from stepahead.device.eager import EagerDevice
from stepahead.model.batch import StepInputs
from stepahead.model.toy import ToyModel
from stepahead.plan import NO_INTS, Join, Plan
from stepahead.runner.flight import Once
from stepahead.runner.runner import Runner
from stepahead.runner.spec import RunnerSpec
from stepahead.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

SPEC = RunnerSpec("", num_slots=5, num_pages=12, page_size=2, max_pages=6, check=True)
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0})


class Watched(ToyModel):
    """Keeps each step's inputs."""

    def __init__(self) -> None:
        super().__init__(32, 12)
        self.inputs: list[StepInputs] = []

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """As the toy."""
        self.inputs.append(inputs)
        return self.forward(inputs, kv)


class Watching:
    """A staging block whose arrays the device remembers."""

    def __init__(self, device: Strict, staging: Staging) -> None:
        self.name = staging.name
        self._device, self._staging = device, staging

    def add(self, array: np.ndarray) -> Tensor:
        """Remembers it."""
        tensor = self._staging.add(array)
        self._device.uploads.append((self.name, tensor))
        return tensor

    def send(self) -> None:
        """Nothing to send."""


class Strict(EagerDevice):
    """An operation finds nonsense in blocks that it does not say it reads, and in freed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[str, Tensor]] = []

    def stage(self, step: int) -> Any:
        """Remembers what goes in."""
        return Watching(self, super().stage(step))

    def free(self, names: tuple[str, ...]) -> None:
        """What is freed may be anybody's."""
        for name, tensor in self.uploads:
            if name in names:
                tensor.fill_(1 << 40)
        self.uploads = [pair for pair in self.uploads if pair[0] not in names]

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Runs it."""
        others = [(t, t.clone()) for name, t in self.uploads if name not in reads]
        for tensor, _ in others:
            tensor.fill_(1 << 40)
        fn()
        for tensor, values in others:
            tensor.copy_(values)


def join(
    slot: int, tokens: list[int], pages: list[int], params: SamplingParams = GREEDY, again: int = 0
) -> Join:
    """A request enters a slot for the `again`th time."""
    held = np.array(tokens, np.int32), np.array(pages, np.int32)
    return Join(slot, again, held[0], len(tokens), 0, held[1], params, 5, 0)


def plan(step: int, rows: list[int], *, same: bool = False, **fields: Any) -> Plan:
    """A plan, with `prefill` for chunks of whole prompts (slot, length)."""
    prefill = [(slot, 0, length, 1) for slot, length in fields.pop("prefill", ())]
    chunks = np.array(prefill, np.int32).reshape(-1)
    return Plan(step, np.array(rows, np.int32), same, chunks=chunks, **fields)


def steps() -> list[Plan]:
    """Two rows; a third joins while they stay, a fourth as the rows change; then they stay."""
    first = (join(1, [5, 6], [1, 2, 3], DRAWN), join(2, [7], [4, 5, 6], DRAWN))
    third = (join(3, [8, 9], [7, 8], DRAWN),)
    fourth = (join(4, [9], [9], DRAWN),)
    return [
        plan(0, [], joins=first, prefill=[(1, 2), (2, 1)]),
        plan(1, [1, 2]),
        plan(2, [1, 2], same=True),
        plan(3, [1, 2], same=True, joins=third, prefill=[(3, 2)]),
        plan(4, [1, 2, 3], joins=fourth, prefill=[(4, 1)]),
        # from here on rows and wishes lie in different blocks
        plan(5, [1, 2, 3], same=True),
        plan(6, [1, 2, 3], same=True),
    ]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_says_all_that_it_reads(
    depth: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        monkeypatch.setattr("stepahead.runner.greedy._LARGE", 0)

    # rows and their wishes stay on the device for many steps, and each of them reads both
    def tokens(device: EagerDevice) -> list[list[int]]:
        runner = Runner(Watched(), device, replace(SPEC, depth=depth), 32)
        return [runner.launch(step).land().tokens.tolist() for step in steps()]

    assert tokens(Strict()) == tokens(EagerDevice())


def test_past_a_rows_pages_stands_the_padding_page() -> None:
    # slot 2 had four pages; its new owner has one, and is read beside a row of four
    model = Watched()
    runner = Runner(model, EagerDevice(), SPEC, 32)
    long = [*range(2, 8)]
    first = (join(1, long, [1, 2, 3, 4]), join(2, long, [5, 6, 7, 8]))
    runner.launch(plan(0, [], joins=first, prefill=[(1, 6), (2, 6)]))
    new = (join(2, [9], [11], again=1),)
    runner.launch(plan(1, [1], leaves=np.array([2], np.int32), joins=new, prefill=[(2, 1)]))
    runner.launch(plan(2, [1, 2]))
    assert model.inputs[2].decode_pages_dev.tolist() == [[1, 2, 3, 4], [11, 0, 0, 0]]


def test_without_rows_nothing_grows() -> None:
    model = Watched()
    runner = Runner(model, EagerDevice(), SPEC, 32)
    for step in range(3):
        new = (join(1 + step, [5], [1 + step]),)
        runner.launch(plan(step, [], same=step > 0, joins=new, prefill=[(1 + step, 1)]))
    assert [inputs.max_decode_len for inputs in model.inputs] == [0, 0, 0]


@pytest.mark.parametrize(
    ("leaves", "again", "words"),
    [
        ([], 1, "slot 1 was joined before its owner left"),
        ([1], 0, "slot 1: generation 0 joined after 0"),
        ([1], 1, ""),
    ],
)
def test_a_join_that_cannot_be_is_caught(leaves: list[int], again: int, words: str) -> None:
    runner = Runner(Watched(), EagerDevice(), SPEC, 32)
    runner.launch(plan(0, [], joins=(join(1, [5], [1]),), prefill=[(1, 1)]))
    new = (join(1, [5], [1], again=again),)
    left = np.array(leaves, np.int32) if leaves else NO_INTS
    second = plan(1, [], same=True, leaves=left, joins=new, prefill=[(1, 1)])
    if words:
        with pytest.raises(AssertionError, match=words):
            runner.launch(second)
    else:
        assert len(runner.launch(second).land().tokens) == 1


def test_a_long_prompt_is_scored_a_few_rows_at_a_time() -> None:
    class Counting(ToyModel):
        most = 0

        def logits(self, hidden: Tensor) -> Tensor:
            self.most = max(self.most, len(hidden))
            return super().logits(hidden)

    spec = RunnerSpec("", num_slots=2, num_pages=82, page_size=2, max_pages=80)
    model = Counting(32, 160)
    runner = Runner(model, EagerDevice(), spec, 32)
    prompt = [i % 32 for i in range(150)]
    wish = SamplingParams(temperature=0.0, prompt_logprobs=2)
    first = (join(1, prompt, [*range(1, 76)], wish),)
    result = runner.launch(plan(0, [], joins=first, prefill=[(1, 150)])).land()
    assert model.most == 64
    (scored,) = result.prompt_logprobs
    right = [
        log_softmax(logits_of(state_of(np.array(prompt[:i])), 32))[prompt[i]] for i in range(1, 150)
    ]
    assert (scored.slot, scored.start, scored.values.width) == (1, 1, 2)
    np.testing.assert_allclose(scored.values.chosen, right, atol=1e-5)


@pytest.mark.parametrize("relay", ["slot", "row"])
def test_a_step_that_samples_nothing_lets_tokens_be_found_after_it(relay: str) -> None:
    # slot 1 has its first token in flight and is left out of a step that runs a middle chunk alone
    spec = replace(SPEC, relay=relay, depth=3)
    runner = Runner(ToyModel(32, 12), EagerDevice(), spec, 32)
    middle = np.array([2, 0, 2, 0], np.int32)
    plans = [
        plan(0, [], joins=(join(1, [5, 6], [1, 2]),), prefill=[(1, 2)]),
        Plan(1, NO_INTS, True, chunks=middle, joins=(join(2, [7, 8, 9], [4, 5]),)),
        plan(2, [1]),
    ]
    found = [runner.launch(step).land().tokens.tolist() for step in plans]
    first = int(logits_of(state_of(np.array([5, 6])), 32).argmax())
    second = int(logits_of(state_of(np.array([5, 6, first])), 32).argmax())
    assert found == [[first], [], [second]]


def test_what_is_called_once_is_over_for_whoever_comes_second() -> None:
    begun, may_end, order = threading.Event(), threading.Event(), list[str]()

    def fn() -> None:
        begun.set()
        assert may_end.wait(60)
        order.append("called")

    once = Once(fn)

    def second() -> None:
        once()
        order.append("went on")

    first, other = threading.Thread(target=once), threading.Thread(target=second)
    first.start()
    assert begun.wait(60)
    other.start()
    other.join(0.05)
    may_end.set()
    first.join(60)
    other.join(60)
    once()
    assert order == ["called", "went on"]
