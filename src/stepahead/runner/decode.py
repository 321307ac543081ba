"""What stands around the model in a decode step on the CPU, as one kernel call before it and one
behind it: its inputs, and the end of rows that take the largest of their logits.

What torch does elsewhere, and with few tokens (`inputs.py`, `sampling.py`), is the same to the
token; there each takes a dozen operations, most of them dearer than what they do.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepahead.model.batch import StepInputs
from stepahead.runner.ends import Ends
from stepahead.runner.grammar import check_masks
from stepahead.runner.greedy import worth_kernels
from stepahead.runner.inputs import StagedStep
from stepahead.runner.relay import Relay
from stepahead.runner.slots import SlotState


class DecodeKernels:
    """Runs on the forward stream; what it gives is valid until the next step's inputs are made."""

    def __init__(self, slots: SlotState, relay: Relay, page_size: int) -> None:
        # compiled, or read from the cache, as it is imported, and not in the first step
        from stepahead.kernels import decode

        self._names = decode
        self._slots = slots
        self._relay = relay
        self._page_size = page_size
        waiting = relay.waiting_dev
        self._before, self._behind = (np.zeros(decode.FIELDS, np.int64) for _ in range(2))
        for fields in (self._before, self._behind):
            fields[decode.SEATS] = address_of(slots.seat_dev)
            fields[decode.TOKENS] = 0 if waiting is None else address_of(waiting)
        self._before[decode.LENGTHS] = address_of(slots.length_dev)
        self._before[decode.PAGES] = address_of(slots.pages_dev)
        self._before[decode.COLUMNS] = slots.pages_dev.shape[1]
        self._before[decode.PAGE_SIZE] = page_size
        self._take_room(0, 0)

    def _take_room(self, count: int, width: int) -> None:
        """Memory for the inputs of `count` rows with page tables of `width` pages."""
        names, fields = self._names, self._before
        room = torch.zeros(5, count, dtype=torch.int64)
        self._ids, self._positions, self._cells, self._lens, self.ends_dev = room.unbind()
        self._tables = torch.zeros(count, width, dtype=torch.int64)
        self._count, self._width = count, width
        fields[names.COUNT], fields[names.WIDTH] = count, width
        places = (names.IDS, names.POSITIONS, names.CELLS, names.LENS, names.ENDS)
        for place, values in zip(places, room, strict=True):
            fields[place] = values.data_ptr()
        fields[names.TABLES] = self._tables.data_ptr()

    def inputs(self, step: StagedStep) -> StepInputs:
        """Those of a step without chunks, as `build_inputs`; its slots are a position longer from
        then on, and `ends_dev` int64[n] says how long.  AssertionError if no token waits for a row,
        or it has no page."""
        names, fields, bounds = self._names, self._before, step.bounds
        count, most = len(bounds), int(bounds.max())
        width = min(-(-most // self._page_size), int(fields[names.COLUMNS]))
        if count != self._count or width != self._width:
            self._take_room(count, width)
        ids = self._ids
        taken = fields[names.TOKENS]
        if not taken or step.route.tokens_dev is not None:
            ids = self._relay.resolve(step.route)
            fields[names.TOKENS] = 0
        fields[names.ROWS] = address_of(step.rows_dev)
        wrong = names.begin(fields)
        fields[names.TOKENS] = taken
        assert not wrong, f"{wrong} rows of {count} have no token from the relay, or no page"
        return StepInputs(
            ids,
            self._positions,
            self._cells,
            count,
            self._tables,
            self._lens,
            bounds,
            most,
            (),
        )

    def end(
        self, slots_dev: Tensor, logits: Tensor, masks_dev: Tensor | None, ends: Ends | None
    ) -> Tensor:
        """int64[n]: as Choose of all rows; left in the relay, and rows that `ends` ends are dead.
        For the step whose inputs were made last, float32[n, vocab] of its logits, and masks
        int32[n, words] if any."""
        names, fields = self._names, self._behind
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        count, vocab_size = logits.shape
        masks = words = 0
        if masks_dev is not None:
            masks_dev = masks_dev.contiguous()
            check_masks(masks_dev, count, vocab_size)
            masks, words = masks_dev.data_ptr(), masks_dev.shape[1]
        tokens = torch.empty(count, dtype=torch.int64)
        fields[names.COUNT], fields[names.ROWS] = count, address_of(slots_dev)
        fields[names.ENDS], fields[names.CHOSEN] = self._before[names.ENDS], tokens.data_ptr()
        fields[names.LOGITS], fields[names.STRIDE] = logits.data_ptr(), logits.stride(0)
        fields[names.VOCAB] = vocab_size
        fields[names.MASKS], fields[names.WORDS] = masks, words
        self._tell_ends(ends)
        names.end(fields)
        if not fields[names.TOKENS]:
            self._relay.stash(slots_dev, tokens)
        return tokens

    def _tell_ends(self, ends: Ends | None) -> None:
        names, fields = self._names, self._behind
        fields[names.EOS] = fields[names.HEED] = fields[names.OWNS] = 0
        if ends is None:
            return
        if ends.eos_dev is not None:
            fields[names.EOS] = ends.eos_dev.data_ptr()
        if ends.heed_dev is not None:
            fields[names.HEED] = address_of(ends.heed_dev)
        if ends.own_dev is not None:
            fields[names.OWN] = address_of(ends.own_dev)
            fields[names.OWNS] = ends.own_dev.shape[1]


def build_decode(
    slots: SlotState, relay: Relay, page_size: int, vocab_size: int
) -> DecodeKernels | None:
    """None where torch's operations are as good."""
    if not worth_kernels(slots.length_dev.device, vocab_size):
        return None
    return DecodeKernels(slots, relay, page_size)


def address_of(array: Tensor) -> int:
    """Of int64 that lie one behind the other."""
    assert array.is_contiguous() and array.element_size() == 8
    return array.data_ptr()
