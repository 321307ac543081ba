"""POST /v1/embeddings: its fields, and prompts' pooled states as it tells them.  No engine."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from stepahead.serve.fields import NOT_YET, convert, read_object, take_neutral
from stepahead.serve.refusal import not_now
from stepahead.serve.requests import Given, read_label, read_prompts
from stepahead.types import Pooling, RequestOutput, SamplingParams

EMBEDDINGS_NOT_YET = NOT_YET | {
    "dimensions": ((), "a model's states have one length, and are not cut; leave it out")
}


class EmbeddingFields(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings.  `user` is a label, which asks for nothing."""

    input: Given
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Pooling = "mean"
    add_special_tokens: bool = True
    request_id: str | None = None
    rid: str | None = None
    user: str | None = None


@dataclass(frozen=True)
class AskedEmbeddings:
    """A request that is well formed."""

    model: str | None
    params: SamplingParams
    label: str | None
    prompts: tuple[str | list[int], ...]
    add_special_tokens: bool
    as_base64: bool
    structure: str = ""  # there is none


class Embedding(msgspec.Struct, frozen=True):
    """The state of one prompt, of length 1: numbers, or base64 of them as little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct, frozen=True):
    """The answer, in the order of the prompts."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def read_embedding_request(body: bytes) -> AskedEmbeddings:
    """Refusal names the field that can't be honoured."""
    fields = convert(take_neutral(read_object(body), EMBEDDINGS_NOT_YET), EmbeddingFields)
    return AskedEmbeddings(
        fields.model,
        SamplingParams(pooling=fields.pooling),
        read_label(fields.request_id, fields.rid),
        read_prompts(fields.input, "input"),
        fields.add_special_tokens,
        fields.encoding_format == "base64",
    )


def embedding_reply(
    asked: AskedEmbeddings, id: str, created: int, model: str, outputs: list[RequestOutput]
) -> EmbeddingReply:
    """The answer; Refusal where a prompt was aborted before its end."""
    data = [
        Embedding(place, _told(_unit(output), asked.as_base64))
        for place, output in enumerate(outputs)
    ]
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingReply(id, created, model, data, EmbeddingUsage(tokens, tokens))


def _unit(output: RequestOutput) -> np.ndarray:
    pooled = output.outputs[0].pooled
    if pooled is None:
        raise not_now("the request was aborted before all of it was read", "aborted")
    exact = pooled.astype(np.float64)
    length = math.sqrt(exact @ exact)
    return (exact / length if length > 0 else exact).astype("<f4")


def _told(values: np.ndarray, as_base64: bool) -> list[float] | str:
    return base64.b64encode(values.tobytes()).decode() if as_base64 else values.tolist()
