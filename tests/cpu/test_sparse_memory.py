"""The pool of a model with a compressed cache: two groups of page tensors, one page table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_parity_glm import MODELS, SPARSE
from test_parity_llama import engine_of
from tiny_models import random_ids, smollm2_path
from tiny_sparse import TOPK, make_sparse, make_with_mtp, reference, save_sparse

from engines import Variant
from harness import Client
from stepahead import LLM, SamplingParams
from stepahead.assemble import model_parts
from stepahead.cache.pools import LatentPool
from stepahead.config import config_from
from stepahead.errors import ConfigError
from stepahead.model.glm_moe_dsa import GlmMoeDsa
from stepahead.model.sparse import (
    CellKind,
    bytes_per_token,
    groups_of,
    latent_groups,
    sparse_weight_values,
    told,
)
from stepahead.model.spec import kv_bytes_per_token, read_spec
from stepahead.model.weights import load_sparse
from text_makers import chat_folder
from workloads import Ask, Workload


@pytest.mark.parametrize(
    ("rows", "keys", "layers", "indexers", "each"),
    [
        ("fp8", "fp8", 78, 21, 53_940),
        ("fp8", "fp8", 79, 22, 54_728),
        ("bfloat16", "fp8", 78, 21, 92_628),
        ("bfloat16", "fp8", 79, 22, 93_912),
        ("bfloat16", None, 79, 22, 96_640),
        ("float32", None, 79, 22, 193_280),
    ],
)
def test_glm_has_its_published_bytes_a_token(
    rows: CellKind, keys: CellKind | None, layers: int, indexers: int, each: int
) -> None:
    """In fp8 a row is 512 values, four scales, and a rotated part in bfloat16: 656 bytes."""
    groups = latent_groups(layers, indexers, (512, 64, 128), rows, keys)
    assert bytes_per_token(groups) == each
    assert [group.cell_bytes for group in groups] == {
        "fp8": [656, 132],
        "bfloat16": [1152, 132 if keys else 256],
        "float32": [2304, 512],
    }[rows]


def test_groups_are_told_with_what_a_token_takes() -> None:
    said = told(latent_groups(79, 22, (512, 64, 128), "fp8"))
    assert said == "79 latent rows of 656 + 22 index keys of 132 = 54,728 bytes a token"


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pool_takes_what_its_groups_say(dtype: torch.dtype, drafts: bool) -> None:
    sparse = replace(SPARSE, indexers=(True, False, True, False), experts=(False,) + 3 * (True,))
    model = GlmMoeDsa(
        replace(MODELS[64].spec, num_layers=4, sparse=replace(sparse, mtp_layers=1)),
        drafts=drafts,
    )
    model.to_empty(device="cpu").to(dtype)
    pool = model.new_kv(5, 4)
    groups = groups_of(model.sparse, dtype.itemsize, drafts)
    assert [len(pool.rows), len(pool.keys)] == [group.layers for group in groups]
    assert [len(pool.rows), [*pool.keys]] == ([5, [0, 2, 4]] if drafts else [4, [0, 2]])
    taken = sum(pages.nbytes for pages in (*pool.rows, *pool.keys.values()))
    assert taken == 5 * 4 * bytes_per_token(groups)
    if not drafts:
        assert taken == 5 * 4 * kv_bytes_per_token(model.spec, dtype.itemsize)


@pytest.mark.parametrize("drafts", [False, True])
def test_weights_are_counted_as_they_are(drafts: bool) -> None:
    sparse = replace(SPARSE, mtp_layers=1)
    model = GlmMoeDsa(replace(MODELS[64].spec, sparse=sparse), drafts=drafts)
    layers = sparse_weight_values(sparse, 32, 4, 48, drafts)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert whole == layers + 2 * 64 * 32 + 32


def test_a_latent_page_stays_finite_whatever_is_written() -> None:
    pool = LatentPool((True, False), 2, 4, 3, 2, torch.float32)
    bad = torch.tensor([[float("nan"), float("inf"), 1.0]])
    pool.write_rows(1, torch.tensor([5]), bad.clone())
    pool.write_keys(0, torch.tensor([6]), bad[:, :2].clone())
    assert all(torch.isfinite(pages).all() for pages in (*pool.rows, *pool.keys.values()))
    assert pool.rows[1][1, 1].tolist() == [0.0, torch.finfo(torch.float32).max, 1.0]
    assert pool.keys[0][1, 2, 1] == torch.finfo(torch.float32).max
    assert not pool.rows[0].any()


# --- through the engine -----------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_a_prefix_hit_brings_latent_rows_and_index_keys(loop: str, tmp_path: Path) -> None:
    """The first request is so short that nothing is scored for it.  Its index keys are needed all
    the same by whoever goes on from its pages: among them the next one's positions are chosen."""
    theirs = save_sparse(make_sparse(), tmp_path)
    model = load_sparse(read_spec(tmp_path), "float32")
    first = random_ids(TOPK, seed=16)
    second = first + random_ids(30, seed=3)
    options = {
        "max_model_len": 96,
        "page_size": 4,
        "max_rows": 2,
        "max_step_tokens": 64,
        "num_pages": 30,
        "vocab_size": model.vocab_size,
    }
    one, more = (
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 12)
    )
    asks = (Ask(0, tuple(first), one), Ask(4, tuple(second), more))
    run = Client(engine_of(model, options, Variant(loop)), Workload(0, options, asks)).play()
    told_second = run.told[1, 0]
    assert told_second.finish is not None
    assert told_second.finish.cached_tokens == TOPK
    answer = told_second.tokens
    logits = reference(theirs, second + answer)[len(second) - 1 : -1]
    assert logits.argmax(1).tolist() == answer


def test_an_llm_serves_a_folder_and_tells_its_pool(tmp_path: Path) -> None:
    theirs = save_sparse(make_sparse(vocab_size=900), tmp_path)
    chat_folder(tmp_path)
    prompt = random_ids(30, seed=5, vocab_size=900)
    with LLM(tmp_path, executor="inline", max_rows=2, num_pages=40, threads=1) as llm:
        said = [line for line in llm.settings if line.startswith("KV pool")]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        answer = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert said == [
        "KV pool: 6 latent rows of 160 + 3 index keys of 64 = 1,152 bytes a token; "
        "room for 640 tokens"
    ]
    logits = reference(theirs, [*prompt, *answer])[len(prompt) - 1 : -1]
    assert logits.argmax(1).tolist() == [*answer]


@pytest.mark.parametrize("absent", [False, True])
def test_an_llm_drafts_with_the_layer_if_the_folder_has_it(absent: bool, tmp_path: Path) -> None:
    make_with_mtp(tmp_path, absent=absent, vocab_size=900)
    chat_folder(tmp_path)
    prompt = random_ids(30, seed=5, vocab_size=900)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers, proposed, settings = [], [], []
    for draft in ("none", "mtp"):
        options = {"executor": "inline", "max_rows": 2, "num_pages": 40, "threads": 1}
        with LLM(tmp_path, draft=draft, **options) as llm:
            answers.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
            proposed.append(llm.engine.draft_counts().proposed)
            settings.append("; ".join(llm.settings))
    assert answers[0] == answers[1]
    assert proposed[0] == 0
    bare = "6 latent rows of 160 + 3 index keys of 64 = 1,152 bytes a token"
    assert bare in settings[0]
    idle = "model.layers.6 (MTP) stays on disk; draft=mtp drafts with it"
    assert (idle in settings[0]) == (not absent)
    assert idle not in settings[1]
    if absent:
        assert bare in settings[1]
        assert "draft=none: the model's files have no layer that drafts (MTP)" in settings[1]
        assert "so nothing drafts" in settings[1]
        assert proposed[1] == 0
    else:
        assert "7 latent rows of 160 + 4 index keys of 64 = 1,376 bytes a token" in settings[1]
        assert "draft_tokens=3" in settings[1]
        assert proposed[1] > 20


def test_drafts_of_the_model_s_own_are_refused_where_there_can_be_none() -> None:
    with pytest.raises(ConfigError, match=r"draft=mtp, but the toy has no layer that drafts"):
        LLM("toy", draft="mtp", num_pages=8)
    with pytest.raises(ConfigError, match=r"draft=mtp, but LlamaForCausalLM .*use draft=ngram"):
        LLM(smollm2_path(), draft="mtp", num_pages=8)


def test_the_layer_that_drafts_is_counted_as_memory(tmp_path: Path) -> None:
    make_with_mtp(tmp_path, vocab_size=900)
    chat_folder(tmp_path)
    model = load_sparse(read_spec(tmp_path), "float32", drafts=True)
    parts = model_parts(config_from(str(tmp_path), {"draft": "mtp"}))
    assert parts.facts.kv_bytes_per_token == 1376
    assert parts.facts.weight_bytes == sum(4 * weight.numel() for weight in model.parameters())


def test_it_is_not_cut_into_stages(tmp_path: Path) -> None:
    save_sparse(make_sparse(vocab_size=900), tmp_path)
    chat_folder(tmp_path)
    with pytest.raises(ConfigError, match="this model can't be cut into stages"):
        LLM(tmp_path, pipeline_stages=2, num_pages=40)
