"""What a step in the air may still do: dead rows, fences, blocks that are kept, named waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines import ORACLE, Variant, resolved, runner_spec, toy_engine
from harness import Client, Run, differences, exactly
from stepahead.device.base import Event, Stream
from stepahead.device.eager import EagerDevice
from stepahead.device.hostile import HostileDevice
from stepahead.executor.inline import InlineExecutor
from stepahead.model.batch import StepInputs
from stepahead.model.toy import ToyModel
from stepahead.runner.ends import Ends, ended
from stepahead.runner.fence import Fence
from stepahead.runner.keep import KeepAlive
from stepahead.runner.runner import Runner
from stepahead.runner.trap import trap
from stepahead.types import SamplingParams
from workloads import Ask, Workload

OPTIONS: dict[str, Any] = {
    "vocab_size": 17,
    "max_model_len": 64,
    "page_size": 4,
    "max_rows": 4,
    "max_step_tokens": 32,
    "prefix_cache": False,
    "num_pages": 64,
    "seed": 3,
}
AHEAD = [Variant("overlap"), *(Variant("batch-queue", depth=depth) for depth in (2, 3, 4))]


class Writes(ToyModel):
    """Counts the writes to each cell but those of the padding page, and the longest reads."""

    def __init__(self, vocab_size: int, max_len: int) -> None:
        super().__init__(vocab_size, max_len)
        self.cells: Counter[int] = Counter()
        self.dead_reads: list[int] = []

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """As the toy."""
        cells = inputs.cells_dev.tolist()
        self.cells.update(cell for cell in cells if cell >= kv.page_size)
        lens = inputs.decode_lens_dev.tolist()
        for cell, length in zip(cells[: inputs.n_decode], lens, strict=True):
            if cell < kv.page_size:
                self.dead_reads.append(length)
        return self.forward(inputs, kv)


class WantsLengths(ToyModel):
    """Attention that works with the host's lengths and checks that they are exact."""

    host_lengths = True

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """As the toy."""
        living = (inputs.cells_dev[: inputs.n_decode] > 0).numpy()  # the dead write to cell 0
        assert inputs.decode_bounds[living].tolist() == inputs.decode_lens_dev[living].tolist()
        return self.forward(inputs, kv)


def play_on(model: ToyModel, work: Workload, variant: Variant) -> Run:
    """The workload on an engine around this very model."""
    settled = resolved(work.options, variant)
    runner = Runner(model, EagerDevice(), runner_spec(settled), model.vocab_size)
    return Client(toy_engine(work.options, variant, executor=InlineExecutor(runner)), work).play()


def asks(count: int, **params: Any) -> tuple[Ask, ...]:
    return tuple(
        Ask(i, (2 + i % 9, 3, 5 + i % 7), SamplingParams(seed=i, **params)) for i in range(count)
    )


STOPPING: dict[str, dict[str, Any]] = {
    "end of sequence": {"max_tokens": 40},
    "a stop id of its own": {"max_tokens": 40, "stop_token_ids": [7, 8], "ignore_eos": True},
    "not before min_tokens": {"max_tokens": 40, "min_tokens": 5},
    "length": {"max_tokens": 6, "ignore_eos": True},
}


@pytest.mark.parametrize("why", STOPPING)
@pytest.mark.parametrize("variant", AHEAD, ids=str)
def test_a_dead_row_writes_no_kv(why: str, variant: Variant) -> None:
    work = Workload(0, OPTIONS, asks(12, **STOPPING[why]))
    model = Writes(17, 64)
    run = play_on(model, work, variant)
    told = run.told.values()
    assert why == "length" or any(one.finish and one.finish.reason == "stop" for one in told)
    # the last token's KV is never needed, and nothing else is written twice or for nothing
    assert sum(model.cells.values()) == sum(3 + len(one.tokens) - 1 for one in told)
    assert set(model.dead_reads) <= {1}
    assert len(model.dead_reads) == run.counts["overshoot_rows"]
    assert why == "length" or run.counts["overshoot_rows"] > 0


def test_a_row_that_the_host_alone_ends_goes_on_writing() -> None:
    # the device knows no stop strings: their rows are the host's to end
    work = Workload(0, OPTIONS, asks(12, max_tokens=40, ignore_eos=True, stop=["c"]))
    model = Writes(17, 64)
    run = play_on(model, work, Variant("overlap"))
    assert run.counts["overshoot_rows"] > 0
    assert not model.dead_reads


def test_a_dead_slots_new_owner_lives() -> None:
    work = Workload(0, OPTIONS | {"max_rows": 1}, asks(8, max_tokens=12))
    model = Writes(17, 64)
    run = play_on(model, work, Variant("overlap"))
    assert run.counts["slot_reuses"] > 0
    assert any(one.finish and one.finish.reason == "stop" for one in run.told.values())
    assert not differences(play_on(Writes(17, 64), work, ORACLE), run, exactly)
    assert sum(model.cells.values()) == sum(2 + len(one.tokens) for one in run.told.values())


def test_a_new_owner_dies_of_its_own_ends_only() -> None:
    ending = SamplingParams(seed=0, max_tokens=4, ignore_eos=True, stop_token_ids=[*range(2, 17)])
    living = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    asked = (Ask(0, (3, 4), ending), *(Ask(12, (5 + i, 6), living) for i in range(2)))
    work = Workload(0, OPTIONS | {"max_rows": 1}, asked)
    model = Writes(17, 64)
    run = play_on(model, work, Variant("overlap"))
    ends = [one.finish.reason for one in run.told.values() if one.finish is not None]
    assert ends == ["stop", "length", "length"]
    assert run.counts["slot_reuses"] > 0
    assert sum(model.cells.values()) == sum(1 + len(one.tokens) for one in run.told.values())


def test_who_has_ended() -> None:
    eos_dev = torch.tensor([False, True, False, False])
    tokens, positions = torch.tensor([1, 1, 3, 3, 2]), torch.tensor([5, 5, 5, 6, 9])
    own = torch.tensor([[2, 3, 3, 4], [3, 3, 2, 2], [6, 6, 6, 0]])
    assert ended(Ends(eos_dev, None, None), tokens, positions).tolist() == [1, 1, 0, 0, 0]
    heed = torch.tensor([0, 1, 1, 1, 1])
    assert ended(Ends(eos_dev, heed, None), tokens, positions).tolist() == [0, 1, 0, 0, 0]
    assert ended(Ends(None, None, own), tokens, positions).tolist() == [0, 0, 0, 1, 1]
    assert ended(Ends(eos_dev, heed, own), tokens, positions).tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("variant", [ORACLE, *AHEAD], ids=str)
def test_lengths_on_the_host_are_exact_and_counted(variant: Variant) -> None:
    work = Workload(0, OPTIONS, asks(10, max_tokens=9))
    plain, wanting = play_on(ToyModel(17, 64), work, variant), WantsLengths(17, 64)
    engine_run = play_on(wanting, work, variant)
    assert not differences(plain, engine_run, exactly)


@pytest.mark.parametrize("variant", [ORACLE, *AHEAD], ids=str)
def test_lengths_on_their_way_are_not_changed_by_a_step_that_only_prefills(
    variant: Variant,
) -> None:
    # such a step fetches no lengths, so nothing else orders it after the copy of those before it
    prompt = tuple(2 + i % 9 for i in range(40))
    work = Workload(0, OPTIONS, (Ask(0, prompt, SamplingParams(seed=0, max_tokens=3)),))
    spec = runner_spec(resolved(work.options, variant))
    for seed in range(4):
        runner = Runner(WantsLengths(17, 64), HostileDevice(seed, spec.depth), spec, 17)
        engine = toy_engine(work.options, variant, executor=InlineExecutor(runner))
        assert not differences(
            play_on(ToyModel(17, 64), work, variant), Client(engine, work).play(), exactly
        )


def test_a_wait_for_lengths_has_its_name() -> None:
    work = Workload(0, OPTIONS, asks(3, max_tokens=9, ignore_eos=True))
    settled = resolved(work.options, Variant("overlap"))
    results = []

    def launched(model: ToyModel) -> list[tuple[str, int]]:
        results.clear()
        runner = Runner(model, EagerDevice(), runner_spec(settled), 17)
        engine = toy_engine(work.options, Variant("overlap"), executor=Tapped(runner, results))
        Client(engine, work).play()
        return [(sync.reason.value, sync.rows) for result in results for sync in result.syncs]

    assert launched(ToyModel(17, 64)) == []
    named = launched(WantsLengths(17, 64))
    assert {reason for reason, _ in named} == {"host-lengths"}
    # every decode row, and the two prompts that ran beside some
    assert sum(rows for _, rows in named) == 3 * 8 + 2


class Tapped(InlineExecutor):
    """Keeps the results that land."""

    def __init__(self, runner: Runner, results: list[Any]) -> None:
        super().__init__(runner)
        self._results = results

    def launch(self, plan: Any) -> Any:
        """As ever."""
        flight = super().launch(plan)
        land, results = flight.land, self._results

        def kept() -> Any:
            results.append(land())
            return results[-1]

        flight.land = kept  # type: ignore[method-assign]
        return flight


class Log(EagerDevice):
    """Writes down who waits for what, and what is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[Stream, Event]] = []
        self.freed: list[str] = []

    def wait(self, stream: Stream, event: Event) -> None:
        """Written down."""
        self.waits.append((stream, event))

    def free(self, names: tuple[str, ...]) -> None:
        """Written down."""
        self.freed += names


def test_a_fine_fence_waits_for_the_reads_and_a_coarse_one_for_the_end() -> None:
    device = Log()
    for fine in (True, False):
        fence = Fence(device, fine)
        fence.before_write()  # nothing has run yet
        assert not device.waits
        reads, end = device.record(Stream.FORWARD), device.record(Stream.FORWARD)
        fence.reads_over(reads)
        fence.forward_over(end)
        fence.before_write()
        assert device.waits.pop() == (Stream.SCHEDULE, reads if fine else end)


class Undeclared:
    """The toy, without a word of what it reads when."""

    def __init__(self, vocab_size: int, max_len: int) -> None:
        toy = ToyModel(vocab_size, max_len)
        self.vocab_size = vocab_size
        self.new_kv, self.logits, self._forward = toy.new_kv, toy.logits, toy.forward

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """As the toy."""
        return self._forward(inputs, kv)


@pytest.mark.parametrize(
    ("model", "fence", "fine"),
    [
        (ToyModel, "fine", True),
        (ToyModel, "coarse", False),
        (Undeclared, "fine", False),
    ],
)
def test_a_model_that_declares_nothing_gets_the_coarse_fence(
    model: Callable[[int, int], Any], fence: str, fine: bool
) -> None:
    spec = runner_spec(resolved(OPTIONS, Variant("overlap", fence=fence)))
    assert Runner(model(17, 64), EagerDevice(), spec, 17)._fence.fine == fine


def test_what_a_step_uses_is_kept_until_it_has_landed() -> None:
    device = Log()
    keep = KeepAlive(device, 2)
    keep.hold("rows")  # they stay for longer than their step
    for step in range(3):
        keep.make_room()
        keep.step((f"staging {step}", "rows"), None)
        assert device.freed == [f"staging {old}" for old in range(step - 1)]
    keep.drop("rows")
    assert device.freed == ["staging 0"]  # steps 1 and 2 still read them
    keep.make_room()
    keep.step(("staging 3",), None)
    keep.make_room()
    assert device.freed == ["staging 0", "staging 1", "staging 2", "rows"]


def test_a_trap_tells_what_it_caught() -> None:
    trap(torch.tensor([True, True]), "fine")
    with pytest.raises(AssertionError, match="a token too few"):
        trap(torch.tensor([True, False]), "a token too few")


def test_hidden_states_are_named_where_a_client_wants_them() -> None:
    settled = resolved(OPTIONS, Variant("overlap"))
    results: list[Any] = []
    runner = Runner(ToyModel(17, 64), EagerDevice(), runner_spec(settled), 17)
    wants = SamplingParams(max_tokens=3, ignore_eos=True, return_hidden_states=True)
    work = Workload(0, OPTIONS, (Ask(0, (3, 4), wants), *asks(2, max_tokens=3, ignore_eos=True)))
    engine = toy_engine(OPTIONS, Variant("overlap"), executor=Tapped(runner, results))
    Client(engine, work).play()
    named = [(sync.reason.value, sync.rows) for result in results for sync in result.syncs]
    assert named == [("hidden-states", 1)] * 3
    widths = [result.hidden.width for result in results if result.hidden is not None]
    assert widths == [1] * 3
    assert all(isinstance(r.hidden.rows, np.ndarray) for r in results if r.hidden)
