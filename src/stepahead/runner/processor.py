"""A user's own logits processor: what it is, what it sees, how it is loaded.

    class Quiet:
        def __init__(self, vocab_size: int, device: torch.device) -> None: ...
        def apply(self, logits: torch.Tensor, rows: AskingRows) -> None:
            logits[:, rows.args[0]["token"]] -= 5.0

It runs in the runner's process, on the forward stream: what it does to tensors is done in the
stream's order, and it must not wait for them (`.item()`, `.tolist()`, `if tensor:`), else no step
runs ahead.  It keeps nothing of a row between two steps: with drafts, after a preemption and for
rows whose end the host has not heard of, only what `rows` says is true.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stepahead.errors import ConfigError
from stepahead.runner.history import TokenHistory

_MAX_WORDS = 300


@dataclass(frozen=True)
class AskingRows:
    """The m rows of a step that ask for the processor; under drafts a row comes once for each token
    that is sampled for it, with the drafts before that one among its tokens.

    args             each row's `extra_args`; the same object for as long as a request runs
    lengths_dev      int64[m], tokens so far, prompt and outputs: the next one stands there
    prompt_lens_dev  int64[m], how many of these are prompt
    host_tokens      int32[..] numpy for each row, the tokens so far; None unless the processor
                     declares `needs_host_history`
    """

    args: tuple[dict[str, Any], ...]
    lengths_dev: Tensor
    prompt_lens_dev: Tensor
    host_tokens: tuple[np.ndarray, ...] | None
    _history: TokenHistory
    _places_dev: Tensor

    def last(self, count: int) -> Tensor:
        """int32[m, count]: the last tokens in their order, -1 where there are not so many."""
        back = torch.arange(-count, 0, device=self.lengths_dev.device)
        positions = self.lengths_dev.unsqueeze(1) + back
        return self._history.read(self._places_dev.unsqueeze(1), positions)

    def tokens(self) -> Tensor:
        """int32[m, model length]: the token of each position; from `lengths_dev` on it is undefined
        what stands there."""
        return self._history.tokens_dev[self._places_dev]


class LogitsProcessor(Protocol):
    """Called with the vocabulary's size and the torch device to be built.  It may also declare

    needs_host_history  True: it wants `host_tokens`, and only the rows that ask for it wait for
                        these to land
    """

    def apply(self, logits: Tensor, rows: AskingRows) -> None:
        """Changes float32[m, vocab] logits in place, in any way; what is -inf stays forbidden.

        They have their bias already; penalties, temperature and filters come after.
        """
        ...


@dataclass(frozen=True)
class Loaded:
    """A processor and the name that it was loaded by; `waits`: rows that ask for it are sampled
    when their tokens are on the host."""

    name: str
    processor: LogitsProcessor
    waits: bool = False

    def apply(self, logits: Tensor, rows: AskingRows) -> str:
        """As the processor does; what went wrong, with its name, "" if nothing did."""
        try:
            self.processor.apply(logits, rows)
        except Exception as error:  # whatever it is: it is these rows' alone
            words = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
            return f"the logits processor {self.name} raised {words}"
        return ""


def load_processor(name: str, vocab_size: int, place: torch.device) -> Loaded | None:
    """The processor "module:name", None if it is ""; ConfigError when it can't be had."""
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        make: Callable[[int, torch.device], LogitsProcessor]
        make = getattr(import_module(module), function)
        processor = make(vocab_size, place)
    except Exception as error:
        raise ConfigError(
            f"logits_processor={name} can't be loaded ({type(error).__name__}: {error}); the "
            "runner's process must be able to import it, and to call it with the vocabulary's size "
            "and a torch device"
        ) from error
    if not callable(getattr(processor, "apply", None)):
        raise ConfigError(f"logits_processor={name} has no method `apply(logits, rows)`")
    return Loaded(name, processor, bool(getattr(processor, "needs_host_history", False)))
