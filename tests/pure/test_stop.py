"""Stop rules: the look-up never misses, and what it flags is judged as by a naive search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.scheduler import stop
from stepahead.scheduler.stop import WATCH_OWN, StopRule, StopTable, Vocabulary
from stepahead.types import SamplingParams

EOS, SPECIALS = 1, frozenset({0, 1})
PIECES = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b"aab", b"bb", b"", b" ", "é".encode(), b"\xc3", b"\xa9"]),
    min_size=4,
    max_size=12,
).map(lambda pieces: [b"<p>", b"</s>", *pieces])
TEXTS = st.text("ab é", min_size=1, max_size=4) | st.sampled_from(["</s>", "s>a"])


def ended(stops: StopTable, rule: StopRule, outputs: list[int]) -> tuple[int | str, int] | None:
    """What the rule makes of the newest output; it may ask for any number of the last ones."""

    def last(count: int) -> np.ndarray:
        assert 1 <= count <= len(outputs)
        return np.array(outputs[-count:], np.int32)

    return stops.matched(rule, len(outputs), last)


def table(pieces: list[bytes]) -> StopTable:
    """A stop table over these tokens, the first two of them special."""
    return StopTable(len(pieces), (EOS,), Vocabulary(pieces, SPECIALS))


def naive(
    pieces: list[bytes], outputs: list[int], params: SamplingParams
) -> tuple[int | str, int] | None:
    """Searches the whole text after each token, as the docstrings say and no faster."""
    if len(outputs) <= params.min_tokens:
        return None
    skipped = SPECIALS if params.skip_special_tokens else frozenset()
    parts = [b"" if token in skipped else pieces[token] for token in outputs]
    text, before = b"".join(parts), len(b"".join(parts[:-1]))
    ends = [
        (at + len(stop.encode()), rank)
        for rank, stop in enumerate(params.stops)
        for at in range(len(text))
        if text.startswith(stop.encode(), at) and at + len(stop.encode()) > before
    ]
    if ends:
        end, rank = min(ends)
        return params.stops[rank], len(text) - end
    ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    return (outputs[-1], 0) if outputs[-1] in ids else None


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[bytes], list[int], SamplingParams]:
    """Tokens, an output over them, and parameters with stops."""
    pieces = draw(PIECES)
    ids = st.integers(0, len(pieces) - 1)
    params = SamplingParams(
        stop=draw(st.lists(TEXTS, max_size=3)),
        stop_token_ids=draw(st.lists(ids, max_size=2)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 3)),
        skip_special_tokens=draw(st.booleans()),
    )
    return pieces, draw(st.lists(ids, min_size=1, max_size=10)), params


@settings(max_examples=400)
@given(stories())
def test_every_end_of_a_naive_search_is_found_and_no_other(
    story: tuple[list[bytes], list[int], SamplingParams],
) -> None:
    pieces, outputs, params = story
    stops = table(pieces)
    rule = stops.rule(params)
    watch = np.array([stops.add(rule)], np.uint8)
    for count in range(1, len(outputs) + 1):
        so_far = outputs[:count]
        wanted = naive(pieces, so_far, params)
        flagged = stops.candidates(np.array(so_far[-1:], np.int32), watch).tolist() == [0]
        if wanted is not None:
            assert flagged, "a token that ends the request is not looked at"
        assert ended(stops, rule, so_far) == wanted


@given(st.lists(stories(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_rules_leave_nothing_behind(stories: list[Any], rnd: Any) -> None:
    stops = table(stories[0][0])
    size = len(stories[0][0])
    rules = []
    for _, _, params in stories:
        ids = [token % size for token in params.stop_token_ids or ()]
        for _ in range(rnd.randint(1, 3)):
            rule = stops.rule(SamplingParams(stop=params.stop, stop_token_ids=ids))
            stops.add(rule)
            rules.append(rule)
    rnd.shuffle(rules)
    tokens = np.arange(size, dtype=np.int32)
    own = np.full(size, WATCH_OWN, np.uint8)
    while rules:
        stops.remove(rules.pop())
        mine = [rule for rule in rules if rule is not stops.rule(SamplingParams())]
        wanted = {token for rule in mine for token in rule.flagged.tolist()}
        assert set(stops.candidates(tokens, own).tolist()) == wanted
    assert not stops.counted


def test_plain_requests_share_a_rule() -> None:
    stops = table([b"", b"", b"a"])
    assert stops.rule(SamplingParams()) is stops.rule(SamplingParams(temperature=0.5))
    assert stops.rule(SamplingParams()) is not stops.rule(SamplingParams(ignore_eos=True))
    assert stops.rule(SamplingParams()) is not stops.rule(SamplingParams(min_tokens=1))


def test_nothing_but_the_rules_tokens_is_looked_at() -> None:
    stops = table([b"", b"", b"a", b"b", b"c", b"ca"])
    watch = stops.add(stops.rule(SamplingParams(stop="ca")))
    everything = np.arange(6, dtype=np.int32)
    # the end, "a" and "ca"; but not "c", with which "ca" can only begin
    own = np.full(6, watch, np.uint8)
    assert stops.candidates(everything, own).tolist() == [1, 2, 5]


def test_one_requests_strings_are_nobody_elses_work() -> None:
    # once every row was looked at in Python whose token could end anybody's string: 20 times the
    # host's step at 256 rows
    stops = table([b"", b"", b"a", b"b", b"c", b"ca"])
    stops.add(stops.rule(SamplingParams(stop="ca")))
    plain = stops.add(stops.rule(SamplingParams()))
    deaf = stops.add(stops.rule(SamplingParams(ignore_eos=True)))
    everything = np.arange(6, dtype=np.int32)
    assert stops.candidates(everything, np.full(6, plain, np.uint8)).tolist() == [EOS]
    assert stops.candidates(everything, np.full(6, deaf, np.uint8)).tolist() == []


@pytest.mark.parametrize(
    ("texts", "outputs", "wanted"),
    [
        (["bb"], [2, 3], None),  # "ab"
        (["ab"], [2, 3], ("ab", 0)),
        (["ab"], [2, 4], ("ab", 1)),  # "a" + "ba": one byte behind it
        (["a"], [3, 5], ("a", 2)),  # the first of two in "aab"
        (["ab", "b"], [2, 3], ("ab", 0)),  # both end there: as listed
        (["b", "ab"], [2, 3], ("b", 0)),
        (["bab", "a"], [3, 2, 3], ("bab", 0)),
        (["aba"], [2, 4, 3], None),  # it stood there a token ago
        (["x"], [2, 3], None),
    ],
)
def test_a_string_ends_where_it_first_ends(
    texts: list[str], outputs: list[int], wanted: tuple[str, int] | None
) -> None:
    stops = table([b"", b"", b"a", b"b", b"ba", b"aab"])
    rule = stops.rule(SamplingParams(stop=texts))
    assert ended(stops, rule, outputs) == wanted


def test_many_strings_are_forgotten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_MOST_REMEMBERED", 100)
    vocabulary = Vocabulary([b"", b"a"])
    for i in range(500):
        vocabulary.enders(str(i).encode())
    assert len(vocabulary._ending) <= 101
    assert vocabulary.enders(b"a").tolist() == [1]
