"""Tool calls as Hermes and Qwen write them.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

from collections.abc import Callable

from stepahead.parse.call_json import CallJson
from stepahead.parse.tags import ToolStream, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesTools(ToolStream):
    """What turns out to be no call is content, tag and all, unless its name has been told."""

    def __init__(self, make_id: Callable[[int], str]) -> None:
        super().__init__(self._outside, make_id)
        self._call = CallJson()
        self._told = False

    def _outside(self, last: bool) -> bool:
        at = self._text.find(OPEN)
        if at < 0:
            held = 0 if last else held_back(self._text, (OPEN,))
            self._content(self._take(len(self._text) - held))
            return False
        self._content(self._take(at))
        self._take(len(OPEN))
        self._call, self._told = CallJson(), False
        self._state = self._inside
        return True

    def _inside(self, last: bool) -> bool:
        call = self._call
        fed = 0
        while fed < len(self._text) and not (call.done or call.bad):
            call.feed(self._text[fed])
            fed += 1
            self._tell_name()
        self._take(fed)
        if self._told:
            self._arguments(call.take())
        if call.bad and not self._told:
            self._content(OPEN + call.raw)
            self._state = self._outside
        elif call.bad or call.done:
            self._state = self._closing
        elif last and not self._told:
            self._content(OPEN + call.raw)
        return call.bad or call.done

    def _tell_name(self) -> None:
        if self._call.name is not None and not (self._told or self._call.bad):
            self._told = True
            self._start(self._call.name)

    def _closing(self, last: bool) -> bool:
        rest = self._text.lstrip()
        if self._call.bad:  # half of it has been told: the other half is nobody's
            at = self._text.find(CLOSE)
            self._take(at if at >= 0 else len(self._text) - held_back(self._text, (CLOSE,)))
            rest = self._text
        if not rest.startswith(CLOSE):
            if CLOSE.startswith(rest) and not last:
                return False
            if self._call.bad:
                return False
            self._state = self._outside  # the tag is missing
            return True
        self._text = rest[len(CLOSE) :]
        self._state = self._outside
        return True
