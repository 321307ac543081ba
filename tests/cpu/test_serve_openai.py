"""OpenAI's own Python client against our server: what it asks, it understands the answers to."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from offline_makers import tiny_llama
from serving import Inside, inside
from stepahead import LLM, SamplingParams
from stepahead.serve.options import ServeConfig
from text_makers import MESSAGES

OPTIONS: dict[str, Any] = {"executor": "inline", "max_rows": 4, "threads": 1, "debug": True}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def wanted(folder: str) -> Any:
    with LLM(folder, **OPTIONS) as llm:
        return llm.chat(MESSAGES, SamplingParams(**GREEDY))[0].outputs[0]


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Inside]:
    config = ServeConfig(api_key="secret", max_waiting=2)
    with inside(config, **OPTIONS, model=folder) as found:
        yield found
        found.rest()


@pytest.fixture
def client(server: Inside) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60) as found:
        yield found


def test_a_chat(client: openai.OpenAI, wanted: Any) -> None:
    found = client.chat.completions.create(model="toy", messages=MESSAGES, **GREEDY)
    assert found.object == "chat.completion"
    assert found.choices[0].message.content == wanted.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == wanted.finish_reason
    assert found.usage is not None
    assert found.usage.completion_tokens == len(wanted.token_ids)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens is not None


def test_a_streamed_chat(client: openai.OpenAI, wanted: Any) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options=options, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(told) == wanted.text
    assert chunks[-2].choices[0].finish_reason == wanted.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(wanted.token_ids)


def test_the_clients_own_stream_helper(client: openai.OpenAI, wanted: Any) -> None:
    stop = wanted.text[3]  # it takes an answer that ends by its length for a failure
    ask = client.chat.completions.stream
    with ask(model="toy", messages=MESSAGES, stop=stop, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == wanted.text.partition(stop)[0]


def test_log_probabilities(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="toy", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for one in logprobs.content:
        best = one.top_logprobs[0]
        # greedy: what was taken is the most likely
        assert (best.token, best.logprob, best.bytes) == (one.token, one.logprob, one.bytes)
        values = [other.logprob for other in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3


def test_completions_of_several_prompts_and_choices(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="toy",
        prompt=["The quick", "In 1984"],
        n=2,
        max_tokens=5,
        seed=3,
        logprobs=2,
        extra_body={"top_k": 20, "min_tokens": 5, "ignore_eos": True},
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == 5
    ids = client.completions.create(model="toy", prompt=[5, 6, 7], stream=True, **GREEDY)
    assert [chunk.object for chunk in ids][-1] == "text_completion"


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(client: openai.OpenAI, folder: str, pooling: Any) -> None:
    prompts = ["The quick", "The quick brown fox jumps over the lazy dog. " * 4, "In 1984"]
    with LLM(folder, **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(pooling=pooling))
    ids = [output.prompt_token_ids for output in outputs]
    more: Any = {"pooling": pooling}
    for given in (prompts, ids):
        for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            asked: Any = {"model": "toy", "input": given, "user": "me", "extra_body": more} | form
            found = client.embeddings.create(**asked)
            assert [one.index for one in found.data] == [0, 1, 2]
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
            for one, output in zip(found.data, outputs, strict=True):
                values: Any = one.embedding
                if form == {"encoding_format": "base64"}:
                    values = np.frombuffer(base64.b64decode(values), "<f4")
                state = output.outputs[0].pooled
                assert state is not None
                assert np.linalg.norm(values) == pytest.approx(1.0, abs=1e-5)
                assert values == pytest.approx(state / np.linalg.norm(state), abs=1e-6)
    (alone,) = client.embeddings.create(model="toy", input=ids[0], extra_body=more).data
    (text,) = client.embeddings.create(model="toy", input=prompts[0], extra_body=more).data
    assert alone.embedding == text.embedding


def test_what_an_embedding_can_not_have_is_refused_by_name(client: openai.OpenAI) -> None:
    ask: Any = client.embeddings.create
    refused: list[tuple[str, dict[str, Any]]] = [
        ("dimensions", {"dimensions": 8}),
        ("input", {"input": []}),
        ("input", {"input": ["a", ""]}),
        ("input", {"input": [[5], [True]]}),
        ("input", {"input": [[5, 10**6]]}),
        ("input", {"input": [5] * 5000}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("pooling", {"extra_body": {"pooling": "max"}}),
        ("temperature", {"extra_body": {"temperature": 0.5}}),
        ("input", {"input": ["a"] * 9}),
    ]
    for param, fields in refused:
        with pytest.raises(openai.BadRequestError) as bad:
            ask(**{"model": "toy", "input": "a"} | fields)
        assert bad.value.param == param


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "stepahead"


def test_errors_are_the_clients_own(server: Inside, client: openai.OpenAI) -> None:
    ask: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="toy", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="toy", messages=MESSAGES, tools=tools)
    # of a model whose template knows no tools
    assert (bad.value.param, bad.value.code) == ("tools", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="toy", prompt=[5] * 5000)
    assert long.value.code == "context_length_exceeded"
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    with server.paused_after(0), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="toy", prompt=[5], n=2)
    server.rest()


def test_a_full_server_is_tried_again(server: Inside, client: openai.OpenAI) -> None:
    many: Any = {"model": "toy", "prompt": [5, 6], "max_tokens": 9, "n": 6}
    many |= {"extra_body": {"min_tokens": 9}}
    with server.paused_after(3):
        stream = client.completions.create(stream=True, **many)
        chunks = iter(stream)
        next(chunks)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="toy", prompt=[5])
    assert len(list(chunks)) == 6 * 9 - 1
    patient = client.with_options(max_retries=3)
    assert patient.completions.create(model="toy", prompt=[5], max_tokens=1).choices
    server.rest()


def test_many_at_once_and_one_that_is_cancelled(server: Inside) -> None:
    async def play() -> tuple[list[str], int]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=9) as client:
            prompts = [[5 + place, 6, 7] for place in range(6)]

            async def ask(prompt: list[int]) -> str:
                found = await client.completions.create(model="toy", prompt=prompt, **GREEDY)
                return found.choices[0].text

            texts = await asyncio.gather(*map(ask, prompts))
            stream = await client.completions.create(
                model="toy", prompt=[9], max_tokens=400, stream=True
            )
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 3:
                    await stream.close()
                    break
            return texts, seen

    texts, seen = asyncio.run(play())
    assert len(set(texts)) > 1
    assert seen <= 3
    server.rest()
