"""The grammar of an answer that calls tools, or of one that follows reasoning.

Knows how the formats of `parse` are written and what arguments a tool takes; no tokens but those
special ones that stand for a tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stepahead.errors import InvalidParameter
from stepahead.grammar.lark import literal, with_options
from stepahead.grammar.schema import schema_text
from stepahead.parse import Tool
from stepahead.parse.answer import THINK, THINK_END, ToolFormat
from stepahead.parse.glm import CLOSE, KEY, KEY_END, OPEN, VALUE, VALUE_END
from stepahead.structured import Grammar

Choice: TypeAlias = Literal["auto", "required"] | str
_ANY_TEXT = r"/(?s:.*)/"


@dataclass(frozen=True)
class ToolGrammar:
    """What a client asks of its tools.

    `choice` is "auto", "required" or the name of the one tool to call.  `parallel` allows several
    calls.  `special` are the texts of the vocabulary's special tokens with their ids: a tag that is
    one of them is that token, any other is its text, however it is cut into tokens.
    """

    tools: Sequence[Tool]
    choice: Choice = "auto"
    tool_format: ToolFormat = "hermes"
    parallel: bool = True
    special: Mapping[str, int] = field(default_factory=dict)


def tool_grammar(asked: ToolGrammar) -> str | None:
    """Its text for `GrammarCompiler.check`; None where nothing is to be held: the model may call or
    not, as often as it likes, and no tool is strict.

    Raises InvalidParameter ("tools" or "tool_choice").
    """
    tools = list(asked.tools)
    if not tools:
        raise InvalidParameter("tools is empty; leave it out", "tools")
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidParameter("tools holds two tools of one name; rename one", "tools")
    if asked.choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == asked.choice]
        if not tools:
            raise InvalidParameter(
                f"tool_choice names no tool of tools: {asked.choice!r}", "tool_choice"
            )
        return _lark(ToolGrammar(tools, "required", asked.tool_format, False, asked.special))
    if asked.choice == "auto" and asked.parallel and not any(tool.strict for tool in tools):
        return None
    return _lark(asked)


def after_reasoning(
    grammar: Grammar, special: Mapping[str, int], inside: bool, optional: bool = False
) -> str:
    """The text of `grammar` behind reasoning that is free; `inside` if the prompt has opened it.

    `optional`: it may be left out, if `inside` doesn't say otherwise.  Not for a `grammar` that
    takes the opening tag for text of its own.
    """
    end = _tag(THINK_END, special)
    think = f"TEXT {end}" if THINK_END in special else "think_text"
    reasoning = f"{'' if inside else _tag(THINK, special)} {think} /\\n{{0,2}}/"
    rules = [
        f"start: {f'[{reasoning}]' if optional and not inside else reasoning} @answer",
        f"TEXT: {_ANY_TEXT}",
        f"think_text[lazy]: {_ANY_TEXT} {literal(THINK_END)}",
    ]
    grammars = [
        {"lark_grammar": with_options("\n".join(rules))},
        {"name": "answer", "lark_grammar": grammar.text},
    ]
    return json.dumps({"grammars": grammars})


def _lark(asked: ToolGrammar) -> str:
    rules = {"TEXT": _ANY_TEXT}
    calls: list[str] = []
    for number, tool in enumerate(asked.tools):
        calls.append(f"call{number}")
        rules[calls[-1]] = _CALLS[asked.tool_format](tool, number, asked.special, rules)
    rules["call"] = " | ".join(calls)
    write = _llama_answer if asked.tool_format == "llama3" else _tagged_answer
    write(asked, rules)
    return with_options("\n".join(f"{name}: {body}" for name, body in rules.items()))


def _tagged_answer(asked: ToolGrammar, rules: dict[str, str]) -> None:
    opened = _tag(OPEN, asked.special)
    if asked.choice == "required":
        rules["start"] = (
            f'{opened} call ("\\n"? {opened} call)*' if asked.parallel else f"{opened} call"
        )
        return
    # lazy: the tag ends the free text at its first appearance, so that no call goes unheld
    if OPEN in asked.special:
        rules["open"] = f"TEXT {opened}"
    else:
        rules["open[lazy]"] = f"{_ANY_TEXT} {literal(OPEN)}"
    rules["tail"] = "TEXT"
    rules["start"] = "(open call)* tail" if asked.parallel else "open call | tail"


def _llama_answer(asked: ToolGrammar, rules: dict[str, str]) -> None:
    calls = 'call ("; " call)*' if asked.parallel else "call"
    free = r"| /\s*[^\s{](?s:.*)/ | /\s*/" if asked.choice == "auto" else ""
    rules["start"] = f"{calls} {free}"


def _hermes_call(tool: Tool, number: int, special: Mapping[str, int], rules: dict[str, str]) -> str:
    head = literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f"{head} %json {_arguments(tool)} {literal('}' + chr(10))} {_tag(CLOSE, special)}"


def _llama_call(tool: Tool, number: int, special: Mapping[str, int], rules: dict[str, str]) -> str:
    head = literal(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
    return f"{head} %json {_arguments(tool)} {literal('}')}"


def _arguments(tool: Tool) -> str:
    if not tool.strict:
        return schema_text({"type": "object"}, "tools")
    # arguments are an object, whatever else the schema says of them
    whole = tool.parameters if "$ref" in tool.parameters else {"type": "object"} | tool.parameters
    if whole.get("type", "object") != "object":
        raise _unheld(tool, 'the type of parameters must be "object"')
    return schema_text(whole, "tools")


def _glm_call(tool: Tool, number: int, special: Mapping[str, int], rules: dict[str, str]) -> str:
    tag = {text: _tag(text, special) for text in (KEY, KEY_END, VALUE, VALUE_END, CLOSE)}
    name = literal(tool.name)
    if not tool.strict:
        rules["KEY_TEXT"] = "/[^<>]+/"
        value = _ended("VALUE_TEXT", _text_without(VALUE_END), special, rules)
        pair = f"{tag[KEY]} KEY_TEXT {tag[KEY_END]} {tag[VALUE]} {value}"
        return f"{name} ({pair})* {tag[CLOSE]}"
    given = tool.parameters.get("required")
    required: list[Any] = given if isinstance(given, list) else list[Any]()
    if tool.parameters.get("additionalProperties", True) is not False:
        raise _unheld(tool, 'a strict tool needs "additionalProperties": false')
    if unknown := sorted(tool.parameters.keys() - _GLM_KEYWORDS):
        raise _unheld(tool, f"{unknown[0]} can't be held in this format")
    pairs: list[str] = []
    for place, (key, schema) in enumerate(tool.properties().items()):
        rule = f"arg{number}_{place}"
        if tool.is_text(key):
            text = _glm_text(tool, key, schema)
            value = _ended(f"ARG{number}_{place}", text, special, rules)
        else:
            whole = schema_text(_with_definitions(tool, schema), "tools")
            value = f"%json {whole} {tag[VALUE_END]}"
        rules[rule] = f"{tag[KEY]} {literal(key)} {tag[KEY_END]} {tag[VALUE]} {value}"
        pairs.append(rule if key in required else f"{rule}?")
    return " ".join([name, *pairs, tag[CLOSE]])


_GLM_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
        *("title", "description", "$schema"),
    }
)
_TEXT_KEYWORDS = frozenset(
    {
        *("type", "enum", "const", "minLength", "maxLength"),
        *("title", "description", "default", "examples"),
    }
)
_CALLS = {"hermes": _hermes_call, "llama3": _llama_call, "glm": _glm_call}


def _glm_text(tool: Tool, key: str, schema: dict[str, Any]) -> str:
    """The terminal of a string's value, which has no quotes."""
    if unknown := sorted(schema.keys() - _TEXT_KEYWORDS):
        raise _unheld(tool, f"{unknown[0]} of the text {key} can't be held in this format")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        lengths = [schema.get("minLength", 0), schema.get("maxLength", 0)]
        if not all(isinstance(length, int) and 0 <= length <= 1 << 30 for length in lengths):
            raise _unheld(tool, f"the lengths of {key} must be whole numbers")
        most = schema.get("maxLength", "")
        return f"/(?s:.){{{lengths[0]},{most}}}/ & {_text_without(VALUE_END)}"
    if not isinstance(values, list):
        raise _unheld(tool, f"enum of {key} must be a list")
    texts = [value for value in values if isinstance(value, str) and VALUE_END not in value]
    if not texts:
        raise _unheld(tool, f"no value of {key} can be written in this format")
    return " | ".join(literal(text) or '""' for text in texts)


def _ended(name: str, text: str, special: Mapping[str, int], rules: dict[str, str]) -> str:
    """A value's text and the tag behind it, in one terminal: in two the first one, as long as can
    be, would take the beginning of the tag for text."""
    if VALUE_END in special:
        rules[name] = text
        return f"{name} {_tag(VALUE_END, special)}"
    rules[name] = f"({text}) {literal(VALUE_END)}"
    return name


def _text_without(tag: str) -> str:
    """A terminal: any text that doesn't hold `tag`."""
    held = tag.replace("/", "\\/")
    return f"/(?s:.*)/ & ~/(?s:.*){held}(?s:.*)/"


def _with_definitions(tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    known = {
        name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters
    }
    return known | schema


def _unheld(tool: Tool, reason: str) -> InvalidParameter:
    return InvalidParameter(
        f"tools: {tool.name}: {reason}; change its schema or leave strict out", "tools"
    )


def _tag(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else literal(text)
