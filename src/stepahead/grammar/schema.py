"""What the grammar library would take without holding it, in a JSON schema; and how big one may be.

Keywords that it doesn't know it refuses itself, by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from stepahead.errors import InvalidParameter

MAX_SCHEMA_CHARS = 131_072
MAX_PATTERN_CHARS = 4096
_MAX_PATTERN_PROPERTIES = 64  # the library compares each with each
_MAX_LEFT_OUT = 400  # each takes five of the 2,000 places that the library has for what may be next
_MAX_MULTIPLES = 65_536  # a state each: a second of CPU, and minutes a little above
_MAX_REFERENCED_DEPTH = 10_000  # see deep.py; a stack of 256 MB holds some 50,000
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXACT = 1 << 53  # the library reads numbers as float64
_INLINE = re.compile(r"%json\s*(?=\{)")
# instances, not schemas
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
# at most so much white space wherever JSON may have some: a small model may never leave it again
_WHITE_SPACE = r"[ \n\t]{1,32}"


def schema_text(schema: dict[str, Any] | str, param: str) -> str:
    """The schema as the library's JSON, with our options in it.  Raises InvalidParameter."""
    found = _decoded(schema, param)
    _refuse_trouble(found, param)
    try:
        text = json.dumps(found | {"x-guidance": _options()}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParameter(f"{param} can't be written as JSON: {error}", param) from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidParameter(
            f"{param} has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are taken", param
        )
    return text


def refuse_inline(lark: str, param: str) -> None:
    """Raises InvalidParameter for what `schema_text` would refuse, in a schema inside a grammar."""
    for mark in _INLINE.finditer(lark):
        try:
            found = json.JSONDecoder().raw_decode(lark, mark.end())[0]
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{param}: its %json is no JSON ({error})", param) from error
        _refuse_trouble(found, param)


def _refuse_trouble(schema: dict[str, Any], param: str) -> None:
    for trouble in _troubles(schema):
        raise InvalidParameter(f"{param}: {trouble}", param)


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
    deepest = multiples = 0
    for part, depth in _parts(schema):
        deepest = max(deepest, depth)
        yield from _trouble_of(part)
        if isinstance(ref := part.get("$ref"), str):
            refs.add(ref)
        multiples += _multiples(part)
    if multiples > _MAX_MULTIPLES:
        yield f"multipleOf above {_MAX_MULTIPLES}, all of them together, takes too long"
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


def _multiples(part: dict[str, Any]) -> int:
    """How many remainders its `multipleOf` tells apart; decimal places before and behind cost
    nothing."""
    of = part.get("multipleOf")
    if isinstance(of, bool) or not isinstance(of, int | float) or not abs(of) < 1e300:
        return 0  # the library says what is wrong
    digits = Decimal(str(of)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))


def _numbers(value: Any) -> Iterator[int | float]:
    """All that there are in a value."""
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int | float):
            yield one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _trouble_of(part: dict[str, Any]) -> Iterator[str]:
    least, required = part.get("minProperties"), part.get("required")
    named = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, named):
        # a key that `properties` doesn't name may come twice, and counts twice
        yield "minProperties above 1 is held only up to the number of required properties"
    bounds = [part[name] for name in _BOUNDS if name in part]
    for number in _numbers([bounds, part.get("const"), part.get("enum")]):
        if abs(number) >= _EXACT and (isinstance(number, int) or number in bounds):
            # only nearly: numbers outside would pass
            yield "numbers from 2**53 on can't be held; leave such bounds and values out"
            break
    properties = part.get("properties")
    if isinstance(properties, dict) and len(properties) - named > _MAX_LEFT_OUT:
        yield f"more than {_MAX_LEFT_OUT} properties may be left out; require them, or nest them"
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict):
        if len(patterns) > _MAX_PATTERN_PROPERTIES:
            yield f"patternProperties has more than {_MAX_PATTERN_PROPERTIES} patterns"
        if any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
            yield f"patternProperties has a pattern above {MAX_PATTERN_CHARS} characters"
    if isinstance(pattern := part.get("pattern"), str) and len(pattern) > MAX_PATTERN_CHARS:
        yield f"pattern has more than {MAX_PATTERN_CHARS} characters"
