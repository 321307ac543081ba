"""Every error the engine raises on purpose, as one tree.

    StepaheadError
    ├── ConfigError             an option is wrong, unknown or contradicts another
    │   └── NotEnoughMemory     the pool or the weights asked for do not fit
    ├── RequestError            refused before anything runs; carries `param`
    │   ├── InvalidParameter    a sampling parameter or a prompt is out of range
    │   ├── PromptTooLong       can never fit the model or the pool
    │   └── PoolFull            fits in principle, not now
    ├── ModelError              a model's files can't be used
    │   ├── UnsupportedModel    architecture, tokenizer or quantisation not known
    │   └── WeightError         a file or a tensor is missing, cut off or of the wrong shape
    └── EngineError             the engine itself failed; running requests end with `error`
        ├── StepFailed          the model raised in a forward
        ├── RunnerDied          the runner's process is gone
        └── EngineClosed        used after close()

Each message names the thing that is wrong and says what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StepaheadError(Exception):
    """Root of everything raised on purpose."""


class ConfigError(StepaheadError):
    """An option is wrong, unknown, or contradicts another one."""


class NotEnoughMemory(ConfigError):
    """The KV pool or the weights asked for do not fit in memory."""


class RequestError(StepaheadError):
    """A request was refused before anything ran; `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameter(RequestError):
    """A sampling parameter or a prompt is malformed or out of range."""


class PromptTooLong(RequestError):
    """The request can never fit the model's length or the page pool."""


class PoolFull(RequestError):
    """The request would fit an empty pool, but not now; try again later."""


class ModelError(StepaheadError):
    """A model's files can't be used."""


class UnsupportedModel(ModelError):
    """Architecture, tokenizer or quantisation is not one that is known."""


class WeightError(ModelError):
    """A file or tensor is missing, cut off, or of the wrong shape; the message names all three."""


class EngineError(StepaheadError):
    """The engine itself failed; running requests end with finish reason `error`.

    `outputs`: what `LLM.generate` would have returned, where it was `generate` that failed.
    """

    outputs: Sequence[Any] = ()


class StepFailed(EngineError):
    """The model raised during a step."""


class RunnerDied(EngineError):
    """The runner's process ended without being asked to."""


class EngineClosed(EngineError):
    """The engine was used after `close()`."""
