"""Turns token ids into text as they come.  Knows one request's ids, no stop rules, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

# What a decoder writes for bytes that are not (yet) a character.
_BROKEN: Final = "\ufffd"
# Tokens of the prompt that the first new token is read after: enough for a character's four bytes.
_CONTEXT: Final = 6


class TextStream:
    """An incremental detokenizer: `push` ids, get the text that no later id can change.

    All that `push` and `finish` return, joined, is what decoding all ids at once gives.  The one
    exception: byte tokens (`<0xE2>`) of a sentencepiece-like tokenizer that are no UTF-8.  Text
    that came out before stays, and only the broken part differs from a decoding in one go.

    With `prompt_ids` the text is what follows the prompt's: a first "▁word" keeps its space.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        # ids of the last text that came out: what follows is decoded after them, since decoders
        # treat the start of a text differently
        self._settled = self._usable_context(prompt_ids)
        self._held: list[int] = []  # ids whose text is not out yet
        self._stream = self._new_stream()

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with these ids; "" if they end inside a character."""
        return "".join(map(self._push_one, ids))

    def finish(self) -> str:
        """The text still held back, broken characters and all; call it after the last push."""
        before = self._decode(self._settled)
        text = self._decode(self._settled + self._held)
        rest = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        self._settle()
        return rest

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # the library's own class: what came out before no longer begins the text
            text = self._decode(self._held)
            self._settle()
            self._stream = self._new_stream()
            return text
        if text is None:
            return ""
        self._settle()
        return text

    def _settle(self) -> None:
        self._settled = self._held
        self._held = []

    def _new_stream(self) -> tokenizers.decoders.DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(self._settled, self._skip_special_tokens)

    def _usable_context(self, prompt_ids: Sequence[int]) -> list[int]:
        context = list(prompt_ids[-_CONTEXT:])
        # the stream would give out the context's own text once its last character is whole
        return [] if self._decode(context).endswith(_BROKEN) else context

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip_special_tokens)
