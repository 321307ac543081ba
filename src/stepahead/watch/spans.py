"""OpenTelemetry spans of requests, made after their ends: queue, prefill, decode.

A thread of its own asks the observer now and then which requests have ended; the engine's thread
only takes their times down, as it always does.  Needs the extra: pip install stepahead[otel]
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepahead import __version__
from stepahead.errors import ConfigError, EngineError
from stepahead.observe.observer import Observer
from stepahead.observe.requests import ENDS, EndedRequests

try:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from opentelemetry.trace import Status, StatusCode, set_span_in_context
except ImportError as error:
    raise ConfigError(
        "request_spans needs OpenTelemetry, which is not installed: pip install 'stepahead[otel]'"
    ) from error

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

EVERY_S = 1.0
_LOOK_S = 1.0  # how long a look waits for the end of a step
_CLOSE_S = 3.0  # a collector may not answer
_LOG = logging.getLogger("stepahead")
_PROTOCOLS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def exporter_from_environment() -> SpanExporter:
    """The exporter that the standard OTEL_ variables name.

    OTEL_TRACES_EXPORTER is `otlp`, or `console`.  Where `otlp` sends to, and how, its own variables
    say (OTEL_EXPORTER_OTLP_ENDPOINT and the like).  ConfigError where it can't be had.
    """
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if kind == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    if kind != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER={kind}; request_spans takes otlp or console")
    named = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", named)
    if protocol not in _PROTOCOLS:
        words = " or ".join(_PROTOCOLS)
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}; request_spans takes {words}")
    try:
        module = importlib.import_module(_PROTOCOLS[protocol])
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-" + protocol.partition("/")[0]
        raise ConfigError(
            f"request_spans: the exporter for {protocol} is not installed: pip install {package}"
        ) from error
    return module.OTLPSpanExporter()


class RequestSpans:
    """Exports a span for each request that ends, until `close`."""

    def __init__(
        self, observer: Observer, exporter: SpanExporter, every_s: float = EVERY_S
    ) -> None:
        self._observer = observer
        self._seen = observer.requests.ended_count
        self._unix_ns = time.time_ns() - observer.clock_ns()
        named = {"service.name": "stepahead", "service.version": __version__}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before what we call ourselves
        resource = Resource.create(named).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("stepahead", __version__)
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepahead spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports what is left and ends, in a few seconds at most.  Idempotent."""
        self._over.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()
        self._look()
        self._provider.shutdown()

    def _look(self) -> None:
        try:
            ended, count = self._observer.ask(self._ended, timeout_s=min(self._every_s, _LOOK_S))
        except EngineError:
            if not self._over.is_set():
                return  # in a long step: next time
            # who closes the engine may do so in the midst of a step, and waits for us
            ended, count = self._ended()
        if lost := count - self._seen - len(ended):
            _LOG.warning("%d requests ended faster than their spans could be made", lost)
        self._seen = count
        for one in _rows(ended):
            self._tell(one)

    def _ended(self) -> tuple[EndedRequests, int]:
        """Who has ended since the last look, and how many ever."""
        log = self._observer.requests
        return log.ends(self._seen), log.ended_count

    def _tell(self, one: dict[str, int]) -> None:
        """The span of a request, and below it those of what it went through."""
        about, reason = self._observer.about, ENDS[one["reason"]]
        model = str(about.get("model", ""))
        root = self._tracer.start_span(
            f"text_completion {model}",
            start_time=self._unix_ns + one["arrived_ns"],
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "stepahead",
                "gen_ai.request.model": model,
                "gen_ai.response.finish_reasons": (reason,),
                "gen_ai.usage.input_tokens": one["prompt_tokens"],
                "gen_ai.usage.output_tokens": one["output_tokens"],
                "gen_ai.usage.cache_read.input_tokens": one["cached_tokens"],
                "stepahead.request_id": one["rid"],
                "stepahead.loop": str(about.get("loop", "")),
                "stepahead.preemptions": one["preemptions"],
            },
        )
        if reason == "error":
            root.set_status(Status(StatusCode.ERROR))
        self._tell_parts(root, one)
        root.end(self._unix_ns + one["ended_ns"])

    def _tell_parts(self, root: Span, one: dict[str, int]) -> None:
        context = set_span_in_context(root)
        posts = [one[f"{post}_ns"] for post in ("arrived", "admitted", "first", "ended")]
        for name, start_ns, end_ns in zip(
            ("queue", "prefill", "decode"), posts, posts[1:], strict=False
        ):
            if start_ns < 0:
                return  # it never came so far
            until_ns = end_ns if end_ns >= 0 else posts[-1]
            part = self._tracer.start_span(
                name, context=context, start_time=self._unix_ns + start_ns
            )
            part.end(self._unix_ns + until_ns)


def _rows(ended: EndedRequests) -> Iterator[dict[str, int]]:
    names = list(vars(ended))
    columns = [getattr(ended, name).tolist() for name in names]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))
