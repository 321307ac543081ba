"""A running engine's app on this machine's own address, in a thread beside the engine.

Only loopback is listened on, and only a request that was addressed to it is answered: a web page
elsewhere may have its own name point here.  No signal is handled and nothing is logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stepahead.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_STOP_S = 2.0  # far more than the end takes
_NO_LOG = logging.getLogger("stepahead.watch")
_NO_LOG.setLevel(logging.CRITICAL + 1)


def listen(port: int) -> socket.socket:
    """A socket on loopback; port 0 is any free one.  ConfigError if the port can't be had."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # else a port can't be used again for a minute after the last engine that had it
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((HOST, port))
        found.listen()
    except OSError as error:
        found.close()
        raise ConfigError(
            f"observe={port}: this port can't be had on {HOST} ({error.strerror}); choose another "
            "one, or 0 for any that is free"
        ) from error
    return found


class _Config(uvicorn.Config):
    """Leaves the process's loggers as they are: it may serve something of its own."""

    def configure_logging(self) -> None:
        """Nothing."""


class _Silent(H11Protocol):
    """Tells no log of the requests it has had, nor of those that the end has cut off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False
        self.logger = _NO_LOG


class Loopback:
    """Serves `app` on a socket of `listen` until `close`."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        self.url = f"http://{HOST}:{listening.getsockname()[1]}"
        self._socket = listening
        config = _Config(
            LocalOnly(app),
            loop="asyncio",
            http=_Silent,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="stepahead watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self._socket.close()

    def close(self) -> None:
        """Stops, at once whatever is being answered.  Idempotent; for any thread."""
        self._server.should_exit = True
        self._server.force_exit = True  # what is being answered may wait for a step to end
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)


class LocalOnly:
    """Answers only requests whose Host is a name of this machine's loopback, or one of `more`."""

    def __init__(self, app: ASGIApp, more: tuple[str, ...] = ()) -> None:
        self._app = app
        self._names = _NAMES + tuple(name.lower() for name in more if name.lower() not in _NAMES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands it on, or refuses it with 403."""
        if scope["type"] == "http" and not _is_local(scope["headers"], self._names):
            await _refuse(send, self._names)
        else:
            await self._app(scope, receive, send)


def _is_local(headers: list[tuple[bytes, bytes]], names: tuple[str, ...]) -> bool:
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    name, colon, port = hosts[0].rpartition(":")
    bare = name if colon and port.isdecimal() else hosts[0]
    return bare in names


async def _refuse(send: Send, names: tuple[str, ...]) -> None:
    told = {
        "message": f"only requests to {', '.join(names)} are answered here",
        "type": "invalid_request_error",
        "param": "host",
        "code": "host_not_allowed",
    }
    body = msgspec.json.encode({"error": told})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
