"""GET /openapi.json: made of the tables that requests are checked with and of the answers' structs.

A field that is honoured or refused there is honoured or refused here; nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from stepahead import __version__
from stepahead.bans import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from stepahead.serve import cards
from stepahead.serve.embeddings import EMBEDDINGS_NOT_YET, EmbeddingFields, EmbeddingReply
from stepahead.serve.fields import NOT_YET, SAMPLING, SPELLINGS, TEXT_NOT_YET
from stepahead.serve.refusal import ErrorReply
from stepahead.serve.replies import ChatReply, TextReply
from stepahead.serve.requests import (
    AbortFields,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
)
from stepahead.types import MAX_LOGPROBS, MAX_STOP_LEN, MAX_STOPS, RANGES, SamplingParams

Schema: TypeAlias = dict[str, Any]


class Exposed(NamedTuple):
    """A route of the app: what it answers to, and its endpoint's first line."""

    method: str
    path: str
    words: str


@dataclass(frozen=True)
class Body:
    """What a route takes: a struct's fields, those of SAMPLING if it samples, and `refused`."""

    fields: type[msgspec.Struct]
    samples: bool = False
    refused: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)


BODIES = {
    "/v1/chat/completions": Body(ChatFields, True, NOT_YET),
    "/v1/completions": Body(CompletionFields, True, TEXT_NOT_YET),
    "/v1/embeddings": Body(EmbeddingFields, False, EMBEDDINGS_NOT_YET),
    "/tokenize": Body(TokenizeFields, False, NOT_YET),
    "/detokenize": Body(DetokenizeFields),
    "/abort": Body(AbortFields),
}
_REPLIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatReply,
    "/v1/completions": TextReply,
    "/v1/embeddings": EmbeddingReply,
    "/v1/models": cards.ModelList,
    "/v1/models/{model}": cards.ModelCard,
    "/tokenize": cards.Tokens,
    "/detokenize": cards.Detokenized,
    "/tokenizer_info": cards.TokenizerInfo,
    "/health": cards.Status,
    "/ready": cards.Status,
    "/version": cards.Version,
    "/abort": cards.Aborted,
    "/flush_cache": cards.Flushed,
}
_STREAMED = ("/v1/chat/completions", "/v1/completions")
_TEXTS = {"/metrics": "text/plain", "/": "text/html"}
_ERRORS = {
    400: "A field is wrong: `error.param` names it.",
    401: "No valid key.",
    403: "Not addressed to this machine's own name.",
    404: "No such model, or no such route.",
    405: "Not with this method.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "The server is full; Retry-After says when to ask again.",
    500: "The server is wrong itself.",
    503: "Loading, draining or failed; Retry-After says when to ask again.",
    504: "Not answered within --request-timeout.",
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_LABEL: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_LEN}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9_.-]{1,64}$"}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN}
_REF = "#/components/schemas/{name}"


def openapi_document(
    exposed: Iterable[Exposed], with_key: bool, model: str, vocab_size: int
) -> Schema:
    """OpenAPI 3.1 of the app's own routes; `with_key`: clients must send one."""
    kinds = [*_REPLIES.values(), *(body.fields for body in BODIES.values())]
    _, schemas = msgspec.json.schema_components(
        [*kinds, ErrorReply, SamplingParams], ref_template=_REF
    )
    sampling = schemas.pop("SamplingParams")["properties"]
    closer = _closer(model, vocab_size)
    for body in BODIES.values():
        name = body.fields.__name__
        schemas[name] = _body(schemas[name], body, sampling, closer)
    paths: dict[str, Schema] = {}
    for route in exposed:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(path, route.words)
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "stepahead", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if with_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        no_scopes: list[str] = []
        found["security"] = [{"key": no_scopes}]
    return found


def _closer(model: str, vocab_size: int) -> dict[str, Schema]:
    """What a field's type does not say."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    tokens = _list_of(token, minItems=1)
    several = [_list_of(_TEXT, minItems=1), _list_of(tokens, minItems=1)]
    prompt: Schema = {"anyOf": [_TEXT, tokens, *several]}
    bias: Schema = {"type": "number", "minimum": -100, "maximum": 100}
    part: Schema = {"type": {"const": "text"}, "text": {"type": "string"}}
    parts = _list_of({"type": "object", "required": ["type", "text"], "properties": part})
    said: Schema = {"anyOf": [{"type": "string"}, parts]}
    message: Schema = {"type": "object", "required": ["role", "content"]}
    message["properties"] = {"role": _TEXT, "content": said}
    choices: list[Schema] = [{"enum": ["none", "auto", "required"]}, _named_function()]
    return {
        "model": {"const": model},
        "prompt": prompt,
        "input": prompt,
        "tokens": _list_of(token),
        "stop_token_ids": _list_of(token),
        "allowed_token_ids": _list_of(token, minItems=1),
        "bad_words": _list_of(_WORD) | {"maxItems": MAX_BAD_WORDS},
        "logit_bias": {"type": "object", "patternProperties": {"^[0-9]+$": bias}},
        "request_id": _LABEL,
        "rid": _LABEL,
        "stop": {"anyOf": [_STOP, _list_of(_STOP) | {"maxItems": MAX_STOPS}]},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "messages": _list_of(message, minItems=1),
        "tools": _list_of(_tool()),
        "tool_choice": {"anyOf": choices},
        "guided_choice": _list_of({"type": "string"}, minItems=1),
    }


def _object_of(properties: Schema, *required: str) -> Schema:
    """An object with these properties and no other."""
    whole: Schema = {"type": "object", "properties": properties, "required": list(required)}
    return whole | {"additionalProperties": False}


def _tool() -> Schema:
    function: Schema = {
        "name": _FUNCTION_NAME,
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    }
    whole = {"type": {"const": "function"}, "function": _object_of(function, "name")}
    return {"type": "object", "properties": whole, "required": ["type", "function"]}


def _named_function() -> Schema:
    named = {
        "type": {"const": "function"},
        "function": _object_of({"name": _FUNCTION_NAME}, "name"),
    }
    return _object_of(named, "type", "function")


def _list_of(items: Schema, **more: int) -> Schema:
    return {"type": "array", "items": items} | more


def _body(schema: Schema, body: Body, sampling: Schema, closer: Mapping[str, Schema]) -> Schema:
    own = dict(schema["properties"])
    if body.samples:
        own |= {name: sampling[name] for name in SAMPLING}
        own |= {name: sampling[ours] for name, ours in SPELLINGS.items()}
    if body.fields is TokenizeFields:
        closer = {name: closer[name] for name in ("model", "messages", "tools")}
    required = set(schema.get("required", ()))
    fields: dict[str, Schema] = {}
    for name, found in own.items():
        close = closer[name] if name in closer else _ranged(name, found)
        fields[name] = close if name in required else _or_null(close)
    refused = {
        name: {"enum": [*neutral, None], "description": words}
        for name, (neutral, words) in body.refused.items()
    }
    either: Schema = {}
    if body.fields is TokenizeFields:
        either = {"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    return schema | {"properties": refused | fields, "additionalProperties": False} | either


def _ranged(name: str, found: Schema) -> Schema:
    if name not in RANGES or found.get("type") == "boolean":  # chat's logprobs is another one
        return found
    low, high, closed = RANGES[name]
    kind = "number" if found.get("type") == "number" else "integer"
    return {"type": kind, "minimum" if closed else "exclusiveMinimum": low, "maximum": high}


def _or_null(found: Schema) -> Schema:
    kinds = found.get("anyOf", [found])
    return found if {"type": "null"} in kinds else {"anyOf": [*kinds, {"type": "null"}]}


def _operation(path: str, words: str) -> Schema:
    found: Schema = {"summary": words, "responses": _responses(path)}
    if path in BODIES:
        ref = {"$ref": _REF.format(name=BODIES[path].fields.__name__)}
        content = {"application/json": {"schema": ref}}
        found["requestBody"] = {"required": True, "content": content}
    if "{model}" in path:
        named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [named]
    if path == "/trace":
        last = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(ms|s|m)$"}
        found["parameters"] = [{"name": "last", "in": "query", "schema": last}]
    return found


def _responses(path: str) -> Schema:
    content: Schema = {_TEXTS.get(path, "application/json"): {}}
    if path in _REPLIES:
        ref = {"$ref": _REF.format(name=_REPLIES[path].__name__)}
        content = {"application/json": {"schema": ref}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    told = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorReply")}}}
    errors = {str(status): {"description": w, "content": told} for status, w in _ERRORS.items()}
    return {"200": {"description": "The answer.", "content": content}} | errors
