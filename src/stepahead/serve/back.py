"""The engine's process behind a server: takes requests in, steps, sends each step's outputs.

One thread does it all: between two steps it takes what has come, and at rest it sleeps until
something does.  Nothing here looks at a token: a step's columns go out as the engine made them.
It waits for no client, but for a front that has left many steps unread: else tokens would come ever
later, and pile up in memory.
Knows no HTTP and no texts.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import threading
import traceback

from stepahead.assemble import Assembly
from stepahead.engine import Engine
from stepahead.errors import EngineError, RequestError
from stepahead.executor.channel import Channel, Kind
from stepahead.executor.child import die_with_parent
from stepahead.executor.failures import ANSWERED, encode_build_failure
from stepahead.serve.messages import (
    AskPage,
    Cancel,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    Ready,
    Refused,
    Start,
    Step,
    Stop,
    Submit,
    Taken,
    ToEngine,
    to_engine,
)
from stepahead.serve.pages import Pages, build_shown
from stepahead.wire import encode

_AT_REST_S = 3600.0  # how long a wait for messages is, at most: there is nothing else to do
_BEHIND_S = 1e-3  # how long the front gets to read, before it is looked at again


def main(read_fd: int, write_fd: int) -> None:
    """The whole life of an engine's process whose end of the channel is these two."""
    faulthandler.enable()
    die_with_parent()
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)  # else the runner would keep the channel open
    channel = Channel(read_fd, write_fd)
    threading.Thread(target=_leave_with_front, args=(channel,), daemon=True).start()
    try:
        start = _receive_start(channel)
        built = _build(channel, start)
        code = 0
        if built is not None:
            # what /metrics and /state tell is for clients: they know no path of this machine
            built.engine.observer.about["model"] = start.name
            code = EngineDesk(channel, built, start.max_waiting).run()
        channel.close()
    except BaseException as error:
        if not isinstance(error, EOFError | BrokenPipeError):  # the front is gone
            traceback.print_exc()
        os._exit(1)
    os._exit(code)  # a page that is being made, or a library's thread, keeps nobody


def _leave_with_front(channel: Channel) -> None:
    channel.wait_for_end()
    os._exit(1)  # the runner goes with us: the kernel sees to it


def _receive_start(channel: Channel) -> Start:
    _, payload = channel.receive()
    start: Start = pickle.loads(payload)
    return start


def _build(channel: Channel, start: Start) -> Assembly | None:
    try:
        return build_shown(start.config, start.chat_template)
    except ANSWERED as error:
        channel.send(Kind.BUILD_FAILED, encode_build_failure(error))
        return None


class EngineDesk:
    """Drives an engine for who is at the channel's other end."""

    def __init__(self, channel: Channel, assembly: Assembly, max_waiting: int) -> None:
        self._channel = channel
        self._engine: Engine = assembly.engine
        self._settings = assembly.settings
        self._max_waiting = max_waiting
        self._pages = Pages(assembly.engine, self._send)
        self._stopping = False

    def run(self) -> int:
        """Until it is told to stop (0) or the engine fails (1); what ran has had its ends then."""
        resolved = self._engine.resolved
        self._send(Ready(self._settings, resolved.model_len, resolved.config.max_rows))
        try:
            while not self._stopping and self._engine.failure is None:
                self._take_all()
                if not self._channel.behind:
                    self._step()
        finally:
            self._engine.close()
        while self._engine.has_work:  # what a close has ended is told
            self._step()
        if self._engine.failure is None:
            return 0
        self._send(Failed(str(self._engine.failure)))
        return 1

    def _step(self) -> None:
        if self._engine.has_work:
            outputs = self._engine.step()
            if outputs is not None:
                self._send(Step(outputs))

    def _take_all(self) -> None:
        channel = self._channel
        while not self._stopping and channel.wait(self._rest_s()):
            self._take(to_engine.decode(channel.receive()[1]))

    def _rest_s(self) -> float:
        if not self._engine.has_work:
            return _AT_REST_S
        return _BEHIND_S if self._channel.behind else 0.0

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            for rid in message.rids.tolist():
                self._engine.abort(rid)
        elif isinstance(message, Flush):
            self._send(Flushed(message.key, self._engine.scheduler.flush_cache()))
        elif isinstance(message, AskPage):
            self._pages.ask(message)
        elif isinstance(message, Stop):
            self._stopping = True

    def _submit(self, asked: Submit) -> None:
        lengths = [len(asked.prompt)] * asked.params.n
        may_wait = self._engine.scheduler.would_wait(lengths) <= self._max_waiting
        try:
            rids = self._engine.add(
                asked.prompt, asked.params, wait=may_wait, grammar=asked.grammar
            )
        except (RequestError, EngineError) as error:
            param = error.param if isinstance(error, RequestError) else ""
            self._send(Refused(asked.key, type(error).__name__, str(error), param))
        else:
            self._send(Taken(asked.key, tuple(rids)))

    def _send(self, message: FromEngine) -> None:
        self._channel.send(Kind.MESSAGE, encode(message))
