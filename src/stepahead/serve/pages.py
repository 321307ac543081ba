"""What an engine shows of itself, /state, /metrics and /trace, answered in its own process.

The pages are those of the app that `watch` makes of an engine; a thread beside the engine's runs
it.  Knows no engine but to hand it on.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import queue
import threading
from collections.abc import Callable
from typing import Any

from stepahead.assemble import Assembly, build_engine
from stepahead.config import EngineConfig
from stepahead.engine import Engine
from stepahead.serve.messages import AskPage, Page


def _watch(module: str) -> Any:
    """A module of the room `watch`, None where there is no such room."""
    room = ".".join(("stepahead", "watch"))
    found = importlib.util.find_spec(room)
    return None if found is None else importlib.import_module(f"{room}.{module}")


def page_app(engine: Engine) -> Any:
    """The ASGI app that shows this engine, None where there is no such room."""
    app = _watch("app")
    if app is None:
        return None
    return app.watch_app(engine, getattr(engine.resolved.config, "metric_names", "stepahead"))


def build_shown(config: EngineConfig, chat_template: str | None) -> Assembly:
    """An engine, and beside it what its options ask for: pages on a port of their own, spans."""
    room = _watch("beside")
    if room is None:
        return build_engine(config, chat_template)
    beside = room.Beside(config)
    try:
        assembly: Any = build_engine(config, chat_template)
        beside.start(assembly.engine)
    except BaseException:
        beside.close()
        raise
    assembly.engine.on_close(beside.close)
    return assembly


class Pages:
    """Answers pages one by one; its thread is started by the first."""

    def __init__(self, engine: Engine, tell: Callable[[Page], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._asked: queue.SimpleQueue[AskPage] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, asked: AskPage) -> None:
        """Has a page made; the answer is told from another thread."""
        self._asked.put(asked)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stepahead-pages", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        app = page_app(self._engine)
        while True:
            asked = self._asked.get()
            self._tell(_absent(asked) if app is None else asyncio.run(answer_page(app, asked)))


def _absent(asked: AskPage) -> Page:
    body = b'{"error": {"message": "this build shows no such page", "type": "not_found_error"}}'
    return Page(asked.key, 404, (("content-type", "application/json"),), body)


async def answer_page(app: Any, asked: AskPage) -> Page:
    """What an ASGI app answers to a GET, 500 if it raises."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": asked.query.encode("latin-1"),
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"accept-encoding", asked.accept_encoding.encode("latin-1")),
        ],
        "client": None,
        "server": None,
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except Exception as error:  # of a page: the engine goes on, and so does this thread
        words = f'{{"error": {{"message": "{type(error).__name__}", "type": "server_error"}}}}'
        return Page(asked.key, 500, (("content-type", "application/json"),), words.encode())
    head, *rest = sent
    headers = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in head["headers"]
    )
    return Page(
        asked.key, head["status"], headers, b"".join(part.get("body", b"") for part in rest)
    )
