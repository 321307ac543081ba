"""Tool calls as Llama 3 writes them: the answer is {"name": ..., "parameters": {...}}, or several
of them with semicolons between, after <|python_tag|> or without it."""

from __future__ import annotations

from collections.abc import Callable

from stepahead.parse.call_json import CallJson
from stepahead.parse.tags import ToolStream

TAG = "<|python_tag|>"


class LlamaTools(ToolStream):
    """Only the names of tools make a call: an answer may be JSON for other reasons."""

    def __init__(self, make_id: Callable[[int], str], names: frozenset[str]) -> None:
        super().__init__(self._begin, make_id)
        self._names = names
        self._call = CallJson()
        self._before = ""  # what would be content if no call comes
        self._told = False

    def _begin(self, last: bool) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(TAG) and TAG not in self._before:
            self._before += self._take(len(self._text) - len(rest) + len(TAG))
            return True
        if TAG.startswith(rest) and not last:
            return False
        return self._object_or_content(rest)

    def _between(self, last: bool) -> bool:
        rest = self._text.lstrip(" \n\r\t;")
        if not rest:
            return False
        return self._object_or_content(rest)

    def _object_or_content(self, rest: str) -> bool:
        if rest.startswith("{"):
            self._before += self._take(len(self._text) - len(rest))
            self._call, self._told = CallJson(), False
            self._state = self._inside
        else:
            self._content(self._before)
            self._before = ""
            self._state = self._plain
        return True

    def _plain(self, last: bool) -> bool:
        self._content(self._take(len(self._text)))
        return False

    def _inside(self, last: bool) -> bool:
        call = self._call
        fed = 0
        while fed < len(self._text) and not (call.done or call.bad):
            call.feed(self._text[fed])
            fed += 1
            if call.name is not None and call.name not in self._names and not self._told:
                call.bad = True
            self._tell_name()
        self._take(fed)
        if self._told:
            self._arguments(call.take())
        if call.bad or (last and not call.done):
            if not self._told:
                self._content(self._before + call.raw)
                self._before = ""
            self._state = self._plain
            return True
        if call.done:
            self._before = ""
            self._state = self._between
        return call.done

    def _tell_name(self) -> None:
        if self._call.name is not None and not (self._told or self._call.bad):
            self._told = True
            self._start(self._call.name)
