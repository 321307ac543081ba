"""The engine behind a server: started, ended, and started again where that was asked for.

Knows the front and processes; no HTTP and no signals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stepahead.errors import StepaheadError
from stepahead.serve.front import Front
from stepahead.serve.link import EngineLink
from stepahead.serve.messages import Start

_QUICK_S = 60.0
_MOST_QUICK = 3


class Patience:
    """How often an engine that dies is started again: until three in a row have served for less
    than a minute each."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._ready_s: float | None = None
        self.quick_deaths = 0  # in a row

    def ready(self) -> None:
        """An engine takes requests from now on; how long it took to load counts for nothing."""
        self._ready_s = self._clock_s()

    def died(self) -> bool:
        """It is gone; whether another one is worth a try."""
        served_s = 0.0 if self._ready_s is None else self._clock_s() - self._ready_s
        self._ready_s = None
        self.quick_deaths = 0 if served_s >= _QUICK_S else self.quick_deaths + 1
        return self.quick_deaths < _MOST_QUICK


class EngineKeeper:
    """Starts engines for a front, one after the other.  For the front's loop."""

    def __init__(self, start: Start, front: Front) -> None:
        self.patience = Patience()
        self._start = start
        self._front = front
        self._link: EngineLink | None = None

    @property
    def build_failure(self) -> StepaheadError | None:
        """Why the newest engine could not be built."""
        return None if self._link is None else self._link.build_failure

    def begin(self) -> None:
        """Starts an engine and connects the front to it; OSError when nothing can start."""
        self._link = EngineLink(self._start, self._front.take, self._front.fail)
        self._front.connect(self._link)
        self._link.listen()

    async def begin_again(self) -> None:
        """Starts another one once nothing is left of the last, with a pause if that was quick."""
        await self.end(patient=False)
        await asyncio.sleep(max(0, self.patience.quick_deaths - 1))
        self.begin()

    async def end(self, patient: bool) -> None:
        """Leaves nothing of the engine; it is waited for if `patient`.  Idempotent."""
        if self._link is not None:
            self._link.deafen()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._link.close, patient)
