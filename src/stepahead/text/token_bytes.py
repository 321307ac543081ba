"""The bytes each token id stands for in decoded text.  Knows a tokenizer's decoder, no requests.

What is held: for byte-level tokenizers the bytes of a sequence, joined and decoded with
replacement, are exactly its text.  For sentencepiece-like ones they are, but for the one space
that their decoders take off at the very start of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stepahead.errors import UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

Step: TypeAlias = Callable[[str | bytes], str | bytes]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# joins and trims of the whole text; nothing to do for one token
_WHOLE_TEXT: Final = ("Fuse", "Strip")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's way to write any byte as a visible character: byte -> character."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(0x100 + place) for place, byte in enumerate(hidden)
    }


def decoder_steps(backend: tokenizers.Tokenizer, source: str) -> list[Step]:
    """What the tokenizer's decoder does to one token, as functions to apply in turn.

    `source` names the model's files in errors.  Raises UnsupportedModel if there is no decoder, or
    one whose output is not the tokens' bytes in a row (word pieces, end-of-word suffixes, regexes).
    """
    if backend.decoder is None:
        raise UnsupportedModel(
            f"{source}: the tokenizer has no decoder, so its text would be tokens between spaces; "
            "add a decoder to its tokenizer.json"
        )
    return [
        step
        for spec in _flat(json.loads(backend.decoder.__getstate__()))
        for step in _steps_of(spec, source)
    ]


def byte_table(backend: tokenizers.Tokenizer, steps: list[Step]) -> list[bytes]:
    """The bytes of every token, by id; an id in a gap of the vocabulary stands for nothing."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        piece: str | bytes = token
        for step in steps:
            piece = step(piece)
        table[index] = piece.encode() if isinstance(piece, str) else piece
    return table


def _flat(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _flat(inner)]


def _steps_of(spec: dict[str, Any], source: str) -> list[Step]:
    kind = spec["type"]
    if kind in _WHOLE_TEXT:
        return []
    if kind == "ByteLevel":
        return [_byte_level_step()]
    if kind == "ByteFallback":
        return [_byte_fallback]
    if kind == "Metaspace":
        return [_replace_step(spec["replacement"], " ")]
    if kind == "Replace" and "String" in spec["pattern"]:
        return [_replace_step(spec["pattern"]["String"], spec["content"])]
    raise UnsupportedModel(
        f"{source}: the tokenizer's decoder {kind} is not supported; known are ByteLevel, "
        "ByteFallback, Metaspace, Replace of a string, Fuse, Strip and sequences of them"
    )


def _replace_step(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _byte_fallback(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes.fromhex(match[1]) if match else piece


def _byte_level_step() -> Step:
    alphabet = byte_alphabet()
    # what is not in the alphabet must not look like a byte: such a token is plain text
    table = dict.fromkeys(range(256), "\uffff")
    table |= {ord(character): chr(byte) for byte, character in alphabet.items()}

    def step(piece: str | bytes) -> str | bytes:
        if isinstance(piece, bytes):
            return piece
        try:
            return piece.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            return piece

    return step
