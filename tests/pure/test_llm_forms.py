"""Answers told apart: the tags that a prompt has us look for, streams that add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_makers import GLM, HERMES, LLAMA3, TEMPLATES, THINKING, added_up, chat_model
from stepahead.errors import InvalidParameter
from stepahead.llm.collect import Collector, Delta
from stepahead.llm.forms import Form
from stepahead.llm.prompts import Prompt
from stepahead.llm.reader import Reader
from stepahead.llm.tools import read_tools
from stepahead.parse import Tool
from stepahead.parse.formats import thinks_of, tool_format_of
from stepahead.serve.calls import Call
from stepahead.serve.replies import chat_reply
from stepahead.serve.requests import read_chat_request
from stepahead.serve.streams import DONE, ChatStory
from stepahead.structured import StructuredOutputs
from stepahead.text import Tokenizer
from stepahead.text.texts import ToyTexts
from stepahead.types import Finish, Outputs, SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
WISH = read_tools(TOOLS)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)
PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "\n", " "),
        *("<arg_key>a</arg_key>", "<arg_value>3</arg_value>", "add", "Hello", "你好", "</", "; "),
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "parameters": {"b": "<x>"}}',
        '{"name": "add"',
    ]
)


def test_the_format_is_the_one_that_the_template_teaches() -> None:
    for name, template in TEMPLATES.items():
        assert tool_format_of("auto", template) == name
        assert tool_format_of("none", template) is None
        assert not thinks_of("auto", template)
    for template in (None, "{{ messages }}", "<tool_call><function=x></function></tool_call>"):
        assert tool_format_of("auto", template) is None
    assert tool_format_of("qwen25", GLM) == "hermes"
    assert tool_format_of("glm45", HERMES) == "glm"
    assert tool_format_of("llama3_json", None) == "llama3"
    assert thinks_of("auto", THINKING)
    assert not thinks_of("none", THINKING)
    assert thinks_of("deepseek-r1", None)


def reader(folder: Path, template: str, special_tags: bool = False, **parsers: Any) -> Reader:
    texts = Tokenizer.load(chat_model(folder, template, special_tags))
    return Reader(texts, 600, texts.eos_ids, **parsers)


def test_a_prompt_knows_what_its_answer_may_have(tmp_path: Path) -> None:
    plain = SamplingParams()
    found = reader(tmp_path / "a", HERMES)
    assert found.read_chat(HELLO, plain).form is None
    prompt = found.read_chat(HELLO, plain, WISH)
    assert prompt.form == Form(WISH.tools if WISH else (), "hermes")
    assert prompt.grammar is None
    assert "<tools>" in (prompt.text or "")
    thinking = reader(tmp_path / "b", THINKING)
    assert thinking.read_chat(HELLO, plain).form == Form(thinks=True, inside=True)
    assert thinking.read_chat(HELLO, plain, enable_thinking=False).form is None
    assert thinking.read_chat(HELLO, plain, parse=False).form is None
    silent = thinking.read_chat(HELLO, plain, WISH, enable_thinking=False).form
    assert silent is not None
    assert not silent.thinks
    closed = reader(tmp_path / "c", THINKING, reasoning_parser="none")
    assert closed.read_chat(HELLO, plain).form is None
    itself = reader(tmp_path / "d", HERMES, reasoning_parser="qwen3")
    assert itself.read_chat(HELLO, plain).form == Form(thinks=True, inside=False)


def test_structure_and_calls_begin_behind_the_reasoning(tmp_path: Path) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    found = reader(tmp_path, THINKING)
    behind = found.read_chat(HELLO, params).grammar
    at_once = found.read_chat(HELLO, params, enable_thinking=False).grammar
    assert behind is not None
    assert at_once is not None
    assert "think" in behind.text
    assert "think" not in at_once.text
    untold = found.read_chat(HELLO, params, parse=False)
    assert untold.grammar == behind
    calls = read_tools(TOOLS, "required")
    assert "think" in found.read_chat(HELLO, SamplingParams(), calls).grammar.text  # type: ignore[union-attr]


@pytest.mark.parametrize("special_tags", [False, True])
def test_free_text_is_not_let_take_the_reasonings_tag_for_its_own(
    tmp_path: Path, special_tags: bool
) -> None:
    """Where it is a token of its own it can't; else the reasoning must come, or what is behind it
    could go unheld."""
    found = reader(tmp_path, HERMES, special_tags, reasoning_parser="qwen3")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]

    def begins(choice: str) -> str:
        prompt = found.read_chat(HELLO, SamplingParams(), read_tools(strict, choice))
        assert prompt.grammar is not None
        lark: str = msgspec.json.decode(prompt.grammar.text)["grammars"][0]["lark_grammar"]
        return lark.splitlines()[0]

    tag = "<[500]>" if special_tags else '"<think>"'
    assert begins("required").startswith(f"start: [{tag}")
    assert begins("auto").startswith(f"start: [{tag}" if special_tags else f"start: {tag}")


def test_what_a_model_can_not_do_is_refused_by_name(tmp_path: Path) -> None:
    held = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    found = reader(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidParameter, match="--tool-call-parser") as caught:
        found.read_chat(HELLO, SamplingParams(), WISH)
    assert caught.value.param == "tools"
    prompt = found.read_chat(HELLO, SamplingParams(), WISH, untold=True)
    assert (prompt.form, prompt.grammar, prompt.text) == (None, None, "Hello")
    for more in ({"choice": "required"}, {"parallel": False}):
        with pytest.raises(InvalidParameter, match="--tool-call-parser"):
            found.read_chat(HELLO, SamplingParams(), read_tools(TOOLS, **more), untold=True)
    with pytest.raises(InvalidParameter, match="both") as caught:
        found.read_chat(HELLO, held, WISH, param="guided_regex")
    assert caught.value.param == "guided_regex"
    bad = SamplingParams(structured_outputs=StructuredOutputs(json={"not": {}}))
    with pytest.raises(InvalidParameter) as caught:
        found.hold(Prompt([1]), bad, "response_format")
    assert caught.value.param == "response_format"
    assert "structured_outputs" not in str(caught.value)
    endless = Reader(ToyTexts(90), 90, ())
    with pytest.raises(InvalidParameter, match="end-of-sequence") as caught:
        endless.hold(Prompt([1]), held, "regex")
    assert caught.value.param == "regex"


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if value and name != "role"}
    kept["tool_calls"] = [call["function"] for call in kept.get("tool_calls", [])]
    return kept


@settings(max_examples=300)
@given(
    st.lists(PIECES, max_size=10).map("".join),
    CUTS,
    st.sampled_from(["hermes", "glm", "llama3"]),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
def test_deltas_add_up_to_the_whole_message(
    text: str, cuts: list[int], tool_format: Any, thinks: tuple[bool, bool], told: bool, reason: Any
) -> None:
    tools = tuple(map(Tool.of, TOOLS))
    form = Form(tools, tool_format, *thinks)
    body = {"messages": HELLO, "stream": True, "tools": TOOLS, "include_reasoning": told}
    body["stream_options"] = {"include_usage": True}
    asked = read_chat_request(msgspec.json.encode(body))
    call = Call("x", [Prompt([3], None, None, form)], asked.params, True)
    story = ChatStory(asked, call, ToyTexts(90), 5, "toy")
    *first, last = pieces_of(text, cuts)
    items = [(0, Delta("", 0, piece, [4])) for piece in first]
    data = story.begin() + b"".join(story.tell([item]) for item in items)
    data += story.tell([(0, Delta("", 0, last, [4, 5], None, reason))]) + story.end()
    assert data.endswith(DONE)
    chunks = [msgspec.json.decode(line[6:]) for line in data.split(b"\n\n")[:-2]]
    assert chunks[-1]["usage"]["completion_tokens"] == len(first) + 2
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    want = form.message(text)
    if not told:
        want.pop("reasoning_content", None)
    assert without_ids(added_up(choice["delta"] for choice in choices)) == without_ids(want)
    ends = [choice["finish_reason"] for choice in choices]
    called = "tool_calls" in want and reason == "stop"
    assert ends == [None] * (len(ends) - 1) + ["tool_calls" if called else reason]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(chat_model(tmp_path_factory.mktemp("tags"), THINKING, special_tags=True))


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 503) | st.integers(500, 503) | st.integers(0, 2), max_size=20))
def test_tags_that_are_tokens_are_told_and_other_special_tokens_are_not(
    tagged: Tokenizer, ids: list[int]
) -> None:
    """Whole and streamed; without a form none of them is, as ever."""
    form = Reader(tagged, 600, tagged.eos_ids).read_chat(HELLO, SamplingParams(), WISH).form
    assert form is not None
    assert form.shown_ids == {500, 501, 502, 503}
    kept = [token for token in ids if token > 2]
    # after the same prompt, as a decoder may begin a text otherwise
    want = tagged.decode([9, *kept], False).removeprefix(tagged.decode([9], False))
    for streaming in (False, True):
        collector = Collector(tagged)
        collector.open("q", Prompt([9], None, None, form), SamplingParams(), [1], streaming)
        texts: list[str] = []
        for place, token in enumerate(ids[:-1]):
            columns = np.array([1], np.int64), np.array([token], np.int32)
            texts += [one.text for one in collector.take(Outputs(place, *columns)).deltas]
        tokens = np.array(ids, np.int32)
        columns = np.array([1] * bool(ids), np.int64), tokens[-1:]
        news = collector.take(Outputs(99, *columns, finishes=(Finish(1, "length", tokens),)))
        (output,) = news.done[0][1].outputs
        assert output.text == want
        if streaming:
            assert "".join(texts + [one.text for one in news.deltas]) == want
        else:
            assert without_ids(output.message or {}) == without_ids(form.message(want))


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_its_grammar_ends_has_its_last_token(streaming: bool) -> None:
    """Without a grammar a stop without a reason is an end of sequence, which is no text."""
    texts = ToyTexts(90)
    reader = Reader(texts, 90, texts.eos_ids)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab?"))
    held = reader.hold(Prompt([9]), params)
    assert held.grammar is not None
    a, b, eos = 2, 3, 1
    for prompt, tokens, stop, want in (
        (held, [a, b], None, "ab"),
        (held, [a, eos], None, "a"),
        (held, [a, b], b, "a"),
        (Prompt([9]), [a, eos], None, "a"),
        (held, [], None, ""),
    ):
        collector = Collector(texts)
        collector.open("q", prompt, params, [1], streaming)
        ended = Finish(1, "stop", np.array(tokens, np.int32), stop)
        columns = np.zeros(0, np.int64), np.zeros(0, np.int32)
        news = collector.take(Outputs(0, *columns, finishes=(ended,)))
        assert news.done[0][1].outputs[0].text == want
        assert "".join(delta.text for delta in news.deltas) == want * streaming


def test_a_whole_answer_is_told_as_openai_does() -> None:
    collector, form = Collector(ToyTexts(90)), Form(tuple(map(Tool.of, TOOLS)), "hermes", True)
    text = '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    def reply(text: str, reason: Any = "stop", **fields: Any) -> Any:
        body = msgspec.json.encode({"messages": HELLO, "tools": TOOLS, **fields})
        asked = read_chat_request(body)
        collector.open("q", Prompt([3]), SamplingParams(), [1])
        ended = Finish(1, reason, np.array([4], np.int32))
        (_, output) = collector.take(Outputs(0, np.zeros(0), np.zeros(0), (), (ended,))).done[0]
        choices = [replace(output.outputs[0], message=form.message(text))]
        told = chat_reply(asked, ToyTexts(90), "x", 5, "toy", replace(output, outputs=choices))
        return msgspec.json.decode(msgspec.json.encode(told))["choices"][0]

    whole = reply(text)
    assert whole["finish_reason"] == "tool_calls"
    (call,) = whole["message"].pop("tool_calls")
    assert call.pop("id").startswith("call_0")
    assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    want = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm"}
    assert whole["message"] == want
    assert "reasoning_content" not in reply(text, include_reasoning=False)["message"]
    cut = reply(text[:-14], "length")
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1'
    assert reply("Hello")["message"]["content"] == "Hello"
    assert reply("<think>hm")["message"]["content"] == ""
    assert "tool_calls" not in reply("Hello")["message"]


def test_arguments_of_calls_reach_a_template_as_an_object(tmp_path: Path) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": "x < y"}'},
            }
        ],
    }
    said = [*HELLO, called, {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
    wanted = {
        HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x < y"}}\n</tool_call>',
        GLM: "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>x < y</arg_value></tool_call>",
        LLAMA3: '{"name": "add", "parameters": {"a": 1, "b": "x < y"}}',
    }
    for place, (template, want) in enumerate(wanted.items()):
        found = reader(tmp_path / str(place), template)
        prompt = found.read_chat(said, SamplingParams(), WISH).text or ""
        assert f"assistant\n{want}<|im_end|>" in prompt
        assert "tool\n3<|im_end|>" in prompt
