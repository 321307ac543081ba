"""The toy model's vocabulary: short pieces of a few letters, so strings end inside tokens."""

from __future__ import annotations

from itertools import product

TOY_EOS = 1
_LETTERS = "abcd"


def toy_token_bytes(vocab_size: int) -> list[bytes]:
    """Bytes by token id: 0 is padding and 1 the end (both special), then a, b, .. aa, ab, .."""
    pieces = [b"<pad>", b"<eos>"]
    length = 1
    while len(pieces) < vocab_size:
        pieces += ["".join(letters).encode() for letters in product(_LETTERS, repeat=length)]
        length += 1
    return pieces[:vocab_size]
