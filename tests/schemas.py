"""JSON schemas to make answers under: nested, recursive, with patterns, ranges, choices, unicode.

Free strings are bounded, or a random model would hardly ever close one.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """An object that has nothing but `properties`, all of them unless `required` says which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def text(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(low: int = -99, high: int = 99) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def array(items: Any, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def nested(depth: int) -> Schema:
    return obj({"in": nested(depth - 1), "n": whole()}) if depth else obj({"end": text(4)})


def tree(leaf: Schema, most: int) -> Schema:
    node = obj({"value": leaf, "children": array({"$ref": "#/$defs/node"}, most)})
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


POINT = obj({"x": whole(), "y": whole()})
LIST = {
    "$defs": {
        "list": {
            "anyOf": [{"type": "null"}, obj({"head": whole(), "tail": {"$ref": "#/$defs/list"}})]
        }
    },
    "$ref": "#/$defs/list",
}
EXPRESSION = {
    "$defs": {
        "e": {
            "anyOf": [
                whole(),
                obj(
                    {
                        "op": {"enum": ["+", "-", "*"]},
                        "left": {"$ref": "#/$defs/e"},
                        "right": {"$ref": "#/$defs/e"},
                    }
                ),
            ]
        }
    },
    "$ref": "#/$defs/e",
}
EVEN_ODD = {
    "$defs": {
        "even": obj({"odd": {"$ref": "#/$defs/odd"}}, required=[]),
        "odd": obj({"even": {"$ref": "#/$defs/even"}}, required=[]),
    },
    "$ref": "#/$defs/even",
}
ORDER = obj(
    {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "status": {"enum": ["new", "paid", "sent"]},
        "items": array(obj({"name": text(), "qty": whole(1, 99)}), 3, 1),
        "note": {"anyOf": [text(20), {"type": "null"}]},
    }
)

SCHEMAS: dict[str, Schema] = {
    # scalars
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": whole(),
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "integer across zero": whole(-1000, 7),
    "integer multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "integer one value": whole(7, 7),
    "number range": {"type": "number", "minimum": -1.5, "maximum": 1.5},
    "number exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "string short": text(),
    "string long": text(200),
    "string between": text(8, minLength=3),
    "string exact": text(5, minLength=5),
    "string empty": text(0),
    "nullable string": {"type": ["string", "null"], "maxLength": 6},
    "several types": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
    # enums and constants
    "enum": {"enum": ["red", "green", "blue"]},
    "enum mixed": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "enum unicode": {"enum": ["naïve", "你好", "😀", "Ångström", "привет"]},
    "enum escapes": {"enum": ['a"b', "c\\d", "e\nf", "g\th", "\u0001"]},
    "enum prefixes": {"enum": ["a", "aa", "aaa", "ab"]},
    "const": {"const": "only this"},
    "const object": {"const": {"b": [1, {"c": None}], "a": "é"}},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}[0-9]{1,3}$"},
    "pattern alternatives": {"type": "string", "pattern": "^(cat|dog|(big )?fish)$"},
    "pattern unicode": {"type": "string", "pattern": "^[α-ω]{1,3}[äöü]?$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 4},
    "pattern inside": {"type": "string", "pattern": "x", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    # arrays
    "array": array(whole(), 4),
    "array at least": array({"type": "boolean"}, 3, 2),
    "array of arrays": array(array(whole(0, 9), 2), 2),
    "array of enums": array({"enum": ["a", "b"]}, 5, 1),
    "tuple": {
        "type": "array",
        "prefixItems": [whole(), text(4), {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "tuple and rest": {
        "type": "array",
        "prefixItems": [{"const": "head"}],
        "items": whole(0, 9),
        "minItems": 1,
        "maxItems": 4,
    },
    "array empty": {"type": "array", "maxItems": 0},
    # objects
    "object empty": obj({}),
    "point": POINT,
    "optional": obj({"a": whole(), "b": whole(), "c": whole()}, required=["b"]),
    "all optional": obj({"a": {"type": "null"}, "b": {"type": "boolean"}}, required=[]),
    "keys unicode": obj({"größe": whole(), "名前": text(3), "🙂": {"type": "null"}}),
    "keys with quotes": obj({'a"b': whole(), "c\\d": {"type": "null"}}),
    "map": {
        "type": "object",
        "additionalProperties": whole(0, 9),
        "maxProperties": 2,
    },
    "map patterns": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": whole(0, 9), "^s_[a-z]{1,3}$": text(3)},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "object of objects": obj({"from": POINT, "to": POINT, "label": text(6)}),
    "nested 3": nested(3),
    "nested 12": nested(12),
    "wide": obj({f"field{number}": whole(0, 9) for number in range(20)}),
    "wide optional": obj({f"f{number}": {"type": "null"} for number in range(16)}, required=[]),
    # combinations
    "anyOf scalars": {"anyOf": [whole(), {"type": "boolean"}, text(4)]},
    "anyOf objects": {"anyOf": [obj({"cat": whole()}), obj({"dog": text(4)}), {"type": "null"}]},
    "anyOf common start": {"anyOf": [obj({"abc": whole()}), obj({"abd": whole()})]},
    "oneOf types": {"oneOf": [whole(), {"type": "null"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "allOf objects": {
        "allOf": [
            {"type": "object", "properties": {"a": whole()}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "discriminated": {
        "anyOf": [
            obj({"kind": {"const": "circle"}, "r": whole(0, 9)}),
            obj({"kind": {"const": "square"}, "side": whole(0, 9)}),
        ]
    },
    "references": {
        "$defs": {
            "p": POINT,
            "line": obj({"a": {"$ref": "#/$defs/p"}, "b": {"$ref": "#/$defs/p"}}),
        },
        **obj({"lines": array({"$ref": "#/$defs/line"}, 2)}),
    },
    "definitions of old": {"definitions": {"p": POINT}, **obj({"p": {"$ref": "#/definitions/p"}})},
    # recursion
    "linked list": LIST,
    "tree": tree(whole(0, 9), 2),
    "tree of texts": tree(text(3), 1),
    "expression": EXPRESSION,
    "even and odd": EVEN_ODD,
    "reference to the root": obj({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    # from life
    "order": ORDER,
    "person": obj(
        {"name": text(20, minLength=1), "age": whole(0, 130), "email": {"type": ["null"]}},
        required=["name", "age"],
    ),
    "weather": obj(
        {
            "city": text(12),
            "unit": {"enum": ["C", "F"]},
            "days": array(obj({"high": whole(-60, 60), "rain": {"type": "boolean"}}), 2, 1),
        }
    ),
    "sentiment": obj(
        {
            "label": {"enum": ["positive", "neutral", "negative"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        }
    ),
    "tool call": obj({"name": {"const": "search"}, "arguments": obj({"query": text(16)})}),
}
