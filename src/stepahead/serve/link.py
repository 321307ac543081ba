"""The engine's process as the front has it: started, heard on the asyncio loop, ended.

Knows processes and frames; what a message means is the front's to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable
from weakref import WeakMethod

from stepahead.errors import StepaheadError
from stepahead.executor.channel import Kind, open_channel
from stepahead.executor.child import Child
from stepahead.executor.failures import decode_build_failure
from stepahead.executor.process import CLOSE_S
from stepahead.serve.messages import FromEngine, Start, Stop, ToEngine, from_engine
from stepahead.wire import encode

_LOG = logging.getLogger("stepahead")
_BACK = "stepahead.serve.back"
# an engine that is asked to stop ends its runner first
_GRACE_S = CLOSE_S + 1.0
# of steps that the front may have unread before the engine waits for it: some 10,000 tokens
UNREAD_BYTES = 1 << 17


class EngineLink:
    """A running engine's process.

    `take` gets each message, `lost` the words for its end when it ends unasked; both on the loop
    that `listen` was called on.  `build_failure` is why there was no engine in it.
    """

    def __init__(
        self, start: Start, take: Callable[[FromEngine], None], lost: Callable[[str], None]
    ) -> None:
        """Starts it; OSError when nothing can start."""
        self.build_failure: StepaheadError | None = None
        self._take = take
        self._lost = lost
        self._listening: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._channel, fds = open_channel(UNREAD_BYTES)
        try:
            self._child = Child(fds, WeakMethod(self._channel.hang_up), module=_BACK)
            self._channel.send(Kind.START, pickle.dumps(start))
        except BaseException:
            self._channel.close()
            raise

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._child.pid

    def send(self, message: ToEngine) -> None:
        """Hands a message over, and never waits; OSError or ValueError when it is gone."""
        self._channel.send(Kind.MESSAGE, encode(message))

    def listen(self) -> None:
        """From now on what comes is taken on the running loop."""
        self._listening = asyncio.get_running_loop()
        self._listening.add_reader(self._channel.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            frames = self._channel.receive_ready()
        except (EOFError, OSError, ValueError):
            self.deafen()
            if not self._stopping:
                self._lost(self._end_in_words())
            return
        try:
            for kind, payload in frames:
                self._take_frame(kind, payload)
        except Exception as error:  # what it was about would be waited for without an end
            _LOG.exception("a message of the engine could not be taken")
            self._lost(f"its message could not be taken ({type(error).__name__}: {error})")

    def _take_frame(self, kind: int, payload: bytes) -> None:
        if kind == Kind.BUILD_FAILED:
            self.build_failure = decode_build_failure(payload)
            self._lost(str(self.build_failure))
        else:
            self._take(from_engine.decode(payload))

    def _end_in_words(self) -> str:
        self._child.wait(1.0)  # it may have closed its pipes before it is gone
        return f"its process {self.pid} {self._child.end()}"

    def deafen(self) -> None:
        """Takes nothing any more; for the loop that `listen` was called on.  Idempotent."""
        if self._listening is not None:
            self._listening.remove_reader(self._channel.fileno())
            self._listening = None

    def close(self, patient: bool = True) -> None:
        """Asks it to leave, ends it if it won't, and leaves nothing of it.  Idempotent.

        One that still loads would not hear: it is not waited for unless `patient`.
        """
        if self._stopping:
            return
        self._stopping = True
        self.deafen()
        with contextlib.suppress(OSError, ValueError):
            self.send(Stop())
        self._child.stop(_GRACE_S if patient else 0.0)
        self._channel.hang_up()
        self._channel.close()
