"""The tokenizer: text to ids and back, for a Hugging Face folder or a GGUF file.

Knows no weights and no requests.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepahead.errors import InvalidParameter, ModelError
from stepahead.text.chat import render_chat
from stepahead.text.detok import TextStream
from stepahead.text.folder import load_folder
from stepahead.text.gguf_tokenizer import load_gguf
from stepahead.text.parts import Parts
from stepahead.text.token_bytes import byte_table, decoder_steps

_LONG = 4096  # characters of a text that takes a thread a millisecond


class Tokenizer:
    """One model's tokenizer and chat template.  Nothing changes after it is made."""

    def __init__(self, parts: Parts, name: str, chat_template: str | None = None) -> None:
        """`name` stands for the model in errors; `chat_template` replaces the model's own."""
        self._backend = parts.backend
        self._special_tokens = parts.special_tokens
        self._steps = decoder_steps(parts.backend, name)
        self.name = name
        self.special_ids: frozenset[int] = parts.special_ids
        self.eos_ids: tuple[int, ...] = parts.eos_ids
        self.chat_template = chat_template if chat_template is not None else parts.chat_template

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of a folder with a tokenizer.json, or of a GGUF file.

        `chat_template` is a template's text that replaces the model's own.  Raises UnsupportedModel
        for a tokenizer that is not known, ModelError if a file is missing or damaged; the message
        names the file.
        """
        if os.path.isdir(path):  # not Path's own, which raises for a name that is too long
            return cls(load_folder(Path(path)), Path(path).resolve().name, chat_template)
        path = Path(path)
        if not os.path.exists(path):
            raise ModelError(f"{path} does not exist: name a folder or a .gguf file that does")
        return cls(load_gguf(path), path.stem, chat_template)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id.  The model's own vocabulary may be padded beyond it."""
        return len(self.token_bytes)

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes each id stands for in decoded text, by id; special tokens their text's."""
        return byte_table(self._backend, self._steps)

    @functools.cached_property
    def bos_id(self) -> int | None:
        """The id that begins a text, whether or not `encode` adds it."""
        bos = self._special_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; texts of special tokens in it become their ids.

        `add_special_tokens` adds what the model wants around a text, a BOS for most or nothing.
        Raises InvalidParameter (param "prompt") if `text` is no text.
        """
        return self._encode(text, add_special_tokens, "prompt")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> list[int]:
        """Ids of the prompt that the chat template makes of `messages`, and nothing added to it.

        Raises InvalidParameter (param "messages") as `render_chat` does.
        """
        text = render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
            **template_kwargs,
        )
        return self._encode(text, False, "messages")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids past the vocabulary stand for nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(
        self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> TextStream:
        """An incremental detokenizer for one answer; after `prompt_ids` if they are given."""
        return TextStream(self._backend, skip_special_tokens, prompt_ids)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        if not isinstance(text, str):
            raise InvalidParameter(f"{param} must be text, not {type(text).__name__}", param)
        try:
            if len(text) < _LONG:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # the library holds Python's lock through all of `encode`, and lets it go in this: a
            # prompt of a megabyte would keep every other thread waiting for two seconds
            (found,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return found.ids
        except TypeError as error:  # the library's word for a string that is no UTF-8
            raise InvalidParameter(
                f"{param} holds half of a surrogate pair, which no UTF-8 text has; take it out",
                param,
            ) from error
