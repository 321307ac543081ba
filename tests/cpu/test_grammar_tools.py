"""Tool calls held by a grammar: what may be said is what the parser reads, its arguments keep to
the tool's schema, and reasoning stays free before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

import walks
from stepahead.errors import InvalidParameter
from stepahead.grammar import (
    GrammarCompiler,
    ToolGrammar,
    Vocabulary,
    after_reasoning,
    tool_grammar,
)
from stepahead.parse import AnswerStream, Arguments, CallStart, Content, Reasoning, Tool, merged
from stepahead.structured import Grammar, StructuredOutputs

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1, "maxLength": 8},
        "limit": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["web", "web news", "</arg_key>"]},
        "near": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["query", "near"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("search", SEARCH, True), Tool("stop", NOTHING, True)]
SPECIAL = {"<tool_call>": 256, "</tool_call>": 257, "</arg_value>": 258, "</think>": 259}
BYTES = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPECIAL), b"<eos>"],
    [*SPECIAL.values(), 260],
    [260],
)
COMPILER = GrammarCompiler(BYTES)
TOKENIZER = BYTES.tokenizer()


def takes(grammar: Grammar, text: str, special: dict[str, int] | None = None) -> bool:
    """Whether `text` is in the language; `special` are tags that are tokens."""
    ids, at = list[int](), 0
    while at < len(text):
        tag = next((tag for tag in special or {} if text.startswith(tag, at)), None)
        ids += [(special or {})[tag]] if tag else list(text[at].encode())
        at += len(tag) if tag else 1
    matcher = llguidance.LLMatcher(TOKENIZER, grammar.text, log_level=0)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def held(choice: str = "auto", tool_format: Any = "hermes", **more: Any) -> Grammar:
    lark = tool_grammar(ToolGrammar(TOOLS, choice, tool_format, **more))
    assert lark is not None
    return COMPILER.check(lark, "tools")


ONE = {
    "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "glm": "<tool_call>stop</tool_call>",
    "llama3": '{"name": "stop", "parameters": {}}',
}
BETWEEN = {"hermes": "\n", "glm": "", "llama3": "; "}


@pytest.mark.parametrize("tool_format", ONE)
def test_what_each_tool_choice_lets_a_model_say(tool_format: str) -> None:
    one = ONE[tool_format]
    two = one + BETWEEN[tool_format] + one
    free = "Not now, 3 < 4."
    for choice, says_free in (("auto", True), ("required", False)):
        many, single = held(choice, tool_format), held(choice, tool_format, parallel=False)
        assert takes(many, one)
        assert takes(many, two)
        assert takes(single, one)
        assert not takes(single, two)
        assert takes(many, free) == takes(single, free) == says_free
        assert takes(many, "") == says_free
        assert not takes(many, one.replace("stop", "go"))
    named = held("stop", tool_format)
    assert takes(named, one)
    assert not takes(named, two)
    assert not takes(named, free)
    assert not takes(named, one.replace("stop", "search"))
    if tool_format != "llama3":  # whose calls are the whole answer
        assert takes(held("auto", tool_format), f"{free} {one} {free} <tool_cal> {one}{free}")
        assert not takes(held("auto", tool_format), f"{free} <tool_call> {free}")


@pytest.mark.parametrize(
    ("tool_format", "as_tokens"),
    [("hermes", False), ("glm", False), ("llama3", False), ("hermes", True), ("glm", True)],
)
def test_random_calls_are_read_back_and_keep_to_their_schema(
    tool_format: str, as_tokens: bool, tmp_path: Path
) -> None:
    """Random logits under the grammar; the text through the parser; the arguments to jsonschema."""
    vocabulary, special = walks.small_vocabulary(tmp_path), dict[str, int]()
    if as_tokens:
        table = vocabulary.token_bytes.copy()
        tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>")
        special = {tag: 500 + number for number, tag in enumerate(tags)}
        for tag, token in special.items():
            table[token] = tag.encode()
        vocabulary = Vocabulary(
            table, [*vocabulary.special_ids, *special.values()], vocabulary.eos_ids
        )
    compiler, grammars = GrammarCompiler(vocabulary), list[Grammar]()
    for choice in ("required", "search"):
        lark = tool_grammar(ToolGrammar(TOOLS, choice, tool_format, special=special))  # type: ignore[arg-type]
        assert lark is not None
        grammars += [compiler.check(lark, "tools")] * 16
    report = walks.Report()
    made = walks.answers(vocabulary, grammars, report, max_tokens=250)
    assert report.wrong == []
    texts = [answer.decode() for answer in made if answer is not None]
    assert len(texts) >= 0.6 * len(grammars)
    schemas, calls = {tool.name: tool.parameters for tool in TOOLS}, 0
    for text in texts:
        parser = AnswerStream(TOOLS, tool_format)  # type: ignore[arg-type]
        events = merged([*parser.push(text), *parser.finish()])
        starts = [event for event in events if isinstance(event, CallStart)]
        arguments = [event for event in events if isinstance(event, Arguments)]
        assert len(starts) == len(arguments) == len(events) / 2 >= 1
        for start, one in zip(starts, arguments, strict=True):
            jsonschema.validate(json.loads(one.text), schemas[start.name])
            calls += 1
    print(f"{tool_format}: {len(texts)} of {len(grammars)} finished, {calls} calls")


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_a_text_of_glm_has_the_lengths_and_values_of_its_schema(special: dict[str, int]) -> None:
    grammar = held("search", "glm", special=special)

    def call(query: str, kind: str = "") -> str:
        pairs = {"query": query} | ({"kind": kind} if kind else {}) | {"near": '{"x": 1}'}
        tags = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in pairs.items()
        )
        return f"<tool_call>search{tags}</tool_call>"

    for query in ("a", "a < b", "</arg_va", "12345678", "你好"):
        assert takes(grammar, call(query), special)
    for query in ("", "123456789"):
        assert not takes(grammar, call(query), special)
    for kind in ("web", "web news", "</arg_key>"):
        assert takes(grammar, call("a", kind), special)
    assert not takes(grammar, call("a", "web new"), special)


def test_a_tag_that_is_a_token_is_that_token_and_no_text() -> None:
    grammar = held("required", "glm", special=SPECIAL)
    assert takes(grammar, ONE["glm"], SPECIAL)
    assert not takes(grammar, ONE["glm"])
    free = held("auto", "glm", special=SPECIAL)
    assert takes(free, f"so {ONE['glm']} so", SPECIAL)
    assert not takes(free, "so <tool_call>", SPECIAL)


def test_tools_that_need_not_be_called_and_are_not_strict_hold_nothing() -> None:
    loose = [Tool(tool.name, tool.parameters) for tool in TOOLS]
    assert tool_grammar(ToolGrammar(loose)) is None
    for tool_format, one in ONE.items():
        single = tool_grammar(ToolGrammar(loose, parallel=False, tool_format=tool_format))  # type: ignore[arg-type]
        assert single is not None, "one call at most is to be held"
        grammar = COMPILER.check(single, "tools")
        assert takes(grammar, one)
        assert takes(grammar, "Not now.")
        assert not takes(grammar, one + BETWEEN[tool_format] + one)
    lark = tool_grammar(ToolGrammar(loose, "required"))
    assert lark is not None
    anything = '<tool_call>\n{"name": "search", "arguments": {"x": [1]}}\n</tool_call>'
    assert takes(COMPILER.check(lark, "tools"), anything)
    lark = tool_grammar(ToolGrammar(loose, "required", "glm"))
    assert lark is not None
    pair = "<arg_key>x</arg_key><arg_value>a < b</arg_value>"
    assert takes(COMPILER.check(lark, "tools"), f"<tool_call>search{pair}{pair}</tool_call>")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_reasoning_is_free_and_the_answer_behind_it_held(
    inside: bool, special: dict[str, int]
) -> None:
    begin = "" if inside else "<think>"
    answer = COMPILER.compile(StructuredOutputs(choice=["yes", "no"]))
    grammar = COMPILER.check(after_reasoning(answer, special, inside), "structured_outputs")
    for thought in ("", "\nyes, no: 3 < 4 </thin>\n", "你好"):
        for between in ("", "\n", "\n\n"):
            text = f"{begin}{thought}</think>{between}yes"
            assert takes(grammar, text, special)
            parser = AnswerStream(thinks=True, inside=inside)
            events = merged([*parser.push(text), *parser.finish()])
            bare = thought.strip("\n")
            assert events == [*([Reasoning(bare)] if bare else []), Content("yes")]
        assert not takes(grammar, f"{begin}{thought}</think>maybe", special)
        assert not takes(grammar, f"{begin}{thought}", special)
    calls = tool_grammar(ToolGrammar(TOOLS, "required", "glm", special=special))
    assert calls is not None
    both = COMPILER.check(after_reasoning(Grammar(calls), special, inside), "tools")
    assert takes(both, f"{begin}hm</think>\n{ONE['glm']}", special)
    assert not takes(both, f"{begin}hm</think>\nno", special)


@pytest.mark.parametrize("special", [{}, SPECIAL, SPECIAL | {"<think>": 258}])
def test_reasoning_that_the_prompt_has_not_opened_may_be_left_out(
    special: dict[str, int],
) -> None:
    answer = COMPILER.compile(StructuredOutputs(json={"enum": ["yes", "no"]}))
    text = after_reasoning(answer, special, inside=False, optional=True)
    grammar = COMPILER.check(text, "structured_outputs")
    assert takes(grammar, '"yes"', special)
    assert takes(grammar, '<think>3 < 4, "no"\n</think>\n\n"yes"', special)
    assert not takes(grammar, '<think>"yes"', special)
    assert not takes(grammar, '</think>"yes"', special)
    assert not takes(grammar, "<think></think>maybe", special)
    opened = after_reasoning(answer, special, inside=True, optional=True)
    held = COMPILER.check(opened, "structured_outputs")
    assert takes(held, 'hm</think>"yes"', special)
    assert not takes(held, '"yes"', special)


@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
def test_arguments_are_an_object_whatever_the_schema(tool_format: Any) -> None:
    for schema in ({}, {"anyOf": [{"type": "null"}, {"required": ["x"]}]}, {"description": "x"}):
        lark = tool_grammar(ToolGrammar([Tool("f", schema, True)], "required", tool_format))
        assert lark is not None
        grammar = COMPILER.check(lark, "tools")
        for arguments, fine in (('{"x":1}', True), ("null", False), ("[]", False), ("1", False)):
            if tool_format == "hermes":
                call = f'{{"name": "f", "arguments": {arguments}}}'
                call = f"<tool_call>\n{call}\n</tool_call>"
            else:
                call = f'{{"name": "f", "parameters": {arguments}}}'
            assert takes(grammar, call) == fine, call


@pytest.mark.parametrize(
    ("tools", "choice", "tool_format", "says"),
    [
        ([], "auto", "hermes", "tools is empty"),
        ([TOOLS[0], TOOLS[0]], "auto", "hermes", "two tools of one name"),
        (TOOLS, "nobody", "hermes", "names no tool"),
        ([Tool("a", {"not": {}}, True)], "auto", "hermes", "not"),
        ([Tool("a", {"x-guidance": {}}, True)], "auto", "llama3", "x-guidance"),
        ([Tool("a", {"type": "array"}, True)], "auto", "llama3", 'type of parameters must be "obj'),
        ([Tool("a", {"type": "object"}, True)], "auto", "glm", '"additionalProperties": false'),
        (
            [Tool("a", NOTHING | {"anyOf": []}, True)],
            "auto",
            "glm",
            "anyOf can't be held in this format",
        ),
        (
            [
                Tool(
                    "a", NOTHING | {"properties": {"b": {"type": "string", "format": "date"}}}, True
                )
            ],
            "auto",
            "glm",
            "format of the text b",
        ),
        (
            [
                Tool(
                    "a",
                    NOTHING | {"properties": {"b": {"type": "string", "maxLength": "3}/"}}},
                    True,
                )
            ],
            "auto",
            "glm",
            "the lengths of b",
        ),
        (
            [Tool("a", NOTHING | {"properties": {"b": {"type": "string", "enum": "abc"}}}, True)],
            "auto",
            "glm",
            "enum of b must be a list",
        ),
        (
            [Tool("a", NOTHING | {"properties": {"b": {"const": "</arg_value>"}}}, True)],
            "auto",
            "glm",
            "no value of b",
        ),
    ],
)
def test_tools_that_can_not_be_held_are_refused_by_name(
    tools: list[Tool], choice: str, tool_format: Any, says: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        COMPILER.check(tool_grammar(ToolGrammar(tools, choice, tool_format)) or "", "tools")
    assert says in str(refused.value)
    assert refused.value.param in ("tools", "tool_choice")
