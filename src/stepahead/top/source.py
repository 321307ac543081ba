"""Where frames come from: a server of ours, of vLLM or of SGLang, that may come and go."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stepahead.top import metrics, state
from stepahead.top.fetch import Answer, Unreachable, get
from stepahead.top.frame import Frame

WINDOW_S = 10.0  # rates and shares are of so long, or of as long as it has been looked at
_OK = 200
_NOT_HERE = (404, 405, 501)


class Source(Protocol):
    """Something to look at."""

    @property
    def place(self) -> str:
        """Where it is."""
        ...

    def look(self) -> Frame:
        """How it is now; Unreachable, and then it may be asked again."""
        ...


class Server:
    """A server by its URL.  Whose it is, is found out anew after each failure."""

    def __init__(
        self, url: str, timeout_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.place = url
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._is_ours: bool | None = None
        self._states: deque[tuple[float, state.State]] = deque()
        self._scrapes: deque[metrics.Scrape] = deque()

    def look(self) -> Frame:
        """How it is now, against how it was up to ten seconds ago."""
        try:
            return self._look()
        except Unreachable:
            self._is_ours = None
            self._states.clear()
            self._scrapes.clear()
            raise

    def _look(self) -> Frame:
        if self._is_ours is not False:
            answer = self._get("/state")
            if answer.status == _OK:
                return self._ours(answer)
            if answer.status not in _NOT_HERE:
                words = state.why_not(answer.body)
                raise Unreachable(f"/state answers with {answer.status}{words}")
        self._is_ours = False
        answer = self._get("/metrics")
        if answer.status != _OK:
            raise Unreachable(
                f"it answers, but /state does not exist and /metrics answers with {answer.status}; "
                "SGLang must be started with --enable-metrics"
            )
        return self._theirs(answer)

    def _get(self, path: str) -> Answer:
        return get(self.place + path, self._timeout_s)

    def _ours(self, answer: Answer) -> Frame:
        now_s, found = self._clock_s(), state.parse(answer.body)
        self._is_ours = True
        states = self._states
        while len(states) > 1 and states[0][0] < now_s - WINDOW_S:
            states.popleft()
        states.append((now_s, found))
        return state.frame_of(found, states[0][1] if len(states) > 1 else None)

    def _theirs(self, answer: Answer) -> Frame:
        now_s = self._clock_s()
        found = metrics.parse(answer.body.decode(errors="replace"), now_s)
        scrapes = self._scrapes
        while len(scrapes) > 1 and scrapes[0].at_s < now_s - WINDOW_S:
            scrapes.popleft()
        scrapes.append(found)
        return metrics.frame_of(found, scrapes[0] if len(scrapes) > 1 else None)
