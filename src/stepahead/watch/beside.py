"""What an engine's options ask to run beside it: the app on loopback, and spans of requests.

What can be found wrong is found before the model is loaded.  What is not asked for is not imported.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from stepahead.config import EngineConfig
from stepahead.observe.observer import Observer

if TYPE_CHECKING:
    import socket

    from opentelemetry.sdk.trace.export import SpanExporter

    from stepahead.observe.reading import Watched


class Beside:
    """Ready at once, at work from `start` to `close`.

    ConfigError if the port can't be had, or if something that spans need is not installed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.url: str | None = None  # of the app, once it is served
        self._names = config.metric_names
        self._running = ExitStack()
        self._exporter = _exporter() if config.request_spans else None
        self._socket = None if config.observe is None else _listen(config.observe)
        if self._socket is not None:
            self._running.callback(self._socket.close)

    def start(self, watched: Watched) -> None:
        """Begins to show this engine."""
        if self._socket is not None:
            self._serve(watched, self._socket)
        if self._exporter is not None:
            self._export(watched.observer, self._exporter)

    def _serve(self, watched: Watched, listening: socket.socket) -> None:
        from stepahead.watch.app import watch_app
        from stepahead.watch.loopback import Loopback

        served = Loopback(watch_app(watched, self._names), listening)
        self.url = served.url
        self._running.callback(served.close)

    def _export(self, observer: Observer, exporter: SpanExporter) -> None:
        from stepahead.watch.spans import RequestSpans

        self._running.callback(RequestSpans(observer, exporter).close)

    def close(self) -> None:
        """Ends it all, in a few seconds whatever it is at.  Idempotent."""
        self._running.close()


def _listen(port: int) -> socket.socket:
    from stepahead.watch.loopback import listen

    return listen(port)


def _exporter() -> SpanExporter:
    from stepahead.watch.spans import exporter_from_environment

    return exporter_from_environment()
