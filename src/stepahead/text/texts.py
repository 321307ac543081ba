"""Text in and out of token ids: what the front ends need of a tokenizer, and the toy's own.

Knows no requests and no stop rules.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from stepahead.errors import InvalidParameter
from stepahead.text.toy import TOY_EOS, toy_token_bytes

# Tokens of the prompt that an answer is decoded after: decoders treat a text's start differently.
_CONTEXT = 6
_BROKEN = "\ufffd"


class TextStream(Protocol):
    """An incremental detokenizer for one answer."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that no later id can change."""
        ...

    def finish(self) -> str:
        """The text still held back; after the last push."""
        ...


class Texts(Protocol):
    """A tokenizer, as far as a front end knows it."""

    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    chat_template: str | None

    @property
    def token_bytes(self) -> list[bytes]:
        """What each id stands for."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, None where there is none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; InvalidParameter when it can't be."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> list[int]:
        """Ids of what the chat template makes of `messages`; InvalidParameter when it can't."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        ...

    def stream(
        self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> TextStream:
        """An incremental detokenizer for an answer to `prompt_ids`."""
        ...


def decode_after(
    texts: Texts, prompt_ids: Sequence[int], ids: Sequence[int], skip_special_tokens: bool
) -> str:
    """The text of `ids` as it follows the prompt's, in two calls whatever their number."""
    context = list(prompt_ids[-_CONTEXT:])
    before = texts.decode(context, skip_special_tokens)
    if not before.endswith(_BROKEN):
        text = texts.decode(context + list(ids), skip_special_tokens)
        if text.startswith(before):
            return text[len(before) :]
    return texts.decode(ids, skip_special_tokens)


class ToyTexts:
    """The toy model's vocabulary: ids to text only, it reads no words."""

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes = toy_token_bytes(vocab_size)
        self.special_ids: frozenset[int] = frozenset({0, TOY_EOS})
        self._shown = self.token_bytes.copy()  # without the special ones
        for token in self.special_ids:
            self._shown[token] = b""
        self.eos_ids: tuple[int, ...] = (TOY_EOS,)
        self.chat_template: str | None = None
        self.bos_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidParameter."""
        self._refuse("prompt")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> list[int]:
        """Raises InvalidParameter."""
        self._refuse("messages")

    def _refuse(self, param: str) -> NoReturn:
        raise InvalidParameter(
            "the toy model has no tokenizer: give it token ids, or name a real model", param
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The joined bytes as text."""
        return self.bytes_of(ids, skip_special_tokens).decode("utf-8", "replace")

    def stream(
        self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> TextStream:
        """The joined bytes, character by character."""
        return _ByteStream(self, skip_special_tokens)

    def bytes_of(self, ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        """The bytes of `ids` in a row."""
        table = self._shown if skip_special_tokens else self.token_bytes
        return b"".join([table[token] for token in ids])


class _ByteStream:
    def __init__(self, texts: ToyTexts, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(self._texts.bytes_of(ids, self._skip_special_tokens))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
