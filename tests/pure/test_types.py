"""Sampling parameters and prompts: what is refused, and that the error names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepahead.errors import InvalidParameter, RequestError
from stepahead.structured import StructuredOutputs
from stepahead.types import MAX_LOGPROBS, CompletionOutput, SamplingParams, as_prompt, params_from

NAN, INF = float("nan"), float("inf")
NOT_WHOLE: list[Any] = [1.5, "1", True, NAN, INF, [1]]
NOT_REAL: list[Any] = ["1", True, NAN, INF, -INF, [1.0], 10**400]
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 129, None, *NOT_WHOLE],
    "temperature": [-0.1, 100.1, None, *NOT_REAL],
    "top_p": [0.0, -0.5, 1.01, None, *NOT_REAL],
    "top_k": [-2, (1 << 31) + 1, None, *NOT_WHOLE],
    "min_p": [-0.1, 1.1, None, *NOT_REAL],
    "presence_penalty": [-2.1, 2.1, None, *NOT_REAL],
    "frequency_penalty": [-2.1, 2.1, None, *NOT_REAL],
    "repetition_penalty": [0.0, -1.0, 100.1, None, *NOT_REAL],
    "seed": [1 << 63, -(1 << 63) - 1, *NOT_WHOLE],
    "stop": [5, "", [""], ["a", ""], [1], [None], {"a": 1}, b"a"],
    "stop_token_ids": [3, "3", [-1], [1.0], [True], ["1"], [None], {1}],
    "ignore_eos": [1, 0, "true", None],
    "max_tokens": [0, -1, (1 << 31) + 1, *NOT_WHOLE],
    "min_tokens": [-1, None, *NOT_WHOLE],
    "logprobs": [-1, MAX_LOGPROBS + 1, *NOT_WHOLE],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, *NOT_WHOLE],
    "logit_bias": [
        *([3], "3", {-1: 1.0}, {"a": 1.0}, {1.5: 1.0}, {True: 1.0}),
        *({1: "x"}, {1: None}, {1: True}, {1: NAN}, {1: INF}, {1: 100.5}, {1: 10**400}),
    ],
    "allowed_token_ids": [3, "3", [], (), [-1], [1.0], [True], ["1"], [None], {1}, [1 << 63]],
    "bad_words": ["a", 3, [""], [1], [None], {"a": 1}, ["a" * 257], ["a"] * 129],
    "bad_word_ids": [
        *(3, [3], "3", [[]], [[-1]], [[True]], [["1"]], [[None]], [{1}]),
        *([[1] * 33], [[1]] * 257, [[1 << 63]]),
    ],
    "extra_args": [
        *(3, "a", [], [1], {1: 2}, {"a": (1,)}, {"a": NAN}, {"a": {1}}, {"a": 1 << 64}),
        {"a": "b" * (1 << 16)},
    ],
    "skip_special_tokens": [1, None, "no"],
    "include_stop_str_in_output": [1, None, "no"],
    "return_hidden_states": [1, None, "no"],
    "pooling": ["max", "", 1, True, ["mean"]],
    "structured_outputs": ["a+", 1, True, {"regex": 5}, {}, {"regex": "a", "choice": ["b"]}],
}
GOOD: dict[str, list[Any]] = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-50, 1, 100.0],
    "top_p": [1e-9, 1, 1.0],
    "top_k": [-1, 0, 1, 1 << 31],
    "min_p": [0, 0.0, 1.0],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2, 2.0],
    "repetition_penalty": [1e-3, 1, 100.0],
    "seed": [None, 0, -(1 << 63), (1 << 63) - 1],
    "stop": [None, "a", [], ["a", "b"], ("a",)],
    "stop_token_ids": [None, [], [0, 5], (3,)],
    "ignore_eos": [True, False],
    "max_tokens": [None, 1, 1 << 31],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "logit_bias": [None, {}, {0: -100.0, 5: 100}],
    "allowed_token_ids": [None, [0], [0, 5, 5], (3,)],
    "bad_words": [None, [], ["a"], ("a", "b c"), ["\n"], ["a" * 256] * 128],
    "bad_word_ids": [None, (), ((0,),), ((5, 6), (7,)), ((1,) * 32,) * 256],
    "extra_args": [None, {}, {"a": 1, "b": [1.5, None, "x", {"c": True}]}],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "return_hidden_states": [True, False],
    "pooling": [None, "mean", "last"],
    "structured_outputs": [None, StructuredOutputs(regex="a+"), StructuredOutputs(choice=["b"])],
}


def test_the_lists_below_cover_every_field() -> None:
    assert list(BAD) == list(GOOD) == list(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_a_bad_value_is_refused_by_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD.items() for v in vs])
def test_a_good_value_is_kept(name: str, value: Any) -> None:
    kept = tuple(value) if isinstance(value, list) else value
    assert getattr(SamplingParams(**{name: value}), name) == kept
    assert getattr(params_from({name: value}), name) == kept


def test_more_least_tokens_than_most_contradict() -> None:
    with pytest.raises(InvalidParameter, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, vs in GOOD.items() for v in vs if n != "pooling"]
)
def test_what_can_say_nothing_of_a_pooled_prompt_is_refused_with_it(name: str, value: Any) -> None:
    kept = tuple(value) if isinstance(value, list) else value
    if kept == getattr(SamplingParams(), name):
        SamplingParams(pooling="mean", **{name: value})
        return
    with pytest.raises(InvalidParameter, match="no token is sampled with pooling") as caught:
        SamplingParams(pooling="mean", **{name: value})
    assert caught.value.param == name


def test_unknown_parameters_are_named_and_the_known_ones_listed() -> None:
    with pytest.raises(InvalidParameter, match=r"unknown parameter 'temprature'.*temperature") as e:
        params_from({"temprature": 1.0})
    assert e.value.param == "temprature"


def test_json_has_strings_for_keys_of_a_bias() -> None:
    assert params_from({"logit_bias": {"7": 1.5}}).logit_bias == {7: 1.5}
    for key in ("-7", "7.0", "", "x"):
        with pytest.raises(InvalidParameter) as caught:
            params_from({"logit_bias": {key: 1.5}})
        assert caught.value.param == "logit_bias"


def test_parameters_cannot_be_changed_behind_the_checks() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = -1.0  # type: ignore[misc]


def test_what_is_asked_is_seen() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams(temperature=1e-3).greedy
    assert not SamplingParams().penalised
    for name, value in (("presence_penalty", 0.1), ("frequency_penalty", -0.1)):
        assert SamplingParams(**{name: value}).penalised
    assert SamplingParams(repetition_penalty=1.1).penalised
    assert SamplingParams().stops == ()
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stops == ("ab", "c")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([[1, 2]], "2 dimensions"),
        ([1, 64], "64"),
        ([-1], "-1"),
        ([1 << 40], str(1 << 40)),
        ([1 << 63], str(1 << 63)),
        ([1 << 70], "token ids"),
        ([1.0], "float64"),
        (["a"], "whole"),
        ([True, False], "bool"),
        ([None], "object"),
        ([1, [2]], "token ids"),
        (np.array([3, 99], np.uint64), "99"),
        (np.array([2, -3], np.int8), "-3"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        as_prompt(prompt, 64)
    assert caught.value.param == "prompt"
    assert isinstance(caught.value, RequestError)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.uint64])
def test_a_prompt_is_int32_and_our_own(dtype: type) -> None:
    given = np.array([0, 5, 63], dtype)
    prompt = as_prompt(given, 64)
    given[:] = 1
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [0, 5, 63]


def test_what_the_giver_changes_later_is_not_taken_over() -> None:
    stop, ids, bias = ["a"], [3], {4: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("")  # an empty stop string would be refused
    ids.append(-1)
    bias[-1] = 2.0
    assert params.stops == ("a",)
    assert list(params.stop_token_ids or ()) == [3]
    assert params.logit_bias == {4: 1.0}


def test_answers_with_hidden_states_can_be_compared() -> None:
    # it raised, for an array's comparison is an array
    one, same, other = (
        CompletionOutput(0, text, [5, 6], hidden_states=np.ones((2, 3), np.float32))
        for text in ("ab", "ab", "ac")
    )
    assert one == same
    assert one != other
