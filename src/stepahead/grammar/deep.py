"""Runs what may recurse deeply on a thread with room for it.  Knows nothing of what runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

_STACK_BYTES = 256 << 20  # of addresses; only what is touched becomes memory
_one_at_a_time = threading.Lock()


def on_deep_stack(work: Callable[[], Value]) -> Value:
    """What `work` returns or raises.

    The grammar library recurses once for each rule or reference in a chain: on an ordinary stack
    some hundreds of them, which a few kilobytes of a request can hold, end the process.
    """
    done: list[Value] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    with _one_at_a_time:  # the size is the process's: whoever starts a thread meanwhile gets it too
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
