"""Workloads as plain data, and the random ones.  Knows no engine.

A workload is small and nasty: few requests, short prompts with shared beginnings, pools that are
often too small for all of them at once, and clients that give up at every point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from stepahead.types import SamplingParams


class Abort(NamedTuple):
    """When a client gives up: at engine `step` n, once it has n `token`s, or after its `end`."""

    when: str
    n: int


@dataclass(frozen=True)
class Ask:
    """A request: added before engine step `at`."""

    at: int
    prompt: tuple[int, ...]
    params: SamplingParams
    abort: Abort | None = None


@dataclass(frozen=True)
class Workload:
    """Everything that happens, as data.  The cache is emptied before the steps in `flushes`; the
    engine is closed before step `shutdown`."""

    seed: int
    options: dict[str, Any]
    asks: tuple[Ask, ...]
    flushes: tuple[int, ...] = ()
    shutdown: int | None = None

    def keeping(self, kept: Sequence[int]) -> Workload:
        """The same with some of its requests only."""
        return replace(self, asks=tuple(self.asks[i] for i in kept))


def workload(seed: int) -> Workload:
    """The random workload of this seed; small, and often short of pages."""
    rnd = random.Random(seed)
    vocab, length = rnd.choice((17, 64, 64)), rnd.choice((24, 40, 64))
    bases = [_tokens(rnd, rnd.choice((4, 8, 16)), vocab) for _ in range(2)]
    asks = []
    at = 0
    for _ in range(rnd.choice((2, 3, 4, 5, 6)) if rnd.random() < 0.97 else 20):
        at += rnd.choice((0, 0, 0, 1, 2, 3, 9))
        asks.append(_ask(rnd, at, bases, vocab, length))
    page_size = rnd.choice((1, 2, 4, 16))
    options = {
        "vocab_size": vocab,
        "max_model_len": length,
        "page_size": page_size,
        "max_rows": rnd.randint(1, 8),
        "max_step_tokens": rnd.choice((2, 4, 8, 16, 32)),
        "prefix_cache": rnd.random() < 0.8,
        "num_pages": pool_for(rnd, asks, page_size, length),
        "seed": rnd.randrange(100),
    }
    flushes = (rnd.randrange(20),) if rnd.random() < 0.05 else ()
    # last, so that all other choices of a seed stay what they were
    return Workload(seed, options, tuple(_wanting_states(rnd, ask) for ask in asks), flushes)


def _tokens(rnd: random.Random, count: int, vocab: int) -> list[int]:
    return [rnd.randrange(2, vocab) for _ in range(count)]


def pool_for(rnd: random.Random, asks: Sequence[Ask], page_size: int, length: int) -> int:
    """The largest request's pages and a few more: requests must yield to each other."""

    def pages(ask: Ask) -> int:
        most = length if ask.params.max_tokens is None else ask.params.max_tokens
        return -(-min(length, len(ask.prompt) + most - 1) // page_size)

    needs = [pages(ask) for ask in asks if len(ask.prompt) < length]
    largest = max(needs, default=1)
    return largest + rnd.randint(0, max(1, largest)) if rnd.random() < 0.7 else sum(needs) + 1


def _ask(rnd: random.Random, at: int, bases: list[list[int]], vocab: int, length: int) -> Ask:
    tail = _tokens(rnd, rnd.randint(1, 10), vocab)
    prompt = (rnd.choice(bases) + tail if rnd.random() < 0.6 else tail)[: length - 1]
    if rnd.random() < 0.02:
        prompt = _tokens(rnd, length, vocab)  # refused: no room for an output
    points = (
        Abort("step", at + rnd.choice((0, 1, 1, 2, 2, 3, 5, 9))),
        Abort("step", at + rnd.choice((0, 1, 1, 2, 2, 3, 5, 9))),
        Abort("token", rnd.randint(1, 4)),
        Abort("end", 0),
    )
    abort = rnd.choice(points) if rnd.random() < 0.25 else None
    return Ask(at, tuple(prompt), _params(rnd, vocab), abort)


def _params(rnd: random.Random, vocab: int) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": rnd.choice((1, 2, 3, 4, 6, 8, 12, 16))}
    if rnd.random() < 0.02:
        fields["max_tokens"] = None

    def maybe(chance: float, name: str, value: Callable[[], Any]) -> None:
        if rnd.random() < chance:
            fields[name] = value()

    fields["temperature"] = rnd.choice((0.0, 0.0, 0.5, 1.0, 2.0))
    maybe(0.15, "top_k", lambda: rnd.choice((-1, 1, 2, 5)))
    maybe(0.15, "top_p", lambda: rnd.choice((0.3, 0.9)))
    maybe(0.1, "min_p", lambda: rnd.choice((0.05, 0.5)))
    maybe(0.15, "presence_penalty", lambda: rnd.choice((-1.0, 0.5, 2.0)))
    maybe(0.15, "frequency_penalty", lambda: rnd.choice((-0.5, 1.0)))
    maybe(0.15, "repetition_penalty", lambda: rnd.choice((0.8, 1.5)))
    maybe(0.15, "logit_bias", lambda: {rnd.randrange(vocab): rnd.choice((-100.0, -1.0, 3.0, 7.0))})
    maybe(0.4, "seed", lambda: rnd.choice((0, 7, -1, (1 << 63) - 1)))
    maybe(0.3, "stop", lambda: _stops(rnd))
    maybe(0.25, "stop_token_ids", lambda: [rnd.randrange(vocab) for _ in range(rnd.randint(1, 6))])
    maybe(0.2, "ignore_eos", lambda: True)
    maybe(0.2, "skip_special_tokens", lambda: False)
    maybe(0.2, "logprobs", lambda: rnd.choice((0, 1, 3)))
    maybe(0.1, "prompt_logprobs", lambda: rnd.choice((0, 2)))
    maybe(0.15, "n", lambda: rnd.choice((2, 3)))
    if fields["max_tokens"] is not None:
        maybe(0.2, "min_tokens", lambda: rnd.randint(1, fields["max_tokens"]))
    return SamplingParams(**fields)


def _wanting_states(rnd: random.Random, ask: Ask) -> Ask:
    if rnd.random() >= 0.1:
        return ask
    return replace(ask, params=msgspec.structs.replace(ask.params, return_hidden_states=True))


def hooked(seed: int) -> Workload:
    """The seed's workload, where most requests forbid tokens and words, and some have their logits
    processed by `processors.Shy`.  Few tokens are allowed, so that words come up."""
    work, rnd = workload(seed), random.Random(seed)
    vocab = work.options["vocab_size"]

    def hooking(ask: Ask) -> Ask:
        own: dict[str, Any] = {}
        allowed = rnd.sample(range(vocab), rnd.randint(4, 6))
        if rnd.random() < 0.7:
            own["allowed_token_ids"] = allowed
        if rnd.random() < 0.7:
            lengths = rnd.choice(((1, 2), (2, 3), (2, 2, 2, 2), (1, 2, 3, 4, 2, 2, 2)))
            barred = allowed[1:] if rnd.random() < 0.9 else allowed
            own["bad_word_ids"] = [_word(rnd, allowed, barred, length) for length in lengths]
        if rnd.random() < 0.4:
            own["extra_args"] = {
                "last": rnd.randint(1, 5),
                "step": rnd.choice((0.75, 3.0)),
                "lift": rnd.choice((0.5, 4.0)),
            }
        return replace(ask, params=msgspec.structs.replace(ask.params, **own))

    options = work.options | {"logits_processor": "processors:Shy"}
    return replace(work, options=options, asks=tuple(map(hooking, work.asks)))


def hooked_on_host(seed: int) -> Workload:
    """`hooked`, with a processor that wants tokens on the host."""
    work = hooked(seed)
    return replace(work, options=work.options | {"logits_processor": "processors:Waiting"})


def _word(rnd: random.Random, tokens: list[int], lasts: list[int], length: int) -> list[int]:
    return [*rnd.choices(tokens, k=length - 1), rnd.choice(lasts)]


def _stops(rnd: random.Random) -> str | list[str]:
    texts = ["".join(rnd.choice("abcd") for _ in range(rnd.randint(1, 4))) for _ in range(2)]
    return rnd.choice((texts[0], texts, ["<eos>", texts[0]]))
