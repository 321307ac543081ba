"""What a model's memory follows from: its weights in parts, its cache by the token."""

from __future__ import annotations

from dataclasses import dataclass

ROUTED = "routed experts"


@dataclass(frozen=True)
class Part:
    """Some of a model's values.

    quantized  whether a quantised checkpoint has them in one byte each; else in two
    copied     on every GPU of a tensor-parallel group, where others are split
    spread     split even where attention is data-parallel: routed experts, the vocabulary
    """

    name: str
    values: int
    quantized: bool = True
    copied: bool = False
    spread: bool = False


@dataclass(frozen=True)
class Cache:
    """Bytes a token takes in the KV pool if it is kept as `name`; `draft_bytes` more with MTP."""

    name: str
    bytes_per_token: int
    draft_bytes: int = 0


@dataclass(frozen=True)
class Sizes:
    """What memory follows from.

    splits_cache  how many GPUs can have a part of the cache each under tensor parallelism; 0 where
                  each needs all of it
    quantized     what a quantised checkpoint of it is called, or empty where none is known
    """

    parts: tuple[Part, ...]
    active_values: int
    caches: tuple[Cache, ...]
    splits_cache: int
    max_len: int
    quantized: str = ""

    @property
    def values(self) -> int:
        """All weights, as numbers."""
        return sum(part.values for part in self.parts)
