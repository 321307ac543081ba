"""What clients say and hear: sampling parameters, requests, outputs.  Knows no tensors, no clock.

Field names are those vLLM users have in their fingers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from stepahead.bans import check_allowed, check_bad_ids, check_bad_words, check_extra, is_token
from stepahead.errors import InvalidParameter
from stepahead.structured import Grammar, StructuredOutputs

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]
MAX_LOGPROBS = 20
MAX_STOP_LEN = 1024
MAX_STOPS = 128


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How to choose tokens and when to stop; checked when built, InvalidParameter names the field.

    `temperature=0` is greedy.  `top_k` of 0 or -1 means off.  `max_tokens=None` means as many as
    the model's length allows.  `seed` makes the noise of each position a function of
    (seed, choice, position) alone.  `logprobs=k` returns the chosen token and the k best;
    values are of the raw distribution, before temperature, penalties and filters.
    `return_hidden_states` returns the last layer's normed state that each output token came from.
    With `pooling` the request ends behind its prompt and no token is sampled: it returns the mean
    of these states over the prompt's positions, or the last one, and goes with no other field.
    With `structured_outputs` the answer is what that says, and ends where that ends, at the latest:
    also under `ignore_eos`, and before `min_tokens`.
    No token outside `allowed_token_ids` is chosen.  None of `bad_words` comes, as the tokenizer
    spells it with a space before it or without; `bad_word_ids` says the same in tokens.
    `extra_args`, plain JSON, asks for the engine's logits processor and is handed to it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_word_ids: list[list[int]] | None = None
    extra_args: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_hidden_states: bool = False
    pooling: Pooling | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _check_params(self)
        # our own copies: a list that its giver changes later would not have been checked
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if isinstance(given := getattr(self, name), list):
                force_setattr(self, name, tuple(given))
        if self.logit_bias is not None:
            force_setattr(self, "logit_bias", dict(self.logit_bias))
        if self.bad_word_ids is not None:
            force_setattr(self, "bad_word_ids", tuple(map(tuple, self.bad_word_ids)))
        if self.extra_args is not None:
            own = msgspec.json.decode(msgspec.json.encode(self.extra_args))
            force_setattr(self, "extra_args", own)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple, however they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        # smaller ones would be zero in float32, and 0 / 0 is NaN
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """True when the device must count this row's tokens."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def remembers(self) -> bool:
        """True when the device must keep this row's tokens in their order."""
        return bool(self.extra_args) or any(len(word) > 1 for word in self.bad_word_ids or ())


# field: (lowest, highest, lowest itself allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "n": (1, 128, True),
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, 1 << 31, True),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (1e-3, 100.0, True),
    "seed": (-(1 << 63), (1 << 63) - 1, True),
    "max_tokens": (1, 1 << 31, True),
    "min_tokens": (0, 1 << 31, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
}
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})
_REAL = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    }
)


_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "return_hidden_states",
)


def _check_params(params: SamplingParams) -> None:
    for name, (low, high, closed) in RANGES.items():
        _check_number(name, getattr(params, name), low, high, closed)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise InvalidParameter(f"{name} must be true or false", name)
    _check_stops(params)
    _check_bias(params.logit_bias)
    check_allowed(params.allowed_token_ids)
    check_bad_words(params.bad_words)
    check_bad_ids(params.bad_word_ids)
    check_extra(params.extra_args)
    if not isinstance(params.structured_outputs, StructuredOutputs | None):
        words = "structured_outputs must be StructuredOutputs"
        raise InvalidParameter(words, "structured_outputs")
    if params.pooling is not None:
        _check_pooling(params)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidParameter(
            f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}",
            "min_tokens",
        )


def _check_pooling(params: SamplingParams) -> None:
    kinds = get_args(Pooling)
    if params.pooling not in kinds:
        words = f"pooling={params.pooling!r}; give one of {', '.join(kinds)}"
        raise InvalidParameter(words, "pooling")
    for one in msgspec.structs.fields(params):
        if one.name != "pooling" and getattr(params, one.name) != one.default:
            words = f"{one.name}: no token is sampled with pooling; leave it out"
            raise InvalidParameter(words, one.name)


def _check_number(name: str, value: Any, low: float, high: float, closed: bool) -> None:
    if value is None and name in _OPTIONAL:
        return
    kinds = (int, float) if name in _REAL else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        what = "a number" if name in _REAL else "a whole number"
        raise InvalidParameter(f"{name} must be {what}, not {value!r}", name)
    # NaN compares false; math.isnan would overflow on a very large whole number
    if not ((low <= value if closed else low < value) and value <= high):
        bracket = "[" if closed else "("
        raise InvalidParameter(f"{name}={value} is outside {bracket}{low}, {high}]", name)


def _check_stops(params: SamplingParams) -> None:
    if params.stop is not None and not isinstance(params.stop, (str, list, tuple)):
        raise InvalidParameter("stop must be a string or a list of strings", "stop")
    if len(params.stops) > MAX_STOPS:  # each is looked for with every token
        raise InvalidParameter(
            f"stop has {len(params.stops)} strings; at most {MAX_STOPS} are taken", "stop"
        )
    for text in params.stops:
        if not isinstance(text, str) or not text:
            raise InvalidParameter("stop must hold non-empty strings", "stop")
        if len(text) > MAX_STOP_LEN:
            raise InvalidParameter(
                f"a stop string has {len(text)} characters; at most {MAX_STOP_LEN} are taken",
                "stop",
            )
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InvalidParameter(f"stop holds {text!r}, which is half a character", "stop")
    ids = params.stop_token_ids
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise InvalidParameter("stop_token_ids must be a list of token ids", "stop_token_ids")
    for token in ids or ():
        if not is_token(token):
            raise InvalidParameter(f"stop_token_ids holds {token!r}", "stop_token_ids")


def _check_bias(bias: dict[int, float] | None) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise InvalidParameter("logit_bias must map token ids to numbers", "logit_bias")
    for token, value in bias.items():
        if not is_token(token):
            raise InvalidParameter(f"logit_bias has the key {token!r}", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidParameter(f"logit_bias has the value {value!r}", "logit_bias")
        _check_number("logit_bias", value, -100.0, 100.0, True)


def params_from(fields: dict[str, Any]) -> SamplingParams:
    """Builds SamplingParams from decoded JSON; InvalidParameter names an unknown or bad field."""
    _refuse_unknown(fields, SamplingParams, "parameter")
    asked = fields.get("structured_outputs")
    if isinstance(asked, dict):
        _refuse_unknown(
            asked, StructuredOutputs, "field of structured_outputs", "structured_outputs"
        )
        fields = fields | {"structured_outputs": StructuredOutputs(**asked)}
    bias = fields.get("logit_bias")
    if isinstance(bias, dict):
        fields = fields | {"logit_bias": {_token_key(key): value for key, value in bias.items()}}
    return SamplingParams(**fields)


def _refuse_unknown(
    fields: dict[str, Any], kind: type[msgspec.Struct], what: str, param: str | None = None
) -> None:
    known = kind.__struct_fields__
    for name in fields:
        if name not in known:
            words = f"unknown {what} {name!r}; known: {', '.join(sorted(known))}"
            raise InvalidParameter(words, param or name)


def _token_key(key: Any) -> Any:
    # JSON objects have string keys
    is_id = isinstance(key, str) and key.isdecimal() and len(key) < 12
    return int(key) if is_id else key


class Request(msgspec.Struct, frozen=True, eq=False):
    """One choice a client waits for: `prompt` int32[n], its parameters, and what keys its noise.
    Its answer keeps to `grammar`; `params` say nothing of that any more."""

    rid: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    choice: int = 0
    grammar: Grammar | None = None


class LogprobRows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Log-probabilities of r rows with w alternatives each, flat: raw float32 and int32 arrays.

    `rows` int32[r] indexes the tokens they belong to; `chosen` float32[r]; `rank` int32[r] counts
    from 1; `top_ids` int32[r*w], `top` float32[r*w] are the w best, best first.
    """

    rows: np.ndarray
    chosen: np.ndarray
    rank: np.ndarray
    width: int
    top_ids: np.ndarray
    top: np.ndarray


class HiddenRows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Hidden states of r rows, flat: `rows` int32[r] indexes the tokens sampled from them, `values`
    float32[r * width]."""

    rows: np.ndarray
    width: int
    values: np.ndarray


class StateSums(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Hidden states of prompt positions, added up over each of p stretches, for who pools them.

    `owners` int64[p] are slots in a Result and request ids in Outputs; `starts` and `counts`
    int64[p] say which positions; `sums` float64[p * width].
    """

    owners: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    width: int
    sums: np.ndarray


class Finish(msgspec.Struct, frozen=True, eq=False):
    """The one terminal message of a request: why it ended and all its output tokens int32[n]."""

    rid: int
    reason: FinishReason
    tokens: np.ndarray
    stop_reason: int | str | None = None
    stop_end_bytes: int = 0  # bytes of the last token that lie behind a matched stop string
    cached_tokens: int = 0
    error: str = ""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Log-probabilities of prompt positions `start`.. of one request, as LogprobRows."""

    rid: int
    start: int
    values: LogprobRows


class Outputs(msgspec.Struct, frozen=True, eq=False):
    """What one retired step gives to clients, in columns: `tokens[i]` belongs to `rids[i]`.

    `rids` int64[n], `tokens` int32[n].  `first` lists requests whose first token this is.  Under
    drafts a request may have several tokens, next to each other; then `requests` int64[m] has each
    once.
    """

    step: int
    rids: np.ndarray
    tokens: np.ndarray
    first: tuple[int, ...] = ()
    finishes: tuple[Finish, ...] = ()
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    hidden: HiddenRows | None = None
    pooled: StateSums | None = None
    requests: np.ndarray | None = None


class DraftCounts(msgspec.Struct, frozen=True):
    """What came of drafts since the start: `rows` of steps, of which `drafted` had drafts,
    `proposed` of them together; and of those that were right how many stood first, second, .. in
    their row."""

    rows: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_at)

    @property
    def tokens_per_row(self) -> float:
        """What a row brought in a step, on average; 1 without drafts."""
        return 1.0 + self.accepted / max(1, self.rows)


class Load(msgspec.Struct, frozen=True):
    """Published at retirement, so one step late: it never decides a refusal."""

    step: int = -1
    rows_running: int = 0
    requests_waiting: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_evictable: int = 0  # of those cached, whom nobody holds
    pages_total: int = 0


@dataclass(frozen=True)
class Logprob:
    """vLLM's shape of one alternative: natural log, rank from 1, text of the token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds on the monotonic clock; None where the request never got so far."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float


@dataclass(frozen=True)
class CompletionOutput:
    """One choice of a request.

    `message` is the answer told apart, where it was to a conversation with tools or of a model that
    reasons first: OpenAI's message with content, reasoning_content and tool_calls.  `text` has the
    tags of both in it then.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str = ""
    message: dict[str, Any] | None = None
    # float32[n, hidden], one row for each of `token_ids`; arrays have no truth to compare by
    hidden_states: np.ndarray | None = field(default=None, compare=False)
    # float32[hidden] where `pooling` was asked for and all of the prompt was computed
    pooled: np.ndarray | None = field(default=None, compare=False)

    def finished(self) -> bool:
        """True once a terminal message has come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """All choices of one prompt, in vLLM's shape."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


def as_prompt(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids as int32[n]; InvalidParameter when empty or out of range."""
    try:
        prompt = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise InvalidParameter(f"prompt is not a list of token ids: {error}", "prompt") from error
    if prompt.ndim != 1:
        raise InvalidParameter(
            f"prompt is an array of {prompt.ndim} dimensions; give one list of token ids", "prompt"
        )
    if not prompt.size:
        raise InvalidParameter("the prompt is empty; give at least one token", "prompt")
    if prompt.dtype.kind not in "iu":
        raise InvalidParameter(f"prompt holds {prompt.dtype}, not whole token ids", "prompt")
    # as unsigned numbers, so that one look finds ids below zero too
    if prompt.astype(np.int64).view(np.uint64).max() >= vocab_size:
        bad = int(prompt[(prompt < 0) | (prompt >= vocab_size)][0])
        raise InvalidParameter(
            f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}", "prompt"
        )
    return prompt.astype(np.int32)
