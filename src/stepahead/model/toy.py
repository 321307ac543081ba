"""The hash model: its next token depends on every KV cell, read through the real page table.

One wrong page, stale token, length off by one or reused slot changes all that follows.  It has
the interface of a real model; a cell holds a mix of its token and position, and reading weighs
each cell by the position it is read *for*.

    cell(i)   = mix(token_i * A + i * B)
    state(p)  = sum over i <= p of cell(i) * (2 i + 1)          (64-bit, wrapping)
    logit(v)  = bits 20..44 of mix(state(p) + v * C) / 2**21     in [0, 8)

It has LAYERS layers: layer k keeps byte k of each cell, and adds what that gives to the state.  So
a part of them keeps only its own bytes, and all parts together give the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepahead.model.batch import ChunkRow, StepInputs

A, B, C = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
LAYERS = 8
M1, M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    # a logical shift: torch's is arithmetic
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A 64-bit finaliser (splitmix64's) on int64, wrapping."""
    x = (x ^ _shifted(x, 30)) * _signed(M1)
    x = (x ^ _shifted(x, 27)) * _signed(M2)
    return x ^ _shifted(x, 31)


class ToyKV:
    """One int64 a cell: [num_pages, page_size], full of a poison that shows when it is read."""

    def __init__(self, num_pages: int, page_size: int, place: torch.device) -> None:
        shape = (num_pages, page_size)
        self.pages_dev = torch.full(shape, -0x0BADBAD, dtype=torch.int64, device=place)
        self.page_size = page_size


class ToyModel:
    """`vocab_size` tokens, positions up to `max_len`."""

    fine_fence = True  # the page table is read in the call and not after it

    def __init__(self, vocab_size: int, max_len: int, device: str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.max_len = max_len
        self._place = torch.device(device)
        self._max_len = max_len
        self._weights_dev = self._weights(4096)
        self._columns_dev = self._count(vocab_size) * _signed(C)

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        """On an accelerator; on the CPU reading whole page tables would cost too much."""
        return self._place.type != "cpu"

    def _weights(self, page_size: int) -> Tensor:
        """int64, for the cells of every page that a request may have."""
        return 2 * self._count(self._max_len + page_size) + 1

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, dtype=torch.int64, device=self._place)

    def new_kv(self, num_pages: int, page_size: int) -> ToyKV:
        """Memory for the KV cells."""
        self._weights_dev = self._weights(page_size)
        return ToyKV(num_pages, page_size, self._place)

    def forward(self, inputs: StepInputs, kv: ToyKV) -> Tensor:
        """The state of each token of the step, int64[T, 1]; writes its cell first."""
        return self.run(self.embed(inputs), inputs, kv).unsqueeze(1)

    __call__ = forward

    def embed(self, inputs: StepInputs) -> Tensor:
        """The cell of each token of the step, int64[T]."""
        return mix(inputs.token_ids_dev * _signed(A) + inputs.positions_dev * _signed(B))

    def run(self, cells: Tensor, inputs: StepInputs, kv: ToyKV) -> Tensor:
        """Keeps the step's cells, int64[T]; what each token's context adds up to, int64[T]."""
        kv.pages_dev.view(-1)[inputs.cells_dev] = cells
        states = [self._decode(inputs, kv)] if inputs.n_decode else []
        states += [self._chunk(chunk, kv) for chunk in inputs.chunks]
        return torch.cat(states)

    def _decode(self, inputs: StepInputs, kv: ToyKV) -> Tensor:
        cells = kv.pages_dev[inputs.decode_pages_dev].flatten(1)
        width = cells.shape[1]
        seen = self._count(width) < inputs.decode_lens_dev.unsqueeze(1)
        return (cells * self._weights_dev[:width]).where(seen, 0).sum(1)

    def _chunk(self, chunk: ChunkRow, kv: ToyKV) -> Tensor:
        cells = kv.pages_dev[chunk.pages_dev].flatten()[: chunk.context_len]
        running = (cells * self._weights_dev[: chunk.context_len]).cumsum(0)
        return running[chunk.context_len - chunk.count :]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab_size] of states int64[R, 1]; exact in float32."""
        bits = _shifted(mix(hidden + self._columns_dev), 20) & 0xFFFFFF
        return bits.to(torch.float32) / 2**21
