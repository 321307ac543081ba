"""The jinja2 environment that chat templates are written for.  Knows no messages.

Templates come with models, from anyone: they run in the immutable sandbox.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser


class Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    # pyrefly: ignore [missing-override-decorator]  (typing has none before Python 3.12)
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes < > & ' for HTML, which no model was taught."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """How a template refuses messages."""
    raise jinja2.TemplateError(message)


def strftime_now(layout: str) -> str:
    """Today, for templates that tell the model the date."""
    return datetime.now().strftime(layout)


_ENVIRONMENT: Final = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = to_json
_GLOBALS: Final[dict[str, Any]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}


def compile_template(text: str) -> jinja2.Template:
    """The template, ready to render; jinja2.TemplateError if it is none."""
    return _ENVIRONMENT.from_string(text, globals=_GLOBALS)
