"""The small answers: what the server says of its model, of texts and of itself."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class ModelCard(msgspec.Struct, frozen=True):
    """GET /v1/models/NAME; `max_model_len` is null while the model is loaded."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "stepahead"


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models: the one model."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct, frozen=True):
    """POST /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """GET /tokenizer_info: special tokens, null where there is none."""

    bos_token: str | None
    eos_token: str | None


class Status(msgspec.Struct, frozen=True):
    """GET /health and /ready."""

    status: Literal["ok", "ready", "loading", "draining"]


class Version(msgspec.Struct, frozen=True):
    """GET /version."""

    version: str


class Aborted(msgspec.Struct, frozen=True):
    """POST /abort: how many requests."""

    aborted: int


class Flushed(msgspec.Struct, frozen=True):
    """POST /flush_cache: how many pages."""

    flushed_pages: int
