"""Text in, token ids out, and back.  Knows files, templates and bytes; no models, no torch."""

from __future__ import annotations

from stepahead.text.chat import render_chat
from stepahead.text.detok import TextStream
from stepahead.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer", "render_chat"]
