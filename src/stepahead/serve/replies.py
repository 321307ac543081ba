"""Whole answers in OpenAI's shapes, and the parts that streams share with them.

Knows outputs and texts; no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from stepahead.serve.requests import Asked, AskedChat
from stepahead.text.texts import Texts
from stepahead.types import CompletionOutput, Logprob, RequestOutput

Alternatives = Mapping[int, Logprob]


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens: those found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens that were read and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    """The usage of one answer."""
    total, details = prompt_tokens + output_tokens, PromptDetails(cached_tokens)
    return Usage(prompt_tokens, output_tokens, total, details)


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have been taken."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that was taken, and the best."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of each token of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The same as the older API tells it, in columns."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CalledFunction(msgspec.Struct, frozen=True):
    """A function to call; `arguments` are the text of a JSON object, as far as it was made."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool; `id` is what its result is sent back with."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """What was answered; `content` is null where there is nothing but calls."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True):
    """One completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class ChatReply(msgspec.Struct, frozen=True):
    """POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class TextReply(msgspec.Struct, frozen=True):
    """POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    object: str = "text_completion"


class Wording:
    """How tokens are told in log-probabilities: their text, or "token_id:7"."""

    def __init__(self, texts: Texts, as_ids: bool, width: int) -> None:
        self._texts = texts
        self._as_ids = as_ids
        self._width = width

    def token(self, token: int, found: Logprob) -> str:
        """The token as it is told."""
        return f"token_id:{token}" if self._as_ids else found.decoded_token or ""

    def chat(self, token_ids: Sequence[int], rows: Sequence[Alternatives]) -> ChatLogprobs:
        """Log-probabilities of an answer's tokens, for chat."""
        pairs = zip(token_ids, rows, strict=False)  # an abort may have cut the last one off
        return ChatLogprobs([self._chat_token(token, row) for token, row in pairs])

    def _chat_token(self, token: int, row: Alternatives) -> TokenLogprob:
        told = [
            TopLogprob(self.token(other, found), found.logprob, self._bytes(other))
            for other, found in self.best(row)
        ]
        chosen = row[token]
        return TokenLogprob(self.token(token, chosen), chosen.logprob, self._bytes(token), told)

    def best(self, row: Alternatives) -> list[tuple[int, Logprob]]:
        """The most likely tokens of a row, best first: as many as were asked for."""
        ranked = [(token, found) for token, found in row.items() if found.rank is not None]
        ranked.sort(key=lambda pair: pair[1].rank or 0)
        return ranked[: self._width]

    def _bytes(self, token: int) -> list[int]:
        pieces = self._texts.token_bytes
        return list(pieces[token]) if token < len(pieces) else []

    def text(
        self, token_ids: Sequence[int], rows: Sequence[Alternatives | None], offset: int
    ) -> TextLogprobs:
        """The same for completions; `offset` is where in the text the first token begins."""
        told = TextLogprobs([], [], [], [])
        for token, row in zip(token_ids, rows, strict=False):
            chosen = None if row is None else row[token]
            piece = self._piece(token)
            told.tokens.append(f"token_id:{token}" if self._as_ids else piece)
            told.token_logprobs.append(None if chosen is None else chosen.logprob)
            told.top_logprobs.append(None if row is None else self._top(token, row))
            told.text_offset.append(offset)
            offset += len(piece)
        return told

    def length(self, token_ids: Sequence[int]) -> int:
        """Characters that `text` counts for these tokens."""
        return sum(len(self._piece(token)) for token in token_ids)

    def _piece(self, token: int) -> str:
        return bytes(self._bytes(token)).decode("utf-8", "replace")

    def _top(self, token: int, row: Alternatives) -> dict[str, float]:
        told: dict[str, float] = {}
        for other, found in [*self.best(row), (token, row[token])]:
            told.setdefault(self.token(other, found), found.logprob)
        return told


def finish_reason(reason: str | None, called: bool) -> str | None:
    """As it is told: an answer that has calls ended for them, unless it was cut."""
    return "tool_calls" if called and reason == "stop" else reason


def _chat_message(asked: AskedChat, choice: CompletionOutput) -> ChatMessage:
    if choice.message is None:
        return ChatMessage("assistant", choice.text)
    found = msgspec.convert(choice.message, ChatMessage)
    return found if asked.tell_reasoning else replace(found, reasoning_content=UNSET)


def chat_reply(
    asked: AskedChat, texts: Texts, id: str, created: int, model: str, output: RequestOutput
) -> ChatReply:
    """The answer to a conversation."""
    wording = Wording(texts, asked.told_as_ids, asked.show_logprobs or 0)
    choices = [
        ChatChoice(
            choice.index,
            _chat_message(asked, choice),
            None if choice.logprobs is None else wording.chat(choice.token_ids, choice.logprobs),
            finish_reason(choice.finish_reason, bool((choice.message or {}).get("tool_calls"))),
            choice.stop_reason,
            choice.token_ids if asked.token_ids else UNSET,
        )
        for choice in output.outputs
    ]
    return ChatReply(
        id,
        created,
        model,
        choices,
        _usage([output], asked),
        prompt_token_ids=output.prompt_token_ids if asked.token_ids else UNSET,
        prompt_logprobs=_prompt_logprobs(asked, output),
    )


def text_reply(
    asked: Asked, texts: Texts, id: str, created: int, model: str, outputs: list[RequestOutput]
) -> TextReply:
    """The answer to prompts, each with its choices one after the other."""
    choices = [
        _text_choice(asked, texts, output, choice, place * asked.params.n + choice.index)
        for place, output in enumerate(outputs)
        for choice in output.outputs
    ]
    return TextReply(id, created, model, choices, _usage(outputs, asked))


def _text_choice(
    asked: Asked, texts: Texts, output: RequestOutput, choice: CompletionOutput, index: int
) -> TextChoice:
    text = "" if asked.no_output else choice.text
    if asked.echo:
        text = echoed(texts, output.prompt, output.prompt_token_ids) + text
    return TextChoice(
        index,
        text,
        _text_logprobs(asked, texts, output, choice),
        choice.finish_reason,
        choice.stop_reason,
        ([] if asked.no_output else choice.token_ids) if asked.token_ids else UNSET,
        output.prompt_token_ids if asked.token_ids else UNSET,
        _prompt_logprobs(asked, output),
    )


def echoed(texts: Texts, text: str | None, ids: Sequence[int]) -> str:
    """The prompt as `echo` tells it: as it was given, or the text of its ids."""
    return texts.decode(ids, skip_special_tokens=False) if text is None else text


def _text_logprobs(
    asked: Asked, texts: Texts, output: RequestOutput, choice: CompletionOutput
) -> TextLogprobs | None:
    if choice.logprobs is None:
        return None
    ids: list[int] = [] if asked.no_output else choice.token_ids
    rows: list[Alternatives | None] = [] if asked.no_output else [*choice.logprobs]
    if asked.echo and output.prompt_logprobs is not None:
        ids = output.prompt_token_ids + ids
        rows = [*output.prompt_logprobs, *rows]
    return Wording(texts, asked.told_as_ids, asked.show_logprobs or 0).text(ids, rows, 0)


def _prompt_logprobs(
    asked: Asked, output: RequestOutput
) -> list[dict[str, Any] | None] | UnsetType:
    if output.prompt_logprobs is None:
        return UNSET
    return [
        None
        if row is None
        else {str(token): msgspec.to_builtins(found) for token, found in row.items()}
        for row in output.prompt_logprobs
    ]


def _usage(outputs: list[RequestOutput], asked: Asked) -> Usage:
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return usage_of(
        sum(len(output.prompt_token_ids) for output in outputs),
        0 if asked.no_output else made,
        sum(output.num_cached_tokens for output in outputs),
    )
