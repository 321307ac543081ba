"""The whole answer: reasoning first, then content and tool calls.  Knows the formats' names."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from stepahead.parse.events import Content, Event, Reasoning
from stepahead.parse.glm import GlmTools
from stepahead.parse.hermes import HermesTools
from stepahead.parse.llama import LlamaTools
from stepahead.parse.tags import held_back
from stepahead.parse.tools import Tool

ToolFormat: TypeAlias = Literal["hermes", "glm", "llama3"]
THINK, THINK_END = "<think>", "</think>"


class Tools(Protocol):
    """A parser of tool calls."""

    def push(self, text: str) -> list[Event]:
        """What `text` makes sure of."""
        ...

    def finish(self) -> list[Event]:
        """What was held back."""
        ...


class AnswerStream:
    """Events of one answer, as its text comes.

    `tools` None: no calls are looked for.  `thinks`: there may be reasoning between <think> and
    </think> at the start; `inside` if the prompt has opened it already.  Line ends at the edges of
    the reasoning are the template's and are left out.
    """

    def __init__(
        self,
        tools: Sequence[Tool] | None = None,
        tool_format: ToolFormat = "hermes",
        thinks: bool = False,
        inside: bool = False,
        make_id: Callable[[int], str] | None = None,
    ) -> None:
        """`make_id` names the call with a number, from 0; None makes random names."""
        self._tools = _parser(tools, tool_format, make_id or _random_id)
        self._text = ""
        self._held = ""  # line ends that end the reasoning, or don't
        self._opened = inside
        self._state = self._begin if thinks else self._after

    def push(self, text: str) -> list[Event]:
        """What `text` makes sure of."""
        self._text += text
        return self._state(False)

    def finish(self) -> list[Event]:
        """What was held back; after the last push."""
        events = self._state(True)
        return events + (self._tools.finish() if self._tools is not None else [])

    def _begin(self, last: bool) -> list[Event]:
        rest = self._text.lstrip()
        if rest.startswith(THINK):
            self._text, self._opened = rest[len(THINK) :], True
        elif THINK.startswith(rest) and not last:
            return []
        self._state = self._first if self._opened else self._after
        return self._state(last)

    def _first(self, last: bool) -> list[Event]:
        self._text = self._text.lstrip("\n")
        if not self._text:
            return []
        self._state = self._reasoning
        return self._state(last)

    def _reasoning(self, last: bool) -> list[Event]:
        at = self._text.find(THINK_END)
        held = 0 if last else held_back(self._text, (THINK_END,))
        end = at if at >= 0 else len(self._text) - held
        text, self._text = self._text[:end], self._text[end:]
        bare = text.rstrip("\n")
        events: list[Event] = [Reasoning(self._held + bare)] if bare else []
        self._held = ("" if bare else self._held) + text[len(bare) :]
        if at < 0:
            return events
        self._text = self._text[len(THINK_END) :]
        self._state = self._edge
        return events + self._state(last)

    def _edge(self, last: bool) -> list[Event]:
        self._text = self._text.lstrip("\n")
        if not self._text:
            return []
        self._state = self._after
        return self._state(last)

    def _after(self, last: bool) -> list[Event]:
        text, self._text = self._text, ""
        if self._tools is not None:
            return self._tools.push(text)
        return [Content(text)] if text else []


def _parser(
    tools: Sequence[Tool] | None, tool_format: ToolFormat, make_id: Callable[[int], str]
) -> Tools | None:
    if tools is None:
        return None
    if tool_format == "glm":
        return GlmTools(make_id, tools)
    if tool_format == "llama3":
        return LlamaTools(make_id, frozenset(tool.name for tool in tools))
    return HermesTools(make_id)


def _random_id(index: int) -> str:
    return f"call_{index}_{secrets.token_hex(8)}"
