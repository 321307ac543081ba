"""What an answer must be, in all the words that clients have for it.  Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from stepahead.errors import InvalidParameter
from stepahead.serve.fields import take_neutral
from stepahead.serve.refusal import bad_request
from stepahead.structured import StructuredOutputs

Schema = dict[str, Any] | str  # or its text


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's; the answer keeps to it whether or not it is `strict`."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Structures(msgspec.Struct, kw_only=True):
    """The fields: OpenAI's, vLLM's, its older ones, SGLang's.  A request may have one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None


_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
# vLLM's, inside of structured_outputs
_INSIDE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "structural_tag": ((), "it is not supported; ask for calls with tools"),
    "disable_any_whitespace": ((False,), "white space can't be forbidden; leave it out"),
    "disable_additional_properties": ((False,), 'say "additionalProperties": false in the schema'),
    "whitespace_pattern": ((), "white space can't be chosen; leave it out"),
    "_backend": ((), "grammars are llguidance's; leave it out"),
    "_backend_was_auto": ((False,), "grammars are llguidance's; leave it out"),
}


def read_structure(fields: Structures) -> tuple[StructuredOutputs | None, str]:
    """What is asked for, and in which field; Refusal names the one that is wrong or too many."""
    found = {name: asked for name in Structures.__struct_fields__ if (asked := _read(fields, name))}
    if len(found) > 1:
        *others, last = found
        words = f"{' and '.join(others)} and {last} each say what the answer must be; give one"
        raise bad_request(words, last)
    for name, asked in found.items():
        return asked, name
    return None, "structured_outputs"


def _read(fields: Structures, name: str) -> StructuredOutputs | None:
    given = getattr(fields, name)
    if given is None:
        return None
    try:
        if isinstance(given, ResponseFormat):
            return _of_format(given)
        if name in _KINDS:
            return StructuredOutputs(**{_KINDS[name]: given})
        return _of_object(given)
    except InvalidParameter as error:
        raise bad_request(f"{name}: {error}", name) from error


def _of_format(given: ResponseFormat) -> StructuredOutputs | None:
    if (given.json_schema is not None) != (given.type == "json_schema"):
        words = 'json_schema goes with the type "json_schema", and that needs it'
        raise bad_request(f"response_format: {words}", "response_format")
    if given.json_schema is not None:
        return StructuredOutputs(json=given.json_schema.schema)
    return StructuredOutputs(json_object=True) if given.type == "json_object" else None


def _of_object(given: dict[str, Any]) -> StructuredOutputs:
    name = "structured_outputs"
    there = {inner: value for inner, value in given.items() if value is not None}
    asked = take_neutral(there, _INSIDE, name)
    for inner in asked:
        if inner not in StructuredOutputs.__struct_fields__:
            raise bad_request(f"{name}.{inner}: no such field is known", name, "unknown_field")
    return StructuredOutputs(**asked)
