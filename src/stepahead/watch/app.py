"""What an engine shows over HTTP, as a Starlette app to mount: /state, /metrics, /lanes, /trace and
/health.

Each answer is made of one short question to the engine's observer; the long part, laying books over
each other and writing JSON, is done in the thread that asked.  Knows no engine, only `Watched`.
"""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stepahead.errors import EngineError, InvalidParameter, RequestError
from stepahead.observe.lanes import lanes, read_lanes
from stepahead.observe.metrics import METRIC_NAMES, EngineCollector
from stepahead.observe.perfetto import chrome_trace
from stepahead.observe.reading import Watched, document, read, status

T = TypeVar("T")
Answer = Callable[[Request], Response]
PATIENCE_S = 5.0  # how long an answer waits for the end of a step
_LOG = logging.getLogger("stepahead")
_JSON = "application/json"
_LAST = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m)")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_FAST = 3  # of gzip's levels: a trace shrinks to about the same with any


def watch_app(
    watched: Watched, metric_names: str = "stepahead", patience_s: float = PATIENCE_S
) -> Starlette:
    """The app of an engine, for any prefix.

    `metric_names` is one of METRIC_NAMES.  While the engine is in one step for longer than
    `patience_s` the answer is 503.
    """
    assert metric_names in METRIC_NAMES, metric_names
    pages = _Pages(watched, metric_names, patience_s)
    answers: dict[str, Answer] = {
        "/state": pages.state,
        "/metrics": pages.metrics,
        "/lanes": pages.lanes,
        "/trace": pages.trace,
        "/health": pages.health,
    }
    return Starlette(
        routes=[Route(path, partial(_answered, answer)) for path, answer in answers.items()],
        exception_handlers={HTTPException: _refused},
    )


class _Pages:
    """The answers; for many threads at once."""

    def __init__(self, watched: Watched, metric_names: str, patience_s: float) -> None:
        self._watched = watched
        self._names = metric_names
        self._patience_s = patience_s

    def state(self, request: Request) -> Response:
        _only(request)
        found = document(self._ask(lambda: read(self._watched)))
        return _json({"status": status(self._watched), **found})

    def metrics(self, request: Request) -> Response:
        _only(request)
        reading = self._ask(lambda: read(self._watched))
        registry = CollectorRegistry()
        registry.register(EngineCollector(lambda: reading, self._names))
        # not the OpenMetrics format, whatever is accepted: it would write vllm: as vllm_
        return _zipped(request, generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)

    def lanes(self, request: Request) -> Response:
        _only(request, "from")
        from_bin = _bin(request.query_params.get("from"))
        return _json(lanes(self._ask(lambda: read_lanes(self._watched, from_bin))))

    def trace(self, request: Request) -> Response:
        _only(request, "last")
        last_s = _seconds(request.query_params.get("last"))
        snapshot = self._ask(self._watched.observer.snapshot)
        return _zipped(request, chrome_trace(snapshot, last_s), _JSON)

    def health(self, request: Request) -> Response:
        _only(request)
        found = status(self._watched)
        if found == "ok":
            return _json({"status": found})
        words = self._watched.failure or "the engine is closed"
        return _error(503, str(words), f"engine_{found}")

    def _ask(self, question: Callable[[], T]) -> T:
        return self._watched.observer.ask(question, self._patience_s)


def _answered(answer: Answer, request: Request) -> Response:
    """The answer, or what went wrong with it: nothing may reach the server or the engine."""
    try:
        return answer(request)
    except RequestError as error:
        return _error(400, str(error), "invalid_value", error.param)
    except EngineError as error:
        return _error(503, str(error), "engine_busy")
    except Exception as error:
        _LOG.exception("%s could not be answered", request.url.path)
        words = f"this could not be answered ({type(error).__name__}: {error}); see the log"
        return _error(500, words, "internal_error")


def _only(request: Request, *known: str) -> None:
    """InvalidParameter unless the query has nothing but these parameters, once each."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            takes = f"only {', '.join(known)}" if known else "no parameters"
            raise InvalidParameter(f"{name!r}: {request.url.path} takes {takes}", name)
        if names.count(name) > 1:
            raise InvalidParameter(f"{name!r} is given twice; give it once", name)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = _LAST.fullmatch(text)
    seconds = float(match[1]) * _UNIT_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise InvalidParameter(
            f"last={text[:40]!r}; give a time above zero with its unit: 500ms, 5s or 1m", "last"
        )
    return seconds


def _bin(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,15}", text):
        raise InvalidParameter(
            f"from={text[:40]!r}; give the number that the last answer has as `next`", "from"
        )
    return int(text)


def _refused(request: Request, error: Exception) -> Response:
    """What the router refuses: paths that are not there, methods that nobody takes."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"{request.url.path} is not here; /state, /metrics, /lanes, /trace and /health are",
        405: f"{request.method} is not for {request.url.path}; use GET",
    }.get(error.status_code, error.detail)
    found = _error(error.status_code, words, "not_found" if error.status_code == 404 else None)
    found.headers.update(error.headers or {})
    return found


def _error(status_code: int, message: str, code: str | None, param: str | None = None) -> Response:
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    told = {"message": message, "type": kind, "param": param, "code": code}
    return _json({"error": told}, status_code)


def _json(found: object, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status_code, media_type=_JSON)


def _zipped(request: Request, body: bytes, kind: str) -> Response:
    headers = {"content-type": kind, "vary": "accept-encoding"}
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        body, headers["content-encoding"] = gzip.compress(body, _FAST), "gzip"
    return Response(body, headers=headers)


def _takes_gzip(accepted: str) -> bool:
    for item in accepted.lower().split(","):
        name, _, rest = item.partition(";")
        if name.strip() == "gzip":
            quality = rest.replace(" ", "").removeprefix("q=")
            return quality.strip("0.") != "" if rest else True
    return False
