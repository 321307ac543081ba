"""The bodies of requests, read and checked.  Knows fields and sampling parameters; no texts yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from stepahead.errors import RequestError
from stepahead.llm.tools import ToolWish, read_tools
from stepahead.serve.fields import (
    TEXT_NOT_YET,
    convert,
    read_object,
    split_sampling,
    take_neutral,
)
from stepahead.serve.refusal import bad_request, refusal_of
from stepahead.serve.structures import Structures, read_structure
from stepahead.types import MAX_LOGPROBS, SamplingParams, params_from

Given: TypeAlias = Any  # text, token ids, or a list of either: more kinds than a type can tell


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What else a stream tells."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Common(Structures, kw_only=True):
    """Fields of both APIs that are no sampling parameters.

    The last five are labels, which ask for nothing.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    rid: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None


class ChatFields(_Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool = False
    add_special_tokens: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True


class CompletionFields(_Common, kw_only=True):
    """POST /v1/completions."""

    prompt: Given
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Asked:
    """A request that is well formed.

    show_logprobs   alternatives to tell for each token, None for no log-probabilities
    told_as_ids     tokens are told as "token_id:7" in log-probabilities
    no_output       only the prompt is wanted, by `echo` and a max_tokens of 0
    structure       the field that says what `params.structured_outputs` does
    """

    model: str | None
    params: SamplingParams
    stream: bool
    usage: StreamOptions
    label: str | None
    show_logprobs: int | None
    told_as_ids: bool
    token_ids: bool
    structure: str
    echo: bool = False
    no_output: bool = False


@dataclass(frozen=True)
class AskedChat(Asked):
    """A conversation.

    tell_reasoning  it is told, in a field of its own if it is `told_apart`
    """

    messages: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] | None = None
    tools: ToolWish | None = None
    tell_reasoning: bool = True
    told_apart: bool = True


@dataclass(frozen=True)
class AskedCompletion(Asked):
    """Prompts, as they were given."""

    prompts: tuple[str | list[int], ...] = ()
    add_special_tokens: bool = True


def read_chat_request(body: bytes) -> AskedChat:
    """Refusal names the field that can't be honoured."""
    sampling, rest = split_sampling(read_object(body))
    fields = convert(take_neutral(rest), ChatFields)
    for name in ("echo", "add_special_tokens"):
        if getattr(fields, name):
            raise bad_request(
                f"{name}: the template makes the whole prompt of a chat; use completions for it",
                name,
                "unsupported_value",
            )
    if fields.max_completion_tokens is not None:
        if sampling.get("max_tokens", fields.max_completion_tokens) != fields.max_completion_tokens:
            words = "max_completion_tokens and max_tokens are one; give one, or the same twice"
            raise bad_request(words, "max_completion_tokens")
        sampling["max_tokens"] = fields.max_completion_tokens
    _check_stream(fields, sampling)
    shown = _chat_logprobs(fields)
    params, structure = _params(fields, sampling, {"max_tokens": None}, shown)
    return AskedChat(
        **_common(fields, params, shown),
        structure=structure,
        messages=tuple(fields.messages),
        add_generation_prompt=fields.add_generation_prompt,
        template_kwargs=fields.chat_template_kwargs,
        tools=_read_tools(fields),
        tell_reasoning=fields.include_reasoning,
        told_apart=fields.separate_reasoning,
    )


def _read_tools(fields: ChatFields) -> ToolWish | None:
    try:
        found = read_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    except RequestError as error:
        raise refusal_of(error) from error
    if not fields.separate_reasoning:
        if found is not None:
            words = "separate_reasoning: calls are looked for behind the reasoning; leave it out"
            raise bad_request(words, "separate_reasoning", "unsupported_value")
        if not fields.include_reasoning:
            words = "include_reasoning: what is not told apart can't be left out; give one of them"
            raise bad_request(words, "include_reasoning")
    return found


def _chat_logprobs(fields: ChatFields) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise bad_request("top_logprobs: set logprobs to true with it", "top_logprobs")
        return None
    top = fields.top_logprobs or 0
    return _within("top_logprobs", top)


def _within(name: str, top: int) -> int:
    if not 0 <= top <= MAX_LOGPROBS:
        raise bad_request(f"{name}={top} is outside [0, {MAX_LOGPROBS}]", name)
    return top


def read_completion_request(body: bytes) -> AskedCompletion:
    """Refusal names the field that can't be honoured."""
    sampling, rest = split_sampling(read_object(body))
    fields = convert(take_neutral(rest, TEXT_NOT_YET), CompletionFields)
    _check_stream(fields, sampling)
    prompts = read_prompts(fields.prompt, "prompt")
    no_output = fields.echo and _is_zero(sampling.get("max_tokens"))
    if no_output:
        sampling["max_tokens"] = 1  # it is computed and not told
    shown = None if fields.logprobs is None else _within("logprobs", fields.logprobs)
    if fields.echo and shown is not None:
        sampling.setdefault("prompt_logprobs", shown)
    params, structure = _params(fields, sampling, {}, shown)
    if fields.best_of not in (None, params.n):
        words = f"best_of={fields.best_of}: only all {params.n} choices of n can be returned"
        raise bad_request(words, "best_of", "unsupported_value")
    return AskedCompletion(
        **_common(fields, params, shown),
        structure=structure,
        echo=fields.echo,
        no_output=no_output,
        prompts=prompts,
        add_special_tokens=fields.add_special_tokens,
    )


def _is_zero(value: Any) -> bool:
    return value == 0 and not isinstance(value, bool)


def read_prompts(given: Given, name: str) -> tuple[str | list[int], ...]:
    """Text, token ids, or a list of either; Refusal names the field that they are in."""
    found = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    for prompt in found:
        if isinstance(prompt, str) and prompt:
            continue
        if not isinstance(prompt, list) or not prompt or not all(map(_is_id, prompt)):
            words = f"{name} must be text, token ids, or a list of either, none of them empty"
            raise bad_request(words, name)
    return tuple(found)


def _is_id(value: Any) -> bool:
    return type(value) is int  # true and false are numbers too


def _params(
    fields: _Common, sampling: dict[str, Any], defaults: dict[str, Any], shown: int | None
) -> tuple[SamplingParams, str]:
    """And the field that says what the answer must be."""
    asked, structure = read_structure(fields)
    own = {"logprobs": shown, "structured_outputs": asked}
    try:
        return params_from({**defaults, **sampling, **own}), structure
    except RequestError as error:
        raise refusal_of(error) from error


def _check_stream(fields: _Common, sampling: dict[str, Any]) -> None:
    if fields.stream and "prompt_logprobs" in sampling:
        words = "prompt_logprobs can't be streamed, but with echo; leave it or stream out"
        raise bad_request(words, "prompt_logprobs")


def _common(fields: _Common, params: SamplingParams, shown: int | None) -> dict[str, Any]:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: only with stream set to true", "stream_options")
    options = fields.stream_options or StreamOptions()
    if options.include_obfuscation:
        raise bad_request(
            "stream_options.include_obfuscation: streams are not padded; set it to false",
            "stream_options",
            "unsupported_value",
        )
    return {
        "model": fields.model,
        "params": params,
        "stream": fields.stream,
        "usage": options,
        "label": read_label(fields.request_id, fields.rid),
        "show_logprobs": shown,
        "told_as_ids": fields.return_tokens_as_token_ids,
        "token_ids": fields.return_token_ids,
    }


def read_label(request_id: str | None, rid: str | None) -> str | None:
    """What the client calls its request, if it does; Refusal."""
    if rid is not None and request_id is not None:
        raise bad_request("rid and request_id are one; give one of them", "rid")
    label = request_id if request_id is not None else rid
    if label is not None and not 0 < len(label) <= 256:
        raise bad_request("request_id must have 1 to 256 characters", "request_id")
    return label


class TokenizeFields(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class AbortFields(msgspec.Struct, kw_only=True):
    """POST /abort: one request, or all."""

    request_id: str | None = None
    rid: str | None = None
    abort_all: bool = False


def read_tokenize(body: bytes) -> TokenizeFields:
    """Refusal names the field that is wrong."""
    fields = convert(take_neutral(read_object(body)), TokenizeFields)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("give a prompt, or messages", "prompt")
    if fields.messages is not None and fields.add_special_tokens:
        words = "add_special_tokens: the template makes the whole prompt of a chat"
        raise bad_request(words, "add_special_tokens")
    return fields


def read_detokenize(body: bytes) -> DetokenizeFields:
    """Refusal names the field that is wrong."""
    return convert(read_object(body), DetokenizeFields)


def read_abort(body: bytes) -> str | None:
    """Whom to abort, None for all; Refusal names the field that is wrong."""
    fields = convert(read_object(body), AbortFields)
    label = read_label(fields.request_id, fields.rid)
    if fields.abort_all == (label is not None):
        raise bad_request("name a request_id, or set abort_all to true", "request_id")
    return label
