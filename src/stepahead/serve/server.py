"""A server's life: a port, an engine, requests, and an end in order.  Knows signals and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import uvicorn

from stepahead.assemble import model_parts
from stepahead.config import EngineConfig
from stepahead.errors import ConfigError, EngineError
from stepahead.executor.stops import STOPS, begin_to_stop
from stepahead.llm.reader import Reader
from stepahead.serve.app import serve_app
from stepahead.serve.front import Front
from stepahead.serve.keeper import EngineKeeper
from stepahead.serve.messages import Ready, Start
from stepahead.serve.options import ServeConfig

_TOLD_S = 2.0  # how long clients may take to hear of an end
_FAILED_S = 1.0  # how long a server whose engine has failed says so before it goes


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError if the address can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host={host}: no such address here ({error.strerror})") from error
    try:
        # else a port can't be used again for a minute after the last server that had it
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"port={port}: it can't be had on {host} ({error.strerror}); choose another one, or 0 "
            "for any that is free"
        ) from error
    found.setblocking(False)
    return found


class Server:
    """One model behind one port."""

    def __init__(
        self,
        engine: EngineConfig,
        config: ServeConfig,
        chat_template: str | None,
        tell: Callable[[str], None],
    ) -> None:
        """What can be found wrong is found here: ConfigError, ModelError.

        `tell` is for lines to people.
        """
        self._config = config
        self._tell = tell
        parts = model_parts(engine, chat_template)
        self._socket = listen(config.host, config.port)
        self._front = Front(parts.texts, config.max_waiting, config.request_timeout)
        self._name = config.served_name or _model_name(engine.model)
        parsers = (config.tool_call_parser, config.reasoning_parser)
        reader = Reader(parts.texts, parts.facts.vocab_size, parts.facts.eos_ids, *parsers)
        app = serve_app(self._front, config, self._name, reader)
        self._start = Start(engine, chat_template, config.max_waiting, self._name)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=2048,
                timeout_graceful_shutdown=int(_TOLD_S),
            )
        )
        self._changed = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._served = False  # whether any engine was ever ready

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> int:
        """Serves until a signal (0) or the engine's end (1); StepaheadError if it never began."""
        try:
            # uvicorn's choice: uvloop where it is installed
            with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
                return runner.run(self._run())
        finally:
            self._socket.close()
            self._front.close()

    async def _run(self) -> int:
        front, keeper = self._front, EngineKeeper(self._start, self._front)
        front.on_change = self._changed.set
        try:
            keeper.begin()
            loop = asyncio.get_running_loop()
            for number in STOPS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, self._on_signal, number)
            helpers = [
                asyncio.create_task(self._watch(keeper)),
                asyncio.create_task(self._ping()),
            ]
            await self._uvicorn.serve(sockets=[self._socket])
            for helper in helpers:
                helper.cancel()
        finally:
            await keeper.end(patient=front.ready is not None)
        if not self._served and keeper.build_failure is not None:
            raise keeper.build_failure
        if not self._served and front.failure is not None:
            raise EngineError(f"the engine ended while it was loaded: {front.failure}")
        return 1 if front.failure is not None else 0

    async def _ping(self) -> None:
        silent_s = self._config.ping_interval
        while True:
            await asyncio.sleep(min(1.0, silent_s / 4))
            self._front.ping(silent_s)

    async def _watch(self, keeper: EngineKeeper) -> None:
        """Tells of each start, and ends the server when the engine is gone for good."""
        front, again = self._front, True
        while again:
            while front.ready is None and front.failure is None:
                await self._next_change()
            if front.ready is not None:
                keeper.patience.ready()
                self._tell_ready(front.ready)
            while front.failure is None:
                await self._next_change()
            again = await self._after(front.failure, keeper)
        self._uvicorn.should_exit = True

    async def _after(self, failure: str, keeper: EngineKeeper) -> bool:
        """The engine is gone; whether there is another one now."""
        if not self._served:
            return False
        self._tell(f"error: the engine has failed: {failure}")
        if self._config.restart and not self._front.draining:
            if keeper.patience.died():
                self._tell("starting the engine again")
                with contextlib.suppress(OSError):  # no process to be had: as without restart
                    await keeper.begin_again()
                    return True
            self._tell("error: the engine can't be started again; the server ends")
        await asyncio.sleep(_FAILED_S)
        return False

    def _tell_ready(self, ready: Ready) -> None:
        if not self._served:
            for line in ready.settings:
                self._tell(line)
        self._served = True
        self._tell(self._where())

    def _where(self) -> str:
        only = ""
        if self._config.local:
            only = "; only this machine can reach it, --host 0.0.0.0 opens it to others"
        return f"serving {self._name} at {self.url}/v1{only}"

    def _on_signal(self, number: int) -> None:
        if self._ending is not None:
            signal.raise_signal(number)  # it had come with the first one, before the kernel had it
        begin_to_stop(number)  # a second one ends us at once, and the kernel the engine
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        front, now_s = self._front, asyncio.get_running_loop().time
        front.draining = True
        limit_s = self._config.shutdown_timeout
        end_s = now_s() + limit_s
        self._tell(f"ending: {len(front.calls)} requests have {limit_s:g} s; again to end at once")
        await self._until_empty(limit_s)
        if front.calls:
            self._tell(f"aborting {len(front.calls)} requests")
            front.abort(None)
            await self._until_empty(_TOLD_S)
        # all is made; who reads slowly has the rest of the time to hear it
        self._uvicorn.config.timeout_graceful_shutdown = int(max(_TOLD_S, end_s - now_s()))
        self._uvicorn.should_exit = True

    async def _until_empty(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._front.calls:
                    await self._next_change()

    async def _next_change(self) -> None:
        await self._changed.wait()  # each who waits is woken before one of them clears it
        self._changed.clear()


class _Uvicorn(uvicorn.Server):
    """One whose signals are the server's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing."""
        yield


def _model_name(model: str) -> str:
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name
