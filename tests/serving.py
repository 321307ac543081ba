"""Servers for tests: a whole one as its users start it, and one whose engine the test can see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn

from stepahead.assemble import Assembly, build_engine, model_parts
from stepahead.config import config_from
from stepahead.engine import Engine
from stepahead.executor.channel import Channel, Kind, open_channel
from stepahead.llm.reader import Reader
from stepahead.serve.app import serve_app
from stepahead.serve.back import EngineDesk
from stepahead.serve.front import Front
from stepahead.serve.link import UNREAD_BYTES
from stepahead.serve.messages import Stop, ToEngine, from_engine
from stepahead.serve.options import ServeConfig
from stepahead.serve.server import listen
from stepahead.types import Outputs
from stepahead.wire import encode

SRC = Path(__file__).parents[1] / "src"
START_S = 100.0


class Served:
    """`stepahead serve` in a process of its own, ready; `said` is what it told people."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stepahead", "serve", *words],
            env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, words: str) -> str:
        """The first line with these words, from now on."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=1.0)
                assert line is not None, "".join(self.said)
                if words in line:
                    return line
        raise AssertionError("".join(self.said))

    def url(self) -> str:
        """Where it serves, once it does."""
        line = self.wait_for(" at http://")
        return line.partition(" at ")[2].split(";")[0].strip().removesuffix("/v1")

    def end(self) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(60.0)
        finally:
            self.close()

    def close(self) -> None:
        """Nothing of it is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def served(*words: str) -> Generator[Served]:
    """A whole server, on a free port; killed at the end if it still runs."""
    server = Served(*words, "--port", "0")
    try:
        yield server
    finally:
        server.close()


class Inside:
    """A server in this process: HTTP on one thread, the engine on another, and both can be seen."""

    def __init__(self, config: ServeConfig, options: dict[str, Any]) -> None:
        engine = config_from(options.pop("model", "toy"), options)
        self.assembly: Assembly = build_engine(engine)
        self.engine: Engine = self.assembly.engine
        self._real_step = self.engine.step
        self._steps_left: int | None = None
        self.pace_s = 0.0  # how long a step takes at least
        self.engine.step = self._step
        parts = model_parts(engine)
        self.front = Front(parts.texts, config.max_waiting, config.request_timeout)
        self._config = config
        self._channel, fds = open_channel(UNREAD_BYTES)
        self._back = Channel(*fds)
        desk = EngineDesk(self._back, self.assembly, config.max_waiting)
        self._engine_thread = threading.Thread(target=desk.run)
        self._socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        parsers = (config.tool_call_parser, config.reasoning_parser)
        reader = Reader(parts.texts, parts.facts.vocab_size, parts.facts.eos_ids, *parsers)
        app = serve_app(self.front, config, "toy", reader)
        self._server = uvicorn.Server(
            uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
        )
        self._http_thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop
        self._began = threading.Event()

    def _step(self) -> Outputs | None:
        time.sleep(self.pace_s)
        if self._steps_left is None:
            return self._real_step()
        if self._steps_left == 0:
            time.sleep(0.001)
            return None
        self._steps_left -= 1
        return self._real_step()

    @contextlib.contextmanager
    def paused_after(self, steps: int) -> Generator[None]:
        """While it is entered, the engine takes messages and makes no more than so many steps."""
        self._steps_left = steps
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """The engine goes on."""
        self._steps_left = None

    def start(self) -> None:
        """Takes requests when it returns."""
        self._engine_thread.start()
        self._http_thread.start()
        assert self._began.wait(START_S)

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._on_readable)
        self.front.connect(self)
        self.front.on_change = lambda: self.front.ready and self._began.set()
        pings = asyncio.create_task(self._ping())
        await self._server.serve(sockets=[self._socket])
        pings.cancel()
        loop.remove_reader(self._channel.fileno())

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._config.ping_interval / 4)
            self.front.ping(self._config.ping_interval)

    def _on_readable(self) -> None:
        for _, payload in self._channel.receive_ready():
            self.front.take(from_engine.decode(payload))

    def send(self, message: ToEngine) -> None:
        """To the engine."""
        self._channel.send(Kind.MESSAGE, encode(message))

    @contextlib.contextmanager
    def deaf(self) -> Generator[None]:
        """While it is entered, the front reads nothing of what the engine says."""
        fd = self._channel.fileno()
        self._loop.call_soon_threadsafe(self._loop.remove_reader, fd)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._loop.add_reader, fd, self._on_readable)

    @property
    def behind(self) -> bool:
        """Whether the engine waits for the front to read."""
        return self._back.behind

    def tasks(self) -> int:
        """Tasks of the front's loop."""
        return len(asyncio.all_tasks(self._loop))

    def rest(self) -> None:
        """Waits until nothing runs any more; AssertionError unless all came back."""
        end_s = time.monotonic() + 60.0
        while (self.front.calls or self.engine.has_work) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert self.front.open_choices == 0
        assert not self.front.calls
        assert not self.front._parts
        assert not len(self.front._collector)
        self.engine.scheduler.check_at_rest()

    def close(self) -> None:
        """Ends both threads."""
        self.resume()
        self.send(Stop())
        self._engine_thread.join()
        self._server.should_exit = True
        self._http_thread.join()
        self.front.close()
        self._channel.hang_up()
        self._channel.close()
        self._back.close()
        self._socket.close()


@contextlib.contextmanager
def inside(config: ServeConfig | None = None, **options: Any) -> Generator[Inside]:
    """A server in this process, ready."""
    server = Inside(config or ServeConfig(), options)
    server.start()
    try:
        yield server
    finally:
        server.close()


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
