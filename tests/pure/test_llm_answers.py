"""Answers made of outputs: text cut where it must stop, told in pieces or whole, never twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.llm.collect import Collector, Delta
from stepahead.llm.prompts import Prompt
from stepahead.scheduler.stop import StopTable, Vocabulary
from stepahead.text.texts import Texts, ToyTexts
from stepahead.text.tokenizer import Tokenizer
from stepahead.types import (
    Finish,
    HiddenRows,
    LogprobRows,
    Outputs,
    RequestOutput,
    SamplingParams,
)
from text_makers import byte_level_json, save_folder, sentencepiece_json

TOY = ToyTexts(90)


def outputs_of(
    rid: int, tokens: list[int], finish: Finish | None, logprobs: bool
) -> Iterator[Outputs]:
    """One step a token, the last one with the end."""
    for place, token in enumerate(tokens):
        last = place == len(tokens) - 1 and finish is not None
        yield Outputs(
            place,
            np.array([rid]),
            np.array([token], np.int32),
            (rid,) if place == 0 else (),
            (finish,) if last and finish is not None else (),
            _rows(place) if logprobs else None,
        )


def _rows(place: int) -> LogprobRows:
    return LogprobRows(
        np.zeros(1, np.int32),
        np.array([-float(place)], np.float32),
        np.array([7], np.int32),
        1,
        np.array([5], np.int32),
        np.array([-0.5], np.float32),
    )


def ended(texts: Texts, tokens: list[int], params: SamplingParams) -> tuple[list[int], Finish]:
    """What the scheduler's own rules make of a stream of tokens."""
    table = StopTable(1000, texts.eos_ids, Vocabulary(texts.token_bytes, texts.special_ids))
    rule = table.rule(params)
    for count in range(1, len(tokens) + 1):
        seen = np.array(tokens[:count], np.int32)
        match = table.matched(rule, count, lambda last, seen=seen: seen[-last:])
        if match is not None:
            told, behind = match
            if isinstance(told, int) and told not in rule.reported:
                return tokens[:count], Finish(0, "stop", seen)
            return tokens[:count], Finish(0, "stop", seen, told, behind)
    return tokens, Finish(0, "length", np.array(tokens, np.int32))


def collect(
    texts: Texts, tokens: list[int], params: SamplingParams, streaming: bool
) -> tuple[RequestOutput, list[Delta]]:
    """The answer to a prompt of one token, through the collector."""
    tokens, finish = ended(texts, tokens, params)
    collector = Collector(texts)
    collector.open("q", Prompt([3]), params, [0], streaming)
    deltas: list[Delta] = []
    done: list[tuple[Any, RequestOutput]] = []
    for outputs in outputs_of(0, tokens, finish, params.logprobs is not None):
        news = collector.take(outputs)
        deltas += news.deltas
        done += news.done
    assert [key for key, _ in done] == ["q"]
    assert len(collector) == 0
    return done[0][1], deltas


def shown(tokens: list[int], skip: bool) -> str:
    pieces = (TOY.token_bytes[t] for t in tokens if not (skip and t in TOY.special_ids))
    return b"".join(pieces).decode()


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(1, 89), min_size=1, max_size=12),
    stops=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 3),
)
def test_text_ends_at_the_stop_and_pieces_make_the_whole(
    tokens: list[int], stops: list[str], include: bool, skip: bool, min_tokens: int
) -> None:
    params = SamplingParams(
        stop=stops or None,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
        max_tokens=20,
    )
    whole, none = collect(TOY, tokens, params, streaming=False)
    pieces, deltas = collect(TOY, tokens, params, streaming=True)
    choice = whole.outputs[0]
    assert none == []
    assert pieces.outputs == whole.outputs
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [t for delta in deltas for t in delta.token_ids] == choice.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (
        choice.finish_reason,
        choice.stop_reason,
    )
    assert choice.text == expected(choice.token_ids, choice.stop_reason, params, choice)


def expected(ids: list[int], stop: int | str | None, params: SamplingParams, choice: Any) -> str:
    """By plain search in the text, not by counting bytes behind the stop."""
    skip = params.skip_special_tokens
    text = shown(ids, skip)
    if choice.finish_reason != "stop":
        return text
    if not isinstance(stop, str):
        return text if params.include_stop_str_in_output else shown(ids[:-1], skip)
    # the occurrence that ends first inside the last token
    before = len(shown(ids[:-1], skip))
    end = next(e for e in range(before + 1, len(text) + 1) if text.endswith(stop, 0, e))
    return text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]


@pytest.mark.parametrize("maker", [byte_level_json, sentencepiece_json])
@pytest.mark.parametrize("stop", ["界", "emoji 😀", "🏽", " the", "fox jumps", "é r", "\n"])
def test_characters_of_many_bytes_are_cut_and_told_whole(
    tmp_path: Path, maker: Any, stop: str
) -> None:
    texts = Tokenizer.load(save_folder(tmp_path, maker()))
    said = f"naïve café 👍🏽 and 😀 over the fox{stop} jumps"
    tokens = texts.encode("x" + said, add_special_tokens=False)
    params = SamplingParams(stop=stop, max_tokens=None, ignore_eos=True)
    whole, _ = collect(texts, tokens, params, streaming=False)
    pieces, deltas = collect(texts, tokens, params, streaming=True)
    assert whole.outputs[0].stop_reason == stop
    assert whole.outputs[0].text.removeprefix(" ") == ("x" + said).partition(stop)[0]
    assert pieces.outputs == whole.outputs
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_what_may_begin_a_stop_is_held_back() -> None:
    a, b, c = 2, 3, 4  # one letter each
    _, deltas = collect(TOY, [c, a, b, a, b, c], SamplingParams(stop="abab"), streaming=True)
    # c; a held; ab held; aba held; abab ends it
    assert [delta.text for delta in deltas] == ["c", "", "", "", ""]
    _, deltas = collect(TOY, [c, a, b, c, a], SamplingParams(stop="abab"), streaming=True)
    assert [delta.text for delta in deltas] == ["c", "", "", "abc", "a"]


def test_logprobs_go_with_their_tokens() -> None:
    params = SamplingParams(logprobs=1)
    whole, _ = collect(TOY, [4, 6, 8], params, streaming=False)
    streamed, deltas = collect(TOY, [4, 6, 8], params, streaming=True)
    choice = whole.outputs[0]
    assert streamed.outputs[0].logprobs == choice.logprobs
    assert [row for delta in deltas for row in delta.logprobs or ()] == choice.logprobs
    assert choice.logprobs is not None
    assert [list(row) for row in choice.logprobs] == [[4, 5], [6, 5], [8, 5]]
    assert choice.logprobs[1][6].logprob == -1.0
    assert choice.logprobs[1][6].rank == 7
    assert choice.logprobs[1][6].decoded_token == "aa"
    assert choice.logprobs[1][5].rank == 1
    assert choice.cumulative_logprob == -3.0
    # a step that brings three tokens of one request: each piece has the row of its own
    collector = Collector(TOY)
    collector.open("q", Prompt([3]), params, [0], streaming=True)
    rows = [_rows(place) for place in range(3)]
    tokens, end = ended(TOY, [4, 6, 8], params)
    news = collector.take(
        Outputs(
            0,
            np.zeros(3, np.int64),
            np.array(tokens, np.int32),
            (0,),
            logprobs=LogprobRows(
                np.arange(3, dtype=np.int32),
                np.concatenate([row.chosen for row in rows]),
                np.concatenate([row.rank for row in rows]),
                1,
                np.concatenate([row.top_ids for row in rows]),
                np.concatenate([row.top for row in rows]),
            ),
        )
    )
    assert [delta.logprobs for delta in news.deltas] == [[row] for row in choice.logprobs]
    collector.take(Outputs(1, np.zeros(0, np.int64), np.zeros(0, np.int32), finishes=(end,)))

    bare, _ = collect(TOY, [4, 6], SamplingParams(logprobs=0), streaming=False)
    assert [list(row) for row in bare.outputs[0].logprobs or ()] == [[4], [6]]


def states(rows: list[int], values: list[list[float]]) -> HiddenRows:
    flat = np.array(values, np.float32).reshape(-1)
    return HiddenRows(np.array(rows, np.int32), len(values[0]), flat)


@pytest.mark.parametrize("streaming", [False, True])
def test_hidden_states_go_with_their_tokens_and_to_who_asked(streaming: bool) -> None:
    collector = Collector(TOY)
    asking = SamplingParams(n=2, return_hidden_states=True)
    collector.open("asked", Prompt([3]), asking, [7, 8], streaming)
    collector.open("not", Prompt([3]), SamplingParams(), [9], streaming)
    first = [[7.0, 0.5], [8.0, 0.25]]
    second = [[8.5, 1.0], [7.5, 2.0]]  # rows change places
    steps = [
        Outputs(
            0, np.array([7, 9, 8]), np.array([4, 5, 6], np.int32), hidden=states([0, 2], first)
        ),
        Outputs(1, np.array([8, 7]), np.array([5, 4], np.int32), hidden=states([0, 1], second)),
        # beside strangers' rows, the last of one and the end of all
        Outputs(
            2,
            np.array([5, 7]),
            np.array([5, 5], np.int32),
            (),
            (_end(7, [4, 4, 5], 0), _end(8, [6, 5], 0), _end(9, [5], 0)),
            hidden=states([0, 1], [[5.0, 5.0], [7.75, 3.0]]),
        ),
    ]
    done = dict(pair for outputs in steps for pair in collector.take(outputs).done)
    one, two = done["asked"].outputs
    assert one.hidden_states is not None
    assert one.hidden_states.dtype == np.float32
    assert one.hidden_states.tolist() == [[7.0, 0.5], [7.5, 2.0], [7.75, 3.0]]
    assert two.hidden_states is not None
    assert two.hidden_states.tolist() == [[8.0, 0.25], [8.5, 1.0]]
    assert done["not"].outputs[0].hidden_states is None


def test_a_kept_state_does_not_keep_those_of_others() -> None:
    collector = Collector(TOY)
    collector.open("q", Prompt([3]), SamplingParams(return_hidden_states=True), [1])
    many = np.arange(1, 65)
    step = states([*range(64)], [[float(i)] * 8 for i in many])
    collector.take(Outputs(0, many, np.full(64, 4, np.int32), hidden=step))
    ((_, answer),) = collector._choices.values()
    assert answer.hidden is not None
    assert [row.base for row in answer.hidden] == [None]


def test_an_answer_without_tokens_has_no_states() -> None:
    collector = Collector(TOY)
    collector.open("q", Prompt([3]), SamplingParams(return_hidden_states=True), [1])
    none = np.zeros(0, np.int64)
    gone = Finish(1, "abort", np.zeros(0, np.int32))
    outputs = Outputs(-1, none, none.astype(np.int32), finishes=(gone,))
    ((_, output),) = collector.take(outputs).done
    assert output.outputs[0].hidden_states is not None
    assert len(output.outputs[0].hidden_states) == 0


def test_choices_come_together_and_times_are_the_clocks() -> None:
    ticks = itertools.count(10.0)
    collector = Collector(TOY, lambda: next(ticks))
    collector.open("q", Prompt([3, 4], "text"), SamplingParams(n=2), [7, 8])
    first = Outputs(0, np.array([7, 8]), np.array([4, 5], np.int32), (7, 8))
    assert collector.take(first).done == []
    one = Outputs(1, np.array([7]), np.array([6], np.int32), (), (_end(8, [5], cached=9),))
    assert collector.take(one).done == []
    assert collector.rids() == [7]
    two = Outputs(2, np.array([7]), np.array([6], np.int32), (), (_end(7, [4, 6], cached=1),))
    ((key, output),) = collector.take(two).done
    assert key == "q"
    assert output.request_id == "q"
    assert output.prompt == "text"
    assert output.prompt_token_ids == [3, 4]
    assert [(c.index, c.text, c.token_ids) for c in output.outputs] == [
        (0, "caa", [4, 6]),
        (1, "d", [5]),
    ]
    assert output.num_cached_tokens == 1  # the first choice's: the second found the first's pages
    assert output.metrics is not None
    assert output.metrics.arrival_s == 10.0
    assert output.metrics.first_token_s == 11.0
    assert output.metrics.finished_s == 13.0


def _end(rid: int, tokens: list[int], cached: int) -> Finish:
    return Finish(rid, "length", np.array(tokens, np.int32), cached_tokens=cached)


def test_strangers_are_passed_over() -> None:
    collector = Collector(TOY)
    collector.open("q", Prompt([3]), SamplingParams(logprobs=1), [1], streaming=True)
    news = collector.take(
        Outputs(0, np.array([5]), np.array([4], np.int32), (5,), (_end(5, [4], 0),), _rows(0))
    )
    assert news.deltas == []
    assert news.done == []
    assert collector.rids() == [1]
