"""What crosses between a server's front and its engine's process.  Knows no process and no HTTP.

Outputs cross as the engine made them: columns of raw integers, one message a step, whatever the
number of clients.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from stepahead.config import EngineConfig
from stepahead.structured import Grammar
from stepahead.types import Outputs, SamplingParams
from stepahead.wire import decoder_of


class Start(msgspec.Struct, frozen=True):
    """To the engine, once: what to build, and what clients call the model.  At most `max_waiting`
    choices may wait."""

    config: EngineConfig
    chat_template: str | None
    max_waiting: int
    name: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1, eq=False):
    """To the engine: a prompt int32[n].  It is answered by Taken or Refused, with the same key.
    `params` no longer say what `grammar` is."""

    key: int
    prompt: np.ndarray
    params: SamplingParams
    grammar: Grammar | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2, eq=False):
    """To the engine: end these requests, int64[n]; their terminal messages come as ever."""

    rids: np.ndarray


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """To the engine: forget cached pages.  It is answered by Flushed."""

    key: int


class AskPage(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """To the engine: what it shows of itself at a path.  It is answered by Page."""

    key: int
    path: str
    query: str
    accept_encoding: str


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """To the engine: close it and leave."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """From the engine, once: it takes requests."""

    settings: tuple[str, ...]
    model_len: int
    max_rows: int


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """From the engine: request ids of a prompt's choices, before any step names them."""

    key: int
    rids: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """From the engine: why a prompt was not taken; `kind` names an error of stepahead.errors."""

    key: int
    kind: str
    message: str
    param: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag=14, eq=False):
    """From the engine: what one step brought."""

    outputs: Outputs


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """From the engine: how many pages were forgotten."""

    key: int
    pages: int


class Page(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """From the engine: an HTTP answer."""

    key: int
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """From the engine, last: what ended it."""

    message: str


ToEngine: TypeAlias = Submit | Cancel | Flush | AskPage | Stop
FromEngine: TypeAlias = Ready | Taken | Refused | Step | Flushed | Page | Failed

to_engine = decoder_of(ToEngine)
from_engine = decoder_of(FromEngine)
