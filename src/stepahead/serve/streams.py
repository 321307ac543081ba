"""Answers as server-sent events.  Knows deltas and OpenAI's chunks; sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from stepahead.llm.collect import Delta
from stepahead.llm.forms import Form
from stepahead.parse import AnswerStream, CallStart, Content, Event, Reasoning, merged
from stepahead.serve.calls import Call
from stepahead.serve.refusal import Refusal
from stepahead.serve.replies import (
    Alternatives,
    ChatLogprobs,
    TextLogprobs,
    Usage,
    Wording,
    echoed,
    finish_reason,
    usage_of,
)
from stepahead.serve.requests import Asked, AskedChat
from stepahead.text.texts import Texts

Rows = Sequence[Alternatives | None]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encode = msgspec.json.Encoder().encode
_MARK = "the text"


class ChatDelta(msgspec.Struct, frozen=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatPiece(msgspec.Struct, frozen=True):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextPiece(msgspec.Struct, frozen=True):
    """The same for completions."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True):
    """One event."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def _plain_chat(index: int, text: str) -> ChatPiece:
    return ChatPiece(index, ChatDelta(content=text))


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_event(error: Refusal) -> bytes:
    """An error in the middle of a stream, and the stream's end."""
    return event(error.body()) + DONE


class Story(Protocol):
    """How an API tells a stream."""

    def begin(self) -> bytes:
        """What comes before the first token."""
        ...

    def tell(self, items: Iterable[tuple[int, Delta]]) -> bytes:
        """Events of what has come."""
        ...

    def end(self) -> bytes:
        """What comes after the last one."""
        ...


class _Telling:
    """What both APIs share: the head of each event, and the usage."""

    def __init__(
        self,
        asked: Asked,
        call: Call,
        texts: Texts,
        object: str,
        created: int,
        model: str,
        plain_piece: Callable[[int, str], ChatPiece | TextPiece],
    ) -> None:
        self.asked = asked
        self.call = call
        self.texts = texts
        self.wording = Wording(texts, asked.told_as_ids, asked.show_logprobs or 0)
        self._head = (call.label, object, created, model)
        self._made = 0
        self._plain_piece = plain_piece  # of a choice that brings only text
        self._forms: dict[int, tuple[bytes, bytes]] = {}
        # whether events differ in nothing but the text, but for those that bring more
        self._plain = not (asked.token_ids or asked.no_output or asked.usage.continuous_usage_stats)
        self._prompt_tokens = sum(len(part.prompt.ids) for part in call.parts)

    def chunk(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        """An event."""
        return event(_encode(Chunk(*self._head, choices, usage, prompt_token_ids)))

    def piece(self, choice: Any, tokens: int, prompt: list[int] | UnsetType = UNSET) -> bytes:
        """An event of one choice that brings so many tokens."""
        self._made += tokens
        return self.chunk([choice], self._usage_so_far(), prompt)

    def plain(self, index: int, delta: Delta) -> bytes | None:
        """The event of a delta that brings only text; None if it brings more.

        Nearly all are such: what is around the text is encoded once.
        """
        if not self.is_plain(delta):
            return None
        return self.only_text(index, delta.text, len(delta.token_ids))

    def is_plain(self, delta: Delta) -> bool:
        """Whether it brings nothing but text."""
        return self._plain and delta.finish_reason is None and delta.logprobs is None

    def only_text(self, index: int, text: str, tokens: int) -> bytes:
        """The event of text that so many tokens bring."""
        self._made += tokens
        before, after = self._forms.get(index) or self._form_of(index)
        return before + _encode(text) + after

    def passed(self, tokens: int) -> None:
        """So many tokens have come, and nothing is told of them yet."""
        self._made += tokens

    def _form_of(self, index: int) -> tuple[bytes, bytes]:
        marked = self.piece(self._plain_piece(index, _MARK), 0)
        # from the end: a name before it may hold the mark, what follows has no words of the user's
        before, _, after = marked.rpartition(_encode(_MARK))
        self._forms[index] = before, after
        return before, after

    def _usage_so_far(self) -> Usage | UnsetType | None:
        options = self.asked.usage
        if options.continuous_usage_stats:
            return usage_of(self._prompt_tokens, self._made, 0)
        return None if options.include_usage else UNSET

    def end(self) -> bytes:
        """The usage, if it was asked for, and the stream's end."""
        if not self.asked.usage.include_usage:
            return DONE
        cached = sum(output.num_cached_tokens for output in self.call.outputs if output)
        return self.chunk([], usage_of(self._prompt_tokens, self._made, cached)) + DONE

    def index(self, place: int, delta: Delta) -> int:
        """The choice's number among those of all prompts."""
        return place * self.asked.params.n + delta.index


class ChatStory(_Telling):
    """A conversation's answer; a chunk for each token, or for each thing that is told apart."""

    def __init__(
        self, asked: AskedChat, call: Call, texts: Texts, created: int, model: str
    ) -> None:
        kind = "chat.completion.chunk"
        super().__init__(asked, call, texts, kind, created, model, _plain_chat)
        self._tell_reasoning = asked.tell_reasoning
        self._form = call.parts[0].prompt.form
        self._parsers: dict[int, AnswerStream] = {}  # by choice, while it comes
        self._called: set[int] = set()  # choices with calls

    def begin(self) -> bytes:
        """The role, of each choice."""
        ids = self.call.parts[0].prompt.ids if self.asked.token_ids else UNSET
        return b"".join(
            self.piece(ChatPiece(index, ChatDelta("assistant", "")), 0, ids)
            for index in range(self.asked.params.n)
        )

    def tell(self, items: Iterable[tuple[int, Delta]]) -> bytes:
        """Text as it comes; the last one of a choice has its finish reason."""
        return b"".join([self._tell(place, delta) for place, delta in items])

    def _tell(self, place: int, delta: Delta) -> bytes:
        index = self.index(place, delta)
        if self._form is not None:
            return self._tell_apart(index, delta, self._form)
        if plain := self.plain(index, delta):
            return plain
        return self._whole(index, delta, ChatDelta(content=delta.text))

    def _whole(self, index: int, delta: Delta, new: ChatDelta) -> bytes:
        """An event with all that came of a choice."""
        told = None
        if delta.logprobs is not None:
            told = self.wording.chat(delta.token_ids, delta.logprobs)
        piece = ChatPiece(
            index,
            new,
            told,
            finish_reason(delta.finish_reason, index in self._called),
            UNSET if delta.finish_reason is None else delta.stop_reason,
            delta.token_ids if self.asked.token_ids else UNSET,
        )
        return self.piece(piece, len(delta.token_ids))

    def _tell_apart(self, index: int, delta: Delta, form: Form) -> bytes:
        """An event for each thing that is sure now.  The last one has what else came; a token that
        makes nothing sure, and brings nothing else, has none."""
        events = self._parsed(index, delta, form)
        if self.is_plain(delta):
            if not events:
                self.passed(len(delta.token_ids))
                return b""
            if len(events) == 1 and isinstance(events[0], Content):
                return self.only_text(index, events[0].text, len(delta.token_ids))
        *first, last = [ChatDelta(**event.delta()) for event in events] or [ChatDelta()]
        told = [self.piece(ChatPiece(index, new), 0) for new in first]
        return b"".join([*told, self._whole(index, delta, last)])

    def _parsed(self, index: int, delta: Delta, form: Form) -> list[Event]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = form.stream()
        events = parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parsers.pop(index).finish()
        if any(isinstance(event, CallStart) for event in events):
            self._called.add(index)
        if not self._tell_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return merged(events)


class TextStory(_Telling):
    """Completions; a chunk for each token."""

    def __init__(self, asked: Asked, call: Call, texts: Texts, created: int, model: str) -> None:
        super().__init__(asked, call, texts, "text_completion", created, model, TextPiece)
        self._offsets: dict[int, int] = {}
        # What is held back, by prompt, until the log-probabilities of an echoed one are there: the
        # first choice brings them.
        self._held: dict[int, list[Delta]] = {}
        if asked.echo and asked.show_logprobs is not None:
            self._held = {part.place: [] for part in call.parts}

    def begin(self) -> bytes:
        """The prompts, if they are to be echoed and there is nothing to wait for."""
        if self._held or not (self.asked.echo or self.asked.token_ids):
            return b""
        return b"".join(self._prompt(place) for place in range(len(self.call.parts)))

    def _prompt(self, place: int, rows: Rows | None = None) -> bytes:
        prompt, n = self.call.parts[place].prompt, self.asked.params.n
        text = echoed(self.texts, prompt.text, prompt.ids) if self.asked.echo else ""
        ids = prompt.ids if self.asked.token_ids else UNSET
        told = None if rows is None else self.wording.text(prompt.ids, rows, 0)
        return b"".join(
            self.piece(TextPiece(place * n + choice, text, told, prompt_token_ids=ids), 0)
            for choice in range(n)
        )

    def tell(self, items: Iterable[tuple[int, Delta]]) -> bytes:
        """Text as it comes; the last one of a choice has its finish reason."""
        if not self._held:
            return b"".join([self._tell(place, delta) for place, delta in items])
        return b"".join([self._tell_behind_prompt(place, delta) for place, delta in items])

    def _tell_behind_prompt(self, place: int, delta: Delta) -> bytes:
        if place not in self._held:
            return self._tell(place, delta)
        if delta.index:
            self._held[place].append(delta)
            return b""
        rows, ids = delta.prompt_logprobs or [], self.call.parts[place].prompt.ids
        first, n = place * self.asked.params.n, self.asked.params.n
        self._offsets |= dict.fromkeys(range(first, first + n), self.wording.length(ids))
        # an abort may have come before all of them did
        told = self._prompt(place, None if None in rows[1:] else rows)
        return told + b"".join(self._tell(place, one) for one in [delta, *self._held.pop(place)])

    def _tell(self, place: int, delta: Delta) -> bytes:
        index, silent = self.index(place, delta), self.asked.no_output
        if plain := self.plain(index, delta):
            return plain
        piece = TextPiece(
            index,
            "" if silent else delta.text,
            None if silent or delta.logprobs is None else self._logprobs(index, delta),
            delta.finish_reason,
            UNSET if delta.finish_reason is None else delta.stop_reason,
            ([] if silent else delta.token_ids) if self.asked.token_ids else UNSET,
        )
        return self.piece(piece, 0 if silent else len(delta.token_ids))

    def _logprobs(self, index: int, delta: Delta) -> TextLogprobs:
        assert delta.logprobs is not None
        offset = self._offsets.get(index, 0)
        told = self.wording.text(delta.token_ids, delta.logprobs, offset)
        self._offsets[index] = offset + self.wording.length(delta.token_ids)
        return told
