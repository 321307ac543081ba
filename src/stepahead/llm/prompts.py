"""What users call a prompt, made into token ids.  Knows texts, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepahead.errors import ConfigError, InvalidParameter
from stepahead.llm.forms import Form
from stepahead.structured import Grammar
from stepahead.text.texts import Texts

_KEYS = ("prompt", "prompt_token_ids")
# variables of a template that have a place of their own
_NOT_EXTRA = ("messages", "add_generation_prompt", "special_tokens")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text they are of where there is one.

    `grammar` is what the answer keeps to, and ends with, or with one of `eos_ids`, which are no
    text of it; `form` is what is told apart in it, if anything.
    """

    ids: list[int]
    text: str | None = None
    grammar: Grammar | None = None
    form: Form | None = None
    eos_ids: frozenset[int] = frozenset()


def prompt_list(prompts: Any) -> list[Any]:
    """The prompts of a call, one of them or many: text and token ids are one."""
    if isinstance(prompts, (str, Mapping, np.ndarray)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidParameter(
            f"prompts must be text, token ids or a list of these, not {type(prompts).__name__}",
            "prompts",
        )
    if prompts and all(isinstance(item, int | np.integer) for item in prompts):
        return [prompts]
    return list(prompts)


def read_prompt(prompt: Any, texts: Texts) -> Prompt:
    """One prompt: text, token ids, or vLLM's {"prompt": ...} and {"prompt_token_ids": ...}.

    Raises InvalidParameter; ids are checked by the engine.
    """
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, texts)
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidParameter("the prompt is empty; give some text, or token ids", "prompt")
        return Prompt(texts.encode(prompt), prompt)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim > 1:
            raise InvalidParameter(
                f"a prompt is one row of token ids, not an array of shape {prompt.shape}; "
                "give a list of rows",
                "prompt",
            )
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidParameter(
            f"a prompt must be text or token ids, not {type(prompt).__name__}", "prompt"
        )
    if not {bool, np.bool_}.isdisjoint(map(type, prompt)):  # numpy would read 0 and 1
        raise InvalidParameter("prompt holds true or false, not whole token ids", "prompt")
    return Prompt(list(prompt))


def _read_mapping(prompt: Mapping[str, Any], texts: Texts) -> Prompt:
    unknown = [key for key in prompt if key not in _KEYS]
    if unknown:
        raise InvalidParameter(
            f"a prompt has {unknown[0]!r}, which is not known; give one of {', '.join(_KEYS)}",
            str(unknown[0]),
        )
    if "prompt_token_ids" in prompt:
        ids = prompt["prompt_token_ids"]
        if isinstance(ids, (str, Mapping)):
            raise InvalidParameter("prompt_token_ids must be token ids", "prompt_token_ids")
        if not isinstance(prompt.get("prompt"), str | None):
            raise InvalidParameter("a prompt's 'prompt' must be text", "prompt")
        return Prompt(read_prompt(ids, texts).ids, prompt.get("prompt"))
    if not isinstance(prompt.get("prompt"), str):
        raise InvalidParameter("a prompt's 'prompt' must be text", "prompt")
    return read_prompt(prompt["prompt"], texts)


def template_variables(given: Any) -> dict[str, Any]:
    """`chat_template_kwargs` as a dict; InvalidParameter if they can't be that."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidParameter(
            "chat_template_kwargs must map names of variables to values", "chat_template_kwargs"
        )
    for name in _NOT_EXTRA:
        if name in given:
            raise InvalidParameter(
                f"chat_template_kwargs may not set {name!r}: it is given in another way; leave it "
                "out",
                "chat_template_kwargs",
            )
    return dict(given)


def read_chat(messages: Any, texts: Texts, /, **template_kwargs: Any) -> Prompt:
    """The prompt that the chat template makes of `messages`; InvalidParameter."""
    ids = texts.encode_chat(messages, **template_kwargs)
    return Prompt(ids, texts.decode(ids, skip_special_tokens=False))


def read_template(template: str | Path | None) -> str | None:
    """A template given as its text or as the path of a file; ConfigError if it can't be read."""
    if template is None or (isinstance(template, str) and "{" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the chat template {str(template)!r} can't be read ({error}); "
            "give the path of a file or a template's text"
        ) from error
