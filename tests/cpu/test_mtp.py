"""The layer that drafts: transformers' decoder layer with what is around it written out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_models import Pages, random_ids
from tiny_sparse import TOPK, WithMtp, make_with_mtp
from torch import Tensor

from stepahead.model.batch import StepInputs
from stepahead.model.glm_moe_dsa import GlmMoeDsa
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_sparse

Pair = tuple[GlmMoeDsa, WithMtp]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("mtp")
    theirs = make_with_mtp(folder)
    return load_sparse(read_spec(folder), "float32", drafts=True), theirs


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


class Drafting(Pages):
    """As Pages; after a step of the model, the MTP layer runs over the same tokens."""

    def draft(
        self, chunks: dict[str, list[int]], decode: dict[str, int], following: list[int]
    ) -> tuple[Tensor, Tensor, StepInputs]:
        """Hidden states, positions read, and what the layer was given; `following` are the tokens
        after each of the step's."""
        _, inputs = self.inputs(decode, chunks)
        with torch.inference_mode():
            hidden = self.model(inputs, self.kv)
            mine = replace(inputs, token_ids_dev=torch.tensor(following))
            return (*self.model.draft(hidden, mine, self.kv), mine)


@pytest.mark.parametrize("cuts", [(0, 44), (0, 7, TOPK, 30, 44)], ids=str)
def test_drafts_of_a_prompt_are_those_of_the_reference(pair: Pair, cuts: tuple[int, ...]) -> None:
    model, theirs = pair
    ids = random_ids(45, seed=4)
    states, logits = theirs.drafts(ids)
    pages = Drafting(model)
    parts = [
        pages.draft({"a": ids[b:e]}, {}, ids[b + 1 : e + 1])[0] for b, e in itertools.pairwise(cuts)
    ]
    close(torch.cat(parts), states)
    with torch.inference_mode():
        close(model.logits(torch.cat(parts)), logits)


def test_drafts_of_decode_rows_are_those_of_the_reference(pair: Pair) -> None:
    model, theirs = pair
    ids = {"a": random_ids(31, seed=5), "b": random_ids(24, seed=6)}
    expected = {name: theirs.drafts(row)[0] for name, row in ids.items()}
    pages = Drafting(model)
    pages.draft({name: row[:20] for name, row in ids.items()}, {}, ids["a"][1:21] + ids["b"][1:21])
    for at in range(20, 30):
        names = [name for name in ids if at + 1 < len(ids[name])]
        states, _, _ = pages.draft(
            {}, {name: ids[name][at] for name in names}, [ids[name][at + 1] for name in names]
        )
        for name, state in zip(names, states, strict=True):
            close(state, expected[name][at])


def test_what_was_read_is_told_as_positions_and_can_be_given(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(40, seed=8)
    pages = Drafting(model)
    pages.draft({"a": ids[:38]}, {}, ids[1:39])
    _, inputs = pages.inputs({"a": ids[38]})
    with torch.inference_mode():
        hidden = model(inputs, pages.kv)
        mine = replace(inputs, token_ids_dev=torch.tensor(ids[39:]))
        states, read = model.draft(hidden, mine, pages.kv)
        again, same = model.draft(hidden, mine, pages.kv, read)
        other, _ = model.draft(hidden, mine, pages.kv, torch.arange(TOPK).unsqueeze(0))
    assert torch.equal(states, again)
    assert torch.equal(read, same)
    assert read.shape == (1, TOPK)
    assert len({*read[0].tolist()} & {*range(39)}) == TOPK
    assert not torch.allclose(states, other)


def test_an_early_token_read_all_up_to_itself(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(TOPK + 4, seed=9)
    _, read, _ = Drafting(model).draft({"a": ids[:5], "b": ids[:-1]}, {}, ids[1:6] + ids[1:])
    for at, row in enumerate(read.tolist()[:5] + read.tolist()[5:][:TOPK]):
        place = at if at < 5 else at - 5
        assert sorted(p for p in row if p >= 0) == [*range(place + 1)]


def test_drafting_leaves_the_models_own_pages_alone(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(30, seed=10)
    torch.manual_seed(0)
    plain = Pages(model)
    torch.manual_seed(0)  # the same garbage in its pages
    drafting = Drafting(model)
    plain.step(chunks={"a": ids[:-1]})
    drafting.draft({"a": ids[:-1]}, {}, ids[1:])
    for layer in range(6):
        assert torch.equal(plain.kv.rows[layer], drafting.kv.rows[layer])
    assert not torch.equal(plain.kv.rows[6], drafting.kv.rows[6])
    assert not torch.equal(plain.kv.keys[6], drafting.kv.keys[6])
    close(drafting.step(decode={"a": ids[-1]})["a"], plain.step(decode={"a": ids[-1]})["a"])
