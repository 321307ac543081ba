"""Bad words as a tokenizer spells them."""

from __future__ import annotations

import pytest

from stepahead.errors import InvalidParameter
from stepahead.text.bad_words import with_bad_word_ids
from stepahead.text.texts import ToyTexts
from stepahead.text.tokenizer import Tokenizer
from stepahead.types import SamplingParams
from text_makers import smollm2


@pytest.fixture(scope="module")
def texts() -> Tokenizer:
    return Tokenizer.load(smollm2())


def test_a_word_is_spelt_with_a_space_before_it_and_without(texts: Tokenizer) -> None:
    params = SamplingParams(bad_words=["  sea", "unforeseeable", "\n"], bad_word_ids=[[5, 6]])
    found = with_bad_word_ids(params, texts)
    assert found.bad_words is None
    assert found.bad_word_ids is not None
    spelt = [texts.decode(word, False) for word in found.bad_word_ids[1:]]
    assert found.bad_word_ids[0] == (5, 6)
    assert spelt == ["sea", " sea", "unforeseeable", " unforeseeable", "\n"]
    assert with_bad_word_ids(found, texts) is found
    none = with_bad_word_ids(SamplingParams(bad_words=[]), texts)
    assert (none.bad_words, none.bad_word_ids) == (None, None)


def test_a_word_that_no_tokenizer_spells_is_refused_by_its_field(texts: Tokenizer) -> None:
    long = SamplingParams(bad_words=["\u0416" * 200])
    with pytest.raises(InvalidParameter, match="tokens; from 1 to 32") as caught:
        with_bad_word_ids(long, texts)
    assert caught.value.param == "bad_words"
    with pytest.raises(InvalidParameter, match="no tokenizer") as caught:
        with_bad_word_ids(SamplingParams(bad_words=["a"]), ToyTexts(64))
    assert caught.value.param == "bad_words"
    half = SamplingParams(bad_words=["\ud800"])
    with pytest.raises(InvalidParameter, match="surrogate") as caught:
        with_bad_word_ids(half, texts)
    assert caught.value.param == "bad_words"
