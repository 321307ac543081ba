"""Texts in the notation of the grammar library, a dialect of Lark.  Knows no schema."""

from __future__ import annotations

import json
import re

from stepahead.errors import InvalidParameter
from stepahead.grammar.schema import MAX_PATTERN_CHARS, MAX_SCHEMA_CHARS, refuse_inline

MAX_GRAMMAR_CHARS = 16_384  # so at most some 2,700 rules in a chain: see deep.py
# what the library would hand to a sampler or a backtracking engine, of which it has neither here
_NOT_HELD = re.compile(r"\b(temperature|stop|stop_capture|max_tokens)\s*=")
_ATTRIBUTES = re.compile(r"^\s*[!?]?[\w-]+\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
# Without it, where an answer has but one continuation, only the tokenizer's own cut of it would be
# allowed.  It stands last: of two lines with options the last one holds.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


def refuse_halves(text: str, param: str) -> None:
    """Raises InvalidParameter for half of a surrogate pair, which no UTF-8 has."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidParameter(f"{param} holds half of a surrogate pair; take it out", param)


def with_options(lark: str) -> str:
    """A grammar whose masks allow every token that keeps the answer a prefix of the language."""
    return f"{lark}\n{_OPTIONS}"


def literal(text: str) -> str:
    """A string, as grammars write it; nothing at all if it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex_grammar(regex: str, param: str) -> str:
    """That of a whole answer that matches `regex`; \\d is 0-9.  Raises InvalidParameter."""
    from llguidance import regex_to_lark

    refuse_halves(regex, param)
    if len(regex) > MAX_PATTERN_CHARS:
        raise InvalidParameter(
            f"{param} has {len(regex)} characters; at most {MAX_PATTERN_CHARS} are taken", param
        )
    # "" stands for a comment there
    pattern = regex_to_lark(regex, "d")
    return f"start: /{pattern}/" if pattern else 'start: ""'


def choice_grammar(choices: list[str], param: str) -> str:
    """One of some texts, as one terminal: ten times as quick as a rule with alternatives.  Raises
    InvalidParameter."""
    texts = sorted(set(choices))
    if (length := sum(map(len, texts))) > MAX_SCHEMA_CHARS:
        raise InvalidParameter(
            f"{param} has {length} characters; at most {MAX_SCHEMA_CHARS} are taken", param
        )
    return "start: CHOICE\nCHOICE: " + " | ".join(literal(text) or '""' for text in texts)


def own_grammar(grammar: str, param: str) -> str:
    """A user's grammar, in Lark's notation or GBNF's ("root ::=").  Raises InvalidParameter."""
    from llguidance.gbnf_to_lark import any_to_lark

    refuse_halves(grammar, param)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidParameter(
            f"{param} has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken", param
        )
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # the converter's own: whatever it met
        raise InvalidParameter(f"{param} is neither Lark nor GBNF: {error}", param) from error
    if "x-guidance" in lark:
        raise InvalidParameter(f"{param}: x-guidance is not taken; leave it out", param)
    refuse_inline(lark, param)
    for attributes in _ATTRIBUTES.finditer(lark):
        if found := _NOT_HELD.search(attributes[1]):
            raise InvalidParameter(f"{param}: {found[1]}= can't be held; leave it out", param)
    return lark
