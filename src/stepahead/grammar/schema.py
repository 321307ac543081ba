"""What the grammar library would take without holding it, in a JSON schema; and how big one may be.

Keywords that it doesn't know it refuses itself, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stepahead.errors import InvalidParameter

MAX_SCHEMA_CHARS = 131_072
MAX_PATTERN_CHARS = 4096
_MAX_PATTERN_PROPERTIES = 64  # the library compares each with each
_MAX_REFERENCED_DEPTH = 10_000  # see deep.py; a stack of 256 MB holds some 50,000
# instances, not schemas
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
# at most so much white space wherever JSON may have some: a small model may never leave it again
_WHITE_SPACE = r"[ \n\t]{1,32}"


def schema_text(schema: dict[str, Any] | str, param: str) -> str:
    """The schema as the library's JSON, with our options in it.  Raises InvalidParameter."""
    found = _decoded(schema, param)
    for trouble in _troubles(found):
        raise InvalidParameter(f"{param}: {trouble}", param)
    try:
        text = json.dumps(found | {"x-guidance": _options()}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParameter(f"{param} can't be written as JSON: {error}", param) from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidParameter(
            f"{param} has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are taken", param
        )
    return text


def _options() -> dict[str, Any]:
    return {"whitespace_pattern": _WHITE_SPACE, "lenient": False, "coerce_one_of": False}


def _decoded(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            found = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{param} is no JSON ({error})", param) from error
    else:
        found = schema
    if not isinstance(found, dict):
        raise InvalidParameter(f"{param} must be a JSON object, a schema", param)
    return found


def _troubles(schema: dict[str, Any]) -> Iterator[str]:
    if "x-guidance" in schema:
        # it could switch off what the library refuses
        yield "x-guidance is not taken; leave it out"
    refs: set[str] = set()
    deepest = 0
    for part, depth in _parts(schema):
        deepest = max(deepest, depth)
        yield from _trouble_of(part)
        if isinstance(ref := part.get("$ref"), str):
            refs.add(ref)
    if len(refs) * (deepest + 1) > _MAX_REFERENCED_DEPTH:
        yield f"{len(refs)} references, nested {deepest} deep, are too many; flatten the schema"


def _parts(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Every object that may be a schema, with its depth."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict):
            yield value, depth
            waiting += [(inner, depth + 1) for key, inner in value.items() if key not in _DATA]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]


def _trouble_of(part: dict[str, Any]) -> Iterator[str]:
    least, required = part.get("minProperties"), part.get("required")
    named = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, named):
        # a key that `properties` doesn't name may come twice, and counts twice
        yield "minProperties above 1 is held only up to the number of required properties"
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict):
        if len(patterns) > _MAX_PATTERN_PROPERTIES:
            yield f"patternProperties has more than {_MAX_PATTERN_PROPERTIES} patterns"
        if any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
            yield f"patternProperties has a pattern above {MAX_PATTERN_CHARS} characters"
    if isinstance(pattern := part.get("pattern"), str) and len(pattern) > MAX_PATTERN_CHARS:
        yield f"pattern has more than {MAX_PATTERN_CHARS} characters"
