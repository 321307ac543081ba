"""Plans, results and controls cross a wire and come out as they were."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.plan import (
    Control,
    Join,
    Plan,
    PromptRows,
    Result,
    decode_control,
    decode_plan,
    decode_result,
    encode_control,
    encode_plan,
    encode_result,
)
from stepahead.sync import Sync, SyncReason
from stepahead.types import HiddenRows, LogprobRows, SamplingParams

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
FLOAT32 = st.floats(width=32)


def ints(multiple: int = 1) -> st.SearchStrategy[np.ndarray]:
    """int32 arrays whose length is a multiple."""
    rows = st.lists(st.tuples(*[INT32] * multiple), max_size=6)
    return rows.map(lambda rows: np.array(rows, np.int32).reshape(-1))


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 1 << 31),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.none() | st.lists(st.integers(0, 1 << 40), max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(1, 1 << 31),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 1 << 31), st.floats(-100, 100)),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 1 << 31), min_size=1, max_size=3),
    bad_words=st.none() | st.lists(st.text(min_size=1, max_size=5), max_size=2),
    bad_word_ids=st.none()
    | st.lists(st.lists(st.integers(0, 1 << 31), min_size=1, max_size=3), max_size=3),
    extra_args=st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
    return_hidden_states=st.booleans(),
)
JOINS = st.builds(
    Join,
    slot=st.integers(1, 2048),
    generation=st.integers(0, 1 << 31),
    tokens=ints(),
    prompt_len=st.integers(1, 1 << 20),
    cached=st.integers(0, 1 << 20),
    pages=ints(),
    params=PARAMS,
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    choice=st.integers(0, 127),
)
PLANS = st.builds(
    Plan,
    step=st.integers(0, 1 << 40),
    rows=ints(),
    same_rows=st.booleans(),
    tokens=st.none() | ints(),
    chunks=ints(4),
    joins=st.lists(JOINS, max_size=2).map(tuple),
    grants=ints(3),
    leaves=ints(),
)


@st.composite
def logprob_rows(draw: st.DrawFn) -> LogprobRows:
    """r rows of w alternatives."""
    count, width = draw(st.integers(0, 3)), draw(st.integers(0, 3))

    def column(values: st.SearchStrategy[Any], size: int, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype)

    return LogprobRows(
        rows=column(INT32, count, np.int32),
        chosen=column(FLOAT32, count, np.float32),
        rank=column(INT32, count, np.int32),
        width=width,
        top_ids=column(INT32, count * width, np.int32),
        top=column(FLOAT32, count * width, np.float32),
    )


@st.composite
def hidden_rows(draw: st.DrawFn) -> HiddenRows:
    """r rows of w numbers."""
    count, width = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    rows = draw(st.lists(INT32, min_size=count, max_size=count))
    values = draw(st.lists(FLOAT32, min_size=count * width, max_size=count * width))
    return HiddenRows(np.array(rows, np.int32), width, np.array(values, np.float32))


RESULTS = st.builds(
    Result,
    step=st.integers(0, 1 << 40),
    tokens=ints(),
    device_start_ns=st.integers(0, 1 << 62),
    device_end_ns=st.integers(0, 1 << 62),
    logprobs=st.none() | logprob_rows(),
    prompt_logprobs=st.lists(
        st.builds(PromptRows, st.integers(0, 99), st.integers(0, 99), logprob_rows()), max_size=2
    ).map(tuple),
    error=st.text(),
    hidden=st.none() | hidden_rows(),
    syncs=st.lists(
        st.builds(Sync, st.sampled_from(SyncReason), st.integers(0, 1024)), max_size=3
    ).map(tuple),
)


def same(one: Any, two: Any) -> bool:
    """Equal to the bit and in type, structs and arrays through and through."""
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.tobytes() == two.tobytes()
    if isinstance(one, msgspec.Struct) and not isinstance(one, SamplingParams):
        names = one.__struct_fields__
        return type(one) is type(two) and all(same(getattr(one, n), getattr(two, n)) for n in names)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


@given(PLANS)
def test_a_plan_comes_out_as_it_went_in(plan: Plan) -> None:
    got = decode_plan(encode_plan(plan))
    if plan.same_rows:
        assert len(got.rows) == 0, "rows that the other side has are sent again"
        got = msgspec.structs.replace(got, rows=plan.rows)
    assert same(got, plan)


@given(RESULTS)
def test_a_result_comes_out_as_it_went_in(result: Result) -> None:
    assert same(decode_result(encode_result(result)), result)


@pytest.mark.parametrize("reason", SyncReason)
def test_a_reason_travels_by_the_name_that_people_read(reason: SyncReason) -> None:
    result = Result(3, np.zeros(0, np.int32), syncs=(Sync(reason, 5),))
    data = encode_result(result)
    assert reason.value.encode() in data
    assert decode_result(data).syncs[0].reason is reason


def test_an_unknown_reason_is_refused() -> None:
    result = Result(3, np.zeros(0, np.int32), syncs=(Sync(SyncReason.DRAIN, 5),))
    data = encode_result(result).replace(b"drain", b"trial")
    with pytest.raises(msgspec.ValidationError, match="'trial'"):
        decode_result(data)


def test_what_comes_beside_the_tokens_is_told_from_nothing() -> None:
    tokens, none = np.array([4], np.int32), np.zeros(0, np.float32)
    one = np.zeros(1, np.int32)
    rows = LogprobRows(one, np.zeros(1, np.float32), one, 0, one[:0], none)
    assert not Result(0, tokens).has_extras
    assert not Result(0, tokens, syncs=(Sync(SyncReason.DRAIN, 1),)).has_extras
    assert Result(0, tokens, logprobs=rows).has_extras
    assert Result(0, tokens, prompt_logprobs=(PromptRows(1, 0, rows),)).has_extras
    assert Result(0, tokens, hidden=HiddenRows(one, 1, np.ones(1, np.float32))).has_extras


@pytest.mark.parametrize("kind", ["shutdown"])
def test_a_control_comes_out_as_it_went_in(kind: Any) -> None:
    assert same(decode_control(encode_control(Control(kind))), Control(kind))


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="'explode'"):
        decode_control(msgspec.msgpack.encode(["explode"]))


def test_a_steady_plan_is_a_handful_of_bytes_whatever_the_batch() -> None:
    rows = np.arange(1, 1025, dtype=np.int32)
    assert len(encode_plan(Plan(7, rows, same_rows=True))) < 40
    assert len(encode_plan(Plan(7, rows, same_rows=False))) > 4096


def test_what_arrives_cannot_be_written_to() -> None:
    plan = decode_plan(encode_plan(Plan(0, np.array([3], np.int32), same_rows=False)))
    with pytest.raises(ValueError, match="read-only"):
        plan.rows[0] = 4


def test_arrays_that_are_not_contiguous_travel_too() -> None:
    rows = np.arange(10, dtype=np.int32)[::3]
    assert decode_plan(encode_plan(Plan(0, rows, same_rows=False))).rows.tolist() == [0, 3, 6, 9]


def test_only_integers_and_arrays_cross() -> None:
    plan = Plan(0, np.zeros(0, np.int32), same_rows=False)
    with pytest.raises(TypeError, match=r"object can't be sent"):
        encode_plan(msgspec.structs.replace(plan, tokens=object()))


def test_tables_are_the_flat_arrays_by_rows() -> None:
    chunks, grants = np.arange(8, dtype=np.int32), np.arange(6, dtype=np.int32)
    plan = Plan(0, np.zeros(0, np.int32), True, chunks=chunks, grants=grants)
    assert plan.chunk_table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.grant_table.tolist() == [[0, 1, 2], [3, 4, 5]]
