"""Each row's largest logit, in one pass over the logits and without copies of them.

Bits of float32 are ranked as whole numbers, so that the compiler compares several at a time without
losing track of NaN: -inf has rank 0, both zeros have the same, and every NaN ranks above +inf.
"""

from __future__ import annotations

import numpy as np

from stepahead.kernels.jit import entry, inner
from stepahead.kernels.memory import int64s, uint32s

_BLOCK = 256  # logits that are looked at before the largest of them is looked for
_WORD = 32  # tokens of a mask's word
_NEGATIVE = 0x80000000  # bits from here on
_INFINITY = 0x7F800000  # its bits; what is added to those of positive numbers
_MINUS_INFINITY = 0xFF800000  # its bits; what those of negative numbers are taken from
_HIGHEST = 0xFF000000  # rank of +inf
_ANY = np.uint32(0xFFFFFFFF)
_BITS = np.uint32(1) << np.arange(_WORD, dtype=np.uint32)  # of a word, by token
_TO_SIGN = _BITS[::-1].copy()  # times these, a token's bit is the word's sign


@inner
def _rank(bits: np.uint32) -> np.uint32:
    """uint32, of uint32 bits of a float32."""
    if bits < _NEGATIVE:
        return np.uint32(bits + _INFINITY)
    return np.uint32(_MINUS_INFINITY - bits)


@inner
def _top(logits: int, count: int) -> np.uint32:
    """The highest rank of `count` logits."""
    bits, top = uint32s(logits, count), np.uint32(0)
    for token in range(count):
        rank = _rank(bits[token])
        if rank > top:
            top = rank
    return top


@inner
def _allowed_top(logits: int, count: int, word: np.uint32) -> np.uint32:
    """The same, of those whose bit in a mask's `word` is set."""
    bits, top = uint32s(logits, count), np.uint32(0)
    for token in range(count):
        # all ones or none, without a branch: the compiler would look at one token at a time
        sign = np.int32(np.uint32(word * _TO_SIGN[token]))
        rank = np.uint32(_rank(bits[token]) & np.uint32(sign >> np.int32(31)))
        if rank > top:
            top = rank
    return top


@inner
def _place(logits: int, count: int, top: np.uint32, word: np.uint32) -> int:
    """The first of `count` logits with this rank, or the first NaN if it is one's, whose bit in
    `word` is set."""
    bits = uint32s(logits, count)
    for token in range(count):
        rank = _rank(bits[token])
        if word & _BITS[token % _WORD] and (rank == top or (rank > _HIGHEST and top > _HIGHEST)):
            return token
    return 0


@inner
def _choose(logits: int, vocab: int) -> int:
    """The first of the largest of float32[vocab]."""
    best, chosen = np.uint32(0), 0
    for first in range(0, vocab, _BLOCK):
        at, count = logits + 4 * first, min(_BLOCK, vocab - first)
        top = _top(at, count)
        if top > best:
            best, chosen = top, first + _place(at, count, top, _ANY)
        if best > _HIGHEST:
            break
    return chosen


@inner
def _choose_allowed(logits: int, vocab: int, masks: int) -> int:
    """The same, of those whose bits in uint32[ceil(vocab / 32)] are set; 0 if they are all -inf."""
    best, chosen = np.uint32(0), 0
    words = uint32s(masks, (vocab + _WORD - 1) // _WORD)
    for place in range(len(words)):
        word, first = words[place], place * _WORD
        if word == 0:
            continue
        at, count = logits + 4 * first, min(_WORD, vocab - first)
        top = _allowed_top(at, count, word)
        if top > best:
            best, chosen = top, first + _place(at, count, top, word)
        if best > _HIGHEST:
            break
    return chosen


@inner
def chosen_of(logits: int, vocab: int, masks: int) -> int:
    """Of one row, what `choose` chooses; `masks` is the address of its own words, or 0."""
    if masks:
        return _choose_allowed(logits, vocab, masks)
    return _choose(logits, vocab)


@entry("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def choose(
    logits: int, stride: int, vocab: int, rows: int, count: int, masks: int, words: int, out: int
) -> None:
    """Writes int64[count] at `out`: the first of the largest logits of each row, NaN being larger
    than any, as torch.argmax has it.

    Addresses: `logits` float32[.., vocab], a row every `stride` values; `rows` int64[count], which
    of them, 0 for the first `count`; `masks` int32[count, words], bit t % 32 of word t // 32 for
    token t, 0 for none.  What a mask forbids counts as -inf.
    """
    chosen = int64s(out, count)
    for place in range(count):
        row = int64s(rows, count)[place] if rows else place
        own = masks + 4 * words * place if masks else 0
        chosen[place] = chosen_of(logits + 4 * stride * row, vocab, own)
