"""The largest logit of rows that ask for nothing else, under masks or without.

On the CPU a kernel reads each logit once and copies none; what torch does, elsewhere and with few
tokens, is the same to the token.

Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stepahead.runner.grammar import apply_masks, check_masks

_LARGE = 4096  # tokens from which on the kernel is worth the second that loading it takes


class Choose(Protocol):
    """How such rows are chosen for."""

    def __call__(
        self, logits: Tensor, rows_dev: Tensor | None, masks_dev: Tensor | None = None
    ) -> Tensor:
        """int64[m], of the rows `rows_dev` int64[m] of float32[r, vocab], None for all: the first
        of the largest that the masks int32[m, words] allow, None for any.  NaN is larger than all;
        where all that is allowed is -inf, it is token 0.  Logits may be changed in place.  On the
        CPU other shapes, types and rows are refused with ValueError: their memory is read by
        address."""
        ...


def worth_kernels(place: torch.device, vocab_size: int) -> bool:
    """Whether kernels for what stands around a model are to be loaded."""
    return place.type == "cpu" and vocab_size >= _LARGE


def build_choose(place: torch.device, vocab_size: int) -> Choose:
    """The way that is fast at this place; what it needs is loaded when this returns."""
    if not worth_kernels(place, vocab_size):
        return choose
    # compiled, or read from the cache, as it is imported, and not in the first step
    from stepahead.kernels.choose import choose as kernel

    def choose_here(
        logits: Tensor, rows_dev: Tensor | None, masks_dev: Tensor | None = None
    ) -> Tensor:
        if logits.dtype != torch.float32 or (rows_dev is None and masks_dev is None):
            return choose(logits, rows_dev, masks_dev)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        count, vocab_size = logits.shape
        rows = masks = words = 0
        if rows_dev is not None:
            rows_dev = rows_dev.contiguous()
            check_rows(rows_dev, count)
            count, rows = rows_dev.shape[0], rows_dev.data_ptr()
        if masks_dev is not None:
            masks_dev = masks_dev.contiguous()
            check_masks(masks_dev, count, vocab_size)
            masks, words = masks_dev.data_ptr(), masks_dev.shape[1]
        out = torch.empty(count, dtype=torch.int64)
        stride, chosen = logits.stride(0), out.data_ptr()
        kernel(logits.data_ptr(), stride, vocab_size, rows, count, masks, words, chosen)
        return out

    return choose_here


def check_rows(rows: Tensor, count: int) -> None:
    """ValueError for rows on the CPU that are not int64, of `count` rows."""
    if rows.dtype != torch.int64 or rows.ndim != 1:
        raise ValueError(f"rows are int64[m], not {rows.dtype}{list(rows.shape)}")
    ids = rows.numpy()
    # the places of the least and the largest are found in a tenth of the time that these take
    if ids.size and not (ids.item(ids.argmin()) >= 0 and ids.item(ids.argmax()) < count):
        raise ValueError(f"rows {ids.min()} to {ids.max()} of {count}")


def choose(logits: Tensor, rows_dev: Tensor | None, masks_dev: Tensor | None = None) -> Tensor:
    """As in Choose, by torch and numpy."""
    if masks_dev is None:
        # a number a row is picked, and not all of its logits
        tokens = best(logits)
        return tokens if rows_dev is None else tokens.index_select(0, rows_dev)
    picked = logits if rows_dev is None else logits.index_select(0, rows_dev)
    apply_masks(picked, masks_dev)
    return best(picked)


def best(logits: Tensor) -> Tensor:
    """int64[r]: the first of the largest of float32[r, vocab]."""
    if logits.device.type == "cpu":  # a tenth of what torch takes there
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
