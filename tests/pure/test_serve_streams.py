"""Events of streams: most are made from a form, and are what encoding all of it would give."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.llm.collect import Delta
from stepahead.llm.prompts import Prompt
from stepahead.serve.calls import Call
from stepahead.serve.requests import read_chat_request, read_completion_request
from stepahead.serve.streams import ChatStory, TextStory
from stepahead.text.texts import ToyTexts
from stepahead.types import Logprob

TEXTS = ToyTexts(90)
# what a form must not take for the place of the text
WORDS = st.one_of(st.text(), st.sampled_from(["the text", '"the text"', "data: [DONE]", "\n\n"]))


def story_of(chat: bool, label: str, model: str, **fields: Any) -> ChatStory | TextStory:
    if chat:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
        asked: Any = read_chat_request(msgspec.json.encode(body))
    else:
        body = {"prompt": [[2, 3], [3]], "stream": True, **fields}
        asked = read_completion_request(msgspec.json.encode(body))
    call = Call(label, [Prompt([2, 3], None), Prompt([3], None)], asked.params, True)
    return (ChatStory if chat else TextStory)(asked, call, TEXTS, 5, model)


@pytest.mark.parametrize("usage", [False, True], ids=["plain", "usage"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@given(label=WORDS, model=WORDS, texts=st.lists(WORDS, min_size=1, max_size=4))
def test_an_event_made_from_a_form_is_the_event(
    chat: bool, usage: bool, label: str, model: str, texts: list[str]
) -> None:
    fields = {"stream_options": {"include_usage": True}} if usage else {}
    story = story_of(chat, label, model, n=2, **fields)
    items = [(0 if chat else i % 2, Delta("", i % 2, text, [4])) for i, text in enumerate(texts)]
    events = story.tell(items).split(b"\n\n")
    assert events.pop() == b""
    for (place, delta), event in zip(items, events, strict=True):
        choice = {"index": 2 * place + delta.index}
        choice |= {"delta": {"content": delta.text}} if chat else {"text": delta.text}
        head = {"id": label, "object": "chat.completion.chunk" if chat else "text_completion"}
        want = {
            **head,
            "created": 5,
            "model": model,
            "choices": [{**choice, "logprobs": None, "finish_reason": None}],
            **({"usage": None} if usage else {}),
        }
        # in this order, too: no client minds, but a form could
        assert event == b"data: " + msgspec.json.encode(want)
    assert story._made == len(texts)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_an_event_that_brings_more_than_text_is_not_made_from_a_form(chat: bool) -> None:
    plain = Delta("", 0, "a", [4])
    rows = [{4: Logprob(-0.5, 1, "a")}]
    more: list[tuple[dict[str, Any], Delta, str]] = [
        ({}, Delta("", 0, "a", [4], None, "stop", 4), '"stop_reason":4'),
        ({"logprobs": True if chat else 1}, Delta("", 0, "a", [4], rows), "-0.5"),
        ({"return_token_ids": True}, plain, '"token_ids":[4]'),
        ({"stream_options": {"continuous_usage_stats": True}}, plain, '"completion_tokens":2'),
    ]
    for fields, delta, words in more:
        told = story_of(chat, "x", "toy", **fields).tell([(0, plain), (0, delta)]).decode()
        assert words in told.split("\n\n")[1], fields


def test_a_completion_whose_output_is_not_wanted_tells_none() -> None:
    story = story_of(False, "x", "toy", echo=True, max_tokens=0)
    assert b'"text":""' in story.tell([(0, Delta("", 0, "a", [4]))])
    assert story._made == 0
