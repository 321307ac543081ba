"""A model cut into stages: each has its own layers and no others; together they are the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_parity_llama import PRECISIONS, ToTheBit, with_margins
from tiny_models import (
    Pages,
    gguf_tensors,
    make_reference,
    random_ids,
    save,
    write_gguf,
)
from torch import Tensor

from closed_form import pieces
from engines import ORACLE, Variant, resolved, runner_spec
from harness import Client, Run, check
from stages import stage_devices, stages_runner
from stepahead.config import ModelFacts
from stepahead.device.hostile import HostileModes
from stepahead.engine import Engine
from stepahead.errors import WeightError
from stepahead.executor.inline import InlineExecutor
from stepahead.model.batch import StepInputs
from stepahead.model.kernel_linear import KernelLinear, TiedEmbedding
from stepahead.model.load import load
from stepahead.model.packed import Quantization
from stepahead.model.toy import LAYERS, ToyModel
from stepahead.parallel.pipeline import ToyPart, layers_of, load_part
from stepahead.runner.model import Model
from stepahead.runner.spec import RunnerSpec
from stepahead.scheduler.stop import Vocabulary
from workloads import Workload


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (7, 3), (8, 7), (3, 3)])
def test_the_layers_are_shared_out_evenly_and_the_last_stage_has_no_more(
    layers: int, stages: int
) -> None:
    parts = [layers_of(layers, stage, stages) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


class Chain:
    """All parts, one after the other, as one model."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.logits = parts[-1].logits

    def new_kv(self, num_pages: int, page_size: int) -> SimpleNamespace:
        """A pool for each."""
        pools = [part.new_kv(num_pages, page_size) for part in self.parts]
        return SimpleNamespace(
            pools=pools,
            k=[pages for pool in pools for pages in getattr(pool, "k", ())],
            v=[pages for pool in pools for pages in getattr(pool, "v", ())],
        )

    def __call__(self, inputs: StepInputs, kv: SimpleNamespace) -> Tensor:
        """What the last gives."""
        states = None
        for part, pool in zip(self.parts, kv.pools, strict=True):
            states = part(replace(inputs, states_dev=states), pool)
        assert states is not None
        return states


def replies(model: Any) -> list[Tensor]:
    """Logits of a few steps that mix prompts and decoding."""
    pages = Pages(model)
    a, b = random_ids(9, 1), random_ids(6, 2)
    steps = [
        pages.step(chunks={"a": a[:5]}),
        pages.step(chunks={"a": a[5:8], "b": b[:4]}),
        pages.step({"a": a[8]}, {"b": b[4:]}),
        pages.step({"a": 7, "b": 9}),
    ]
    return [logits for step in steps for logits in step.values()]


@pytest.fixture(scope="module", params=["llama", "qwen2-tied", "qwen3", "gguf"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of five layers."""
    folder = tmp_path_factory.mktemp(request.param)
    family, _, tied = request.param.partition("-")
    family = "llama" if family == "gguf" else family
    sizes = {"num_hidden_layers": 5, "hidden_size": 64, "head_dim": 16}
    reference = make_reference(family, tie_word_embeddings=bool(tied), **sizes)
    if request.param != "gguf":
        save(reference, folder)
        return folder
    write_gguf(folder / "tiny.gguf", reference, gguf_tensors(reference))
    return folder / "tiny.gguf"


@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_parts_of_a_model_are_the_model_to_the_last_bit(
    checkpoint: Path, stages: int, kind: Quantization
) -> None:
    whole = load(str(checkpoint), "float32", quantization=kind)
    parts = [
        load_part(str(checkpoint), "float32", stage, stages, quantization=kind)
        for stage in range(stages)
    ]
    assert all(part.model._fused is not None for part in parts)
    for logits, right in zip(replies(Chain(parts)), replies(whole), strict=True):
        assert torch.equal(logits, right)


@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_middle_stage_of_gemma_in_bfloat16_is_taken_for_what_it_is(
    kind: Quantization, tmp_path: Path
) -> None:
    """Its norms stay float32, and it has no other parameters: it was run as float32."""
    save(make_reference("gemma3", num_hidden_layers=5), tmp_path)
    whole = load(str(tmp_path), "bfloat16", quantization=kind)
    parts = [
        load_part(str(tmp_path), "bfloat16", stage, 3, quantization=kind) for stage in range(3)
    ]
    for logits, right in zip(replies(Chain(parts)), replies(whole), strict=True):
        assert torch.equal(logits, right)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_has_the_weights_and_the_memory_of_its_layers_only(
    checkpoint: Path, stages: int
) -> None:
    def names(model: Any) -> set[str]:
        """Of all that has weights; kernels' matrices are no parameters."""
        modules = model.named_modules(remove_duplicate=False)
        matrices = {f"{name}.weight" for name, one in modules if isinstance(one, KernelLinear)}
        return matrices | {name for name, _ in model.named_parameters(remove_duplicate=False)}

    whole = load(str(checkpoint), "float32")
    tied = whole.spec.tied_head
    found = []
    for stage in range(stages):
        part = load_part(str(checkpoint), "float32", stage, stages)
        mine = layers_of(5, stage, stages)
        has = names(part.model)
        layers = {int(name.split(".")[1]) for name in has if name.startswith("layers.")}
        assert layers == {*mine}
        looked_up = isinstance(part.model.embed, TiedEmbedding) if tied else "embed.weight" in has
        assert looked_up == (stage == 0 or (tied and stage == stages - 1))
        assert ("norm.weight" in has, "head.weight" in has) == (stage == stages - 1,) * 2
        assert all(p.device.type == "cpu" for p in part.model.parameters())  # none left without
        assert len(part.new_kv(9, 4).k) == len(mine)
        found.append(has)
    assert set().union(*found) == names(whole)


def test_a_tensor_that_no_stage_has_a_place_for_is_refused_by_each(tmp_path: Path) -> None:
    reference = make_reference("llama", num_hidden_layers=4)
    save(reference, tmp_path)
    config = (tmp_path / "config.json").read_text()
    config = config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 3')
    (tmp_path / "config.json").write_text(config)
    for stage in range(2):
        with pytest.raises(WeightError, match=r"model\.layers\.3\..*has no place"):
            load_part(str(tmp_path), "float32", stage, 2)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_the_parts_of_the_toy_are_the_toy(stages: int) -> None:
    assert stages <= LAYERS
    parts = [ToyPart(96, 64, stage, stages) for stage in range(stages)]
    for logits, right in zip(replies(Chain(parts)), replies(Whole()), strict=True):
        assert torch.equal(logits, right)


class Whole(ToyModel):
    """The toy, for `Pages`."""

    def __init__(self) -> None:
        super().__init__(96, 64)

    def new_kv(self, num_pages: int, page_size: int) -> Any:
        """With nothing to be spoiled by layer."""
        kv = super().new_kv(num_pages, page_size)
        kv.k = kv.v = []  # type: ignore[attr-defined]
        return kv


# --- engines --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of the workloads' vocabulary."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "head_dim": 16}
    save(make_reference("llama", vocab_size=64, **sizes), folder)
    return folder


@pytest.fixture(autouse=True)
def _torchs_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def play_llama(folder: Path, kind: Quantization, work: Workload, variant: Variant) -> Run:
    """The workload on that Llama: in one piece, or its stages in this thread; kernels of a stage
    have one or two threads."""
    torch.set_num_threads(1 + (variant.device_seed + variant.stages) % 2)
    settled = resolved(work.options, variant)
    facts = ModelFacts(64, settled.model_len, (1,), 8)
    settled = replace(settled, facts=facts)
    spec = runner_spec(settled)

    def part(one: RunnerSpec) -> Model:
        return load_part(str(folder), "float32", one.stage, one.stages, quantization=kind)

    devices = stage_devices(spec, variant.device == "hostile", HostileModes())
    executor = InlineExecutor(stages_runner(spec, devices, part))
    engine = Engine(settled, executor, Vocabulary(pieces(64), frozenset({0, 1})))
    return Client(engine, work).play()


@pytest.mark.parametrize("shard", range(4))
def test_over_stages_a_llama_says_the_same(folder: Path, shard: int) -> None:
    to_the_bit = ToTheBit()
    played = 0
    for seed in range(shard * 12, (shard + 1) * 12):
        if with_margins(seed).options["vocab_size"] != 64:
            continue
        played += 1
        stages = 2 + seed % 2
        loop = ("batch-queue", "batch-queue", "overlap", "serial")[seed % 4]
        device = ("cpu", "hostile")[seed % 3 == 0]
        variant = Variant(loop, device, seed, stages=stages)
        player = partial(play_llama, folder, PRECISIONS[shard])
        check(seed, [variant], with_margins, player, to_the_bit, oracle=ORACLE)
    assert played
    assert to_the_bit.tokens > 50
