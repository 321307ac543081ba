"""Reads the tokenizer of a Hugging Face folder.  Knows file names and their keys, no weights.

tokenizer.json is the tokenizer, whatever the class that tokenizer_config.json names; also whether
a BOS is added is its post-processor's word alone (transformers reads `add_bos_token` only where
there is no tokenizer.json).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepahead.errors import ModelError, UnsupportedModel
from stepahead.text.parts import Parts

if TYPE_CHECKING:
    import tokenizers

_NAMES: Final = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
_EXTRA: Final = ("additional_special_tokens", "extra_special_tokens")


def load_folder(folder: Path) -> Parts:
    """The tokenizer of `folder`.

    Raises UnsupportedModel if there is no tokenizer.json, ModelError if a file can't be read or
    is damaged.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModel(
            f"{folder} has no tokenizer.json: name a folder that has one, or make it with "
            f"transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...)"
        )
    backend = _backend(file)
    config = _with_map(_read(folder / "tokenizer_config.json"), folder)
    texts = {f"{name}_token": _content(config.get(f"{name}_token")) for name in _NAMES}
    special_tokens = {name: text for name, text in texts.items() if text is not None}
    _mark_special(backend, [*special_tokens.values(), *_extra_tokens(config, folder)])
    return Parts(
        backend=backend,
        special_tokens=special_tokens,
        special_ids=_special_ids(backend),
        eos_ids=_eos_ids(backend, special_tokens.get("eos_token"), folder),
        chat_template=_chat_template(config, folder),
    )


def _backend(file: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    # the library raises Exception itself for whatever is wrong with the text
    except Exception as error:
        raise ModelError(f"{file} can't be used: {error}; fetch it again") from error
    # some files carry their training's settings, which would cut prompts without a word
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read(file: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} can't be read: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no object but {type(value).__name__}; fetch it again")
    return value


def _with_map(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with special_tokens_map.json: it counts less where the config lists all tokens."""
    token_map = _read(folder / "special_tokens_map.json")
    return {**token_map, **config} if "added_tokens_decoder" in config else {**config, **token_map}


def _content(token: object) -> str | None:
    """The text of a token, which files spell as a string or as an object; None if it is no text."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or text.encode("utf-8", "ignore").decode() != text:
        return None  # JSON can say half of a surrogate pair, which no vocabulary has
    return text


def _extra_tokens(config: Mapping[str, Any], folder: Path) -> list[str]:
    entries: list[object] = []
    for key in _EXTRA:
        value = config.get(key) or []
        if isinstance(value, dict):
            entries += value.values()
        elif isinstance(value, list):
            entries += value
        else:
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: {key} is {value!r}, not a list of tokens; "
                "fetch it again"
            )
    return [text for text in map(_content, entries) if text is not None]


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Makes the named tokens special, where tokenizer.json does not say so itself."""
    from tokenizers import AddedToken

    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in texts:
        # one that the vocabulary lacks would get a new id, which the model has no embedding for
        if backend.token_to_id(text) is not None:
            token = added.get(text) or AddedToken(text, normalized=False)
            token.special = True
            backend.add_special_tokens([token])


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)


def _eos_ids(backend: tokenizers.Tokenizer, eos: str | None, folder: Path) -> tuple[int, ...]:
    """The tokenizer's own, then those at which generation ends as the model's makers say."""
    own = backend.token_to_id(eos) if eos is not None else None
    generation = folder / "generation_config.json"
    # transformers too takes the model's config where there is no generation config
    file = generation if generation.is_file() else folder / "config.json"
    said = _read(file).get("eos_token_id")
    ids = [own, *(said if isinstance(said, list) else [said])]
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int)))


def _chat_template(config: Mapping[str, Any], folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}; fetch it again") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        try:
            template = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: chat_template is a list, but not of objects "
                "with name and template; fetch it again"
            ) from error
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
