"""Decode steps as captured graphs: one launch for a whole forward, for a few numbers of rows.

A step of n rows takes the smallest graph that has room.  The rest of its rows is slot 0, which is
padding: length 0, page table full of page 0, to which it also writes.

    static memory   rows | input tokens   -> graph ->   hidden states | logits
    first part      positions, cells, lengths, page table of the rows, copied from the slots
    second part     the model, and logits

So a page table is read for the last time in the first part, and the fence opens as early as that.

Graphs differ in their number of rows only, and share their static memory: what a step leaves there
is gone with the next.  Whoever wants hidden states or raw logits after the forward copies them on
the forward stream.

Not yet run on a GPU; what is captured is replayed on the CPU in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Device, Event, Graph, Stream, Work
from stepahead.model.batch import StepInputs
from stepahead.runner.inputs import decode_inputs
from stepahead.runner.relay import shape_of
from stepahead.runner.slots import SlotState
from stepahead.runner.verify import ask, verify_inputs

if TYPE_CHECKING:
    from stepahead.runner.model import Model

# names of static memory, for devices that check who touches what
_INPUTS, _STATES, RESULTS = "graph inputs", "graph states", "graph results"


class Capturable(Protocol):
    """What a model says of being captured; one that does not say is not captured."""

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        """Whether its decode steps can be, with page tables of `max_pages` columns, and cost about
        what they cost uncaptured."""
        ...


@dataclass(frozen=True)
class DecodeRun:
    """A launched step of n rows.

    states_dev  [n, hidden] and
    logits_dev  float32[n, vocab], under drafts [n * width, ..]: valid on the forward stream until
                the next launch; read the memory `RESULTS`
    reads_over  passes when the page tables have been read for the last time
    """

    states_dev: Tensor
    logits_dev: Tensor
    reads_over: Event


class DecodeGraphs:
    """Graphs for steps that only decode, of up to `sizes[-1]` rows."""

    def __init__(
        self,
        device: Device,
        model: Model,
        kv: Any,
        slots: SlotState,
        page_size: int,
        max_pages: int,
        sizes: tuple[int, ...],
        width: int = 1,
    ) -> None:
        """Captures them all; nothing may be in flight.  Use `capture_decode`.  `width`: positions
        of a row."""
        self._device = device
        self._model = model
        self._kv = kv
        self._slots = slots
        self._page_size = page_size
        self._most = max_pages * page_size
        most_rows, place = sizes[-1], device.place
        self._width = width
        self._bounds = np.full(most_rows * width, self._most)
        self._rows_dev = torch.zeros(most_rows, dtype=torch.int64, device=place)
        shape = shape_of(most_rows, width)
        self._tokens_dev = torch.zeros(shape, dtype=torch.int64, device=place)
        self._inputs: StepInputs | None = None  # from the first part to the second, in capture
        self._states_dev, self._logits_dev = self._result_memory(most_rows * width)
        self._graphs: dict[int, Graph] = {}
        for size in reversed(sizes):  # the largest first: its memory has room for all others
            graph = device.capture(partial(self._first, size), partial(self._rest, size))
            if graph is None:
                break
            self._graphs[size] = graph
        self._inputs = None
        self._sizes = tuple(sorted(self._graphs))

    def fits(self, rows: int) -> bool:
        """Whether there is a graph for a step of so many decode rows and nothing else."""
        return 0 < rows <= max(self._sizes, default=0)

    def launch(
        self,
        rows_dev: Tensor,
        tokens: Callable[[], Tensor],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
    ) -> DecodeRun:
        """Enqueues a step of slots `rows_dev` int64[n] on the forward stream.

        `tokens` gives their input tokens, int64[n] or int64[n, width], there; it, and reading
        `rows_dev`, reads `reads` and writes `writes`.
        """
        rows = len(rows_dev)
        size = next(size for size in self._sizes if size >= rows)
        fill = partial(self._fill, size, rows_dev, tokens)
        self._device.enqueue(Stream.FORWARD, fill, reads, (*writes, _INPUTS))
        reads_over = self._graphs[size].launch(
            Work(partial(self._first, size), (_INPUTS, "pages", "slots"), (_STATES,)),
            Work(partial(self._rest, size), (_INPUTS, _STATES, "kv"), ("kv", RESULTS)),
        )
        positions = rows * self._width
        return DecodeRun(self._states_dev[:positions], self._logits_dev[:positions], reads_over)

    def _fill(self, size: int, rows_dev: Tensor, tokens: Callable[[], Tensor]) -> None:
        rows = len(rows_dev)
        with torch.inference_mode():
            self._rows_dev[:rows].copy_(rows_dev)
            # else a row that has left would go on, and write where its pages' new owner reads
            self._rows_dev[rows:size].zero_()
            self._tokens_dev[:rows].copy_(tokens())

    def _first(self, size: int) -> None:
        with torch.inference_mode():
            rows, tokens, slots = self._rows_dev[:size], self._tokens_dev[:size], self._slots
            bounds = self._bounds[: size * self._width]
            rest = (bounds, slots, self._page_size, self._most)
            self._inputs = (
                decode_inputs(rows, tokens, *rest)
                if self._width == 1
                else verify_inputs(ask(rows, tokens, slots), *rest)
            )

    def _rest(self, size: int) -> None:
        with torch.inference_mode():
            assert self._inputs is not None, "the second part ran without the first"
            states = self._model(self._inputs, self._kv)
            self._states_dev[: len(states)].copy_(states)
            self._logits_dev[: len(states)].copy_(self._model.logits(states))

    def _result_memory(self, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for what both parts leave, of the shapes that a row of padding shows."""
        with torch.inference_mode():
            self._first(1)
            assert self._inputs is not None
            states = self._model(self._inputs, self._kv)
            logits = self._model.logits(states)
        return _like(states, rows), _like(logits, rows)


def capture_decode(
    device: Device,
    model: Any,
    kv: Any,
    slots: SlotState,
    page_size: int,
    max_rows: int,
    width: int = 1,
) -> DecodeGraphs | None:
    """Graphs for decode steps of up to `max_rows` rows, `width` positions each; None where the
    model can't be captured."""
    max_pages = slots.pages_dev.shape[1]
    says = getattr(model, "can_capture", None)
    if says is None or not says(page_size, max_pages):
        return None
    if getattr(model, "host_lengths", False):
        return None  # a graph would have the lengths of its capture for ever
    sizes = graph_sizes(max_rows)
    return DecodeGraphs(device, model, kv, slots, page_size, max_pages, sizes, width)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, .. and `max_rows`: from 16 on at most a third of a graph
    is padding."""
    sizes = {max_rows}
    size = 1
    while size < max_rows:
        sizes.add(size)
        if size >= 16 and size * 3 // 2 < max_rows:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes))


def _like(tensor: Tensor, rows: int) -> Tensor:
    return torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
