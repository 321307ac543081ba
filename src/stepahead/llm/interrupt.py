"""Ctrl-C between steps, never inside one.  Knows signals, no engine."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interruption:
    """While it is entered, the first SIGINT only sets `asked`; a second one raises as ever.

    KeyboardInterrupt strikes between any two instructions: inside a step it would leave the engine
    with a launch that nobody knows of.  Outside the main thread, and where a program has a handler
    of its own, it changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._armed = False

    def __enter__(self) -> Interruption:
        self._armed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._armed:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._armed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
