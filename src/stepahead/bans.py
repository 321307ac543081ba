"""What may not be in an answer, as a client says it: the bounds of these fields, and their checks.

InvalidParameter names the field.  Knows no tokenizer and no vocabulary.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stepahead.errors import InvalidParameter

MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 32
MAX_BAD_WORD_LEN = 256
_MAX_BAD_IDS = 2 * MAX_BAD_WORDS  # each with a space before it, and without
_MAX_EXTRA_BYTES = 1 << 16


def is_token(token: Any) -> bool:
    """Whether it may be a token's id: one that no message can carry is no model's."""
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 63


def check_allowed(ids: Any) -> None:
    """`allowed_token_ids`: one token or more, or None."""
    if ids is None:
        return
    name = "allowed_token_ids"
    if not isinstance(ids, (list, tuple)) or not ids:
        raise InvalidParameter(f"{name} must be a list of one token id or more", name)
    for token in ids:
        if not is_token(token):
            raise InvalidParameter(f"{name} holds {token!r}", name)


def check_bad_words(words: Any) -> None:
    """`bad_words`: texts, or None."""
    name = "bad_words"
    if words is None:
        return
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise InvalidParameter(f"{name} must be a list of strings", name)
    if len(words) > MAX_BAD_WORDS:  # each is looked for with every token
        raise InvalidParameter(
            f"{name} has {len(words)} words; at most {MAX_BAD_WORDS} are taken", name
        )
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_LEN:
            raise InvalidParameter(
                f"{name} holds a word of {len(word)} characters; from 1 to {MAX_BAD_WORD_LEN} are "
                "taken",
                name,
            )


def check_bad_ids(words: Any) -> None:
    """`bad_word_ids`: words as their tokens, or None."""
    name = "bad_word_ids"
    if words is None:
        return
    lists = (list, tuple)
    if not isinstance(words, lists) or not all(isinstance(word, lists) for word in words):
        raise InvalidParameter(f"{name} must be a list of lists of token ids", name)
    if len(words) > _MAX_BAD_IDS:
        raise InvalidParameter(
            f"{name} has {len(words)} words; at most {_MAX_BAD_IDS} are taken", name
        )
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidParameter(
                f"{name} holds a word of {len(word)} tokens; from 1 to {MAX_BAD_WORD_TOKENS} are "
                "taken",
                name,
            )
        for token in word:
            if not is_token(token):
                raise InvalidParameter(f"{name} holds {token!r}", name)


def check_extra(args: Any) -> None:
    """`extra_args`: plain JSON, so that it crosses to a runner as it is; or None."""
    name = "extra_args"
    if args is None:
        return
    try:
        msgspec.msgpack.encode(
            args
        )  # which plans travel in, and has no whole numbers above 64 bits
        data = msgspec.json.encode(args)
        plain = isinstance(args, dict) and msgspec.json.decode(data) == args
    except (TypeError, ValueError, OverflowError, RecursionError):
        plain, data = False, b""
    if not plain:
        raise InvalidParameter(f"{name} must be an object of plain JSON values", name)
    if len(data) > _MAX_EXTRA_BYTES:
        raise InvalidParameter(
            f"{name} has {len(data):,} bytes of JSON; at most {_MAX_EXTRA_BYTES:,} are taken", name
        )
