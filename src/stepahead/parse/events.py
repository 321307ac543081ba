"""What a parser tells.  One event is one delta of OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str

    def delta(self) -> dict[str, Any]:
        """As a chunk's `delta`."""
        return {"content": self.text}


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before it."""

    text: str

    def delta(self) -> dict[str, Any]:
        """As a chunk's `delta`; the field is the one that vLLM, SGLang and DeepSeek have."""
        return {"reasoning_content": self.text}


@dataclass(frozen=True)
class CallStart:
    """Call number `index` of the answer, from 0, has its name."""

    index: int
    id: str
    name: str

    def delta(self) -> dict[str, Any]:
        """As a chunk's `delta`."""
        function = {"name": self.name, "arguments": ""}
        call = {"index": self.index, "id": self.id, "type": "function", "function": function}
        return {"tool_calls": [call]}


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str

    def delta(self) -> dict[str, Any]:
        """As a chunk's `delta`."""
        return {"tool_calls": [{"index": self.index, "function": {"arguments": self.text}}]}


Event: TypeAlias = Content | Reasoning | CallStart | Arguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind put together: what does not depend on the pieces."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, CallStart) or type(event) is not type(last):
            out.append(event)
        elif isinstance(last, Arguments) and isinstance(event, Arguments):
            if last.index == event.index:
                out[-1] = replace(last, text=last.text + event.text)
            else:
                out.append(event)
        elif isinstance(last, Content | Reasoning) and isinstance(event, Content | Reasoning):
            out[-1] = replace(last, text=last.text + event.text)
    return out


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The whole message that these deltas add up to, as OpenAI tells it.

    `content` is None where there is nothing but calls; `reasoning_content` and `tool_calls` are
    there if there are any.
    """
    content, reasoning, calls = "", "", dict[int, dict[str, Any]]()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": event.id, "type": "function", "function": function}
        else:
            calls[event.index]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
