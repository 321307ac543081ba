"""What an engine shows of itself, /state, /metrics and /trace, answered in its own process.

The pages are those of the app that `watch` makes of an engine; a thread beside the engine's runs
it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from stepahead.assemble import Assembly, build_engine
from stepahead.config import EngineConfig
from stepahead.engine import Engine
from stepahead.serve.messages import AskPage, Page
from stepahead.watch.app import watch_app
from stepahead.watch.beside import Beside


def build_shown(config: EngineConfig, chat_template: str | None) -> Assembly:
    """An engine, and beside it what its options ask for: pages on a port of their own, spans."""
    beside = Beside(config)
    try:
        assembly = build_engine(config, chat_template)
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
        app = watch_app(self._engine, self._engine.resolved.config.metric_names)
        while True:
            asked = self._asked.get()
            self._tell(asyncio.run(answer_page(app, asked)))


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
