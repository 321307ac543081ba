"""Tags in a text that comes in pieces, and the way parsers of it work.  Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepahead.parse.events import Arguments, CallStart, Content, Event


def held_back(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `tags`."""
    most = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), most, -1):
            if text.endswith(tag[:size]):
                most = size
                break
    return most


def first_of(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Where the first of `tags` stands in `text`, and which it is; (-1, "") for none."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=(-1, ""))


class ToolStream:
    """A parser of tool calls: `_text` is what no state has taken yet, `_state` takes more of it.

    A state says whether it got anywhere; `last` tells it that no more text comes.  White space
    right before and after a call belongs to the format, not to the content.
    """

    def __init__(self, state: Callable[[bool], bool], make_id: Callable[[int], str]) -> None:
        self._state = state
        self._text = ""
        self._make_id = make_id
        self._calls = 0
        self._space = ""  # of the content, until something else comes
        self._after_call = False
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """What `text` makes sure of."""
        self._text += text
        return self._run(last=False)

    def finish(self) -> list[Event]:
        """What was held back; after the last push."""
        events = self._run(last=True)
        if self._space and not self._calls:
            events.append(Content(self._space))
        return events

    def _run(self, last: bool) -> list[Event]:
        while self._state(last):
            pass
        events = self._events
        self._events = []
        return events

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        bare = text.rstrip()
        if bare:
            self._events.append(Content(self._space + bare))
            self._space, self._after_call = "", False
        self._space += text[len(bare) :]

    def _start(self, name: str) -> None:
        self._space, self._after_call = "", True
        self._events.append(CallStart(self._calls, self._make_id(self._calls), name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._calls - 1, text))
