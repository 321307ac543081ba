"""What can be chosen of a server beside its engine.  Knows no HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stepahead.errors import ConfigError
from stepahead.parse.formats import AUTO, REASONING_PARSERS, TOOL_PARSERS


@dataclass(frozen=True)
class ServeConfig:
    """All options of a server; ConfigError names the one that is wrong.

    host              the address to listen on; only this machine can reach the default
    port              the port to listen on; 0 is any that is free
    api_key           what clients must send as their key; all routes but /health, /ready
                      and the web page ask for it
    served_name       what clients call the model, instead of MODEL
    allow_origins     web pages of these origins may ask; none unless named, * is all
    max_waiting       most choices that wait for a row or for pages; more are refused with 429
    request_timeout   seconds from a request's arrival to its end; later it ends with 504
    shutdown_timeout  seconds that running requests may take to end after SIGTERM
    max_body_mb       most megabytes of a request's body; more is refused with 413
    ping_interval     seconds of silence after which a stream gets a comment line
    tool_call_parser  how the model writes tool calls: hermes, glm or llama3; auto looks what its
                      chat template teaches, none looks for none
    reasoning_parser  whether it reasons first: think (between <think> and </think>), none, or auto,
                      as its chat template says
    restart           start the engine again when it dies; three times in a row within a minute are
                      too often, and end the server
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_name: str | None = None
    allow_origins: list[str] | None = None
    max_waiting: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    max_body_mb: float = 32.0
    ping_interval: float = 10.0
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    restart: bool = False

    @property
    def local(self) -> bool:
        """Whether it listens for this machine alone."""
        return self.host.lower().startswith(_LOOPBACK)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port={self.port}; give one from 0 (any that is free) to 65535")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting={self.max_waiting}; give 0 or more")
        for name, lowest in _SECONDS.items():
            value = getattr(self, name)
            if value is not None and not (lowest <= value < math.inf):
                raise ConfigError(f"{name}={value}; give a number of at least {lowest:g}")
        for name, known in _PARSERS.items():
            value = getattr(self, name)
            if value != AUTO and value.replace("-", "_") not in known:
                names = ", ".join([AUTO, *known])
                raise ConfigError(f"{name}={value!r} is not known; give one of {names}")
        for origin in self.allow_origins or ():
            if "[" in origin.partition("://")[0]:  # in JSON, as vLLM takes them
                words = "give each origin as a word of its own"
                raise ConfigError(f"allow_origins={origin!r}; {words}")
        for name in ("api_key", "served_name", "host"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; give it some text or leave it out")
        key = self.api_key or ""
        if not key.isprintable() or key != key.strip():
            raise ConfigError("api_key can't be sent in a header; give letters, digits and signs")


_LOOPBACK = ("127.", "::1", "localhost")
_SECONDS = {
    "request_timeout": 1e-3,
    "shutdown_timeout": 0.0,
    "max_body_mb": 1e-3,
    "ping_interval": 1e-3,
}
_PARSERS: dict[str, Mapping[str, object]] = {
    "tool_call_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
# what other engines call our fields
SERVE_ALIASES = {
    "served_model_name": "served_name",
    "model_name": "served_name",
    "server_name": "host",
    "server_port": "port",
    "api_keys": "api_key",
    "allowed_origins": "allow_origins",
    "max_queued_requests": "max_waiting",
}


def serve_config(options: dict[str, Any]) -> ServeConfig:
    """A ServeConfig of keyword options; ConfigError."""
    known = {field.name for field in fields(ServeConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known options: {', '.join(sorted(known))}")
    return ServeConfig(**options)
