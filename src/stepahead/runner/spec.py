"""How to build a runner, as plain data that travels to another process.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepahead.grammar.vocabulary import Vocabulary


@dataclass(frozen=True)
class RunnerSpec:
    """What a runner is built from.

    factory    "module:function" that is called with `options` and returns the model
    options    keyword arguments for it, plain values only
    device     cpu, cuda or hostile
    beside     whether the CPU's forwards have a thread beside the one that launches
    max_rows   most decode rows of a step
    num_slots  slot 0 is padding; `num_pages` counts the padding page 0
    max_pages  page-table entries of a slot
    threads    torch threads
    relay      slot, or row for a loop that runs `depth` steps ahead
    fence      fine or coarse
    check      consume-once poison in the relay and other cheap traps
    stages     parts that the model is cut into; this runner has part `stage`
    step_tokens  most positions computed in a step
    state_bytes  of one of them, as a stage hands it to the next
    drafter    "module:function" that is called with this, the slots' state and the model, and
               returns the drafter; "" for none
    draft_tokens  most drafts of a row in a step, 0 without a drafter
    processor  "module:name" that is called with the vocabulary's size and the device, and returns
               the logits processor; "" for none
    vocabulary  the bytes of the tokens, for grammars; None where no answer can keep to one
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    device_seed: int = 0
    beside: bool = False
    max_rows: int = 1
    num_slots: int = 2
    num_pages: int = 2
    page_size: int = 16
    max_pages: int = 1
    eos_ids: tuple[int, ...] = ()
    threads: int = 1
    relay: str = "slot"
    depth: int = 2
    fence: str = "fine"
    check: bool = False
    stages: int = 1
    stage: int = 0
    step_tokens: int = 0
    state_bytes: int = 0
    drafter: str = ""
    draft_tokens: int = 0
    processor: str = ""
    vocabulary: Vocabulary | None = None

    @property
    def width(self) -> int:
        """Positions of a decode row in a step: its last token, and drafts."""
        return 1 + self.draft_tokens
