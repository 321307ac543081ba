"""Random workloads some of whose answers keep to a regex, and what such a regex lets come next."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import msgspec

from closed_form import Allowed, Toy, pieces
from grammars import (
    NOTHING,
    Regex,
    after,
    after_text,
    concat,
    either,
    star,
    takes_empty,
    written,
)
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.structured import Grammar, StructuredOutputs
from workloads import Ask, Workload, workload

LETTERS = "abcd"
SHARES = (0.0, 0.3, 0.6, 1.0)


def structured(seed: int) -> Workload:
    """The workload of this seed, with a regex for none, some, most or all of its requests."""
    rnd = random.Random(~seed)
    share = SHARES[seed % len(SHARES)]
    work = workload(seed)
    asks = tuple(_with_regex(rnd, ask) if rnd.random() < share else ask for ask in work.asks)
    return replace(work, asks=asks)


def _with_regex(rnd: random.Random, ask: Ask) -> Ask:
    if ask.params.pooling is not None:
        return ask
    asked = StructuredOutputs(regex=written(random_regex(rnd)))
    return replace(ask, params=msgspec.structs.replace(ask.params, structured_outputs=asked))


_REGEXES: dict[str, Regex] = {}  # by how they are written


def random_regex(rnd: random.Random) -> Regex:
    """A language with at least one text that is not empty."""
    while True:
        regex = _random(rnd, 3)
        if not is_over(regex):
            _REGEXES[written(regex)] = regex
            return regex


def _random(rnd: random.Random, depth: int) -> Regex:
    kind = rnd.choice(("letters", "concat", "concat", "concat", "either", "star")) if depth else ""
    if kind == "concat":
        return concat(_random(rnd, depth - 1), _random(rnd, depth - 1))
    if kind == "either":
        return either(_random(rnd, depth - 1), _random(rnd, depth - 1))
    if kind == "star":
        return star(_random(rnd, depth - 1))
    return Regex("letters", "".join(sorted(rnd.sample(LETTERS, rnd.choice((1, 1, 2, 3, 4))))))


def regex_of(asked: StructuredOutputs) -> Regex:
    """What `structured` wrote."""
    assert asked.regex is not None
    return _REGEXES[asked.regex]


@functools.cache
def is_over(regex: Regex) -> bool:
    """Whether nothing more can come."""
    return all(after(regex, letter) == NOTHING for letter in LETTERS)


@functools.cache
def next_tokens(vocab_size: int, regex: Regex) -> frozenset[int]:
    """Which tokens may come next, but for the end of sequence."""
    words = enumerate(pieces(vocab_size))
    return frozenset(
        i for i, word in words if i > 1 and after_text(regex, word.decode()) != NOTHING
    )


def allowed(vocab_size: int, asked: StructuredOutputs) -> Allowed:
    """Which tokens may come after outputs; none when the answer is complete."""
    regex, eos = regex_of(asked), Toy(vocab_size, 1).eos

    def may(outputs: list[int]) -> set[int]:
        if eos in outputs:
            return set()
        words = pieces(vocab_size)
        left = after_text(regex, "".join(words[token].decode() for token in outputs))
        end = {eos} if takes_empty(left) and not is_over(left) else set()
        return {*next_tokens(vocab_size, left), *end}

    return may


@functools.cache
def compiler(vocab_size: int) -> GrammarCompiler:
    """For the toy with so many tokens."""
    return GrammarCompiler(toy_vocabulary(vocab_size))


def toy_vocabulary(vocab_size: int) -> Vocabulary:
    """The toy's, for grammars."""
    toy = Toy(vocab_size, 1)
    return Vocabulary(list(pieces(vocab_size)), sorted(toy.specials), [toy.eos])


@functools.cache
def compiled(vocab_size: int, regex: str) -> Grammar:
    """A regex's grammar."""
    return compiler(vocab_size).compile(StructuredOutputs(regex=regex))
