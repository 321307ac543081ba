"""The view that goes on: looks, draws, and hears keys."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from stepahead.top.fetch import Unreachable
from stepahead.top.frame import Frame
from stepahead.top.source import Source
from stepahead.top.view import History, nothing_yet, view

SHORTEST_S, LONGEST_S = 0.1, 60.0


class Keyboard(Protocol):
    """Where keys come from."""

    @property
    def there(self) -> bool:
        """Whether anybody can press one."""
        ...

    def wait(self, timeout_s: float) -> str:
        """The next key, "" if none comes in that time."""
        ...


class Screen:
    """What is seen, and how often it is looked at."""

    def __init__(self, source: Source, interval_s: float) -> None:
        self.interval_s = interval_s
        self.paused = False
        self._source = source
        self._history = History()
        self._frame: Frame | None = None
        self._note = ""

    def look(self) -> None:
        """One look; a server that does not answer leaves the last frame there, and says so."""
        try:
            self._frame = self._source.look()
        except Unreachable as error:
            self._note = f"no answer: {error}; asking again"
            return
        self._note = ""
        self._history.add(self._frame)

    def press(self, key: str) -> bool:
        """Does what a key asks for; False when it is to end."""
        if key == "p":
            self.paused = not self.paused
        elif key in ("+", "="):
            self.interval_s = min(LONGEST_S, self.interval_s * 2)
        elif key == "-":
            self.interval_s = max(SHORTEST_S, self.interval_s / 2)
        return key != "q"

    def draw(self, with_keys: bool = False) -> RenderableType:
        """The whole screen."""
        place = self._source.place
        if self._frame is None:
            seen = nothing_yet(place, self._note or "asking")
        else:
            seen = view(self._frame, self._history, place, self._note)
        pace = "paused" if self.paused else f"every {self.interval_s:g} s"
        keys = "q quit · p pause · + - slower, faster · " if with_keys else ""
        return Group(seen, Text(f"\n{keys}{pace}", style="dim"))


def watch(source: Source, interval_s: float, keys: Keyboard, console: Console) -> None:
    """Until q is pressed."""
    screen = Screen(source, interval_s)
    with Live(screen.draw(keys.there), console=console, auto_refresh=False, screen=False) as live:
        while True:
            next_s = time.monotonic()
            if not screen.paused:
                screen.look()
            while True:
                live.update(screen.draw(keys.there), refresh=True)
                left_s = next_s + screen.interval_s - time.monotonic()
                if left_s <= 0:
                    break
                was_paused = screen.paused
                if not screen.press(keys.wait(left_s)):
                    return
                if was_paused and not screen.paused:
                    break
