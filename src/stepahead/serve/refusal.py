"""What a client is told when it gets no answer: OpenAI's error object and the HTTP status.

Knows errors, no routes.
"""

from __future__ import annotations

import msgspec

from stepahead import errors
from stepahead.errors import EngineError, PoolFull, PromptTooLong, RequestError, StepaheadError

_RETRY_S = 1  # a queue that is full now has moved by then


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong, and in which field, if it is in one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """What is told instead of an answer."""

    error: ErrorDetail


class Refusal(Exception):
    """A request that gets no answer; `status` is that of HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(ErrorReply(self.told()))

    def told(self) -> ErrorDetail:
        """The inside of the error object."""
        kind = _KINDS.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return ErrorDetail(self.message, kind, self.param, self.code)


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> Refusal:
    """400: what was asked is wrong in `param`."""
    return Refusal(400, message, code, param)


def too_many(message: str) -> Refusal:
    """429, with the time to wait before the next try."""
    return Refusal(429, message, "queue_full", None, {"Retry-After": str(_RETRY_S)})


def not_now(message: str, code: str) -> Refusal:
    """503: the server is loading, draining or has failed."""
    return Refusal(503, message, code, None, {"Retry-After": str(_RETRY_S)})


def refusal_of(error: StepaheadError) -> Refusal:
    """How one of our own errors is told."""
    if isinstance(error, PoolFull):
        return too_many(str(error))
    if isinstance(error, PromptTooLong):
        return bad_request(str(error), error.param, "context_length_exceeded")
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param)
    return not_now(str(error), "engine_failed")


def refusal_named(kind: str, message: str, param: str) -> Refusal:
    """The same of an error that has crossed from the engine's process as words."""
    known = getattr(errors, kind, EngineError)
    if issubclass(known, RequestError):
        return refusal_of(known(message, param))
    return refusal_of(EngineError(message))
