"""Servers on loopback that answer as they are told: well, badly, slowly, in part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answers:
    """What is answered, by path; a path that is not there is a 404.

    `missing` bytes are promised and never sent.  `slow` sends a byte now and then until the server
    is closed.
    """

    bodies: dict[str, bytes | Callable[[], bytes]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    missing: int = 0
    slow: bool = False
    asked: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """The URL of a server; it is gone afterwards, threads and all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.asked.append(self.path)
            found = answers.bodies.get(self.path)
            body = found() if callable(found) else found
            default = 404 if body is None else 200
            self.send_response(answers.status.get(self.path, default))
            body = body or b""
            self.send_header("Content-Length", str(len(body) + answers.missing))
            self.end_headers()
            if answers.slow:
                self._trickle(body)
            else:
                self.wfile.write(body)

        def _trickle(self, body: bytes) -> None:
            try:
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    if answers.closing.wait(0.02):
                        return
            except OSError:  # who asked has had enough
                return

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing waits for them
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        answers.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
