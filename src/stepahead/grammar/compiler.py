"""From what a request asks to one immutable grammar, or a refusal by name.

About a millisecond of CPU, on whichever thread the request is parsed, which holds Python's lock for
little of it.  Never widened: what the library can't hold is refused.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from stepahead.errors import InvalidParameter
from stepahead.grammar.deep import on_deep_stack
from stepahead.grammar.lark import (
    choice_grammar,
    own_grammar,
    refuse_halves,
    regex_grammar,
    with_options,
)
from stepahead.grammar.schema import schema_text
from stepahead.grammar.vocabulary import Vocabulary, matcher_of
from stepahead.structured import Grammar, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

OWN_PARAM = "structured_outputs"
_KEPT = 256  # grammars, by what asked for them
_MAX_REASON_CHARS = 400
_WHERE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n +(\d+ \||\^).*")


class GrammarCompiler:
    """Makes grammars for one vocabulary; any thread may ask."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._checked = functools.lru_cache(_KEPT)(self._check)

    def compile(self, asked: StructuredOutputs, param: str = OWN_PARAM) -> Grammar:
        """What `asked` asks for; the same value for equal wishes.

        Raises InvalidParameter, for `param` (or the field of structured_outputs, if it is that),
        that says what can't be honoured.
        """
        return self.check(with_options(_lark_of(asked, param)), param)

    def check(self, text: str, param: str) -> Grammar:
        """A whole grammar, as `tool_grammar` and `after_reasoning` write it, found good.

        Raises InvalidParameter, for `param`.
        """
        refuse_halves(text, param)
        return self._checked(text, param)

    def _check(self, text: str, param: str) -> Grammar:
        grammar = Grammar(text)
        if reason := on_deep_stack(lambda: _reason_against(grammar, self._tokenizer)):
            raise InvalidParameter(f"{param} can't be honoured: {reason}; ask without that", param)
        return grammar

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()


def _lark_of(asked: StructuredOutputs, param: str) -> str:
    def named(field: str) -> str:
        return f"{param}.{field}" if param == OWN_PARAM else param

    if asked.json is not None:
        return f"start: %json {schema_text(asked.json, named('json'))}"
    if asked.json_object:
        return f"start: %json {schema_text({'type': 'object'}, named('json_object'))}"
    if asked.regex is not None:
        return regex_grammar(asked.regex, named("regex"))
    if asked.grammar is not None:
        return own_grammar(asked.grammar, named("grammar"))
    assert asked.choice is not None
    return choice_grammar(asked.choice, named("choice"))


def _reason_against(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Why it can't be used; "" if it can."""
    matcher = matcher_of(tokenizer, grammar.text)
    if matcher.is_error():
        return _plain(matcher.get_error())
    if words := matcher.get_grammar_warnings():  # a keyword that was taken without being held
        return _plain(words[0])
    matcher.compute_bitmask()
    # a rule that never ends, a reference to itself, a class of no characters
    return "no text can match it" if matcher.is_error() else ""


def _plain(message: str) -> str:
    """The library's words without where they stand in a text that the user has not written."""
    words = _EXCERPT.sub("", _WHERE.sub("", message.partition("<backtrace>")[0]))
    return " ".join(words.split())[:_MAX_REASON_CHARS]
