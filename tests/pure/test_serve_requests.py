"""What a request's body may hold: each field honoured, or refused by its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.serve.fields import NOT_YET, SAMPLING, SPELLINGS
from stepahead.serve.refusal import Refusal
from stepahead.serve.requests import (
    ChatFields,
    CompletionFields,
    read_abort,
    read_chat_request,
    read_completion_request,
    read_detokenize,
    read_tokenize,
)
from stepahead.types import SamplingParams

MESSAGES = [{"role": "user", "content": "Hello"}]
# what OpenAI documents for both APIs, and what vLLM and SGLang both have beside it
OPENAI_CHAT = [
    "messages",
    "model",
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
]
OPENAI_TEXT = [
    "prompt",
    "model",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
]
EXTENSIONS = [
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "return_token_ids",
    "cache_salt",
    "session_id",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "priority",
    "request_id",
    "kv_transfer_params",
    "regex",
    "ebnf",
    "rid",
    "custom_logit_processor",
    "response_format",
    "add_special_tokens",
    "return_tokens_as_token_ids",
]
CHAT_EXTENSIONS = ["continue_final_message", "chat_template_kwargs", "chat_template"]


def chat(**fields: Any) -> Any:
    return read_chat_request(msgspec.json.encode({"messages": MESSAGES, **fields}))


def text(**fields: Any) -> Any:
    return read_completion_request(msgspec.json.encode({"prompt": "Hello", **fields}))


def refused(read: Any, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", sorted({*OPENAI_CHAT, *EXTENSIONS, *CHAT_EXTENSIONS}))
def test_each_known_field_of_chat_is_known(name: str) -> None:
    assert name in {*SAMPLING, *SPELLINGS, *NOT_YET, *ChatFields.__struct_fields__}
    assert chat(**({} if name == "messages" else {name: None}))


@pytest.mark.parametrize("name", sorted({*OPENAI_TEXT, *EXTENSIONS}))
def test_each_known_field_of_completions_is_known(name: str) -> None:
    assert name in {*SAMPLING, *SPELLINGS, *NOT_YET, *CompletionFields.__struct_fields__}
    assert text(**({} if name == "prompt" else {name: None}))


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(
    read: Any, name: str
) -> None:
    neutral, words = NOT_YET[name]
    for value in (None, *neutral):
        read(**{name: value})
    for value in ("something", 7, [1], {"type": "json_object"}):
        refusal = refused(read, **{name: value})
        assert refusal.param == name
        assert refusal.code == "unsupported_value"
        assert words in refusal.message


def test_a_neutral_number_is_no_truth() -> None:
    assert refused(chat, store=0).param == "store"
    assert refused(chat, priority=False).param == "priority"
    assert refused(text, use_beam_search=0).param == "use_beam_search"


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize("name", ["temprature", "logprob", "", "max_length", "stream_option"])
def test_an_unknown_field_is_refused_by_name(read: Any, name: str) -> None:
    refusal = refused(read, **{name: 1})
    assert refusal.param == name
    assert refusal.code == "unknown_field"


@given(st.sampled_from([chat, text]), st.text(min_size=1, max_size=20))
def test_no_name_is_passed_over(read: Any, name: str) -> None:
    known = {
        *SAMPLING,
        *SPELLINGS,
        *NOT_YET,
        *ChatFields.__struct_fields__,
        *CompletionFields.__struct_fields__,
    }
    if name not in known:
        assert refused(read, **{name: 1}).param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"vllm_xargs": 3}, "extra_args"),
        ({"vllm_xargs": {"a": 1}, "custom_params": {"a": 1}}, "custom_params"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"all": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a", "rid": "b"}, "rid"),
        ({"model": 3}, "model"),
        ({"user": 3}, "user"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
@pytest.mark.parametrize("read", [chat, text])
def test_a_bad_value_is_refused_by_the_fields_name(
    read: Any, fields: dict[str, Any], param: str
) -> None:
    assert refused(read, **fields).param == param


@pytest.mark.parametrize("read", [chat, text])
def test_a_token_id_that_no_message_can_carry_is_refused_by_name(read: Any) -> None:
    for token in (-1, 1 << 63, 10**22):
        assert refused(read, stop_token_ids=[3, token]).param == "stop_token_ids"
        assert refused(read, logit_bias={str(token): 1}).param == "logit_bias"


@pytest.mark.parametrize("read", [chat, text])
def test_bans_and_a_processors_arguments_are_taken(read: Any) -> None:
    params = read(allowed_token_ids=[3, 4], bad_words=["a b"]).params
    assert (params.allowed_token_ids, params.bad_words) == ((3, 4), ("a b",))
    for name in SPELLINGS:
        assert read(**{name: {"step": 2}}).params.extra_args == {"step": 2}
        assert read(**{name: None}).params.extra_args is None
    assert refused(read, extra_args={"step": 2}).param == "extra_args"  # not what others call it


@pytest.mark.parametrize("read", [chat, text])
def test_so_many_stop_strings_that_all_would_wait_are_refused(read: Any) -> None:
    """Each is looked for with every token: 200,000 of them held a server up for a minute."""
    assert read(stop=["a"] * 128).params.stops == ("a",) * 128
    assert refused(read, stop=["a"] * 129).param == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [3]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_chat_refuses(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_completions_refuse(fields: dict[str, Any], param: str) -> None:
    assert refused(text, **fields).param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b'"a"', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_chat_request(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for read in (read_chat_request, read_completion_request, read_tokenize, read_abort):
        with pytest.raises(Refusal):
            read(body)


def test_sampling_parameters_arrive() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    asked = chat(**fields, logit_bias={"5": -1.0}, logprobs=True, top_logprobs=2)
    assert asked.params == SamplingParams(**fields, logit_bias={5: -1.0}, logprobs=2)
    assert text(**fields, logprobs=0).params == SamplingParams(**fields, logprobs=0)


def test_defaults_are_openais() -> None:
    assert chat().params == SamplingParams(max_tokens=None)
    assert chat(max_completion_tokens=3).params.max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).params.max_tokens == 3  # some send both
    assert text().params == SamplingParams(max_tokens=16)
    assert text(prompt=[1, 2]).prompts == ([1, 2],)
    assert text(prompt=["a", "b"]).prompts == ("a", "b")
    assert text(prompt=[[1], [2, 3]]).prompts == ([1], [2, 3])


def test_echo_asks_for_the_prompts_log_probabilities() -> None:
    assert text(echo=True, logprobs=2).params.prompt_logprobs == 2
    assert text(echo=True).params.prompt_logprobs is None
    silent = text(echo=True, max_tokens=0)
    assert silent.no_output
    assert silent.params.max_tokens == 1


def test_the_small_routes_read_their_fields() -> None:
    assert read_tokenize(b'{"prompt": "a"}').prompt == "a"
    assert read_detokenize(b'{"tokens": [1, 2]}').tokens == [1, 2]
    assert read_abort(b'{"request_id": "a"}') == read_abort(b'{"rid": "a"}') == "a"
    assert read_abort(b'{"abort_all": true}') is None
    for read, body, param in (
        (read_tokenize, b"{}", "prompt"),
        (read_tokenize, b'{"prompt": "a", "messages": []}', "prompt"),
        (read_tokenize, b'{"prompts": "a"}', "prompts"),
        (read_detokenize, b"{}", "tokens"),
        (read_detokenize, b'{"tokens": ["a"]}', "tokens"),
        (read_abort, b"{}", "request_id"),
        (read_abort, b'{"abort_all": true, "rid": "a"}', "request_id"),
        (read_abort, b'{"request_id": "%s"}' % (b"a" * 257), "request_id"),
        (read_abort, b'{"request_id": "a", "rid": "b"}', "rid"),
        (read_abort, b'{"all": true}', "all"),
    ):
        with pytest.raises(Refusal) as caught:
            read(body)
        assert caught.value.param == param
