"""The toy's answers from its formulas, in plain Python and numpy; shares no code with the engine.

`complete` says what a request must get: tokens, why it ends, log-probabilities.  The arithmetic is
float64 where the engine's is float32, so each token also says whether it is *sure*: where another
choice lies within `NEAR` of the best, either may come out and nothing after it can be compared.
Written from the docstrings of the toy model, of the noise and of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product
from typing import Any

import numpy as np

NEAR = 1e-5
_64 = (1 << 64) - 1
_32 = (1 << 32) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Toy:
    """The toy as a client sees it."""

    vocab_size: int
    model_len: int
    eos: int = 1
    specials: frozenset[int] = frozenset({0, 1})


@cache
def pieces(vocab_size: int) -> list[bytes]:
    """Bytes by id: two specials, then all words over abcd, shorter ones first."""
    words = ("".join(word).encode() for n in range(1, 9) for word in product("abcd", repeat=n))
    return [b"<pad>", b"<eos>", *islice(words, vocab_size - 2)]


# --- the model ------------------------------------------------------------------------------


def mix64(x: int) -> int:
    """splitmix64's finaliser on a Python integer."""
    x &= _64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64
    return x ^ (x >> 31)


def mix_column(x: np.ndarray) -> np.ndarray:
    """The same on uint64[n]; arrays wrap without a warning."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def state_of(tokens: np.ndarray) -> int:
    """The state after these tokens: each cell's mix, weighted by 2 i + 1, wrapping."""
    position = np.arange(len(tokens), dtype=np.uint64)
    cells = mix_column(
        tokens.astype(np.uint64) * np.uint64(_GOLDEN64) + position * np.uint64(0xC2B2AE3D27D4EB4F)
    )
    return int((cells * (np.uint64(2) * position + np.uint64(1))).sum(dtype=np.uint64))


def logits_of(state: int, vocab_size: int) -> np.ndarray:
    """float64[vocab_size] in [0, 8), exact."""
    column = np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x165667B19E3779F9)
    bits = mix_column(np.uint64(state) + column) >> np.uint64(20)
    return (bits & np.uint64(0xFFFFFF)).astype(np.float64) / 2**21


def hidden_of(state: int) -> float:
    """The state as a client gets it: a signed 64-bit number, rounded to float32."""
    return float(np.float32(np.int64(signed(state))))


def signed(state: int) -> int:
    """The state as a signed number of 64 bits."""
    return state - (1 << 64) if state >> 63 else state


# --- noise ----------------------------------------------------------------------------------


def noise(seed: int, choice: int, position: int, vocab_size: int) -> np.ndarray:
    """float64[vocab_size] Gumbel noise of (seed, choice, position), token by token."""
    key = mix64(mix64(seed) + _GOLDEN64 * (choice + 1))
    mixed = (key + position * _GOLDEN64) & _64
    mixed = ((mixed ^ (mixed >> 32)) * 0xB4B82F3A5E59492D) & _64
    row = (mixed ^ (mixed >> 29)) & _32
    bits = [_mix32((row + token * 0x9E3779B9) & _32) >> 9 for token in range(vocab_size)]
    return -np.log(-np.log((np.array(bits) + 0.5) / 2**23))


def _mix32(x: int) -> int:
    # murmur3's finaliser
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _32
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _32
    return x ^ (x >> 16)


# --- the sampler ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a token is chosen: whose noise, after which tokens, and what must not come yet."""

    seed: int
    choice: int
    prompt: list[int]
    outputs: list[int]
    ends: frozenset[int]  # ids that end the request, banned below min_tokens
    allowed: set[int] | None = None  # what its grammar lets come, None where it has none

    @property
    def position(self) -> int:
        """Of the token to be chosen."""
        return len(self.prompt) + len(self.outputs)


def choose(logits: np.ndarray, params: Any, place: Place) -> tuple[int, bool]:
    """The token for float64[v] logits, and whether it is sure."""
    scores = _penalised(_edited(logits, params, place), params, place)
    if place.allowed is not None:
        forbidden = [token for token in range(len(scores)) if token not in place.allowed]
        scores[forbidden] = -np.inf
        if not np.isfinite(scores).any():
            return -1, False
    if params.temperature < 1e-5:
        return _best(scores)
    scores = scores / params.temperature
    kept, sure = filtered(scores, params)
    drawn = np.where(kept, scores, -np.inf)
    drawn = drawn + noise(place.seed, place.choice, place.position, len(scores))
    token, clear = _best(drawn)
    return token, sure and clear


def _edited(logits: np.ndarray, params: Any, place: Place) -> np.ndarray:
    scores = logits.copy()
    for token, value in (params.logit_bias or {}).items():
        scores[token] += value
    if len(place.outputs) < params.min_tokens:
        scores[list(place.ends)] = -np.inf
    return scores


def _penalised(scores: np.ndarray, params: Any, place: Place) -> np.ndarray:
    scores = scores.copy()
    for token in {*place.prompt, *place.outputs}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(place.outputs):
        count = place.outputs.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def filtered(scores: np.ndarray, params: Any) -> tuple[np.ndarray, bool]:
    """bool[v]: which tokens min-p, then top-k, then top-p leave; and whether no edge was near."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    kept, sure = len(ranked), True
    if params.min_p > 0:
        floor = ranked[0] + np.log(params.min_p)
        kept = int((ranked >= floor).sum())
        sure &= not (np.abs(ranked[1:] - floor) < NEAR).any()
    if params.top_k > 0:
        kept = min(kept, params.top_k)
    if params.top_p < 1:
        weights = np.exp(ranked[:kept] - ranked[0])
        before = np.cumsum(weights) / weights.sum() - weights / weights.sum()
        sure &= not (np.abs(before[1:] - params.top_p) < NEAR).any()
        kept = max(1, int((before < params.top_p).sum()))
    # ties at the edge stay in
    if kept < len(ranked) and np.isfinite(ranked[kept]):
        sure &= bool(ranked[kept - 1] - ranked[kept] > NEAR)
    return scores >= ranked[kept - 1], bool(sure)


def _best(scores: np.ndarray) -> tuple[int, bool]:
    token = int(scores.argmax())
    others = np.delete(scores, token)
    return token, bool(len(others) == 0 or scores[token] - others.max() > NEAR)


# --- log-probabilities ----------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64[v] of float64[v]."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


# --- a request ------------------------------------------------------------------------------


@dataclass
class Answer:
    """What a request must get.  `logits` are the raw ones each output was chosen from, and
    `prompt_logits` those behind each prompt token but the first; `hidden` are the states that
    the outputs came from; `sure` outputs are certain."""

    tokens: list[int] = field(default_factory=list)
    reason: str = "length"
    stop_reason: int | str | None = None
    stop_end_bytes: int = 0
    sure: int = 0
    logits: list[np.ndarray] = field(default_factory=list)
    prompt_logits: list[np.ndarray] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)


Allowed = Callable[[list[int]], set[int]]


def complete(
    toy: Toy,
    prompt: list[int],
    params: Any,
    seed: int,
    choice: int = 0,
    allowed: Allowed | None = None,
) -> Answer:
    """Runs one request to its end.  `allowed` says which tokens may come after outputs; none when
    the answer is complete."""
    answer = Answer()
    if params.prompt_logprobs is not None and choice == 0:
        answer.prompt_logits = [
            logits_of(state_of(np.array(prompt[:i])), toy.vocab_size) for i in range(1, len(prompt))
        ]
    named = set(params.stop_token_ids or ())
    ends = frozenset(named if params.ignore_eos else named | {toy.eos})
    most = toy.model_len - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    sure = True
    while len(answer.tokens) < most:
        state = state_of(np.array(prompt + answer.tokens))
        logits = logits_of(state, toy.vocab_size)
        may = None if allowed is None else allowed(answer.tokens)
        place = Place(seed, choice, prompt, answer.tokens, ends, may)
        token, clear = choose(logits, params, place)
        if token < 0:  # nothing may come
            answer.reason = "error"
            break
        sure &= clear
        answer.tokens.append(token)
        answer.logits.append(logits)
        answer.hidden.append(hidden_of(state))
        answer.sure += sure
        if (stop := ended(toy, answer.tokens, params, ends)) is not None:
            answer.reason = "stop"
            told, answer.stop_end_bytes = stop
            answer.stop_reason = told if isinstance(told, str) or told in named else None
            break
        if allowed is not None and not allowed(answer.tokens):
            answer.reason = "stop"
            break
    return answer


def ended(
    toy: Toy, outputs: list[int], params: Any, ends: frozenset[int]
) -> tuple[int | str, int] | None:
    """What ends a request with its last output: (id or string, bytes of it behind the string)."""
    if len(outputs) <= params.min_tokens:
        return None
    texts = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    parts = [_text(toy, token, params.skip_special_tokens) for token in outputs]
    whole, before = b"".join(parts), len(b"".join(parts[:-1]))
    found = [
        (at + len(text.encode()), rank)
        for rank, text in enumerate(texts)
        for at in range(len(whole))
        if whole.startswith(text.encode(), at) and at + len(text.encode()) > before
    ]
    if found:
        end, rank = min(found)
        return texts[rank], len(whole) - end
    return (outputs[-1], 0) if outputs[-1] in ends else None


def _text(toy: Toy, token: int, skip_special: bool) -> bytes:
    return b"" if skip_special and token in toy.specials else pieces(toy.vocab_size)[token]
