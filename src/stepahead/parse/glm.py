"""Tool calls as GLM 4.5 to 5 write them: a name and tagged keys and values, no JSON around them.

    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>

GLM 4.5 has line ends between the tags, later ones have none; both are read.  A value is JSON, but a
string's is its bare text: which are strings stands in the tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from stepahead.parse.tags import ToolStream, first_of, held_back
from stepahead.parse.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmTools(ToolStream):
    """Gives the arguments as JSON text, a string's value as it comes."""

    def __init__(self, make_id: Callable[[int], str], tools: Sequence[Tool]) -> None:
        super().__init__(self._outside, make_id)
        self._tools = {tool.name: tool for tool in tools}
        self._tool: Tool | None = None
        self._key = ""
        self._keys = 0  # of this call, told

    def _outside(self, last: bool) -> bool:
        at = self._text.find(OPEN)
        if at < 0:
            held = 0 if last else held_back(self._text, (OPEN,))
            self._content(self._take(len(self._text) - held))
            return False
        self._content(self._take(at))
        self._take(len(OPEN))
        self._state = self._name
        return True

    def _name(self, last: bool) -> bool:
        at, _ = first_of(self._text, (KEY, CLOSE))
        if at < 0:
            if last:
                self._content(OPEN + self._take(len(self._text)))
            return False
        name = self._take(at).strip()
        if not name:  # a call of nothing is no call
            self._content(OPEN)
            self._state = self._outside
            return True
        self._tool, self._keys = self._tools.get(name), 0
        self._start(name)
        self._state = self._between
        return True

    def _between(self, last: bool) -> bool:
        """To the next key or the call's end; what else stands there is nobody's."""
        at, tag = first_of(self._text, (KEY, CLOSE))
        if at < 0:
            self._take(len(self._text) - held_back(self._text, (KEY, CLOSE)))
            return False
        self._take(at + len(tag))
        if tag == CLOSE:
            self._arguments("}" if self._keys else "{}")
            self._state = self._outside
        else:
            self._state = self._in_key
        return True

    def _in_key(self, last: bool) -> bool:
        at, tag = first_of(self._text, (KEY_END, CLOSE))
        if at < 0:
            return False
        if tag == CLOSE:
            self._state = self._between
            return True
        self._key = self._take(at).strip()
        self._take(len(KEY_END))
        self._state = self._before_value
        return True

    def _before_value(self, last: bool) -> bool:
        at, tag = first_of(self._text, (VALUE, KEY, CLOSE))
        if at < 0:
            return False
        if tag != VALUE:  # a key without a value
            self._state = self._between
            return True
        self._take(at + len(VALUE))
        start = "{" if not self._keys else ", "
        self._keys += 1
        self._arguments(f"{start}{json.dumps(self._key, ensure_ascii=False)}: ")
        if self._tool is not None and self._tool.is_text(self._key):
            self._arguments('"')
            self._state = self._in_text
        else:
            self._state = self._in_value
        return True

    def _in_text(self, last: bool) -> bool:
        at = self._text.find(VALUE_END)
        held = 0 if last else held_back(self._text, (VALUE_END,))
        text = self._take(at if at >= 0 else len(self._text) - held)
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if at < 0:
            return False
        self._take(len(VALUE_END))
        self._arguments('"')
        self._state = self._between
        return True

    def _in_value(self, last: bool) -> bool:
        at = self._text.find(VALUE_END)
        if at < 0:
            return False
        self._arguments(_as_json(self._take(at)))
        self._take(len(VALUE_END))
        self._state = self._between
        return True


def _as_json(text: str) -> str:
    """The value's own text where that is JSON, else a string of it."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
