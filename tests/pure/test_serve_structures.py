"""What an answer must be, tools and reasoning: each spelling is read, and each refusal names its
field."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec
import pytest

from stepahead.errors import ConfigError
from stepahead.serve.options import ServeConfig
from stepahead.serve.refusal import Refusal
from stepahead.serve.requests import read_chat_request, read_completion_request
from stepahead.structured import StructuredOutputs

MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "add"}}


def chat(**fields: Any) -> Any:
    return read_chat_request(msgspec.json.encode({"messages": MESSAGES, **fields}))


def text(**fields: Any) -> Any:
    return read_completion_request(msgspec.json.encode({"prompt": "Hello", **fields}))


def refused(read: Any, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


SPELLINGS: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        {"json": SCHEMA},
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}},
        {"json": SCHEMA},
    ),
    ("response_format", {"type": "json_object"}, {"json_object": True}),
    ("structured_outputs", {"json": SCHEMA}, {"json": SCHEMA}),
    ("structured_outputs", {"json": "{}"}, {"json": "{}"}),
    ("structured_outputs", {"json_object": True}, {"json_object": True}),
    ("structured_outputs", {"regex": "a+", "json": None}, {"regex": "a+"}),
    ("structured_outputs", {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    (
        "structured_outputs",
        {"choice": ["a", "b"], "disable_any_whitespace": False, "whitespace_pattern": None},
        {"choice": ["a", "b"]},
    ),
    ("guided_json", SCHEMA, {"json": SCHEMA}),
    ("guided_json", "{}", {"json": "{}"}),
    ("guided_regex", "a+", {"regex": "a+"}),
    ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
    ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    ("json_schema", "{}", {"json": "{}"}),
    ("regex", "a+", {"regex": "a+"}),
    ("ebnf", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
]


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize(("name", "value", "want"), SPELLINGS)
def test_each_spelling_of_a_structure_is_read(
    read: Any, name: str, value: Any, want: dict[str, Any]
) -> None:
    asked = read(**{name: value})
    assert asked.params.structured_outputs == StructuredOutputs(**want)
    assert asked.structure == name


@pytest.mark.parametrize("read", [chat, text])
def test_two_structures_at_once_are_refused_with_their_names(read: Any) -> None:
    one_each = {name: value for name, value, _ in SPELLINGS}
    for pair in combinations(one_each.items(), 2):
        refusal = refused(read, **dict(pair))
        assert refusal.param in dict(pair)
        assert all(name in refusal.message for name in dict(pair))


@pytest.mark.parametrize("read", [chat, text])
def test_a_format_of_text_asks_for_nothing(read: Any) -> None:
    assert read(response_format={"type": "text"}).params.structured_outputs is None
    asked = read(response_format={"type": "text"}, regex="a", guided_decoding_backend="auto")
    assert asked.params.structured_outputs == StructuredOutputs(regex="a")


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("response_format", {"type": "json_schema"}, "needs it"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "schema"),
        ("response_format", {"type": "json_object", "json_schema": {"schema": {}}}, "goes with"),
        ("response_format", {"type": "structural_tag", "structures": []}, "structural_tag"),
        ("response_format", {"type": "text", "schema": {}}, "schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": True}}, "object"),
        ("response_format", "json", "object"),
        ("structured_outputs", {}, "nothing"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "regex and choice"),
        ("structured_outputs", {"choice": []}, "choice"),
        ("structured_outputs", {"regex": 3}, "regex"),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ("structured_outputs", {"json": {}, "disable_any_whitespace": True}, "disable_any"),
        ("structured_outputs", {"structural_tag": "{}"}, "structural_tag"),
        ("structured_outputs", {"regex": "a", "colour": 1}, "colour"),
        ("guided_json", 3, "guided_json"),
        ("guided_choice", [], "choice"),
        ("guided_choice", [1], "guided_choice"),
        ("guided_regex", 3, "guided_regex"),
        ("guided_decoding_backend", "outlines", "llguidance"),
        ("guided_whitespace_pattern", " ", "white space"),
        ("structural_tag", "{}", "not supported"),
        ("ebnf", 3, "ebnf"),
    ],
)
def test_a_structure_that_is_none_is_refused_by_its_field(
    read: Any, name: str, value: Any, says: str
) -> None:
    refusal = refused(read, **{name: value})
    assert refusal.param == name
    assert says in refusal.message


@pytest.mark.parametrize(
    ("fields", "choice", "parallel"),
    [
        ({}, "auto", True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "auto", False),
        ({"tool_choice": "required"}, "required", True),
        ({"tool_choice": NAMED}, "add", True),
    ],
)
def test_tools_are_read(fields: dict[str, Any], choice: str, parallel: bool) -> None:
    wish = chat(tools=[TOOL], **fields).tools
    assert wish.given == (TOOL,)
    assert [tool.name for tool in wish.tools] == ["add"]
    assert (wish.choice, wish.parallel) == (choice, parallel)


def test_no_tools_is_no_wish() -> None:
    assert chat().tools is None
    assert chat(tools=[], tool_choice="auto", parallel_tool_calls=True).tools is None
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    assert chat(tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "add"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": FUNCTION | {"description": 3}}]}, "tools"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": NAMED}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "add"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED | {"mode": "auto"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tools": [TOOL], "separate_reasoning": False}, "separate_reasoning"),
        ({"include_reasoning": False, "separate_reasoning": False}, "include_reasoning"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"stream_reasoning": False}, "stream_reasoning"),
    ],
)
def test_tools_and_reasoning_that_can_not_be_had_are_refused_by_their_field(
    fields: dict[str, Any], param: str
) -> None:
    assert refused(chat, **fields).param == param


def test_completions_take_no_tools_and_tell_no_reasoning_apart() -> None:
    for name, neutral, other in (
        ("tools", [], [TOOL]),
        ("tool_choice", "auto", "required"),
        ("parallel_tool_calls", False, 3),
        ("include_reasoning", True, False),
        ("separate_reasoning", True, False),
    ):
        assert text(**{name: neutral})
        assert refused(text, **{name: other}).param == name


def test_a_parser_that_is_not_known_is_refused_with_those_that_are() -> None:
    for name in ("hermes", "qwen25", "glm45", "llama3_json", "llama3", "glm47", "none", "auto"):
        assert ServeConfig(tool_call_parser=name)
    for name in ("deepseek_r1", "deepseek-r1", "qwen3", "glm45", "none", "auto", "think"):
        assert ServeConfig(reasoning_parser=name)
    for option in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"{option}='mistral'.*auto, .*glm45"):
            ServeConfig(**{option: "mistral"})
