"""Who goes first and who yields.  Pure decisions over entries and counts; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stepahead.errors import PromptTooLong
from stepahead.scheduler.lifetime import Entry


@dataclass(frozen=True)
class Limits:
    """The sizes a scheduler works within.

    `num_pages` counts the padding page; `num_slots` slot 0.  `relay` is where decode rows get
    their input tokens: `host` (the plan brings them all), `slot`, or `row` (the plan brings those
    whose row has no sample in flight).  `serial_prefill`: a step of prompts alone waits until the
    one before it, of prompts alone too, is retired.  `stages` that the model is cut into; the rows
    take turns in `turns` plans, as many as there are stages and steps in the air.  `width`: the
    positions of a decode row in a step, its drafts included.
    """

    max_rows: int
    max_step_tokens: int
    page_size: int
    num_pages: int
    num_slots: int
    model_len: int
    relay: str = "slot"
    prefix_cache: bool = True
    serial_prefill: bool = False
    stages: int = 1
    turns: int = 1
    width: int = 1
    debug: bool = False

    @property
    def max_pages(self) -> int:
        """Most pages of one request."""
        return -(-self.model_len // self.page_size)


def output_limit(limits: Limits, prompt_len: int, max_tokens: int | None) -> int:
    """How many outputs a request may have; PromptTooLong when it can never be held."""
    room = limits.model_len - prompt_len
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; the model takes {limits.model_len} in all, "
            "so at least one must be left for the output",
            "prompt",
        )
    if max_tokens is None:  # as many as there is room for, in the pool too
        room = min(room, max(1, (limits.num_pages - 1) * limits.page_size - prompt_len + 1))
    granted = room if max_tokens is None else min(max_tokens, room)
    needed = -(-(prompt_len + granted - 1) // limits.page_size)
    if needed > limits.num_pages - 1:
        raise PromptTooLong(
            f"prompt and output need {needed} pages of {limits.page_size} tokens; the pool has "
            f"{limits.num_pages - 1}; shorten the prompt, lower max_tokens or enlarge the pool",
            "prompt" if -(-prompt_len // limits.page_size) > limits.num_pages - 1 else "max_tokens",
        )
    return granted


def spare_pages(running: int, limits: Limits) -> int:
    """Pages an admission must leave: those of a step for each running row, or it would be preempted
    at once."""
    return running * -(-limits.width // limits.page_size)


def victims(running: Iterable[Entry]) -> list[Entry]:
    """In which order requests yield their pages: the last of the list, the youngest, first.

    A request yields to older ones only, so the oldest always gets ahead.
    """
    return sorted(running, key=lambda entry: entry.arrival)
