"""Words that may not come, as a tokenizer spells them.  Knows no engine and no logits."""

from __future__ import annotations

from msgspec.structs import replace

from stepahead.bans import MAX_BAD_WORD_TOKENS
from stepahead.errors import InvalidParameter
from stepahead.text.texts import Texts
from stepahead.types import SamplingParams


def with_bad_word_ids(params: SamplingParams, texts: Texts) -> SamplingParams:
    """The parameters with their `bad_words` as tokens, beside those that `bad_word_ids` has.

    A word is spelt twice, with a space before it and without, for it may begin an answer or stand
    inside one; white space is spelt as it is.  InvalidParameter where a word can't be.
    """
    if params.bad_words is None:
        return params
    spelt = dict.fromkeys(map(tuple, params.bad_word_ids or ()))
    for word in params.bad_words:
        spelt |= dict.fromkeys(_spellings(word, texts))
    ids = [list(tokens) for tokens in spelt] or None
    return replace(params, bad_words=None, bad_word_ids=ids)


def _spellings(word: str, texts: Texts) -> list[tuple[int, ...]]:
    bare = word.lstrip()
    return [_spell(form, texts) for form in ((bare, f" {bare}") if bare else (word,))]


def _spell(form: str, texts: Texts) -> tuple[int, ...]:
    try:
        tokens = tuple(texts.encode(form, add_special_tokens=False))
    except InvalidParameter as error:
        raise InvalidParameter(f"bad_words can't be read: {error}", "bad_words") from error
    if not 1 <= len(tokens) <= MAX_BAD_WORD_TOKENS:
        raise InvalidParameter(
            f"bad_words holds {form.strip()!r}, which has {len(tokens)} tokens; from 1 to "
            f"{MAX_BAD_WORD_TOKENS} are taken",
            "bad_words",
        )
    return tokens
