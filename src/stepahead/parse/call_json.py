"""One tool call as a JSON object, {"name": ..., "arguments": {...}}, a character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable

_SPACE = " \n\r\t"
_ARGUMENTS = ("arguments", "parameters")


class CallJson:
    """`name` is None until it is known; `take` gives what is new of the arguments' JSON text.

    `done` once the object is closed, `bad` where it is no call's.  `raw` is all that was fed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.bad = False
        self._raw: list[str] = []
        self._state: Callable[[str], None] = self._open
        self._key = ""
        self._has_arguments = False
        self._new: list[str] = []  # of the arguments
        self._value: list[str] = []  # of any other value, and of a string's
        self._depth = 0
        self._in_text = False
        self._escaped = False

    @property
    def raw(self) -> str:
        """All that was fed."""
        return "".join(self._raw)

    def feed(self, letter: str) -> None:
        """The next character; nothing may follow the last one."""
        self._raw.append(letter)
        self._state(letter)

    def take(self) -> str:
        """What is new of the arguments; an object with a name and none of them has {}."""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        text = "".join(self._new)
        self._new.clear()
        return text

    def _open(self, letter: str) -> None:
        if letter == "{":
            self._state = self._before_key
        elif letter not in _SPACE:
            self.bad = True

    def _before_key(self, letter: str) -> None:
        if letter == '"':
            self._begin_text()
            self._state = self._in_key
        elif letter == "}":
            self._close()
        elif letter not in _SPACE:
            self.bad = True

    def _in_key(self, letter: str) -> None:
        self._value.append(letter)
        if self._text_ends(letter):
            self._key = self._decoded()
            self._state = self._colon

    def _colon(self, letter: str) -> None:
        if letter == ":":
            self._state = self._before_value
        elif letter not in _SPACE:
            self.bad = True

    def _before_value(self, letter: str) -> None:
        if letter in _SPACE:
            return
        self._depth = 0
        self._value.clear()
        self._in_text = self._escaped = False
        self._state = self._in_value
        if letter == '"':
            self._begin_text()
            self._state = self._in_string
        elif letter in ",}]:":
            self.bad = True
        else:
            self._in_value(letter)

    def _in_string(self, letter: str) -> None:
        self._value.append(letter)
        if self._text_ends(letter):
            text = self._decoded()
            if self._key == "name":
                self.name = text
            elif self._key in _ARGUMENTS:  # some models write the object as a string's content
                self._has_arguments = True
                self._new.append(text)
            self._state = self._after_value

    def _in_value(self, letter: str) -> None:
        """An object, an array, or a number or word, which ends with what follows it."""
        if not self._depth and letter in ",}" + _SPACE:
            self._state = self._after_value
            self._after_value(letter)
            return
        if self._key in _ARGUMENTS:
            self._has_arguments = True
            self._new.append(letter)
        if self._in_text:
            self._in_text = not self._text_ends(letter)
        elif letter == '"':
            self._in_text = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if not self._depth:
                self._state = self._after_value

    def _after_value(self, letter: str) -> None:
        if letter == ",":
            self._state = self._before_key
        elif letter == "}":
            self._close()
        elif letter not in _SPACE:
            self.bad = True

    def _close(self) -> None:
        if self.name is None:
            self.bad = True
        self.done = True

    def _begin_text(self) -> None:
        self._value, self._escaped = ['"'], False

    def _text_ends(self, letter: str) -> bool:
        ends = letter == '"' and not self._escaped
        self._escaped = letter == "\\" and not self._escaped
        return ends

    def _decoded(self) -> str:
        try:
            return str(json.loads("".join(self._value), strict=False))
        except ValueError:
            self.bad = True
            return ""
