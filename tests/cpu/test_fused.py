"""All layers as one kernel, against the plain layers: the same numbers, and a row's to the bit
whatever is beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import Pages, laid_out, make_reference, random_ids, save
from torch import Tensor
from torch.nn import functional as F

from stepahead.cache.pools import KVPool
from stepahead.kernels import step
from stepahead.kernels.team import Team
from stepahead.model import fused
from stepahead.model.batch import StepInputs
from stepahead.model.fused import FusedLayers
from stepahead.model.kernel_linear import KernelLinear
from stepahead.model.llama import Llama
from stepahead.model.packed import AS_READ, Packing
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_model

PRECISIONS = ("none", "float16", "int8", "int4")
# head_dim and hidden_size are whole vectors and panels on every CPU
WHOLE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}
GEMMA = {
    "sliding_window": 10,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4, "intermediate_size": 43}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide": ("llama", {"head_dim": 80, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-window": (
        "qwen3",
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "gemma3": ("gemma3", GEMMA),
}
LENGTHS = {"a": 9, "b": 40, "c": 11, "d": 150}
Step = tuple[str, dict[str, int], int]  # decode rows, chunks with their counts, dead rows
SCRIPT: list[Step] = [
    ("", {"a": 5}, 0),
    ("a", {"b": 17, "c": 6}, 2),
    ("ac", {"b": 20, "d": 1}, 0),
    ("cab", {"d": 131}, 1),  # more rows than there was memory for so far
    ("dcba", {}, 3),
    ("bc", {"d": 17}, 0),
    ("c", {}, 1),
]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, config = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(make_reference(family, **WHOLE | config), folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(make_reference("llama", **WHOLE), folder)
    return folder


def loaded(
    folder: Path,
    packing: Packing = AS_READ,
    *,
    fused: bool = True,
    kv_dtype: torch.dtype | None = None,
) -> Llama:
    """The model; `fused`: as kernels run it, else its plain layers with the same matrices;
    `kv_dtype`: of new pools, unless what it is otherwise."""
    model = load_model(read_spec(folder), "float32", packing=packing)
    if packing.team is not None:
        assert model._fused is not None
        model._fused = model._fused if fused else None
        model._kv_dtype = kv_dtype or model._kv_dtype
    return model


def with_dead(inputs: StepInputs, count: int) -> StepInputs:
    """With rows before all others whose stop tokens have been sampled; the host, which does not
    know, thinks all rows longer than they are."""
    longest = max(1, inputs.max_decode_len)
    pages = F.pad(inputs.decode_pages_dev, (0, int(inputs.n_decode == 0), count, 0))
    return replace(
        inputs,
        token_ids_dev=F.pad(inputs.token_ids_dev, (count, 0), value=7),
        positions_dev=F.pad(inputs.positions_dev, (count, 0)),
        cells_dev=F.pad(inputs.cells_dev, (count, 0)),
        n_decode=inputs.n_decode + count,
        decode_pages_dev=pages,
        decode_lens_dev=F.pad(inputs.decode_lens_dev, (count, 0), value=1),
        decode_bounds=np.full(inputs.n_decode + count, longest),
        max_decode_len=longest,
        chunks=tuple(replace(row, first=row.first + count) for row in inputs.chunks),
    )


def stepped(
    pages: Pages, decode: dict[str, int], chunks: dict[str, list[int]], dead: int = 0
) -> dict[str, Tensor]:
    """As `Pages.step`, beside dead rows."""
    rows, inputs = pages.inputs(decode, chunks)
    inputs = with_dead(inputs, dead) if dead else inputs
    with torch.inference_mode():
        logits = pages.model.logits(pages.model(inputs, pages.kv))[dead:]
    return dict(zip(rows, logits.split([len(t) for t in rows.values()]), strict=True))


def told(model: Llama, script: list[Step] = SCRIPT, seed: int = 0) -> dict[str, Tensor]:
    """Logits of all positions of a few requests whose steps are mixed."""
    ids = {name: random_ids(count, seed=10 + count) for name, count in LENGTHS.items()}
    done = dict.fromkeys(ids, 0)
    logits: dict[str, list[Tensor]] = {name: [] for name in ids}
    pages = Pages(model, seed=seed)
    for decoding, counts, dead in script:
        decode = {name: ids[name][done[name]] for name in decoding}
        chunks = {name: ids[name][done[name] :][:count] for name, count in counts.items()}
        for name, rows in stepped(pages, decode, chunks, dead).items():
            logits[name].append(rows)
            done[name] += len(rows)
    assert all(torch.isfinite(memory).all() for memory in (*pages.kv.k, *pages.kv.v))
    return {name: torch.cat(rows) for name, rows in logits.items() if rows}


@pytest.mark.parametrize("threads", [1, 2])
def test_one_kernel_gives_what_plain_layers_give(folder: Path, threads: int) -> None:
    plain, fused = told(loaded(folder)), told(loaded(folder, laid_out("none", threads)))
    for name, expected in plain.items():
        # the promise is 1e-4; at this size nothing but a mistake comes near it
        torch.testing.assert_close(fused[name], expected, rtol=0, atol=8e-5)


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_one_kernel_gives_in_any_precision_what_its_matrices_give(folder: Path, kind: Any) -> None:
    """An activation that lies between two of its steps may be rounded to either."""
    full = {"kv_dtype": torch.float32}
    layers, fused = (told(loaded(folder, laid_out(kind), fused=it, **full)) for it in (False, True))
    halved = told(loaded(folder, laid_out(kind)))  # keys and values in float16
    for name, expected in layers.items():
        apart, further = ((it[name] - expected).norm() / expected.norm() for it in (fused, halved))
        assert apart < (1e-5 if kind == "float16" else 2e-3), name
        assert 1e-5 < further < 1e-2, name


@pytest.mark.parametrize("kind", PRECISIONS)
def test_threads_change_nothing(folder: Path, kind: Any) -> None:
    one, two = (told(loaded(folder, laid_out(kind, threads)), seed=threads) for threads in (1, 2))
    assert all(torch.equal(two[name], logits) for name, logits in one.items())


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_large_step_in_bands_is_the_same_to_the_bit(
    folder: Path, kind: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows, dead ones and chunks, cut anywhere."""
    whole = told(loaded(folder, laid_out(kind, 2)))
    monkeypatch.setattr(fused, "_BAND", rows)
    cut = told(loaded(folder, laid_out(kind, 2)))
    assert all(torch.equal(cut[name], logits) for name, logits in whole.items())


def alone(name: str, cuts: list[int], decoded: int) -> list[Step]:
    """A request by itself: its prompt in chunks of these sizes, then token by token."""
    return [*(("", {name: cut}, 0) for cut in cuts), *([(name, {}, 0)] * decoded)]


@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_requests_logits_are_the_same_to_the_bit_beside_any_others(
    folder: Path, kind: Any
) -> None:
    """Alone or beside others and dead rows, its prompt at once, in chunks or token by token."""
    model = loaded(folder, laid_out(kind, 2))
    beside = told(model)
    ways = {
        "a": [alone("a", [9], 0), alone("a", [], 9)],
        "b": [alone("b", [40], 0), alone("b", [1, 3, 16], 20), alone("b", [], 40)],
        "d": [alone("d", [150], 0), alone("d", [70, 70], 10)],
    }
    for name, scripts in ways.items():
        for seed, script in enumerate(scripts):
            found = told(model, script, seed + 1)[name]
            assert torch.equal(found[: len(beside[name])], beside[name]), (name, seed)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_chunk_that_begins_where_another_ends_reads_its_own_pages(
    llama: Path, threads: int
) -> None:
    """Rows of a chunk read their pages together; these only look as if they were of one."""
    model = loaded(llama, laid_out("none", threads))
    first, second = random_ids(18, seed=1), random_ids(36, seed=2)
    alone, beside = Pages(model), Pages(model)
    expected = alone.step(chunks={"a": first})["a"], alone.step(chunks={"b": second})["b"]
    beside.step(chunks={"b": second[:18]})
    found = beside.step(chunks={"a": first, "b": second[18:]})
    assert torch.equal(found["a"], expected[0])
    assert torch.equal(found["b"], expected[1][18:])


def test_a_long_prompt_is_the_same_to_the_bit_in_any_chunks(tmp_path: Path) -> None:
    """So long that rows have no room for the scores of all heads at once."""
    save(make_reference("llama", **WHOLE, max_position_embeddings=4096), tmp_path)
    model, count = loaded(tmp_path, laid_out("none", 2)), 2600
    assert count * model.spec.num_heads * step.ROWS > step.MOST_SCORES
    ids = random_ids(count, seed=3)
    whole = Pages(model, count).step(chunks={"a": ids})["a"]
    pages, done = Pages(model, count), count - 12
    pages.step(chunks={"a": ids[:done]})
    for cut in (1, 2, 9):
        rows = slice(done, done + cut)
        assert torch.equal(pages.step(chunks={"a": ids[rows]})["a"], whole[rows])
        done += cut


BAD = {
    "nan": [float("nan")],
    "inf": [float("inf")],
    "-inf": [-float("inf")],
    "large": [3e38, -3e38],
}


@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_row_that_is_not_finite_leaves_all_others_as_they_were(
    llama: Path, kind: Any, bad: list[float]
) -> None:
    """Cells stay finite too: whoever gets the page next may be read past its end."""
    model = loaded(llama, laid_out(kind, 2))
    prompts = {name: random_ids(6, seed=place) for place, name in enumerate("abc")}

    def states(spoil: bool) -> Tensor:
        pages = Pages(model)
        rows, inputs = pages.inputs({}, prompts)
        given = []
        for _ in range(3):
            with torch.inference_mode():
                x = model.embed(inputs.token_ids_dev)
                if spoil:
                    for place, value in enumerate(bad):
                        x[8 if len(x) > 3 else 1, 5 + place] = value  # of b
                given.append(model.run(x, inputs, pages.kv).clone())
            assert all(torch.isfinite(memory).all() for memory in (*pages.kv.k, *pages.kv.v))
            _, inputs = pages.inputs(dict.fromkeys(rows, 5))
        return torch.cat([given[0][:6], given[0][12:], *(some[[0, 2]] for some in given[1:])])

    assert torch.equal(states(spoil=True), states(spoil=False))


def test_a_model_runs_on_whatever_pool_it_is_given(llama: Path) -> None:
    """A pool's addresses, and its page size, are looked up when it is another one."""
    plain, fused = loaded(llama), loaded(llama, laid_out())
    # both hand out the same pages: in one pool, one request would overwrite the other
    expected, given = ([Pages(model) for _ in range(2)] for model in (plain, fused))
    for turn in range(6):
        ids = random_ids(1 + turn, seed=turn)
        logits = [pages[turn % 2].step(chunks={"a": ids})["a"] for pages in (expected, given)]
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=8e-5)


def test_a_context_as_long_as_the_model_allows(tmp_path: Path) -> None:
    save(make_reference("llama", **WHOLE, max_position_embeddings=40), tmp_path)
    ids = random_ids(40, seed=1)
    plain, fused = (Pages(loaded(tmp_path, packing)) for packing in (AS_READ, laid_out("none", 2)))
    for pages in (plain, fused):
        pages.step(chunks={"a": ids[:39]})
    logits = [pages.step(decode={"a": ids[39]})["a"] for pages in (plain, fused)]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=8e-5)


SHAPES = {
    "heads of 4": {"head_dim": 4, "hidden_size": 64},
    "24 hidden": {"head_dim": 16, "hidden_size": 24, "num_attention_heads": 4},
    "heads of 20": {"head_dim": 20, "hidden_size": 64},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_that_kernels_have_no_code_for_keep_plain_layers(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    save(make_reference("qwen3", **shape), tmp_path)
    plain = told(loaded(tmp_path))
    for kind, bound in zip(PRECISIONS, (1e-5, 0.01, 0.05, 0.8), strict=True):
        model = load_model(read_spec(tmp_path), "float32", packing=laid_out(kind, 2))
        assert model._fused is None
        assert isinstance(model.head, KernelLinear)
        for name, logits in told(model).items():
            assert (logits - plain[name]).norm() < bound * plain[name].norm(), (kind, name)


@pytest.mark.parametrize("kind", PRECISIONS)
def test_plain_layers_too_can_be_the_same_to_the_bit_beside_any_others(
    kind: Any, tmp_path: Path
) -> None:
    save(make_reference("qwen3", **SHAPES["heads of 4"]), tmp_path)
    packing = replace(laid_out(kind, 2), invariant=True)
    model = load_model(read_spec(tmp_path), "float32", packing=packing)
    beside = told(model)
    for cuts, decoded in (([40], 0), ([1, 16, 3], 20)):
        found = told(model, alone("b", cuts, decoded))["b"]
        assert torch.equal(found[: len(beside["b"])], beside["b"]), cuts


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers than a trial of threads runs."""
    folder = tmp_path_factory.mktemp("deep")
    save(make_reference("llama", **WHOLE, num_hidden_layers=fused._TRIAL_LAYERS + 2), folder)
    return folder


def layers_of(model: Llama) -> FusedLayers:
    assert model._fused is not None
    return model._fused


TRIALS: dict[str, tuple[dict[int, int], int]] = {
    "one is clearly faster": ({4: 100, 2: 95, 1: 89}, 1),
    "two are fastest": ({4: 100, 2: 50, 1: 70}, 2),
    "two are barely faster": ({4: 100, 2: 90, 1: 130}, 4),
    "all are fastest": ({4: 100, 2: 180, 1: 330}, 4),
}


@pytest.mark.parametrize(("took", "used"), TRIALS.values(), ids=TRIALS)
def test_fewer_threads_are_used_where_they_are_clearly_faster(
    llama: Path, monkeypatch: pytest.MonkeyPatch, took: dict[int, int], used: int
) -> None:
    """And the note says what was seen."""
    monkeypatch.setattr(
        FusedLayers, "_trial_ns", lambda layers: took[layers._team.threads] * 1_000_000
    )
    team = Team(4)
    model = loaded(llama, Packing(team=team, settle_threads=True))
    assert team.threads == used
    tried = f"{took[1]}.0 ms with 1, {took[2]}.0 ms with 2, {took[4]}.0 ms with 4"
    assert model.notes == (f"kernels use {used} of 4 threads: a trial took {tried}",)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_trial_of_threads_leaves_a_model_as_it_was(
    deep: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """It runs some of the layers: a model that was left with these would answer, and badly."""
    model = loaded(deep, Packing(team=Team(2)))
    before = told(model, alone("a", [5], 4))["a"]
    if interrupted:
        with monkeypatch.context() as patched:
            patched.setattr(fused.time, "perf_counter_ns", interrupt)
            with pytest.raises(KeyboardInterrupt):
                layers_of(model).settle_threads()
    else:
        assert "a trial took" in layers_of(model).settle_threads()
        assert layers_of(model)._pool is None  # nor is the trial's pool kept
    assert torch.equal(told(model, alone("a", [5], 4))["a"], before)


def interrupt() -> int:
    raise KeyboardInterrupt


def test_what_kernels_know_by_address_is_held(folder: Path) -> None:
    """Memory of norms and turns must outlive another norm's being put in their place."""
    model = loaded(folder, laid_out())
    layers = layers_of(model)
    held = {array.data_ptr() for array in layers._held if isinstance(array, Tensor)}
    norms = layers._matrices[:, [step.NORM, step.AFTER, step.MLP_NORM, step.MLP_AFTER]]
    heads = layers._matrices[:, [step.Q_NORM, step.K_NORM]]
    turns = layers._fields[[step.TURNS, step.WINDOW_TURNS]]
    assert {*norms.flat, *heads.flat, *turns} - {0} == held
    parts = [part for part in layers._held if isinstance(part, KernelLinear)]
    assert len(parts) == 4 * len(model.layers)


@pytest.mark.parametrize("name", ["attention_norm", "mlp_norm"])
def test_norms_that_are_not_float32_are_not_read_as_if_they_were(llama: Path, name: str) -> None:
    model = loaded(llama, laid_out())
    norm: Any = getattr(model.layers[0], name)
    for weight in (norm.weight.data.half(), norm.weight.data.repeat(2)[::2]):
        norm.weight.data = weight
        with pytest.raises(AssertionError, match="kernels read float32"):
            FusedLayers(model, Team(1))


# of a step with a decode row of 2 positions, and a chunk of 3
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a cell too few": ({"cells_dev": torch.arange(4, 7)}, "a cell a token"),
    "a position too few": ({"positions_dev": torch.arange(3)}, "a cell a token"),
    "a row too many": ({"n_decode": 2}, "a row a token"),
    "no chunk": ({"chunks": ()}, "a row a token"),
    "a length too many": ({"decode_lens_dev": torch.tensor([2, 2])}, "rows with pages"),
    "no pages": ({"decode_pages_dev": torch.zeros(0, 1, dtype=torch.int64)}, "rows with pages"),
    "pages of 32 bits": ({"decode_pages_dev": torch.ones(1, 1, dtype=torch.int32)}, "page ids"),
    "pages apart": ({"decode_pages_dev": torch.ones(1, 8).long()[:, ::2]}, "page ids"),
    "longer than its pages": ({"decode_lens_dev": torch.tensor([5])}, "longer than its pages"),
    "no length": ({"decode_lens_dev": torch.tensor([0])}, "longer than its pages"),
    "lengths of 32 bits": ({"decode_lens_dev": torch.tensor([2]).int()}, "cells are int64"),
    "a position behind the last": ({"positions_dev": torch.tensor([1, 0, 1, 256])}, "position"),
    "a position before the first": ({"positions_dev": torch.tensor([-1, 0, 1, 2])}, "position"),
    "a cell behind the pool": ({"cells_dev": torch.tensor([4, 8, 9, 800])}, "a cell of no page"),
    "a cell before the pool": ({"cells_dev": torch.tensor([-4, 8, 9, 10])}, "a cell of no page"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_a_step_that_would_read_or_write_elsewhere_in_memory_is_refused(
    llama: Path, wrong: dict[str, Any], words: str
) -> None:
    """Kernels are given addresses, and look at no bounds."""
    pages = Pages(loaded(llama, laid_out()))
    pages.step(chunks={"a": [5]})
    _, inputs = pages.inputs({"a": 6}, {"b": [7, 8, 9]})
    with pytest.raises(AssertionError, match=words):
        pages.model(replace(inputs, **wrong), pages.kv)


def test_a_chunk_longer_than_its_pages_is_refused(llama: Path) -> None:
    pages = Pages(loaded(llama, laid_out()))
    _, inputs = pages.inputs({}, {"b": [7, 8, 9]})
    for length in (2, 5):
        chunks = (replace(inputs.chunks[0], context_len=length),)
        with pytest.raises(AssertionError, match="a chunk longer than its pages"):
            pages.model(replace(inputs, chunks=chunks), pages.kv)


def test_a_pool_of_another_model_is_refused(llama: Path) -> None:
    model = loaded(llama, laid_out())
    spec = model.spec
    _, inputs = Pages(model).inputs({}, {"b": [7, 8, 9]})
    for heads, head_dim, dtype in ((1, 16, torch.float32), (2, 8, torch.float32), (2, 16, None)):
        shape = (len(model.layers), 200, 4, heads, head_dim)
        pool = KVPool(*shape, dtype=dtype or torch.bfloat16)
        assert (spec.num_kv_heads, spec.head_dim) == (2, 16)
        with pytest.raises(AssertionError, match=r"a pool of other heads|keys are float32"):
            model(inputs, pool)


def test_what_a_kernel_was_told_stays_as_it_was(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that has met the others for the last time may still look at it."""
    told: list[tuple[np.ndarray, np.ndarray]] = []
    compute = FusedLayers._compute

    def noted(self: FusedLayers, fields: np.ndarray) -> None:
        told.append((fields, fields.copy()))
        compute(self, fields)

    monkeypatch.setattr(FusedLayers, "_compute", noted)
    model = loaded(llama, laid_out("none", 2))
    pages = Pages(model)
    inputs = pages.inputs(chunks={"a": random_ids(9, seed=1)})[1]
    with torch.inference_mode():
        model(replace(inputs, wanted_dev=torch.tensor([8])), pages.kv)
    assert len(told) == 2
    for fields, then in told:
        assert (fields == then).all()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("kind", ["none", "int8"])
def test_states_that_are_asked_for_are_the_same_to_the_bit_where_others_are_not(
    folder: Path, kind: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are the keys and values of all, which the next steps read."""
    monkeypatch.setattr(fused, "_BAND", 64)
    model = loaded(folder, laid_out(kind, 2))
    ids = {name: random_ids(count, seed=10 + count) for name, count in LENGTHS.items()}
    done = dict.fromkeys(ids, 0)
    whole, some = Pages(model, seed=1), Pages(model, seed=1)
    for one, other in zip((*whole.kv.k, *whole.kv.v), (*some.kv.k, *some.kv.v), strict=True):
        other.copy_(one)  # what nobody has written
    generator, shortened = np.random.default_rng(7), 0
    for decoding, counts, dead in SCRIPT:
        decode = {name: ids[name][done[name]] for name in decoding}
        chunks = {name: ids[name][done[name] :][:count] for name, count in counts.items()}
        for name in decode:
            done[name] += 1
        for name, tokens in chunks.items():
            done[name] += len(tokens)
        inputs = [with_dead(pages.inputs(decode, chunks)[1], dead) for pages in (whole, some)]
        total = len(inputs[0].cells_dev)
        asked = np.sort(generator.choice(total, int(total * share), replace=False))
        wanted = torch.from_numpy(asked)
        shortened += 2 * len(wanted) <= total
        with torch.inference_mode():
            expected = model(inputs[0], whole.kv)[wanted]
            found = model(replace(inputs[1], wanted_dev=wanted), some.kv)[wanted]
        assert torch.equal(found, expected)
    assert shortened == len(SCRIPT)
    for one, other in zip((*whole.kv.k, *whole.kv.v), (*some.kv.k, *some.kv.v), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
