"""Attention of a step's rows over pages, for devices with their own memory: no length is read on
the host, so nothing waits for the device.

Two ways, chosen once for a shape by `paged_kernel`:

- `KernelAttention`: one call a layer of torch's paged variable-length attention for all rows of the
  step, decode rows and chunks alike.  Lengths and page tables are read on the device.
- `GatherAttention`, in plain operations, where torch has no such kernel for the shape (float32, a
  page size that it does not take, an older torch): a row's pages are gathered at the full width of
  the table and masked by the device's lengths.  The arithmetic is that of `paged.py`.

What torch's kernel takes depends on the torch: flash attention 2 wants float16 or bfloat16, head
sizes of a multiple of 8 up to 256, and pages of a multiple of 256 positions; flash attention 3,
where the user has activated it, takes other pages too.  And some versions answer wrongly as soon as
they split a row's keys.  So the kernel is not believed: it is asked for no splits, and tried on a
small case against `GatherAttention` first.

The kernel's side has not yet been run on a GPU; `GatherAttention` runs on CPUs in the tests.

It knows pages and lengths of one step; it must not know requests, weights or who owns a page.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.model.attention.paged import (
    ChunkReads,
    HeadShape,
    lay_out_chunks,
    own_heads,
    unseen,
)
from stepahead.model.batch import ChunkRow, StepInputs

# Keys gathered at a time: more rows than fit are read one part after the other.
_GATHERED_BYTES = 256 << 20
# Beyond it, a captured step, whose table is always as wide as the longest request may get, would
# gather too much that nobody reads.
_MOST_CELLS_CAPTURED = 2048


# --- torch's kernel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedKernel:
    """torch's `varlen_attn` with pages.  `options` are the arguments that this torch has;
    `key_starts`: whether it wants to be told where keys would begin if they lay in a row."""

    varlen_attn: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    key_starts: bool
    before: int = -1  # how many positions before its own a query sees; -1: all

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: KernelRows) -> Tensor:
        """[T, heads, head_dim], each row's queries the last of its context."""
        starts_dev = rows.key_starts_dev if self.key_starts else None
        return self.varlen_attn(
            *(q, k_pages, v_pages, rows.starts_dev, starts_dev, rows.max_count, rows.max_len),
            window_size=(self.before, 0),  # causal, aligned at the end of the context
            seqused_k=rows.lens_dev,
            block_table=rows.table_dev,
            **dict(self.options),
        )


@dataclass(frozen=True)
class KernelRows:
    """The rows of a step as the kernel wants them, r of them.

    starts_dev      int32[r + 1], where each row's queries begin
    key_starts_dev  int32[r + 1], running sum of lens
    lens_dev        int32[r], context lengths
    table_dev       int32[r, width], pages
    max_count       the most queries of a row
    max_len         an upper bound of the lengths
    """

    starts_dev: Tensor
    key_starts_dev: Tensor
    lens_dev: Tensor
    table_dev: Tensor
    max_count: int
    max_len: int


@dataclass(frozen=True)
class KernelAttention:
    """A step's attention by torch's kernel, ready for every layer."""

    kernel: PagedKernel
    rows: KernelRows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """As in `paged.StepAttention`."""
        # the queries are a part of what came from one matrix; kernels have misread such strides
        return self.kernel(q.contiguous(), k_pages, v_pages, self.rows).flatten(1)


@functools.cache
def paged_kernel(shape: HeadShape, device: torch.device) -> PagedKernel | None:
    """torch's paged kernel if it is there for the shape and gives what plain operations give.

    Tried on the device, so not while a graph is captured; the answer is kept.
    """
    if device.type != "cuda" or shape.dtype not in (torch.float16, torch.bfloat16):
        return None
    from torch.nn.attention import varlen

    return usable_kernel(getattr(varlen, "varlen_attn", None), shape, device)


def usable_kernel(
    varlen_attn: Callable[..., Any] | None, shape: HeadShape, device: torch.device
) -> PagedKernel | None:
    """`varlen_attn` as a kernel that gives the right answer for the shape, None if it does not."""
    if varlen_attn is None:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"seqused_k", "block_table", "window_size"} <= known.keys():
        return None
    wanted: dict[str, Any] = {"enable_gqa": shape.num_heads != shape.num_kv_heads, "num_splits": 1}
    if shape.scale is not None:
        wanted["scale"] = shape.scale
    options = tuple((name, value) for name, value in wanted.items() if name in known)
    for key_starts in (True, False):  # flash attention 2 wants them, 3 refuses them
        before = -1 if shape.window is None else shape.window - 1
        kernel = PagedKernel(varlen_attn, options, key_starts, before)
        if _right(kernel, shape, device):
            return kernel
    return None


def _right(kernel: PagedKernel, shape: HeadShape, device: torch.device) -> bool:
    """Whether the kernel gives what plain operations give in float32 on a small case, with and
    without a chunk; False too if it refuses the shape."""
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, shape.dtype)

    width = max(2, -(-512 // shape.page_size))
    pages = [
        noise(1 + 3 * width, shape.page_size, shape.num_kv_heads, shape.head_dim) for _ in "kv"
    ]
    for chunk in (False, True):
        inputs = _small_case(shape, width, chunk, device)
        tokens = len(inputs.token_ids_dev)
        # long queries: few keys decide, so that one key too many or too few shows
        q = 4 * noise(tokens, shape.num_heads, shape.head_dim)
        k = v = noise(tokens, shape.num_kv_heads, shape.head_dim)  # not read: the chunk is late
        exact = gather(inputs, replace(shape, dtype=torch.float32))
        expected = exact.attend(*(x.float() for x in (q, k, v, *pages)))
        try:
            found = KernelAttention(kernel, kernel_rows(inputs)).attend(q, k, v, *pages)
        except (RuntimeError, ValueError, TypeError):
            return False
        if found.shape != expected.shape or not _close(found, expected):
            return False
    return True


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected, rtol=0, atol=0.06)


def _small_case(shape: HeadShape, width: int, chunk: bool, device: torch.device) -> StepInputs:
    """A decode row that fills its pages, a short one, and perhaps a chunk that is not its
    prompt's first."""
    pages = 1 + torch.arange(3 * width, device=device).flip(0).view(3, width)
    most = width * shape.page_size
    count = 3 if chunk else 0
    zeros = torch.zeros(2 + count, dtype=torch.int64, device=device)
    lens_dev = most - (most - 2) * torch.arange(2, device=device)
    row = ChunkRow(first=2, count=count, context_len=count + 2, pages_dev=pages[2])
    return StepInputs(
        *(zeros, zeros, zeros, 2, pages[:2], lens_dev),
        decode_bounds=np.array([most, 2]),
        max_decode_len=most,
        chunks=(row,) if chunk else (),
    )


def kernel_rows(inputs: StepInputs) -> KernelRows:
    """The step's rows; what is only known on the host is filled in by the device, without a copy
    that the host would wait for."""
    n, chunks, device = inputs.n_decode, inputs.chunks, inputs.token_ids_dev.device
    rows = n + len(chunks)
    width = max([inputs.decode_pages_dev.shape[1], *(len(chunk.pages_dev) for chunk in chunks)])
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    lens = torch.ones(rows, dtype=torch.int32, device=device)
    table = torch.zeros((rows, width), dtype=torch.int32, device=device)
    lens[:n] = inputs.decode_lens_dev.clamp(min=1)
    table[:n, : inputs.decode_pages_dev.shape[1]] = inputs.decode_pages_dev
    for row, chunk in enumerate(chunks, n):
        starts[row + 1].fill_(chunk.first + chunk.count)
        lens[row].fill_(chunk.context_len)
        table[row, : len(chunk.pages_dev)] = chunk.pages_dev
    return KernelRows(
        starts,
        F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
        lens,
        table,
        max([1, *(chunk.count for chunk in chunks)]),
        max([inputs.max_decode_len, *(chunk.context_len for chunk in chunks)]),
    )


# --- plain operations -------------------------------------------------------------------------


@dataclass(frozen=True)
class RowGroup:
    """Decode rows begin..end, read together, L cells each.

    pages_dev  int64[(end - begin) * L / page_size]
    mask_dev   [end - begin, 1, L], 0 where the row sees a cell and -inf elsewhere
    """

    begin: int
    end: int
    pages_dev: Tensor
    mask_dev: Tensor


@dataclass(frozen=True)
class GatherAttention:
    """A step's attention in plain operations, ready for every layer.

    Queries are widened with zeros to the width of a whole cell, as in `paged.py`, so that gathered
    keys and values are used as they lie: products per KV head would first copy them head by head.
    """

    own_head_dev: Tensor
    groups: tuple[RowGroup, ...]
    chunks: tuple[ChunkReads, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """As in `paged.StepAttention`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self.groups:
            rows = q[group.begin : group.end]
            out[group.begin : group.end] = self._decode(group, rows, k_pages, v_pages)
        for chunk in self.chunks:
            here = chunk.place
            out[here] = chunk.attend(q[here], k[here], v[here], k_pages, v_pages)
        return out.flatten(1)

    def _decode(self, group: RowGroup, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        n, heads, head_dim = q.shape
        cell = k_pages[0, 0].numel()
        keys = k_pages.flatten(1).index_select(0, group.pages_dev).view(n, -1, cell)
        wide = (q.unsqueeze(2) * self.own_head_dev).view(n, heads, cell)
        scores = torch.baddbmm(group.mask_dev, wide, keys.transpose(1, 2))
        values = v_pages.flatten(1).index_select(0, group.pages_dev).view(n, -1, cell)
        summed = torch.bmm(torch.softmax(scores, -1), values)
        # of each head's wide sum, the part of its own KV head
        kv_heads = cell // head_dim
        parts = summed.view(n, kv_heads, heads // kv_heads, kv_heads, head_dim)
        return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(n, heads, head_dim)


def gather(inputs: StepInputs, shape: HeadShape) -> GatherAttention:
    """A step's attention in plain operations.  Reads no lengths on the host."""
    n, device = inputs.n_decode, inputs.token_ids_dev.device
    pages = inputs.decode_pages_dev
    places = torch.arange(pages.shape[1] * shape.page_size, device=device)
    # an empty row has no softmax; its NaN would be written to its page and spread from there
    hidden = unseen(places, inputs.decode_lens_dev.clamp(min=1).unsqueeze(1), shape.window)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=device)
    mask = mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)
    most = max(1, _GATHERED_BYTES // max(1, len(places) * shape.cell_bytes))
    groups = []
    for begin in range(0, n, most):
        end = min(begin + most, n)
        groups.append(RowGroup(begin, end, pages[begin:end].reshape(-1), mask[begin:end]))
    return GatherAttention(own_heads(shape, device), tuple(groups), lay_out_chunks(inputs, shape))


# --- the choice -------------------------------------------------------------------------------


def lay_out(inputs: StepInputs, shape: HeadShape) -> KernelAttention | GatherAttention:
    """Prepare a step's attention.  Reads nothing on the host."""
    kernel = paged_kernel(shape, inputs.token_ids_dev.device)
    if kernel is None:
        return gather(inputs, shape)
    return KernelAttention(kernel, kernel_rows(inputs))


def can_capture(shape: HeadShape, device: torch.device, max_pages: int) -> bool:
    """Whether a captured step, whose page tables have all `max_pages` columns, costs about what the
    same step costs uncaptured."""
    if paged_kernel(shape, device) is not None:
        return True
    return device.type != "cpu" and max_pages * shape.page_size <= _MOST_CELLS_CAPTURED
