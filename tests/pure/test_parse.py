"""Answers told apart while they come: the pieces change nothing, and tags are never told."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.errors import InvalidParameter
from stepahead.parse import AnswerStream, Arguments, CallStart, Content, Event, Reasoning, Tool
from stepahead.parse.events import merged

TOOLS = [
    Tool(
        "search",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "kind": {"enum": ["a", "b"]},
                "where": {"$ref": "#/$defs/place"},
            },
            "$defs": {"place": {"type": "string"}},
        },
    ),
    Tool("stop", {"type": "object", "properties": {}}),
]
FORMATS = ("hermes", "glm", "llama3")


def stream(tool_format: Any, **more: Any) -> AnswerStream:
    return AnswerStream(TOOLS, tool_format, make_id=lambda index: f"id{index}", **more)


def events_of(parser: AnswerStream, pieces: list[str]) -> list[Event]:
    found = [event for piece in pieces for event in parser.push(piece)]
    return merged([*found, *parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def call(name: str, arguments: str, index: int = 0) -> list[Event]:
    return [CallStart(index, f"id{index}", name), Arguments(index, arguments)]


_FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "</"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call", "</tool_cal"),
            *(
                "search",
                "stop",
                "query",
                "limit",
                "kind",
                "\n",
                "\n\n",
                " ",
                ";",
                "; ",
                "3",
                "你好",
            ),
            '{"name": "search", "arguments": {"query": "a<b", "limit": 3}}',
            '{"name": "stop", "parameters": {}}',
            '{"arguments": {"x": [1, "}"]}, "name": "search"}',
            '{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}',
            '{"name": "stop"}',
            '{"a": 1}',
            *(
                '{"name": ',
                '"search"',
                ', "arguments": {',
                '"q": "</tool_call>"',
                "}",
                "{",
                '"',
                "\\",
            ),
        ]
    ),
    st.text('ab<>/{}":,\\ \n', max_size=4),
)


@settings(max_examples=400)
@given(
    st.lists(_FRAGMENTS, max_size=12).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
)
def test_the_pieces_a_text_comes_in_change_nothing(
    text: str, places: list[int], tool_format: str, thinks: bool, inside: bool
) -> None:
    def told(pieces: list[str]) -> list[Event]:
        return events_of(stream(tool_format, thinks=thinks, inside=inside), pieces)

    whole = told([text])
    assert told(cut(text, places)) == whole
    assert told(list(text)) == whole


@settings(max_examples=200)
@given(st.lists(_FRAGMENTS, max_size=10).map("".join), st.sampled_from(FORMATS))
def test_calls_are_whole_and_in_order(text: str, tool_format: str) -> None:
    """Numbers from 0, a start before its arguments, and arguments of a finished call are JSON."""
    events = events_of(stream(tool_format), list(text))
    starts = [event.index for event in events if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))
    begun = -1
    for event in events:
        if isinstance(event, CallStart):
            begun = event.index
            assert event.name
        elif isinstance(event, Arguments):
            assert event.index == begun
    assert all(event.text for event in events if isinstance(event, Content | Reasoning | Arguments))


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_text_without_tags_is_content_to_the_letter_and_at_once(tool_format: str) -> None:
    parser = stream(tool_format)
    assert parser.push("Hello") == [Content("Hello")]
    assert merged([*parser.push(" a < b\n"), *parser.finish()]) == [Content(" a < b\n")]


def test_nothing_that_may_become_a_tag_is_told() -> None:
    parser = stream("hermes")
    assert parser.push("so <tool") == [Content("so")]
    assert parser.push("_cal") == []
    assert parser.push("led>") == [Content(" <tool_called>")]
    parser = stream("hermes", thinks=True)
    assert parser.push("<thi") == []
    assert parser.push("nk>\nhm</thin") == [Reasoning("hm")]
    assert parser.push("gs\n\n") == [Reasoning("</things")]
    assert parser.push("</think>\n\nyes") == [Content("yes")]


HERMES = """Let me look.
<tool_call>
{"name": "search", "arguments": {"query": "</tool_call> \\"x\\"", "limit": [1, {"a": 2}]}}
</tool_call>
<tool_call>
{"name": "stop", "arguments": {}}
</tool_call>"""


def test_hermes_calls() -> None:
    arguments = '{"query": "</tool_call> \\"x\\"", "limit": [1, {"a": 2}]}'
    assert events_of(stream("hermes"), [HERMES]) == [
        Content("Let me look."),
        *call("search", arguments),
        *call("stop", "{}", 1),
    ]


def test_arguments_are_streamed_as_they_come() -> None:
    parser = stream("hermes")
    assert parser.push('<tool_call>{"name": "search", "argu') == [CallStart(0, "id0", "search")]
    assert parser.push('ments": {"query": "ab') == [Arguments(0, '{"query": "ab')]
    assert parser.push('c"}') == [Arguments(0, 'c"}')]
    assert parser.push("}</tool_call>") == []
    parser = stream("glm")
    told = parser.push("<tool_call>search<arg_key>query</arg_key><arg_value>a\nb")
    assert merged(told) == call("search", '{"query": "a\\nb')
    assert merged(parser.push('"</arg_val')) == [Arguments(0, '\\"')]
    assert merged(parser.push("ue></tool_call>")) == [Arguments(0, '"}')]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # arguments before the name; as a string; none
        (
            '<tool_call>{"arguments": {"a": 1}, "name": "stop"}</tool_call>',
            call("stop", '{"a": 1}'),
        ),
        (
            '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
            call("stop", '{"a": 1}'),
        ),
        ('<tool_call>{"name": "stop"}</tool_call>', call("stop", "{}")),
        # no call: content, nothing lost
        ("<tool_call>what?</tool_call>", [Content("<tool_call>what?</tool_call>")]),
        ('<tool_call>{"a": 1}</tool_call>!', [Content('<tool_call>{"a": 1}</tool_call>!')]),
        ('a<tool_call>{"na', [Content('a<tool_call>{"na')]),
        # the end tag is missing
        ('<tool_call>{"name": "stop", "arguments": {}} ok', [*call("stop", "{}"), Content("ok")]),
        # broken after its name was told: what came is kept, the rest is skipped
        (
            '<tool_call>{"name": "stop", "arguments": {"a": 1}; 2}</tool_call>\nok',
            [*call("stop", '{"a": 1}'), Content("ok")],
        ),
        # cut off
        ('<tool_call>{"name": "stop", "arguments": {"a', call("stop", '{"a')),
    ],
)
def test_hermes_calls_that_are_not_as_they_should_be(text: str, expected: list[Event]) -> None:
    assert events_of(stream("hermes"), [text]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # GLM 4.7 and 5, then 4.5
        (
            "<tool_call>search<arg_key>query</arg_key><arg_value>3</arg_value>"
            "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
            call("search", '{"query": "3", "limit": 3}'),
        ),
        (
            "I look.\n<tool_call>search\n<arg_key>where</arg_key>\n<arg_value>here</arg_value>\n"
            "<arg_key>kind</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
            [Content("I look."), *call("search", '{"where": "here", "kind": "a"}')],
        ),
        ("<tool_call>stop</tool_call>\n", call("stop", "{}")),
        (
            "<tool_call>stop</tool_call><tool_call>stop\n</tool_call>",
            [*call("stop", "{}"), *call("stop", "{}", 1)],
        ),
        # a value that is no JSON, of an argument that nobody described
        (
            "<tool_call>other<arg_key>a</arg_key><arg_value>x y</arg_value>"
            '<arg_key>b</arg_key><arg_value>{"c": [1]}</arg_value></tool_call>',
            call("other", '{"a": "x y", "b": {"c": [1]}}'),
        ),
        ("<tool_call></tool_call>", [Content("<tool_call></tool_call>")]),
        ("<tool_call>sto", [Content("<tool_call>sto")]),
        (
            "<tool_call>search<arg_key>query</arg_key><arg_value>cut",
            call("search", '{"query": "cut'),
        ),
    ],
)
def test_glm_calls(text: str, expected: list[Event]) -> None:
    assert events_of(stream("glm"), [text]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "stop", "parameters": {"a": "}"}}', call("stop", '{"a": "}"}')),
        ('<|python_tag|>{"name": "stop", "parameters": {}}', call("stop", "{}")),
        (
            '{"name": "stop", "parameters": {}}; {"name": "search", "arguments": {"a": 1}}',
            [*call("stop", "{}"), *call("search", '{"a": 1}', 1)],
        ),
        # JSON that is an answer
        ('{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
        ('{"answer": {"name": "stop"}}', [Content('{"answer": {"name": "stop"}}')]),
        (' {"a', [Content(' {"a')]),
        ("No {braces} here", [Content("No {braces} here")]),
    ],
)
def test_llama_calls(text: str, expected: list[Event]) -> None:
    assert events_of(stream("llama3"), [text]) == expected


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\na\n\nb\n</think>\n\nc\n", False, [Reasoning("a\n\nb"), Content("c\n")]),
        ("a</think>c", True, [Reasoning("a"), Content("c")]),
        ("<think>a</think>c", True, [Reasoning("a"), Content("c")]),
        ("<think></think>c", False, [Content("c")]),
        ("\n\n</think>\n\nc", True, [Content("c")]),
        ("a</think>c", False, [Content("a</think>c")]),
        ("a <think>b</think>", False, [Content("a <think>b</think>")]),
        ("<think>a, cut</thi", False, [Reasoning("a, cut</thi")]),
        ("<thi", False, [Content("<thi")]),
        (
            "<think>a</think><tool_call>stop</tool_call>",
            False,
            [Reasoning("a"), *call("stop", "{}")],
        ),
    ],
)
def test_reasoning(text: str, inside: bool, expected: list[Event]) -> None:
    assert events_of(stream("glm", thinks=True, inside=inside), [text]) == expected


def test_without_tools_or_reasoning_a_text_is_content() -> None:
    assert events_of(AnswerStream(), ["<think><tool_call>", "x"]) == [
        Content("<think><tool_call>x")
    ]


def test_events_have_the_shape_of_openai() -> None:
    parser = stream("glm", thinks=True)
    deltas = [
        event.delta()
        for event in events_of(parser, ["<think>a</think>b<tool_call>stop</tool_call>"])
    ]
    assert deltas == [
        {"reasoning_content": "a"},
        {"content": "b"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "id0",
                    "type": "function",
                    "function": {"name": "stop", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    ]
    ids = [
        event.id
        for event in AnswerStream(TOOLS, "glm").push("<tool_call>a</tool_call>" * 2)
        if isinstance(event, CallStart)
    ]
    assert len(set(ids)) == 2
    assert all(name.startswith("call_") for name in ids)


@given(st.text(max_size=30))
def test_a_glm_text_value_is_its_text_whatever_it_holds(value: str) -> None:
    text = f"<tool_call>search<arg_key>query</arg_key><arg_value>{value}</arg_value></tool_call>"
    if "</arg_value>" in value:
        return
    _, arguments = events_of(stream("glm"), list(text))
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == {"query": value}


@pytest.mark.parametrize(
    ("given_tool", "says"),
    [
        ("search", 'the type "function"'),
        ({"type": "web"}, 'the type "function"'),
        ({"type": "function"}, "an object"),
        ({"type": "function", "function": {"name": "a b"}}, "a name has"),
        ({"type": "function", "function": {"name": "a", "parameters": 3}}, "must be a schema"),
        ({"type": "function", "function": {"name": "a", "strict": "yes"}}, "true or false"),
        ({"type": "function", "function": {"name": "a", "colour": 1}}, "colour"),
    ],
)
def test_a_tool_that_is_none_is_refused_by_name(given_tool: Any, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as refused:
        Tool.of(given_tool)
    assert refused.value.param == "tools"


def test_a_tool_without_parameters_takes_none() -> None:
    tool = Tool.of({"type": "function", "function": {"name": "now", "description": "the time"}})
    assert tool.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
