"""A tool as a client describes it.  Knows OpenAI's shape and a little of JSON schemas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stepahead.errors import InvalidParameter

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KNOWN = frozenset({"name", "description", "parameters", "strict"})
_MAX_REFERENCES = 20
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function with its arguments' JSON schema; `strict` if they must keep to it."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False

    @classmethod
    def of(cls, given: Any) -> Tool:
        """From `{"type": "function", "function": {...}}`.  Raises InvalidParameter ("tools")."""
        if not isinstance(given, dict) or given.get("type") != "function":
            raise InvalidParameter('each tool must have the type "function"', "tools")
        function = given.get("function")
        if not isinstance(function, dict):
            raise InvalidParameter('each tool must have an object "function"', "tools")
        if unknown := sorted(str(name) for name in function.keys() - _KNOWN):
            raise InvalidParameter(f"tools: {unknown[0]} of a function is not known", "tools")
        name, strict = function.get("name"), function.get("strict")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidParameter(
                f"tools: a name has 1 to 64 of A-Z, a-z, 0-9, _, . and -, not {name!r}", "tools"
            )
        if not isinstance(function.get("description"), str | None):
            raise InvalidParameter(f"tools: the description of {name} must be text", "tools")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = dict(_NO_PARAMETERS)
        if not isinstance(parameters, dict):
            raise InvalidParameter(f"tools: the parameters of {name} must be a schema", "tools")
        if strict is not None and not isinstance(strict, bool):
            raise InvalidParameter(f"tools: strict of {name} must be true or false", "tools")
        return cls(name, parameters, bool(strict))

    def properties(self) -> dict[str, dict[str, Any]]:
        """The schema of each argument that has one, references followed, in the tool's order."""
        found = self.parameters.get("properties")
        if not isinstance(found, dict):
            return {}
        return {
            name: self._resolved(schema)
            for name, schema in found.items()
            if isinstance(schema, dict)
        }

    def is_text(self, argument: str) -> bool:
        """Whether an argument is a string and nothing else: formats without quotes need to know."""
        schema = self.properties().get(argument, {})
        if schema.get("type") == "string":
            return True
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        return (
            "type" not in schema
            and isinstance(values, list)
            and all(isinstance(value, str) for value in values)
        )

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_MAX_REFERENCES):
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            target: Any = self.parameters
            for part in reference[2:].split("/"):
                target = target.get(part) if isinstance(target, dict) else None
            if not isinstance(target, dict):
                break
            schema = target
        return schema
