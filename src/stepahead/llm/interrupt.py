"""Ctrl-C between steps, never inside one.  Knows signals, no engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from stepahead.executor.stops import STOPS, Stopped, begin_to_stop, raise_stopped

# How long a step may go on when the program was told to end.  Who tells a program to end (docker,
# systemd, Kubernetes) kills it after 10 s or more: there must be time left to tell what is done.
STEP_S = 3.0
T = TypeVar("T")


class Interruption:
    """While it is entered, the first SIGINT only sets `asked`; a second one raises as ever.

    KeyboardInterrupt strikes between any two instructions: inside a step it would leave the engine
    with a launch that nobody knows of.  Outside the main thread, and where a program has a handler
    of its own, it changes nothing.

    In a program of ours (`hear_stops`) SIGTERM and SIGHUP are put off too, and the second signal of
    any kind ends the process.  There `give_up` is called, from another thread, when the step at
    hand has not ended in STEP_S: nobody may be there to send a second one.  After Ctrl-C somebody
    is.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        self.number = 0  # of the signal that asked, 0 if none has
        self._waits = False
        self._before: dict[int, Any] = {}
        self._patience = threading.Timer(STEP_S, give_up)
        self._patience.daemon = True

    @property
    def asked(self) -> bool:
        """Whether to end after this step."""
        return self.number != 0

    @property
    def error(self) -> KeyboardInterrupt:
        """What to raise when asked."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else Stopped(self.number)

    def wait_for(self, fn: Callable[[], T]) -> T | None:
        """What `fn` gives, or None when a signal ends the wait for it: it may wait for ever."""
        try:
            self._waits = True
            return None if self.asked else fn()
        except KeyboardInterrupt:
            return None
        finally:
            self._waits = False

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            ours = (signal.default_int_handler, raise_stopped)
            found = {number: signal.getsignal(number) for number in STOPS}
            self._before = {number: handler for number, handler in found.items() if handler in ours}
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patience.cancel()
        if self.number not in (0, signal.SIGINT):
            return  # the program ends, and the next signal still ends it at once
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.number = number
        if raise_stopped in self._before.values():
            begin_to_stop(number)
        if self._waits:
            raise self.error
        if number != signal.SIGINT:
            self._patience.start()
