"""Chat templates: rendered as Hugging Face does, and every way to get messages wrong refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepahead
from stepahead.errors import InvalidParameter
from stepahead.text import render_chat
from text_makers import MESSAGES, TEMPLATE

HELLO = [{"role": "user", "content": "hi"}]


def refusal(template: str | None, messages: Any, **variables: object) -> str:
    with pytest.raises(InvalidParameter) as caught:
        render_chat(template, messages, **variables)
    assert caught.value.param == "messages"
    return str(caught.value)


def test_a_chat_is_rendered_turn_by_turn() -> None:
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n你好! How much is 12 + 30?<|im_end|>\n"
    )
    assert render_chat(TEMPLATE, MESSAGES) == turns + "<|im_start|>assistant\n"
    assert render_chat(TEMPLATE, MESSAGES, add_generation_prompt=False) == turns


@pytest.mark.parametrize(
    ("template", "text"),
    [
        # blocks leave no line of their own: trim_blocks and lstrip_blocks
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        # no HTML escapes, no ASCII escapes, keys in their order
        ("{{ {'b': '<&é>', 'a': 1} | tojson }}", '{"b": "<&é>", "a": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>hi"),
        ("{{ mood | default('calm') }}", "calm"),
    ],
)
def test_templates_have_what_hugging_face_gives_them(template: str, text: str) -> None:
    assert render_chat(template, HELLO, special_tokens={"bos_token": "<s>"}) == text


def test_templates_get_the_day_and_the_callers_variables() -> None:
    assert re.fullmatch(r"20\d\d", render_chat("{{ strftime_now('%Y') }}", HELLO))
    shown = render_chat("{{ tools[0].name }} {{ think }}", HELLO, tools=[{"name": "add"}], think=1)
    assert shown == "add 1"


def test_text_parts_are_joined_for_templates_that_know_only_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == (
        "one\ntwo"
    )


def test_a_call_of_tools_needs_no_content() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    template = "{% for m in messages %}{{ m.tool_calls[0].function.name }}{% endfor %}"
    assert render_chat(template, [call]) == "add"


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    render_chat("{{ messages[0].content }}", [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hi", "a list of messages, not str"),
        ({"role": "user", "content": "hi"}, "a list of messages, not dict"),
        (None, "not NoneType"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*HELLO, {"content": "hi"}], r"messages\[1\] needs a role"),
        ([{"role": "", "content": "hi"}], "needs a role"),
        ([{"role": 3, "content": "hi"}], "needs a role"),
        ([{"role": "user"}], r"messages\[0\] needs a content"),
        ([{"role": "user", "content": None}], "needs a content"),
        ([{"role": "user", "content": 7}], "must be a string or a list of parts, not int"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\] is 'str': only text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "is 'image_url': only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "is 'text': only text"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: object, complaint: str) -> None:
    assert re.search(complaint, refusal(TEMPLATE, messages))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_what_goes_wrong_in_a_template_is_an_error_of_the_request(
    template: str, complaint: str
) -> None:
    assert complaint in refusal(template, HELLO)


def test_a_model_without_a_template_says_what_to_do() -> None:
    message = refusal(None, HELLO)
    assert "no chat template" in message
    assert "--chat-template FILE" in message
    assert "completion prompts" in message


def test_the_room_is_cheap_to_import() -> None:
    # --help must answer at once: what is slow to import is imported by who needs it
    program = (
        "import sys, stepahead.text\n"
        "slow = {'tokenizers', 'jinja2', 'gguf', 'numpy', 'torch', 'transformers'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(Path(stepahead.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
