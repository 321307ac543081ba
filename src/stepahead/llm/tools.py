"""The tools of a conversation, as clients of OpenAI's API give them.  Knows no template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepahead.errors import InvalidParameter
from stepahead.grammar.tools import Choice
from stepahead.parse import Tool

_WORDS = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolWish:
    """Tools that may be called; `given` are the same as templates show them to the model.

    `choice` is "auto", "required" or the name of the one to call; `parallel`: several at once.
    """

    given: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    parallel: bool = True

    @property
    def held(self) -> bool:
        """Whether a grammar has to hold what the model writes."""
        strict = any(tool.strict for tool in self.tools)
        return self.choice != "auto" or not self.parallel or strict


def read_tools(tools: Any, choice: Any = None, parallel: bool = True) -> ToolWish | None:
    """OpenAI's `tools` and `tool_choice`; None where none may be called.

    Raises InvalidParameter ("tools" or "tool_choice").
    """
    wanted = _choice(choice)
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise InvalidParameter("tools must be a list of tools", "tools")
    if not tools:
        if wanted not in ("none", "auto"):
            raise InvalidParameter("tool_choice asks for a call, but there are no tools", "tools")
        return None
    found = tuple(map(Tool.of, tools))
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        raise InvalidParameter("tools holds two tools of one name; rename one", "tools")
    if wanted not in (*_WORDS, *names):
        raise InvalidParameter(f"tool_choice names no tool of tools: {wanted!r}", "tool_choice")
    if isinstance(choice, dict) and wanted in _WORDS:
        words = f"a tool named {wanted!r} can't be chosen by its name; rename it"
        raise InvalidParameter(words, "tool_choice")
    return None if wanted == "none" else ToolWish(tuple(tools), found, wanted, parallel)


def _choice(given: Any) -> Choice:
    if given is None:
        return "auto"
    if isinstance(given, str) and given in _WORDS:
        return given
    function = given.get("function") if isinstance(given, dict) else None
    if isinstance(function, dict) and set(given) == {"type", "function"}:
        name = function.get("name")
        if given["type"] == "function" and isinstance(name, str) and set(function) == {"name"}:
            return name
    raise InvalidParameter(
        f"tool_choice must be one of {', '.join(_WORDS)} or "
        '{"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )
