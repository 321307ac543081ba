"""OpenAI's client asks for structure, tools and reasoning: a model that knows nothing gives what
the grammar holds, and streams add up to it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from answer_makers import TEMPLATES, THINKING, added_up, chat_model
from offline_makers import tiny_llama
from serving import Inside, inside
from text_makers import byte_level_json

OPTIONS: dict[str, Any] = {"executor": "inline", "max_rows": 4, "threads": 1, "debug": True}
HELLO: Any = [{"role": "user", "content": "Hello"}]
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["red", "green", "blue"]},
        "share": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "share"],
    "additionalProperties": False,
}
PAINT: Any = {
    "type": "function",
    "function": {"name": "paint", "description": "x", "parameters": COLOUR, "strict": True},
}
STOP: Any = {"type": "function", "function": {"name": "stop", "strict": True}}
TOOLS = [PAINT, STOP]
SCHEMAS = {"paint": COLOUR, "stop": {"type": "object", "maxProperties": 0}}
# an end that is allowed is taken at once, and white space that is not asked for hardly ever
SPACES = [
    str(token)
    for piece, token in json.loads(byte_level_json())["model"]["vocab"].items()
    if set(piece) <= set("ĠĊĉč")
]
END: Any = {"2": 8} | dict.fromkeys(SPACES, -8)
RANDOM: dict[str, Any] = {"model": "toy", "temperature": 1.0, "max_tokens": 200, "logit_bias": END}


def model(folder: Path, template: str, special_tags: bool = False) -> str:
    return str(chat_model(tiny_llama(folder, max_len=4096), template, special_tags))


@pytest.fixture(scope="module", params=list(TEMPLATES))
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Inside]:
    folder = model(tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])
    with inside(**OPTIONS, model=folder) as found:
        yield found
        found.rest()


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    folder = model(tmp_path_factory.mktemp("plain"), TEMPLATES["hermes"])
    with inside(**OPTIONS, model=folder) as found:
        yield found
        found.rest()


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    folder = model(tmp_path_factory.mktemp("thinker"), THINKING, special_tags=True)
    with inside(**OPTIONS, model=folder) as found:
        yield found
        found.rest()


def client_of(server: Inside) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=100)


@pytest.fixture
def client(server: Inside) -> Iterator[openai.OpenAI]:
    with client_of(server) as found:
        yield found


@pytest.fixture
def plain(plain_server: Inside) -> Iterator[openai.OpenAI]:
    """Of one format, for what knows none."""
    with client_of(plain_server) as found:
        yield found


@pytest.fixture
def thinking(thinker: Inside) -> Iterator[openai.OpenAI]:
    with client_of(thinker) as found:
        yield found


def fits(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


def is_json(text: str) -> bool:
    return fits(text, COLOUR)


def matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) is not None


STRUCTURES: list[tuple[dict[str, Any], Any]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "c", "schema": COLOUR},
            }
        },
        is_json,
    ),
    ({"extra_body": {"structured_outputs": {"json": COLOUR}}}, is_json),
    ({"extra_body": {"structured_outputs": {"regex": "[ab]{2,5}"}}}, matches("[ab]{2,5}")),
    ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, matches("yes|no")),
    (
        {"extra_body": {"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}},
        matches("a[bc]"),
    ),
    ({"extra_body": {"guided_json": json.dumps(COLOUR)}}, is_json),
    ({"extra_body": {"guided_regex": "[ab]{2,5}"}}, matches("[ab]{2,5}")),
    ({"extra_body": {"guided_choice": ["yes", "no"]}}, matches("yes|no")),
    ({"extra_body": {"guided_grammar": 'start: "a" "b"'}}, matches("ab")),
    ({"extra_body": {"json_schema": json.dumps(COLOUR)}}, is_json),
    ({"extra_body": {"regex": "[ab]{2,5}"}}, matches("[ab]{2,5}")),
    ({"extra_body": {"ebnf": 'root ::= "a" ("b" | "c")'}}, matches("a[bc]")),
]


def test_an_answer_is_what_each_field_says_it_must_be(plain: openai.OpenAI) -> None:
    for place, (fields, holds) in enumerate(STRUCTURES):
        asked = RANDOM | fields | {"seed": place}
        said = plain.chat.completions.create(messages=HELLO, n=2, **asked)
        for choice in said.choices:
            assert choice.finish_reason == "stop"
            assert holds(choice.message.content), fields
        if place % 4 == 0:
            pieces = list(plain.chat.completions.create(messages=HELLO, stream=True, **asked))
            told = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert told == said.choices[0].message.content
        if "response_format" in asked:
            asked["extra_body"] = {"response_format": asked.pop("response_format")}
        done = plain.completions.create(prompt=["Hello", [5, 6]], **asked)
        assert all(holds(choice.text) for choice in done.choices)


def test_any_json_object_is_one_or_is_told_as_cut(plain: openai.OpenAI) -> None:
    finished = 0
    for seed in range(4):
        said = plain.chat.completions.create(
            messages=HELLO, response_format={"type": "json_object"}, **RANDOM, seed=seed
        )
        (choice,) = said.choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
            finished += 1
        else:
            assert choice.finish_reason == "length"
            assert (choice.message.content or "").lstrip().startswith("{")
    assert finished


class Colour(pydantic.BaseModel):
    """What the client's own helper asks for, and reads back."""

    name: Literal["red", "green", "blue"]
    share: Literal[1, 2, 3]


def test_the_clients_own_parsing_of_a_structure(plain: openai.OpenAI) -> None:
    said = plain.chat.completions.parse(messages=HELLO, response_format=Colour, **RANDOM, seed=3)
    assert isinstance(said.choices[0].message.parsed, Colour)


def test_an_answer_cut_in_the_middle_is_told_as_it_is(plain: openai.OpenAI) -> None:
    fields = RANDOM | {"max_tokens": 3, "tools": TOOLS, "tool_choice": "required", "seed": 1}
    (choice,) = plain.chat.completions.create(messages=HELLO, **fields).choices
    assert choice.finish_reason == "length"
    held = {"messages": HELLO, "max_tokens": 3, "temperature": 1.0, "model": "toy"}
    ask: Any = plain.chat.completions.create
    (choice,) = ask(**held, extra_body={"guided_json": COLOUR}).choices
    assert choice.finish_reason == "length"
    assert choice.message.content


def check_calls(message: Any, names: set[str], most: int) -> None:
    assert message.content is None
    assert 1 <= len(message.tool_calls) <= most
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids)
    for call in message.tool_calls:
        assert call.type == "function"
        assert call.function.name in names
        assert fits(call.function.arguments, SCHEMAS[call.function.name])


@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": "required"}, {"paint", "stop"}, 99),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"paint", "stop"}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "paint"}}}, {"paint"}, 1),
    ],
)
def test_calls_are_valid_whole_and_streamed(
    client: openai.OpenAI, fields: Any, names: set[str], most: int
) -> None:
    ends = []
    for seed in range(2):
        asked = RANDOM | fields | {"messages": HELLO, "tools": TOOLS, "seed": seed}
        (choice,) = client.chat.completions.create(**asked).choices
        chunks = list(client.chat.completions.create(stream=True, **asked))
        told = added_up(chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks)
        calls = [call["function"] for call in told.get("tool_calls", [])]
        whole = choice.message.tool_calls or []
        assert calls == [call.function.model_dump() for call in whole]  # type: ignore[union-attr]
        assert not told.get("content")
        assert chunks[-1].choices[0].finish_reason == choice.finish_reason
        ends.append(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            check_calls(choice.message, names, most)
    assert "tool_calls" in ends
    assert set(ends) <= {"tool_calls", "length"}


def test_a_model_that_may_call_says_what_it_likes(client: openai.OpenAI) -> None:
    asked: Any = RANDOM | {"messages": HELLO, "max_tokens": 20, "seed": 4}
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    bare = client.chat.completions.create(**asked)
    assert none.choices[0].message.content == bare.choices[0].message.content
    said = client.chat.completions.create(**asked, tools=TOOLS)
    assert said.choices[0].finish_reason in ("stop", "length", "tool_calls")
    for strict in (True, False):
        tools = [{"type": "function", "function": STOP["function"] | {"strict": strict}}]
        only: Any = {"tools": tools, "parallel_tool_calls": False}
        found = client.chat.completions.create(**asked, **only).choices[0].message
        assert len(found.tool_calls or []) <= 1


def test_results_of_calls_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    asked: Any = RANDOM | {"tools": TOOLS, "seed": 2}
    named: Any = {"type": "function", "function": {"name": "stop"}}
    (choice,) = client.chat.completions.create(messages=HELLO, tool_choice=named, **asked).choices
    assert choice.message.tool_calls
    call_id = choice.message.tool_calls[0].id
    # as a program sends it: the message itself, with all its fields
    back: Any = [*HELLO, choice.message.model_dump()]
    back.append({"role": "tool", "tool_call_id": call_id, "content": "done"})
    again = client.chat.completions.create(messages=back, tool_choice=named, **asked)
    assert again.choices[0].finish_reason == "tool_calls"
    assert again.usage is not None


def test_the_clients_own_stream_of_calls(client: openai.OpenAI) -> None:
    asked: Any = RANDOM | {"messages": HELLO, "tools": [STOP], "tool_choice": "required", "seed": 1}
    strict = {"type": "object", "properties": {}, "additionalProperties": False}
    asked["tools"] = [{"type": "function", "function": STOP["function"] | {"parameters": strict}}]
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {}
    assert final.choices[0].finish_reason == "tool_calls"


def test_many_clients_at_once_each_have_their_own_calls(server: Inside) -> None:
    async def play() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:

            async def whole(seed: int, name: str) -> Any:
                named: Any = {"type": "function", "function": {"name": name}}
                asked = RANDOM | {"messages": HELLO, "tools": TOOLS, "tool_choice": named}
                found = await client.chat.completions.create(**asked, seed=seed)
                assert found.choices[0].message.tool_calls
                return found.choices[0].message.tool_calls[0].function  # type: ignore[union-attr]

            async def streamed(seed: int, name: str) -> Any:
                named: Any = {"type": "function", "function": {"name": name}}
                asked = RANDOM | {"messages": HELLO, "tools": TOOLS, "tool_choice": named}
                stream = await client.chat.completions.create(**asked, seed=seed, stream=True)
                deltas = [
                    chunk.choices[0].delta.model_dump(exclude_none=True) async for chunk in stream
                ]
                return added_up(deltas)["tool_calls"][0]["function"]

            names = ["paint", "stop", "paint"]
            wholes = await asyncio.gather(*(whole(n, name) for n, name in enumerate(names)))
            pieces = await asyncio.gather(*(streamed(n, name) for n, name in enumerate(names)))
            assert [one.model_dump() for one in wholes] == pieces
            return pieces

    found = asyncio.run(play())
    assert [one["name"] for one in found] == ["paint", "stop", "paint"]
    for one in found:
        assert fits(one["arguments"], SCHEMAS[one["name"]])


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "often"}),
        ("response_format", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
        (
            "response_format",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"not": {}}},
                }
            },
        ),
        ("guided_regex", {"extra_body": {"guided_regex": "(?=a)b"}}),
        ("ebnf", {"extra_body": {"ebnf": "no grammar"}}),
        ("regex", {"extra_body": {"regex": "a", "guided_regex": "a"}}),
        (
            "tools",
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"not": {}}, "strict": True},
                    }
                ]
            },
        ),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_its_field(
    plain: openai.OpenAI, param: str, fields: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        plain.chat.completions.create(**RANDOM | {"messages": HELLO} | fields)
    assert refused.value.param == param


def test_a_grammar_that_nothing_can_go_on_with_ends_its_request_alone(
    plain: openai.OpenAI,
) -> None:
    dead: Any = {"guided_grammar": 'start: "aaaa" X\nX: /b/ & /c/'}
    asked: Any = RANDOM | {"messages": HELLO}
    with pytest.raises(openai.InternalServerError) as failed:
        plain.chat.completions.create(**asked, extra_body=dead)
    assert failed.value.code == "answer_failed"
    stream = plain.chat.completions.create(**asked, extra_body=dead, stream=True)
    with pytest.raises(openai.APIError):
        list(stream)
    assert plain.chat.completions.create(**asked, extra_body={"regex": "a"}).choices


# --- reasoning --------------------------------------------------------------------------------

END_THINK = 501
# so likely that it comes soon, and not so likely that it comes at once
SOON: Any = {"logit_bias": END | {str(END_THINK): 3}}


def test_reasoning_is_told_apart_and_what_is_held_begins_behind_it(
    thinking: openai.OpenAI,
) -> None:
    reasoned = 0
    for seed in range(4):
        asked: Any = RANDOM | {"messages": HELLO, "seed": seed, "extra_body": {"regex": "[ab]+"}}
        asked |= SOON
        (choice,) = thinking.chat.completions.create(**asked).choices
        reasoning = getattr(choice.message, "reasoning_content", None)
        chunks = list(thinking.chat.completions.create(stream=True, **asked))
        told = added_up(chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks)
        assert told.get("reasoning_content") == reasoning
        assert told.get("content", "") == choice.message.content
        assert "think>" not in f"{reasoning}{choice.message.content}"
        if choice.finish_reason == "stop":
            assert re.fullmatch("[ab]+", choice.message.content or "")
            reasoned += reasoning is not None
    assert reasoned


def test_calls_come_behind_the_reasoning(thinking: openai.OpenAI) -> None:
    called = 0
    for seed in range(4):
        asked: Any = RANDOM | {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
        asked |= SOON | {"seed": seed}
        (choice,) = thinking.chat.completions.create(**asked).choices
        if choice.finish_reason == "tool_calls":
            check_calls(choice.message, {"paint", "stop"}, 99)
            called += 1
    assert called


def test_reasoning_is_not_told_or_not_told_apart_where_that_is_asked(
    thinking: openai.OpenAI,
) -> None:
    asked: Any = RANDOM | {"messages": HELLO, "seed": 1} | SOON
    extra: Any = {"regex": "[ab]{3}"}
    ask = thinking.chat.completions.create
    whole = ask(**asked, extra_body=extra).choices[0].message
    silent = ask(**asked, extra_body=extra | {"include_reasoning": False}).choices[0].message
    assert silent.content == whole.content
    assert not hasattr(silent, "reasoning_content")
    mixed = ask(**asked, extra_body=extra | {"separate_reasoning": False}).choices[0].message
    assert not hasattr(mixed, "reasoning_content")
    assert (mixed.content or "").endswith(whole.content or "none")
    off: Any = extra | {"chat_template_kwargs": {"enable_thinking": False}}
    at_once = ask(**asked, extra_body=off).choices[0].message
    assert re.fullmatch("[ab]{3}", at_once.content or "")
    assert not hasattr(at_once, "reasoning_content")
