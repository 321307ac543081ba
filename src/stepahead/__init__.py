"""stepahead: an LLM serving engine that is always one step ahead of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepahead.llm import LLM
    from stepahead.types import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "stepahead.llm",
    "CompletionOutput": "stepahead.types",
    "RequestOutput": "stepahead.types",
    "SamplingParams": "stepahead.types",
}


def __getattr__(name: str) -> Any:
    # lazy, so that `import stepahead` and `--help` never load torch
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stepahead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
