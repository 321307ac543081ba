"""What a chat template teaches a model to write, and what users call it.

Knows words of templates and names of parsers; renders nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepahead.parse.answer import THINK_END, ToolFormat
from stepahead.parse.glm import KEY, OPEN

AUTO = "auto"
# as users of vLLM and SGLang type them; no format stands for no parser
TOOL_PARSERS: Mapping[str, ToolFormat | None] = {
    "hermes": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
    "glm": "glm",
    "glm45": "glm",
    "glm47": "glm",
    "llama3": "llama3",
    "llama3_json": "llama3",
    "none": None,
}
# all of them write <think> and </think>; whether the prompt has opened it shows in the prompt
REASONING_PARSERS: Mapping[str, bool] = {
    "think": True,
    "deepseek_r1": True,
    "deepseek_v3": True,
    "glm45": True,
    "qwen3": True,
    "qwen3_thinking": True,
    "none": False,
}
# Llama 3.1 to 3.3 say so word for word
_LLAMA = '{"name": function name, "parameters":'
_OTHER_CALLS = "<function="  # inside of <tool_call>, as Qwen3-Coder writes them


def tool_format_of(parser: str, template: str | None) -> ToolFormat | None:
    """The format of tool calls that `parser` names, or that `template` teaches if it is "auto";
    None for none that is known.  KeyError for a name that is not."""
    return _taught(template or "") if parser == AUTO else TOOL_PARSERS[parser.replace("-", "_")]


def thinks_of(parser: str, template: str | None) -> bool:
    """Whether answers may begin with reasoning; as `tool_format_of`."""
    if parser == AUTO:
        return THINK_END in (template or "")
    return REASONING_PARSERS[parser.replace("-", "_")]


def _taught(template: str) -> ToolFormat | None:
    if KEY in template:
        return "glm"
    if OPEN in template and _OTHER_CALLS not in template:
        return "hermes"
    return "llama3" if _LLAMA in template else None
