"""HTTP beside the routes: bodies within limits, keys, JSON answers, streams, clients that go away.

Knows calls and stories; no fields, no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stepahead.serve.calls import Call
from stepahead.serve.refusal import Refusal
from stepahead.serve.streams import PING, Story, error_event

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_JSON = "application/json"
_OPEN = ("/", "/health", "/ready")  # the page is the same for all, and asks for the key
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers would hold the tokens back
]


def json_answer(found: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(found), status, media_type=_JSON)


def refusal_answer(request: Request, error: Exception) -> Response:
    """What is told instead of an answer; for Refusal and what Starlette itself refuses."""
    if isinstance(error, HTTPException):
        error = _of_router(request, error)
    assert isinstance(error, Refusal)
    return Response(error.body(), error.status, error.headers, _JSON)


def _of_router(request: Request, error: HTTPException) -> Refusal:
    words, code = error.detail, "error"
    if error.status_code == 404:
        words, code = f"{request.url.path} is not a route of this server", "not_found"
    elif error.status_code == 405:
        words, code = f"{request.method} is not for {request.url.path}", "method_not_allowed"
    return Refusal(error.status_code, words, code, None, dict(error.headers or {}))


def fault_answer(request: Request, error: Exception) -> Response:
    """What is told when we are wrong ourselves; the log has the rest."""
    words = f"the server could not answer this ({type(error).__name__}); its log says more"
    return refusal_answer(request, Refusal(500, words, "internal_error"))


def unheard_answer(request: Request, error: Exception) -> Response:
    """What is told to a client that went away before all it had to say was heard."""
    return Response(status_code=400)


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body; Refusal if it is too large or of another type than JSON."""
    kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind != _JSON:
        # a page elsewhere can send a form or plain text here without being asked first
        raise Refusal(415, f"content-type {kind!r}: send application/json", "content_type")
    length = request.headers.get("content-length", "0")
    too_large = Refusal(413, f"the body has more than {most_bytes} bytes", "body_too_large")
    if length.isdecimal() and int(length) > most_bytes:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most_bytes:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


class KeyGuard:
    """Lets nobody through without the key, but to /health, /ready and the page."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands it on, or refuses it with 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        words = "no valid key: send the header Authorization: Bearer KEY"
        refusal = Refusal(401, words, "invalid_api_key", None, headers)
        await Response(refusal.body(), 401, refusal.headers, _JSON)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # in a time that tells nothing of how much of it was right
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)


@contextlib.contextmanager
def watching(receive: Receive, gone: Callable[[], None]) -> Generator[None]:
    """While it is entered, `gone` is called when the client goes away."""
    task = asyncio.create_task(_until_gone(receive, gone))
    try:
        yield
    finally:
        task.cancel()


async def _until_gone(receive: Receive, gone: Callable[[], None]) -> None:
    with contextlib.suppress(ClientDisconnect):
        while (await receive())["type"] != "http.disconnect":
            pass
    gone()


class StreamAnswer(Response):
    """A call told as server-sent events, as fast as its client reads: nothing waits for it."""

    def __init__(self, call: Call, story: Story, cancel: Callable[[Call], None]) -> None:
        super().__init__()
        self._call = call
        self._story = story
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it all."""
        try:
            with watching(receive, self._gone):
                await self._tell(send)
        finally:
            self._gone()  # the server may end us in the middle

    def _gone(self) -> None:
        self._cancel(self._call)

    async def _tell(self, send: Send) -> None:
        call, story = self._call, self._story
        loop = asyncio.get_running_loop()

        async def put(data: bytes, more: bool = True) -> None:
            call.told_s = loop.time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        if head := story.begin():
            await put(head)
        while call.unread or not call.over:
            items = await call.news()
            if items or not call.over:
                data = story.tell(items) if items else PING
                if data:  # it may be held back
                    await put(data)
        last = story.end() if call.error is None else error_event(call.error)
        await put(last, more=False)


def query_of(request: Request) -> str:
    """The query as it came."""
    found: Any = request.scope["query_string"]
    return found.decode("latin-1")
