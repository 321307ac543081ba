"""Renders a chat template as Hugging Face does, in a sandbox.  Knows messages, no tokens.

A template is code that came with the model: whatever goes wrong inside it is an error of the
request.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from stepahead.errors import InvalidParameter

if TYPE_CHECKING:
    import jinja2

_NO_TEMPLATE: Final = (
    "this model has no chat template: name one with --chat-template FILE, "
    "or send completion prompts instead of messages"
)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **variables: object,
) -> str:
    """The prompt that `template` makes of `messages`.

    `special_tokens` maps names as templates use them ("bos_token") to texts; a name that is not
    there stays undefined.  `variables` go to the template as they are; `tools` and `documents` are
    None unless given.  A message's content may be a list of text parts: they are joined by
    newlines, since most templates know only strings.

    Raises InvalidParameter (param "messages") if there is no template, if `messages` is not a list
    of messages with a role and a content, or if the template refuses them or fails.
    """
    if template is None:
        _refuse(_NO_TEMPLATE)
    chat = _checked(messages)
    context = {"tools": None, "documents": None, **(special_tokens or {}), **variables}
    try:
        return _compiled(template).render(
            context, messages=chat, add_generation_prompt=add_generation_prompt
        )
    # a template can raise anything: its own refusals, undefined values, sums of text and lists
    except Exception as error:
        raise InvalidParameter(
            f"the chat template can't render these messages: {type(error).__name__}: {error}; "
            "check their roles, order and contents against the model's template, "
            "or name another one with --chat-template FILE",
            param="messages",
        ) from error


def _refuse(message: str) -> NoReturn:
    raise InvalidParameter(message, param="messages")


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        _refuse(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        _refuse("messages is empty: send at least one message with a role and a content")
    return [_checked_message(place, message) for place, message in enumerate(messages)]


def _checked_message(place: int, message: object) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping):
        _refuse(f"{where} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        _refuse(f'{where} needs a role, a string such as "user"; it has {role!r}')
    # clients dump messages with all their fields, and templates ask whether a field is there
    checked = {name: value for name, value in message.items() if value is not None}
    if "function_call" in checked:
        _refuse(f"{where}.function_call is not read; write it as one of tool_calls")
    calls = checked.pop("tool_calls", None)
    if calls:
        checked["tool_calls"] = _calls(f"{where}.tool_calls", calls)
        checked.setdefault("content", "")  # templates would write None
    elif "content" not in checked:
        _refuse(f"{where} needs a content, a string or a list of text parts")
    checked["content"] = _text(f"{where}.content", checked["content"])
    return checked


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        _refuse(f"{where} must be a list of calls, not {type(calls).__name__}")
    return [_call(f"{where}[{place}]", call) for place, call in enumerate(calls)]


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(f"{where} needs a function with a name")
    assert isinstance(call, Mapping)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(f"{where}.function.arguments", arguments)
    # none are an empty object to templates that go through them
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _decoded(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        _refuse(f"{where} is no JSON ({error})")
    if not isinstance(found, dict):
        _refuse(f"{where} must be a JSON object")
    return found


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        _refuse(f"{where} must be a string or a list of parts, not {type(content).__name__}")
    return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    _refuse(f'{where} is {kind!r}: only text is understood, {{"type": "text", "text": "..."}}')


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    # jinja2 costs 35 ms to import: only who renders pays for it
    from stepahead.text.sandbox import compile_template

    return compile_template(template)
