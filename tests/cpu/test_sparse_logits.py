"""Sparse attention over a compressed cache: our logits are transformers', however a prompt is cut
into steps and pages, and however many rows are beside it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tiny_models import Pages, random_ids
from tiny_sparse import TOPK, make_sparse, reference, save_sparse
from torch import Tensor

from stepahead.model.spec import read_spec
from stepahead.model.weights import load_sparse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stepahead.model.glm_moe_dsa import GlmMoeDsa

Pair = tuple["GlmMoeDsa", "PreTrainedModel"]
# early chunks read all before them, and are expanded; the others choose
LENGTHS = {"a": 9, "b": 43, "c": TOPK, "d": 36}
KINDS = ["glm", "deepseek"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_sparse(make_sparse(request.param), folder)
    return load_sparse(read_spec(folder), "float32"), theirs


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_a_sparse_prompt_at_once(pair: Pair) -> None:
    model, theirs = pair
    for count in (1, TOPK, TOPK + 1, 61):
        ids = random_ids(count, seed=1)
        close(Pages(model).step(chunks={"a": ids})["a"], reference(theirs, ids))


@pytest.mark.parametrize("cuts", [(0, 7, 8, 30, 61), (0, 16, 17, 61), (0, 20, 40, 60, 61)], ids=str)
def test_a_sparse_prompt_in_chunks(pair: Pair, cuts: tuple[int, ...]) -> None:
    model, theirs = pair
    ids = random_ids(cuts[-1], seed=1)
    pages = Pages(model)
    parts = [pages.step(chunks={"a": ids[b:e]})["a"] for b, e in itertools.pairwise(cuts)]
    close(torch.cat(parts), reference(theirs, ids))


def test_sparse_decode_from_the_first_token(pair: Pair) -> None:
    """Past the number that is chosen, the index keys of the first tokens, for which nothing was
    scored when they were written, are what the others are chosen among."""
    model, theirs = pair
    ids = random_ids(45, seed=2)
    pages = Pages(model)
    steps = [pages.step(decode={"a": token})["a"] for token in ids]
    close(torch.cat(steps), reference(theirs, ids))


def test_ragged_sparse_steps(pair: Pair) -> None:
    """Prompts that arrive, run in chunks and decode beside one another; a batch is its rows."""
    model, theirs = pair
    ids = {name: random_ids(count, seed=10 + count) for name, count in LENGTHS.items()}
    done = dict.fromkeys(ids, 0)
    logits: dict[str, list[Tensor]] = {name: [] for name in ids}
    pages = Pages(model)
    script: list[tuple[str, dict[str, int]]] = [  # decode rows, chunks with their counts
        ("", {"a": 5}),
        ("a", {"b": 17, "c": 11}),
        ("ac", {"b": 23, "d": 1}),
        ("cab", {"d": 34}),
        ("dcba", {}),
        ("bc", {}),
        ("c", {}),
    ]
    for decoding, counts in script:
        decode = {name: ids[name][done[name]] for name in decoding}
        chunks = {name: ids[name][done[name] :][:count] for name, count in counts.items()}
        for name, rows in pages.step(decode, chunks).items():
            logits[name].append(rows)
            done[name] += len(rows)
    assert done == {"a": 9, "b": 43, "c": 16, "d": 36}
    for name, rows in logits.items():
        close(torch.cat(rows), reference(theirs, ids[name]))


def test_rows_of_unlike_lengths_are_read_apart_and_give_the_same(pair: Pair) -> None:
    model, _ = pair
    pages, alone = Pages(model, 900), Pages(model, 900)
    lens = {"a": 450, "b": 30, "c": 20, "d": 19, "e": 18, "f": 17, "g": 18}
    ids = {name: random_ids(count + 1, seed=count) for name, count in lens.items()}
    for name in lens:
        pages.step(chunks={name: ids[name][:-1]})
        alone.step(chunks={name: ids[name][:-1]})
    together = pages.step(decode={name: ids[name][-1] for name in lens})
    for name in lens:
        close(together[name], alone.step(decode={name: ids[name][-1]})[name])


@pytest.mark.parametrize("before", [3, 30])
def test_positions_of_one_request_may_be_rows_of_their_own(pair: Pair, before: int) -> None:
    """As drafts are verified: each sees the others before it, which the same step writes."""
    model, theirs = pair
    ids = random_ids(before + 4, seed=7)
    pages = Pages(model)
    pages.step(chunks={"a": ids[:before]})
    _, chunk = pages.inputs(chunks={"a": ids[before:]})
    lens = chunk.positions_dev + 1
    rows = replace(
        chunk,
        n_decode=4,
        decode_pages_dev=chunk.chunks[0].pages_dev.expand(4, -1),
        decode_lens_dev=lens,
        decode_bounds=np.minimum(lens.numpy() + 3, before + 4),  # as far as the host knows
        max_decode_len=before + 4,
        chunks=(),
    )
    with torch.inference_mode():
        logits = model.logits(model(rows, pages.kv))
    close(logits, reference(theirs, ids)[before:])


def test_an_empty_sparse_row_spoils_nothing(pair: Pair) -> None:
    """A padding row may come with length 0: it must stay finite, for its NaN would be written."""
    model, _ = pair
    ids = random_ids(30, seed=6)
    pages, alone = Pages(model), Pages(model)
    pages.step(chunks={"a": ids[:-1]})
    alone.step(chunks={"a": ids[:-1]})
    _, inputs = pages.inputs(decode={"a": ids[-1], "b": 1})
    lens = inputs.decode_lens_dev * torch.tensor([1, 0])
    padded = replace(inputs, decode_lens_dev=lens, decode_bounds=lens.numpy())
    with torch.inference_mode():
        logits = model.logits(model(padded, pages.kv))
    assert logits.isfinite().all()
    close(logits[:1], alone.step(decode={"a": ids[-1]})["a"])


# --- guards of the tests above ----------------------------------------------------------------


def test_what_is_left_out_matters_here(pair: Pair) -> None:
    """With everything read the model would be far off: attention is sparse in these tests."""
    model, theirs = pair
    ids = random_ids(61, seed=1)
    dense = type(model)(replace(model.spec, sparse=replace(model.sparse, index_topk=512)))
    dense.load_state_dict(model.state_dict(), assign=True)
    wrong = Pages(dense).step(chunks={"a": ids})["a"] - reference(theirs, ids)
    assert wrong[:TOPK].abs().max() < 2e-5
    assert wrong.abs().max() > 0.1


@pytest.mark.parametrize("name", ["pairs", "index_pairs"])
def test_how_positions_turn_matters_here(pair: Pair, name: str) -> None:
    model, theirs = pair
    ids = random_ids(61, seed=1)
    other = replace(model.sparse, **{name: not getattr(model.sparse, name)})
    turned = type(model)(replace(model.spec, sparse=other))
    turned.load_state_dict(model.state_dict(), assign=True)
    wrong = Pages(turned).step(chunks={"a": ids})["a"] - reference(theirs, ids)
    assert wrong.abs().max() > 0.05


def test_the_epsilon_of_latents_is_a_setting(tmp_path: Path) -> None:
    """transformers has 1e-6 for them whatever the config says, the model's servers rms_norm_eps."""
    theirs = save_sparse(make_sparse(rms_norm_eps=1e-3), tmp_path)
    spec = read_spec(tmp_path)
    assert spec.sparse is not None
    assert spec.sparse.latent_eps == spec.rms_eps == 1e-3
    ids = random_ids(30, seed=4)
    as_theirs = replace(spec, sparse=replace(spec.sparse, latent_eps=1e-6))
    ours, served = (load_sparse(each, "float32") for each in (as_theirs, spec))
    expected = reference(theirs, ids)
    close(Pages(ours).step(chunks={"a": ids})["a"], expected)
    assert (Pages(served).step(chunks={"a": ids})["a"] - expected).abs().max() > 1e-3
