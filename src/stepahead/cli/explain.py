"""`stepahead explain`: what a configuration does to overlap, before anything is loaded."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from stepahead.cli.options import EngineFlags, given
from stepahead.errors import ConfigError
from stepahead.explain.build import explain_command, explain_model
from stepahead.explain.render import command_text, model_text


def explain(
    model: str | None = None,
    /,
    *command: str,
    json: Annotated[bool, Parameter(help="One JSON document instead.", negative=())] = False,
    engine: EngineFlags = None,
) -> None:
    """Explains a model's configuration here, or another engine's command line.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, `toy` or `glm-5.3`.
    command
        Behind `--`: a command line of SGLang or vLLM.
    """
    if model is None:
        raise ConfigError("name a MODEL, or give a command line of SGLang or vLLM after --")
    options = given(engine)
    if command or (" " in model and not os.path.exists(model)):
        if options:
            raise ConfigError(
                f"{', '.join(options)}: a command line of another engine brings its own flags; "
                "leave these out, or name a MODEL alone"
            )
        other = explain_command([model, *command])
        _show_json(other) if json else Console().print(command_text(other))
        return
    report = explain_model(model, options)
    _show_json(report) if json else Console().print(model_text(report))


def _show_json(report: msgspec.Struct) -> None:
    print(msgspec.json.encode(report).decode())
