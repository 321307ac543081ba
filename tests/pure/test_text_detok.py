"""The incremental detokenizer: what it gives out is final, and all of it is the whole text."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import text_makers as makers
from stepahead.text import TextStream

BYTE_LEVEL = tokenizers.Tokenizer.from_str(makers.byte_level_json())
LLAMA = tokenizers.Tokenizer.from_str(makers.sentencepiece_json())
UNIGRAM = tokenizers.Tokenizer.from_str(makers.unigram_json())
FIRST_BYTE = 3  # the id of <0x00> in LLAMA


def streamed(
    backend: tokenizers.Tokenizer,
    ids: list[int],
    skip_special_tokens: bool = True,
    prompt_ids: tuple[int, ...] = (),
) -> list[str]:
    stream = TextStream(backend, skip_special_tokens, prompt_ids)
    return [*(stream.push([token]) for token in ids), stream.finish()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("backend", [BYTE_LEVEL, LLAMA, UNIGRAM], ids=["bytes", "llama", "unigram"])
def test_what_comes_out_is_the_whole_text(backend: tokenizers.Tokenizer, skip: bool) -> None:
    for text in makers.TEXTS:
        ids = backend.encode(text).ids
        out = streamed(backend, ids, skip)
        assert "".join(out) == backend.decode(ids, skip_special_tokens=skip)
        assert out[-1] == ""  # whole characters are never held back


@given(ids=st.lists(st.integers(0, 499), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_byte_level_ids_give_the_text_of_all_of_them(ids: list[int], skip: bool) -> None:
    assert "".join(streamed(BYTE_LEVEL, ids, skip)) == BYTE_LEVEL.decode(ids, skip)


@given(ids=st.lists(st.integers(0, 499), max_size=40), cuts=st.lists(st.integers(0, 40)))
@settings(max_examples=200, deadline=None)
def test_how_ids_are_grouped_does_not_matter(ids: list[int], cuts: list[int]) -> None:
    stream = TextStream(BYTE_LEVEL, False)
    out, at = "", 0
    for cut in [*sorted(cuts), len(ids)]:
        out += stream.push(ids[at:cut])
        at = max(at, cut)
        assert BYTE_LEVEL.decode(ids, False).startswith(out)  # final: nothing is taken back
    assert out == "".join(streamed(BYTE_LEVEL, ids, False)[:-1])
    assert out + stream.finish() == BYTE_LEVEL.decode(ids, False)


def as_byte_tokens(character: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in character.encode()]


WHOLE = st.integers(FIRST_BYTE + 256, LLAMA.get_vocab_size() - 1).map(lambda token: [token])
WRITTEN = st.characters(exclude_categories=["Cs"]).map(as_byte_tokens)


@given(groups=st.lists(WHOLE | WRITTEN, max_size=30))
@settings(max_examples=300, deadline=None)
def test_byte_tokens_that_are_characters_give_the_text_of_all_of_them(
    groups: list[list[int]],
) -> None:
    ids = [token for group in groups for token in group]
    assert "".join(streamed(LLAMA, ids)) == LLAMA.decode(ids)


@given(ids=st.lists(st.integers(0, LLAMA.get_vocab_size() - 1), max_size=40))
@settings(max_examples=300, deadline=None)
def test_broken_byte_tokens_spoil_nothing_around_them(ids: list[int]) -> None:
    out = "".join(streamed(LLAMA, ids, False))
    at = 0
    for token in ids:
        if not FIRST_BYTE <= token < FIRST_BYTE + 256:
            piece = LLAMA.id_to_token(token).replace("▁", " ").strip()
            at = out.index(piece, at) + len(piece)


def test_a_character_waits_for_its_last_byte() -> None:
    smile = [BYTE_LEVEL.token_to_id(c) for c in "ðŁĺ"] + [BYTE_LEVEL.token_to_id("Ģ")]
    assert streamed(BYTE_LEVEL, smile) == ["", "", "", "😀", ""]
    # cut short, it comes out broken at the end, not never
    assert streamed(BYTE_LEVEL, smile[:2]) == ["", "", "\ufffd"]
    # broken by what follows, it comes out with it
    a = BYTE_LEVEL.token_to_id("a")
    assert streamed(BYTE_LEVEL, [*smile[:2], a]) == ["", "", "\ufffda", ""]


def test_text_that_came_out_is_not_taken_back_by_broken_byte_tokens() -> None:
    # decoded in one go the run <0x41><0xFF> is no UTF-8, and both are shown as broken; but the A
    # was out before the second came
    ids = [FIRST_BYTE + 0x41, FIRST_BYTE + 0xFF, LLAMA.token_to_id("x")]
    assert LLAMA.decode(ids, False) == "\ufffd\ufffdx"
    assert streamed(LLAMA, ids, False) == ["A", "", "\ufffdx", ""]
    assert "".join(streamed(LLAMA, ids[:2], False)) == "A\ufffd"
    # and the stream goes on after it
    more = LLAMA.encode("the dog 你").ids
    assert "".join(streamed(LLAMA, ids + more, False)) == "A\ufffdx the dog 你"


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = [1, *BYTE_LEVEL.encode("hi").ids, 2]
    assert "".join(streamed(BYTE_LEVEL, ids)) == "hi"
    assert "".join(streamed(BYTE_LEVEL, ids, False)) == "<|im_start|>hi<|im_end|>"


def test_after_a_prompt_the_first_space_is_kept() -> None:
    prompt = tuple(LLAMA.encode("The quick brown").ids)
    answer = LLAMA.encode("fox").ids
    assert "".join(streamed(LLAMA, answer)) == "fox"
    assert "".join(streamed(LLAMA, answer, prompt_ids=prompt)) == " fox"
    for text in makers.TEXTS:
        ids = LLAMA.encode(text).ids
        whole = LLAMA.decode([*prompt, *ids])
        out = "".join(streamed(LLAMA, ids, prompt_ids=prompt))
        assert "The quick brown" + out == whole


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    start = [BYTE_LEVEL.token_to_id(c) for c in "ðŁ"]
    hi = BYTE_LEVEL.encode("hi").ids
    assert "".join(streamed(BYTE_LEVEL, hi, prompt_ids=(*hi, *start))) == "hi"


def test_finishing_twice_gives_nothing_twice() -> None:
    stream = TextStream(BYTE_LEVEL)
    stream.push([BYTE_LEVEL.token_to_id("ð")])
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert TextStream(BYTE_LEVEL).finish() == ""
