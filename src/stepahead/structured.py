"""What an answer must be: as a client says it, and as a runner holds it.  Knows no tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import force_setattr

from stepahead.errors import InvalidParameter


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must be, in vLLM's shape: one of a JSON schema (a dict or its text), any JSON
    object, a regex, a grammar (Lark's or GBNF's notation), or one of some strings.

    Checked when built, as far as that goes without a tokenizer; InvalidParameter names the field.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name, kind in _STRUCTURES.items() if _is_given(self, name, kind)]
        if len(given) != 1:
            raise InvalidParameter(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give one of "
                f"{', '.join(_STRUCTURES)}",
                "structured_outputs",
            )
        if self.choice is not None:
            if not self.choice or not all(isinstance(text, str) for text in self.choice):
                raise InvalidParameter(
                    "choice must be a list of one or more strings", "structured_outputs.choice"
                )
            force_setattr(self, "choice", list(self.choice))


_STRUCTURES: dict[str, tuple[type, ...]] = {
    "json": (dict, str),
    "json_object": (bool,),
    "regex": (str,),
    "grammar": (str,),
    "choice": (list, tuple),
}


def _is_given(asked: StructuredOutputs, name: str, kinds: tuple[type, ...]) -> bool:
    value = getattr(asked, name)
    if value is None or value is False:
        return False
    if not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidParameter(f"{name} must be {words}", f"structured_outputs.{name}")
    return True


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that was found good for a model's vocabulary; equal texts are equal grammars.

    `text` is in the notation of the library that makes masks from it (llguidance).
    """

    text: str
