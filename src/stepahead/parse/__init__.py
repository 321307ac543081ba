"""An answer's text told apart while it comes: reasoning, content, tool calls.

Pure text in, events out.  Knows no tokens, no requests and no grammar; what may yet become a tag is
held back until it is one or isn't, so how the text is cut into pieces changes nothing.
"""

from __future__ import annotations

from stepahead.parse.answer import AnswerStream
from stepahead.parse.events import Arguments, CallStart, Content, Event, Reasoning, merged
from stepahead.parse.tools import Tool

__all__ = [
    "AnswerStream",
    "Arguments",
    "CallStart",
    "Content",
    "Event",
    "Reasoning",
    "Tool",
    "merged",
]
