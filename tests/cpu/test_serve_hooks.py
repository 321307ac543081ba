"""Bans and a processor's arguments from LLM and over HTTP, with a tokenizer that spells words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from offline_makers import tiny_llama
from serving import Inside, inside
from stepahead import LLM, SamplingParams
from stepahead.errors import InvalidParameter
from stepahead.serve.options import ServeConfig

OPTIONS: dict[str, Any] = {"executor": "inline", "max_rows": 4, "max_model_len": 64, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Inside]:
    more = {"debug": True, "logits_processor": "processors:Shy"}
    with inside(ServeConfig(max_waiting=2), model=str(folder), **OPTIONS, **more) as found:
        yield found
        found.rest()


def test_a_word_that_is_bad_does_not_come(folder: Path, server: Inside) -> None:
    """A word of the free answer, spelt by its own tokenizer; the same from LLM and over HTTP."""
    with LLM(folder, **OPTIONS) as llm:
        (free,) = llm.generate([PROMPT], GREEDY)
        pieces = [(llm.tokenizer.decode([token]), token) for token in free.outputs[0].token_ids]
        text, spelt = next(piece for piece in pieces if piece[0].strip().isalpha())
        bad = text.strip()
        params = SamplingParams(
            temperature=0.0, max_tokens=16, ignore_eos=True, bad_words=[bad], logprobs=1
        )
        (held,) = llm.generate([PROMPT], params)
        with pytest.raises(InvalidParameter, match=r"prompts\[0\]: bad_words"):
            llm.generate([PROMPT], SamplingParams(bad_words=["\ud800"]))
    assert spelt not in held.outputs[0].token_ids
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    asked |= {"bad_words": [bad], "return_token_ids": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=asked).json()
    assert reply["choices"][0]["token_ids"] == held.outputs[0].token_ids


def test_only_allowed_tokens_come_and_a_processor_has_its_arguments(server: Inside) -> None:
    url = f"{server.url}/v1/completions"
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    asked |= {"ignore_eos": True, "return_token_ids": True, "allowed_token_ids": [8, 9, 11]}

    def tokens(**more: Any) -> list[int]:
        found: list[int] = httpx.post(url, json=asked | more).json()["choices"][0]["token_ids"]
        return found

    assert {*tokens()} <= {8, 9, 11}
    shy = {"last": 1, "step": 100.0, "lift": 0.0}  # the token that was last does not come again
    for name in ("vllm_xargs", "custom_params"):
        found = tokens(**{name: shy})
        assert all(a != b for a, b in itertools.pairwise(found))
    for fields, param in (
        ({"allowed_token_ids": [1 << 20]}, "allowed_token_ids"),
        ({"bad_words": ["\u0416" * 200]}, "bad_words"),
    ):
        refused = httpx.post(url, json=asked | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
