"""One GET, of which nothing hangs and nothing grows: a deadline for all of it, and a size."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

from stepahead.errors import ConfigError, StepaheadError

LARGEST = 32 << 20
# where a person looks is named by that person: no proxy is asked
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unreachable(StepaheadError):
    """Nothing that can be read comes from there, for now."""


@dataclass(frozen=True)
class Answer:
    """An HTTP status and a body."""

    status: int
    body: bytes


def base_url(place: str) -> str:
    """The root of a server, from its URL, `host:port` or a bare port; ConfigError if it is none of
    them.  A path of /state or /metrics is left out."""
    text = place.strip()
    if text.lstrip(":").isdigit():
        text = f"127.0.0.1:{text.lstrip(':')}"
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(
            f"{place!r} names no server; give a URL, host:port or a port, as in 127.0.0.1:9100"
        )
    path = parts.path.rstrip("/")
    for ending in ("/state", "/metrics"):
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{parts.netloc}{path}"


def get(url: str, timeout_s: float) -> Answer:
    """What is there, if all of it comes in `timeout_s`; Unreachable otherwise, saying why."""
    end_s = time.monotonic() + timeout_s
    request = urllib.request.Request(url, headers={"Accept": "application/json, text/plain"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return Answer(response.status, _body(response, end_s))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _words(error))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(_why(error, timeout_s)) from error


def _words(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return b""  # the status says enough


def _body(response: http.client.HTTPResponse, end_s: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    # piece by piece: the socket's own timeout starts again with every byte that trickles in
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise Unreachable(f"its answer is larger than {LARGEST >> 20} MiB")
        if time.monotonic() > end_s:
            raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _why(error: Exception, timeout_s: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no whole answer in {timeout_s:g} s"
    if isinstance(cause, http.client.IncompleteRead):
        return "its answer ended in the middle"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause) or type(cause).__name__
