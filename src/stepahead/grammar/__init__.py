"""What an answer may be: a request's wish in, one immutable grammar out.

Knows schemas, grammars and the bytes of tokens; no requests, no tensors, no torch.
"""

from __future__ import annotations

from stepahead.grammar.compiler import GrammarCompiler
from stepahead.grammar.tools import ToolGrammar, after_reasoning, tool_grammar
from stepahead.grammar.vocabulary import Vocabulary

__all__ = ["GrammarCompiler", "ToolGrammar", "Vocabulary", "after_reasoning", "tool_grammar"]
