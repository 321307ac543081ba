"""How much memory a model takes, and how many GPUs hold it.  Sums only; no file is read here."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stepahead.explain.sizes import ROUTED, Part, Sizes

# nominal capacities; the share of it that weights and cache may take, so that a step has room
_GB = 10**9
GPUS = {"80 GB (A100, H100)": 80 * _GB, "141 GB (H200)": 141 * _GB, "180 GB (B200)": 180 * _GB}
USABLE = 0.85
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_LEAST_TOKENS = 8192  # a GPU that holds the weights and no conversation holds nothing


class WeightSize(msgspec.Struct, frozen=True):
    """All weights, if kept as `dtype`."""

    dtype: str
    bytes: int


class CacheSize(msgspec.Struct, frozen=True):
    """The KV pool's bytes a token, more with MTP drafts, and those of one sequence as long as the
    model knows positions (drafts included)."""

    dtype: str
    bytes_per_token: int
    draft_bytes_per_token: int
    longest_bytes: int


class Fit(msgspec.Struct, frozen=True):
    """The fewest GPUs of a kind that hold the model, and how many cached tokens (bfloat16) then.

    `cache_tokens` with tensor parallelism, `cache_tokens_dp_ep` with data-parallel attention and
    spread experts; None where that does not apply or does not fit.
    """

    weights: str
    gpu: str
    gpus: int
    weight_bytes_per_gpu: int
    cache_tokens: int
    cache_tokens_dp_ep: int | None


class Memory(msgspec.Struct, frozen=True):
    """What a model takes; `usable_share` of a GPU is what weights and cache may fill."""

    parameters: int
    active_parameters: int
    weights: list[WeightSize]
    cache: list[CacheSize]
    usable_share: float
    fits: list[Fit]


def memory_of(sizes: Sizes) -> Memory:
    """The whole estimate."""
    kinds = [*([sizes.quantized] if sizes.quantized else []), "bfloat16", "float32"]
    return Memory(
        parameters=sizes.values,
        active_parameters=sizes.active_values,
        weights=[WeightSize(kind, round(_bytes(sizes, kind))) for kind in kinds],
        cache=[
            CacheSize(
                cache.name,
                cache.bytes_per_token,
                cache.draft_bytes,
                (cache.bytes_per_token + cache.draft_bytes) * sizes.max_len,
            )
            for cache in sizes.caches
        ],
        usable_share=USABLE,
        fits=[fit for kind in kinds[:2] for fit in _fits(sizes, kind)],
    )


def _fits(sizes: Sizes, kind: str) -> Iterator[Fit]:
    cache = next(cache for cache in sizes.caches if cache.name == "bfloat16")
    each = cache.bytes_per_token + cache.draft_bytes
    for name, capacity in GPUS.items():
        for count in _COUNTS:
            per_gpu = _tensor_parallel(sizes, kind, count)
            groups = min(count, sizes.splits_cache) or 1
            tokens = int(groups * (capacity * USABLE - per_gpu) // each)
            if tokens >= _LEAST_TOKENS:
                yield Fit(
                    weights=kind,
                    gpu=name,
                    gpus=count,
                    weight_bytes_per_gpu=round(per_gpu),
                    cache_tokens=tokens,
                    cache_tokens_dp_ep=_dp_tokens(sizes, kind, count, capacity, each),
                )
                break


def _dp_tokens(sizes: Sizes, kind: str, count: int, capacity: int, each: int) -> int | None:
    """Tokens that fit if attention is data-parallel and the routed experts are spread; None where
    there are none, or where the rest of the weights leaves no room."""
    if count == 1 or not any(part.name == ROUTED for part in sizes.parts):
        return None
    per_gpu = sum(
        part.values * _width(part, kind) / (count if part.spread else 1) for part in sizes.parts
    )
    tokens = int(count * (capacity * USABLE - per_gpu) // each)
    return tokens if tokens >= _LEAST_TOKENS else None


def _tensor_parallel(sizes: Sizes, kind: str, count: int) -> float:
    return sum(
        part.values * _width(part, kind) / (1 if part.copied else count) for part in sizes.parts
    )


def _bytes(sizes: Sizes, kind: str) -> float:
    return sum(part.values * _width(part, kind) for part in sizes.parts)


def _width(part: Part, kind: str) -> float:
    """Bytes a value takes."""
    if kind == "float32":
        return 4
    if kind == "bfloat16" or not part.quantized:
        return 2
    return 1 + 4 / 128**2  # one float32 scale for a block of 128 by 128
