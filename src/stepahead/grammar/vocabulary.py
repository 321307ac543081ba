"""A model's vocabulary as the grammar library wants it.  Knows bytes, no text and no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from stepahead.errors import UnsupportedModel
from stepahead.text.texts import Texts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


_MOST_ITEMS = 5000  # of the parser's, in one mask; everyday schemas need a tenth of it


class Vocabulary(msgspec.Struct, frozen=True, eq=False):
    """The bytes of every token id, which ids are special, and which of them end an answer.

    It is as long as the model's logits are wide.  An id without bytes is never allowed.
    """

    token_bytes: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @classmethod
    def of(cls, texts: Texts, size: int, eos_ids: Sequence[int]) -> Vocabulary:
        """That of a tokenizer, padded to the model's `size`; `eos_ids` are the model's.

        Raises UnsupportedModel when there is no end of sequence, or more tokens than logits.
        """
        table = texts.token_bytes
        if len(table) > size:
            raise UnsupportedModel(
                f"the tokenizer has {len(table)} tokens and the model only {size} logits: no "
                "grammar can be held; use the tokenizer that belongs to the model"
            )
        if not eos_ids:
            raise UnsupportedModel(
                "the model has no end-of-sequence token, so a structured answer could never end; "
                "name one in its generation_config.json"
            )
        padded = table + [b""] * (size - len(table))
        return cls(padded, sorted({*texts.special_ids, *eos_ids}), list(eos_ids))

    @property
    def words(self) -> int:
        """How many int32 a row's mask has."""
        return (len(self.token_bytes) + 31) // 32

    def tokenizer(self) -> LLTokenizer:
        """The library's own, a trie of all tokens: half a second of CPU for 50,000 of them."""
        from llguidance import LLTokenizer

        wrapped = cast("TokenizerWrapper", _Wrapped(self))  # of which it reads no more than this
        return LLTokenizer(wrapped, eos_token=self.eos_ids)


def matcher_of(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher of a grammar's text, at its beginning; an error of the grammar is its state.

    A grammar of a few lines can make a mask take seconds, and all rows that wait for masks wait for
    it.  Within the limit a mask takes some ten milliseconds at most; past it the row ends with an
    error.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_max_items=_MOST_ITEMS)
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


class _Wrapped:
    """What the library reads off a Python tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        # only to force the tokens of a text that has but one continuation, which every grammar of
        # ours forbids: it would call Python from inside a fill, and leave out tokens that are right
        raise AssertionError("a grammar without no_forcing")
