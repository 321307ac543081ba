"""The signals that ask this process to end, and what a program makes of them.  Knows no engine.

A program of ours calls `hear_stops` first of all.  From then on it may be asked to end at any
moment, as by Ctrl-C, and unwinds; `llm.interrupt` puts that off to a step's end.  A library's user
has his own way with signals, and nothing here touches it.
"""

from __future__ import annotations

import os
import signal
import stat
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The program was asked to end by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(number: int) -> int:
    """What a program ends with when a signal has asked it to, as shells have it."""
    return 128 + number


def hear_stops() -> None:
    """From now on SIGTERM and SIGHUP raise Stopped, as Ctrl-C raises KeyboardInterrupt.

    Not those that the caller has settled already: under nohup SIGHUP is ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, raise_stopped)


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """The handler of a program's signals, where nobody puts them off."""
    begin_to_stop(number)
    raise Stopped(number)


def begin_to_stop(number: int) -> None:
    """A program has been asked to end: the next signal ends it at once, whatever it is at.

    The kernel does that, and then ends the worker (executor.child): it needs nothing of a process
    that may be stuck in a forward.
    """
    leave_signals()
    if number == signal.SIGHUP:
        _leave_terminal()


def leave_signals() -> None:
    """From now on each of these signals ends the process, and nothing in it hears of that."""
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _leave_terminal() -> None:
    # it is gone, and a word to it would be an error, in the middle of ending
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        if stat.S_ISCHR(os.fstat(fd).st_mode):
            os.dup2(null, fd)
    os.close(null)
