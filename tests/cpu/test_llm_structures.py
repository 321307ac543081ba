"""Structure, tools and reasoning offline: LLM, and lines of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from answer_makers import HERMES, THINKING, chat_model
from offline_makers import TOY_OPTIONS, tiny_llama
from stepahead import LLM, SamplingParams
from stepahead.cli.main import run_command
from stepahead.errors import InvalidParameter
from stepahead.structured import StructuredOutputs

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
STATE: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
LIGHT = {"type": "function", "function": {"name": "light", "parameters": STATE, "strict": True}}
OPTIONS: dict[str, Any] = {"executor": "inline", "max_rows": 4, "threads": 1, "debug": True}
LONG = SamplingParams(max_tokens=300, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tiny_llama(tmp_path_factory.mktemp("hermes")), HERMES)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as found:
        yield found
        found.engine.scheduler.check_at_rest()


def held(**asked: Any) -> SamplingParams:
    structure = StructuredOutputs(**asked)
    return msgspec.structs.replace(LONG, structured_outputs=structure, n=2)


def test_each_prompt_of_a_call_keeps_to_its_own_structure(llm: LLM) -> None:
    params = [held(regex="[ab]{3}"), LONG, held(choice=["yes", "no"]), held(json=STATE)]
    outputs = llm.generate(["a", "b", [5, 6], "d"], params)
    texts = [[choice.text for choice in output.outputs] for output in outputs]
    assert all(len(text) == 3 and set(text) <= {"a", "b"} for text in texts[0])
    assert all(text in ("yes", "no") for text in texts[2])
    assert all(isinstance(json.loads(text)["on"], bool) for text in texts[3])
    assert [len(found) for found in texts] == [2, 1, 2, 2]
    (chat,) = llm.chat(HELLO, held(json=STATE))
    assert all(isinstance(json.loads(choice.text)["on"], bool) for choice in chat.outputs)
    assert chat.outputs[0].message is None


def test_a_chat_with_tools_has_messages_that_go_back(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, LONG, tools=[LIGHT], tool_choice="required")
    message = output.outputs[0].message
    assert message is not None
    assert message["content"] is None
    assert "<tool_call>" in output.outputs[0].text
    for call in message["tool_calls"]:
        assert call["function"]["name"] == "light"
        assert isinstance(json.loads(call["function"]["arguments"])["on"], bool)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done"}
    (again,) = llm.chat([*HELLO, message, result], LONG, tools=[LIGHT])
    assert "<tool_call>" in (again.prompt or "")
    assert again.outputs[0].message is not None


def test_what_can_not_be_held_is_refused_with_its_prompts_place(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"prompts\[1\]: structured_outputs\.json") as bad:
        llm.generate(["a", "b"], [LONG, held(json="no JSON")])
    assert bad.value.param == "structured_outputs.json"
    with pytest.raises(InvalidParameter, match=r"messages\[0\]: .*both"):
        llm.chat(HELLO, held(regex="a"), tools=[LIGHT])
    with pytest.raises(InvalidParameter, match="tool_choice names no tool"):
        llm.chat(
            HELLO,
            tools=[LIGHT],
            tool_choice={"type": "function", "function": {"name": "heat"}},
        )
    assert not llm.engine.has_work


def test_a_model_that_reasons_first_is_told_apart(tmp_path: Path) -> None:
    folder = chat_model(tiny_llama(tmp_path), THINKING, special_tags=True)
    params = msgspec.structs.replace(held(choice=["yes", "no"]), n=4, logit_bias={501: 3.0, 2: 8.0})
    with LLM(folder, **OPTIONS) as llm:
        (output,) = llm.chat(HELLO, params)
        done = [choice for choice in output.outputs if choice.finish_reason == "stop"]
        assert done
        for choice in done:
            assert choice.message is not None
            assert choice.message["content"] in ("yes", "no")
            assert "</think>" in choice.text
        (at_once,) = llm.chat(HELLO, params, chat_template_kwargs={"enable_thinking": False})
        assert all(choice.text in ("yes", "no") for choice in at_once.outputs)


def test_the_toy_keeps_to_a_regex() -> None:
    with LLM("toy", **TOY_OPTIONS) as llm:
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=40), use_tqdm=False)
        (short,) = llm.generate(
            [[5, 6]], SamplingParams(structured_outputs=StructuredOutputs(regex="[ab]{2}c"))
        )
    assert output.outputs[0].finish_reason
    assert short.outputs[0].text[:2].strip("ab") == ""
    assert short.outputs[0].text[2:] == "c"
    assert short.outputs[0].finish_reason == "stop"


def test_lines_of_a_file_say_what_their_answers_must_be(folder: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}},
        {"messages": HELLO, "tools": [LIGHT], "tool_choice": "required"},
        {"messages": HELLO, "structured_outputs": {"regex": "[ab]{3}"}},
        {"prompt": "a", "structured_outputs": {"json": {"not": {}}}},
        {"prompt": "a", "tools": [LIGHT]},
    ]
    asked, told = tmp_path / "asked.jsonl", tmp_path / "told.jsonl"
    asked.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    flags = ["--executor", "inline", "--threads", "1", "--quiet", "--max-tokens", "300"]
    words = ["run", str(folder), "--input", str(asked), "--output", str(told), *flags]
    assert run_command(words) == 1  # two lines are refused
    found = {answer["line"]: answer for answer in map(json.loads, told.read_text().splitlines())}
    assert found[1]["text"] in ("yes", "no")
    assert found[2]["message"]["tool_calls"][0]["function"]["name"] == "light"
    assert set(found[3]["text"]) <= {"a", "b"}
    assert found[4]["error"]["param"] == "structured_outputs"
    assert found[5]["error"]["param"] == "tools"
