"""Languages small enough to know all about: regular expressions with their derivatives, by hand.

Shares nothing with the grammar library: the oracle of its masks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

from hypothesis import strategies as st

from stepahead.grammar import Vocabulary

EOS, PAD, GAP = 1, 0, 2
LETTERS = "ab0"


def tiny_vocabulary() -> Vocabulary:
    """Every text of up to three of three letters, one of them twice, and an id without bytes."""
    pieces = ["".join(text) for n in (1, 2, 3) for text in product(LETTERS, repeat=n)]
    table = [b"<pad>", b"<eos>", b"", *(piece.encode() for piece in pieces), b"ab"]
    return Vocabulary(table, [PAD, EOS], [EOS])


@dataclass(frozen=True)
class Regex:
    """`kind`: nothing, empty, letters, concat, either or star; no `nothing` inside of others."""

    kind: str
    letters: str = ""
    parts: tuple[Regex, ...] = ()


NOTHING, EMPTY = Regex("nothing"), Regex("empty")


def concat(left: Regex, right: Regex) -> Regex:
    if NOTHING in (left, right):
        return NOTHING
    if left == EMPTY:
        return right
    if left.kind == "concat":  # to the right, so that equal languages are more often equal values
        return concat(left.parts[0], concat(left.parts[1], right))
    return left if right == EMPTY else Regex("concat", parts=(left, right))


def either(*found: Regex) -> Regex:
    parts = {part for one in found for part in (one.parts if one.kind == "either" else (one,))}
    parts -= {NOTHING}
    if len(parts) < 2:
        return parts.pop() if parts else NOTHING
    return Regex("either", parts=tuple(sorted(parts, key=repr)))


def star(inner: Regex) -> Regex:
    if inner.kind == "star":
        return inner
    return EMPTY if inner in (NOTHING, EMPTY) else Regex("star", parts=(inner,))


def written(regex: Regex) -> str:
    """As the library reads it."""
    if regex.kind == "empty":
        return "(?:)"
    if regex.kind == "letters":
        return f"[{regex.letters}]"
    inner = [f"(?:{written(part)})" for part in regex.parts]
    return {"concat": "".join, "either": "|".join, "star": lambda texts: texts[0] + "*"}[
        regex.kind
    ](inner)


def takes_empty(regex: Regex) -> bool:
    if regex.kind in ("empty", "star"):
        return True
    found = [takes_empty(part) for part in regex.parts]
    return {"concat": all, "either": any}.get(regex.kind, lambda _: False)(found)


@functools.cache
def after(regex: Regex, letter: str) -> Regex:
    """The derivative: what may follow `letter`."""
    if regex.kind == "letters":
        return EMPTY if letter in regex.letters else NOTHING
    if regex.kind == "either":
        return either(*(after(part, letter) for part in regex.parts))
    if regex.kind == "star":
        return concat(after(regex.parts[0], letter), regex)
    if regex.kind == "concat":
        first, rest = regex.parts
        through = after(rest, letter) if takes_empty(first) else NOTHING
        return either(concat(after(first, letter), rest), through)
    return NOTHING


def after_text(regex: Regex, text: str) -> Regex:
    for letter in text:
        regex = after(regex, letter)
    return regex


def regexes() -> st.SearchStrategy[Regex]:
    """Languages with at least one text."""
    leaves = st.sets(st.sampled_from(LETTERS), min_size=1).map(
        lambda letters: Regex("letters", "".join(sorted(letters)))
    )
    return st.recursive(
        leaves | st.just(EMPTY),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: concat(*pair)),
            st.tuples(inner, inner).map(lambda pair: either(*pair)),
            inner.map(star),
        ),
        max_leaves=8,
    )
