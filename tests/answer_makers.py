"""Small chat templates in the ways of Hermes, GLM and Llama 3, models that know them, and what
clients make of their streams."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from text_makers import SPECIAL, byte_level_json, save_folder

_TURN = "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}"
_END = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
HERMES = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}" + _END + "{% endif %}"
)
GLM = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{% for k, v in call.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
    "{% endfor %}</tool_call>{% endfor %}" + _END + "{% endif %}"
)
LLAMA3 = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}. '
    "{{ tools | tojson }}\n{% endif %}{% for m in messages %}" + _TURN + "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}" + _END + "{% endif %}"
)
# the prompt opens the reasoning, or closes it at once
THINKING = HERMES.removesuffix("{% endif %}") + (
    "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' }}{% endif %}"
)
TEMPLATES = {"hermes": HERMES, "glm": GLM, "llama3": LLAMA3}
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def chat_model(folder: Path, template: str, special_tags: bool = False) -> Path:
    """A tokenizer's folder with this template; the tags may be special tokens."""
    spec = json.loads(byte_level_json())
    if special_tags:
        for text in TAGS:
            token = len(spec["model"]["vocab"]) + len(spec["added_tokens"]) - len(SPECIAL)
            added = {"id": token, "content": text, "special": True, "normalized": False}
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            spec["added_tokens"].append(added | flags)
    return save_folder(
        folder,
        json.dumps(spec),
        tokenizer_config={"eos_token": "<|im_end|>", "pad_token": None},
        chat_template=template,
        generation_config={"eos_token_id": [2, 0]},
    )


def added_up(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make, as OpenAI's client adds them up; AssertionError for
    deltas that no client would understand."""
    whole: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                whole[name] = whole.get(name, "") + delta[name]
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                assert piece["type"] == "function"
                assert piece["id"]
                assert piece["function"]["name"]
                calls.append({"id": piece["id"], "type": "function", "function": {}})
                calls[-1]["function"] = dict(piece["function"])
            else:
                assert piece["index"] == len(calls) - 1
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return whole | ({"tool_calls": calls} if calls else {})
