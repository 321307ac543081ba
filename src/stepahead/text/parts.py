"""What a tokenizer is made of, however its files spell it.  Knows no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers


class Parts(NamedTuple):
    """Read from a folder or a GGUF file, complete."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # as templates name them: "bos_token" -> "<s>"
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]  # the tokenizer's own first
    chat_template: str | None
