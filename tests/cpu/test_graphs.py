"""Captured decode steps: replayed from what was captured, they give what the model gives anew.

On the hostile device and on the stand-in for CUDA a graph is a tape of tensor operations, so what
Python would do differently the second time shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, install
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stepahead.device.base import Device, Stream
from stepahead.device.cuda import CudaDevice
from stepahead.device.eager import EagerDevice
from stepahead.device.hostile import HostileDevice
from stepahead.model.batch import StepInputs
from stepahead.model.llama import Llama
from stepahead.model.spec import ModelSpec, RopeSpec
from stepahead.model.toy import ToyModel
from stepahead.model.weights import random_model
from stepahead.runner.graphs import DecodeGraphs, DecodeRun, capture_decode, graph_sizes
from stepahead.runner.inputs import decode_inputs
from stepahead.runner.slots import SlotState

SLOTS, PAGES, PAGE, MAX_PAGES, MAX_ROWS = 24, 100, 4, 4, 20


class CapturedToy(ToyModel):
    """The toy, which has always been capturable."""

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        return True


class CapturedLlama(Llama):
    """A Llama that doesn't mind wide tables on the CPU."""

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        return True


class Table:
    """Slots with pages and lengths, a model with its KV, and graphs for it."""

    def __init__(self, device: Device, model: ToyModel | Llama) -> None:
        draw = np.random.default_rng(1)
        self.device = device
        self.model = model
        self.kv = model.new_kv(PAGES, PAGE)
        self.slots = SlotState(SLOTS, MAX_PAGES, device.place)
        pages = torch.arange(1, 1 + (SLOTS - 1) * MAX_PAGES).view(SLOTS - 1, MAX_PAGES)
        self.slots.pages_dev[1:] = pages
        self.slots.length_dev[1:] = torch.from_numpy(draw.integers(0, 12, SLOTS - 1))
        made = capture_decode(device, model, self.kv, self.slots, PAGE, MAX_ROWS)
        assert made is not None
        self.graphs: DecodeGraphs = made

    def anew(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits without a graph."""
        with torch.inference_mode():
            states = self.model(self.inputs(rows, tokens), self.kv)
            return states, self.model.logits(states)

    def inputs(self, rows: Tensor, tokens: Tensor) -> StepInputs:
        bounds = (self.slots.length_dev[rows] + 1).numpy()
        most = int(bounds.max())
        return decode_inputs(rows, tokens, bounds, self.slots, PAGE, most)

    def launch(self, rows: Tensor, tokens: Tensor) -> DecodeRun:
        return self.graphs.launch(rows, lambda: tokens, (), ())

    def compare(self, rows: list[int], seed: int) -> None:
        """One step by graph and anew; the slots then grow."""
        rows_dev = torch.tensor(rows)
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(2, 60, len(rows)))
        run = self.launch(rows_dev, tokens)
        self.device.record(Stream.FORWARD).wait()
        states, logits = run.states_dev.clone(), run.logits_dev.clone()
        expected = self.anew(rows_dev, tokens)
        if states.dtype == torch.int64:
            assert torch.equal(states, expected[0])
        torch.testing.assert_close(states, expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, expected[1], rtol=0, atol=1e-5)
        self.slots.length_dev[rows_dev] += 1


def toy() -> ToyModel:
    return CapturedToy(64, 64)


def llama() -> Llama:
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_eps=1e-5,
        max_len=64,
        rope=RopeSpec(theta=1e4),
        tied_head=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    model = random_model(spec, 0, "float32")
    model.__class__ = CapturedLlama
    return model


@pytest.fixture(params=["eager", "hostile", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    torch.set_num_threads(1)
    if request.param == "eager":
        return EagerDevice()
    if request.param == "hostile":
        return HostileDevice(3, 2)
    install(monkeypatch, FakeCuda())
    return CudaDevice(2)


@pytest.mark.parametrize("make", [toy, llama])
def test_a_graph_gives_what_the_model_gives(
    device: Device, make: Callable[[], ToyModel | Llama]
) -> None:
    table = Table(device, make())
    for seed, rows in enumerate([[3], [3], [3, 9, 4], [9, 4], [*range(1, 21)], [5, 6, 7, 8, 9]]):
        table.compare(rows, seed)


def test_rows_that_left_do_not_go_on(device: Device) -> None:
    """A graph of 4 after one of 4 rows with 3: the fourth is padding, and its pages stay."""
    table = Table(device, toy())
    table.compare([1, 2, 3, 4], 0)
    before = table.kv.pages_dev.clone()
    table.compare([1, 2, 3], 1)
    changed = (table.kv.pages_dev != before).any(1).nonzero().flatten().tolist()
    pages = table.slots.pages_dev[1:4].flatten().tolist()
    assert 0 in changed
    assert set(changed) <= {0, *pages}
    assert int(table.slots.length_dev[0]) == 0
    assert not table.slots.pages_dev[0].any()


def test_dead_rows_write_to_the_padding_page(device: Device) -> None:
    table = Table(device, toy())
    table.slots.seat_dev[2] = 0
    before = table.kv.pages_dev.clone()
    table.compare([1, 2, 3, 4], 0)  # as many as a graph has: padding would write there too
    changed = (table.kv.pages_dev != before).any(1)
    assert not changed[table.slots.pages_dev[2]].any()
    assert changed[table.slots.pages_dev[1]].any()


def test_page_tables_and_lengths_are_read_at_each_launch(device: Device) -> None:
    table = Table(device, toy())
    table.compare([1, 2], 0)
    table.slots.pages_dev[1, :] = torch.tensor([96, 97, 98, 99])
    table.slots.length_dev[1] = 0
    table.slots.length_dev[2] = 11
    table.compare([1, 2], 1)


def test_the_next_launch_takes_the_memory_over(device: Device) -> None:
    table = Table(device, toy())
    first = table.launch(torch.tensor([1, 2]), torch.tensor([5, 6]))
    device.record(Stream.FORWARD).wait()
    kept = first.states_dev.clone()
    second = table.launch(torch.tensor([3, 4]), torch.tensor([5, 6]))
    device.record(Stream.FORWARD).wait()
    assert first.states_dev.data_ptr() == second.states_dev.data_ptr()
    assert not torch.equal(first.states_dev, kept)


def test_the_event_passes_before_the_model_runs() -> None:
    """What is written behind it does not reach the step: its page tables are a copy."""
    calls: list[str] = []

    class Loud(CapturedToy):
        def __call__(self, inputs: StepInputs, kv: object) -> Tensor:
            calls.append("model")
            return self.forward(inputs, kv)

    class Telling(EagerDevice):
        def capture(self, first: Callable[[], None], rest: Callable[[], None]) -> object:
            def told() -> None:
                first()
                calls.append("pages read")
                table.slots.pages_dev[1:] = 0

            return super().capture(told, rest)

    table = Table.__new__(Table)
    device = Telling()
    plain = Table(EagerDevice(), toy())
    table.device, table.model, table.slots = device, Loud(64, 64), plain.slots
    table.kv = table.model.new_kv(PAGES, PAGE)
    pages = table.slots.pages_dev.clone()
    made = capture_decode(device, table.model, table.kv, table.slots, PAGE, MAX_ROWS)
    assert made is not None
    table.graphs = made
    table.slots.pages_dev.copy_(pages)
    rows, tokens = torch.tensor([1, 2]), torch.tensor([5, 6])
    expected = plain.anew(rows, tokens)[0]
    calls.clear()
    found = table.launch(rows, tokens).states_dev
    assert calls == ["pages read", "model"]
    assert torch.equal(found, expected)


def test_what_has_no_graph(device: Device) -> None:
    slots = SlotState(SLOTS, MAX_PAGES, device.place)
    kv = toy().new_kv(PAGES, PAGE)
    assert capture_decode(device, object(), kv, slots, PAGE, 4) is None
    looking = toy()
    looking.host_lengths = True
    assert capture_decode(device, looking, kv, slots, PAGE, 4) is None
    assert capture_decode(device, llama_uncaptured(), kv, slots, PAGE, 4) is None
    graphs = Table(device, toy()).graphs
    assert [rows for rows in range(30) if graphs.fits(rows)] == list(range(1, MAX_ROWS + 1))


def llama_uncaptured() -> Llama:
    model = llama()
    model.__class__ = Llama
    return model


def test_a_device_without_graphs_fits_nothing() -> None:
    class Without(EagerDevice):
        def capture(self, first: Callable[[], None], rest: Callable[[], None]) -> None:
            return None

    graphs = Table(Without(), toy()).graphs
    assert not any(graphs.fits(rows) for rows in range(30))


def test_sizes() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    for most in (1, 7, 16, 17, 100, 256, 1024):
        sizes = graph_sizes(most)
        assert sizes[-1] == most
        for small, large in itertools.pairwise(sizes):
            assert large <= 2 * small
            assert small < 16 or 3 * (large - small) <= large + 1


def test_a_step_stays_on_the_device() -> None:
    """Mixing places, or looking at a value, raises on pretended tensors; "meta" is not the CPU."""

    class Elsewhere(EagerDevice):
        place = torch.device("meta")

    with FakeTensorMode():
        model = llama()
        model = random_model(model.spec, 0, "float32", device="meta")
        model.__class__ = CapturedLlama
        table = Table(Elsewhere(), model)
        run = table.launch(*torch.ones(2, 3, dtype=torch.int64, device="meta"))
    assert (run.states_dev.device.type, tuple(run.logits_dev.shape)) == ("meta", (3, 64))
