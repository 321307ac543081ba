"""How an answer to a conversation is told apart: which tags it may have, and where it begins.

Knows texts and parsers; no engine and no grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepahead.parse import AnswerStream, Tool
from stepahead.parse.answer import THINK, THINK_END, ToolFormat
from stepahead.parse.events import message_of
from stepahead.parse.glm import CLOSE, KEY, KEY_END, OPEN, VALUE, VALUE_END
from stepahead.parse.llama import TAG
from stepahead.text.texts import Texts

_TAGS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (OPEN, CLOSE),
    "glm": (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    "llama3": (TAG,),
}
_END_TOKENS = 16  # of a prompt, in which a tag that it ends with must be


@dataclass(frozen=True)
class Form:
    """What stands in the text of an answer beside its content.

    tools        whose calls are looked for; None for none
    thinks       there may be reasoning first; `inside` if the prompt has opened it
    shown_ids    tokens that are told as text though they are special: tags
    """

    tools: tuple[Tool, ...] | None = None
    tool_format: ToolFormat = "hermes"
    thinks: bool = False
    inside: bool = False
    shown_ids: frozenset[int] = frozenset()

    def stream(self) -> AnswerStream:
        """A parser of one answer."""
        return AnswerStream(self.tools, self.tool_format, self.thinks, self.inside)

    def message(self, text: str) -> dict[str, Any]:
        """A whole answer as a message of the conversation, in OpenAI's shape."""
        parser = self.stream()
        return message_of([*parser.push(text), *parser.finish()])


def special_texts(texts: Texts) -> dict[str, int]:
    """Ids of special tokens by their text."""
    table, found = texts.token_bytes, dict[str, int]()
    for token in sorted(texts.special_ids):
        if token < len(table) and (text := table[token].decode("utf-8", "ignore")):
            found.setdefault(text, token)
    return found


def shown_ids(special: dict[str, int], tool_format: ToolFormat | None) -> frozenset[int]:
    """Which special tokens are tags of reasoning, and of calls in this format."""
    tags = (THINK, THINK_END, *(_TAGS[tool_format] if tool_format is not None else ()))
    return frozenset(special[tag] for tag in tags if tag in special)


def reasoning_begun(texts: Texts, ids: Sequence[int]) -> bool | None:
    """Whether a prompt's end has opened reasoning (True) or closed it (False); None if neither."""
    end = texts.decode(ids[-_END_TOKENS:], skip_special_tokens=False).rstrip()
    if end.endswith(THINK_END):
        return False
    return True if end.endswith(THINK) else None
