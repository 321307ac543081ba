"""Attention for devices with their own memory: the same numbers as on the CPU, no look at lengths.

The plain operations run here for real; torch's paged kernel is stood in for by one that is written
out, and by its own shape check on tensors that only pretend to lie on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from stepahead.cache.pools import KVPool
from stepahead.model.attention import paged, varlen
from stepahead.model.attention.paged import HeadShape
from stepahead.model.batch import ChunkRow, StepInputs

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 3, 8, 4
SHAPE = HeadShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32, PAGE)
CPU = torch.device("cpu")
ELSEWHERE = "meta"  # under FakeTensorMode, a device that is not the CPU and whose values nobody has


class Case:
    """A random ragged step over a filled pool: decode rows, some dead, and chunks at offsets."""

    def __init__(self, seed: int, decode: int, chunks: int, shape: HeadShape = SHAPE) -> None:
        self.shape = shape
        self.draw = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.free = (self.draw.permutation(400) + 1).tolist()
        self.pool = KVPool(1, 401, shape.page_size, shape.num_kv_heads, shape.head_dim, shape.dtype)
        self.pool.k[0].normal_()
        self.pool.v[0].normal_()
        bounds = self.draw.integers(1, 60, decode)
        dead = self.draw.random(decode) < 0.2
        lens = np.where(dead, 1, bounds)
        table = [self.pages(bound) for bound in bounds]
        width = max((len(pages) for pages in table), default=0) + int(self.draw.integers(0, 3))
        padded = [pages + [0] * (width - len(pages)) for pages in table]
        rows, tokens = [], decode
        for _ in range(chunks):
            count, start = int(self.draw.integers(1, 12)), int(self.draw.integers(0, 2)) * 21
            pages = torch.tensor(self.pages(start + count))
            rows.append(ChunkRow(tokens, count, start + count, pages))
            tokens += count
        zeros = torch.zeros(tokens, dtype=torch.int64)
        self.inputs = StepInputs(
            *(zeros, zeros, zeros, decode),
            torch.tensor(padded, dtype=torch.int64).view(decode, width),
            torch.from_numpy(lens.astype(np.int64)),
            bounds.astype(np.int64),
            int(bounds.max(initial=0)),
            tuple(rows),
        )
        self.q = torch.randn(tokens, shape.num_heads, shape.head_dim).to(shape.dtype)
        k, v = torch.randn(2, tokens, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        for row in rows:  # a step's own keys lie in the pages by the time it attends
            places = torch.arange(row.context_len - row.count, row.context_len)
            cells = row.pages_dev[places // shape.page_size] * shape.page_size
            here = slice(row.first, row.first + row.count)
            self.pool.write(0, cells + places % shape.page_size, k[here], v[here])
        self.step = (self.q, k, v, self.pool.k[0], self.pool.v[0])

    def pages(self, length: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-length // self.shape.page_size))]

    def expected(self) -> Tensor:
        laid_out = paged.lay_out(self.inputs, self.shape, self.pool.num_pages)
        return laid_out.attend(*self.step)


CASES = [
    (seed, decode, chunks)
    for seed, (decode, chunks) in enumerate([(1, 0), (9, 0), (7, 2), (0, 3), (0, 1), (30, 1)])
]


SHAPES = [SHAPE, replace(SHAPE, window=7, scale=0.3)]


@pytest.mark.parametrize("shape", SHAPES, ids=["all", "window"])
@pytest.mark.parametrize(("seed", "decode", "chunks"), CASES)
def test_plain_operations_give_what_the_cpu_gives(
    seed: int, decode: int, chunks: int, shape: HeadShape
) -> None:
    case = Case(seed, decode, chunks, shape)
    found = varlen.gather(case.inputs, shape).attend(*case.step)
    torch.testing.assert_close(found, case.expected(), rtol=0, atol=1e-5)


def test_more_rows_than_memory_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, 11, 1)
    cells = case.inputs.decode_pages_dev.shape[1] * PAGE
    monkeypatch.setattr(varlen, "_GATHERED_BYTES", 4 * cells * SHAPE.cell_bytes)
    step = varlen.gather(case.inputs, SHAPE)
    assert [(group.begin, group.end) for group in step.groups] == [(0, 4), (4, 8), (8, 11)]
    torch.testing.assert_close(step.attend(*case.step), case.expected(), rtol=0, atol=1e-5)


def test_an_empty_row_stays_finite() -> None:
    case = Case(5, 3, 0)
    case.inputs.decode_lens_dev[1] = 0
    assert varlen.gather(case.inputs, SHAPE).attend(*case.step).isfinite().all()


class NoHostReads(TorchDispatchMode):
    """Raises where a value would have to come to the host, or one made there would have to go."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        for what in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh"):
            assert what not in name, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["gather", "kernel"])
def test_the_host_reads_nothing_of_the_device(way: str) -> None:
    """Pretended tensors have no values, and do not mix with the CPU's."""
    with FakeTensorMode(), NoHostReads(), torch.inference_mode():
        inputs = pretended(decode=3, chunk=5, page_size=PAGE)
        if way == "kernel":
            assert varlen.kernel_rows(inputs).lens_dev.device.type == ELSEWHERE
            return
        pages = [torch.empty(9, PAGE, KV_HEADS, HEAD_DIM, device=ELSEWHERE) for _ in "kv"]
        q = torch.empty(8, HEADS, HEAD_DIM, device=ELSEWHERE)
        k = torch.empty(8, KV_HEADS, HEAD_DIM, device=ELSEWHERE)
        out = varlen.gather(inputs, SHAPE).attend(q, k, k, *pages)
    assert (tuple(out.shape), out.device.type) == ((8, HEADS * HEAD_DIM), ELSEWHERE)


def test_the_watchers_see_host_reads() -> None:
    with NoHostReads(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(2)[0].item()
    with NoHostReads(), pytest.raises(AssertionError, match="waits for the device"):
        torch.tensor([1, 2])
    with FakeTensorMode():
        inputs = pretended(decode=3, chunk=5, page_size=PAGE)
        with pytest.raises(RuntimeError, match="aten"):
            inputs.decode_lens_dev.tolist()
        with pytest.raises(RuntimeError, match="on the same device"):
            inputs.decode_lens_dev + torch.arange(3)


def pretended(decode: int, chunk: int, page_size: int) -> StepInputs:
    """Inputs on a device that is not there; call it under FakeTensorMode."""

    def ints(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=ELSEWHERE)

    tokens, context = decode + chunk, page_size + chunk
    row = ChunkRow(decode, chunk, context, ints(-(-context // page_size)))
    return StepInputs(
        *(ints(tokens), ints(tokens), ints(tokens), decode, ints(decode, 3), ints(decode)),
        np.full(decode, 2 * page_size),
        2 * page_size,
        (row,),
    )


# --- torch's kernel ---------------------------------------------------------------------------


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """What `varlen_attn` is documented to do, row by row in float64."""
    assert seqused_k is not None
    assert block_table is not None
    assert window_size[1] == 0
    assert num_splits == 1, "split rows come out wrong in some versions of torch"
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert cu_seq_k is None or torch.equal(cu_seq_k[1:], seqused_k.cumsum(0, dtype=torch.int32))
    assert max_k >= int(seqused_k.max())
    assert max_q == int(cu_seq_q.diff().max())
    out = torch.empty(query.shape, dtype=torch.float64)
    for row, length in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[row : row + 2].tolist()
        k = key[block_table[row].long()].flatten(0, 1)[:length].double()
        v = value[block_table[row].long()].flatten(0, 1)[:length].double()
        for token in range(first, last):
            seen = length - (last - 1 - token)
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // key.shape[2])
                first_seen = 0 if window_size[0] < 0 else max(0, seen - 1 - window_size[0])
                these = slice(first_seen, seen)
                scores = k[these, kv_head] @ query[token, head].double()
                scores *= HEAD_DIM**-0.5 if scale is None else scale
                out[token, head] = torch.softmax(scores, 0) @ v[these, kv_head]
    return out.to(query.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=["all", "window"])
@pytest.mark.parametrize(("seed", "decode", "chunks"), CASES)
def test_the_kernel_is_given_the_step(
    seed: int, decode: int, chunks: int, shape: HeadShape
) -> None:
    case = Case(seed, decode, chunks, shape)
    kernel = varlen.usable_kernel(written_out, shape, CPU)
    assert kernel is not None
    step = varlen.KernelAttention(kernel, varlen.kernel_rows(case.inputs))
    torch.testing.assert_close(step.attend(*case.step), case.expected(), rtol=0, atol=1e-5)


def test_a_kernel_that_errs_is_not_used() -> None:
    def splits_go_missing(*args: Any, num_splits: int | None = None, **kwargs: Any) -> Tensor:
        return written_out(*args, num_splits=1, **kwargs).index_fill_(0, torch.tensor(1), 0.0)

    def sees_ahead(*args: Any, window_size: Any = None, **kwargs: Any) -> Tensor:
        q, k, v, starts, *rest = args
        every = torch.arange(len(q) + 1, dtype=torch.int32)  # each token a row of its own
        rows = (every[1:, None] > starts[1:]).sum(1).clamp(max=len(starts) - 2)
        table, lens = kwargs.pop("block_table")[rows], kwargs.pop("seqused_k")[rows]
        return written_out(
            *(q, k, v, every, None, 1, rest[-1]),
            window_size=(-1, 0),
            block_table=table,
            seqused_k=lens,
            **kwargs,
        )

    def sees_too_far_back(*args: Any, window_size: Any = None, **kwargs: Any) -> Tensor:
        return written_out(*args, window_size=(-1, 0), **kwargs)

    wrongs = ((splits_go_missing, SHAPE), (sees_ahead, SHAPE), (sees_too_far_back, SHAPES[1]))
    for wrong, shape in wrongs:
        assert varlen.usable_kernel(functools.wraps(written_out)(wrong), shape, CPU) is None


def test_a_kernel_that_refuses_the_shape_or_lacks_pages_is_not_used() -> None:
    def refuses(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")

    def without_pages(query: Tensor, seqused_k: Tensor, window_size: tuple[int, int]) -> Tensor:
        raise AssertionError("called")

    refuses = functools.wraps(written_out)(refuses)
    assert varlen.usable_kernel(refuses, SHAPE, CPU) is None
    assert varlen.usable_kernel(without_pages, SHAPE, CPU) is None
    assert varlen.usable_kernel(None, SHAPE, CPU) is None


@pytest.mark.parametrize("wants_starts", [True, False])
def test_key_starts_are_given_to_those_who_want_them(wants_starts: bool) -> None:
    def picky(*args: Any, **kwargs: Any) -> Tensor:
        if (args[4] is not None) != wants_starts:
            raise RuntimeError("cu_seq_k")
        return written_out(*args, **kwargs)

    kernel = varlen.usable_kernel(functools.wraps(written_out)(picky), SHAPE, CPU)
    assert kernel is not None
    assert kernel.key_starts == wants_starts


def test_torchs_own_kernel_takes_what_it_is_given() -> None:
    """Its shape check, on tensors that only pretend to lie on a GPU."""
    shape = HeadShape(8, 2, 64, torch.bfloat16, 256)
    with FakeTensorMode(), torch.inference_mode():
        pages = [torch.empty(9, 256, 2, 64, dtype=torch.bfloat16, device=ELSEWHERE) for _ in "kv"]
        inputs = pretended(decode=3, chunk=5, page_size=256)
        options = (("enable_gqa", True), ("num_splits", 1))
        kernel = varlen.PagedKernel(varlen_attn, options, key_starts=True)
        q = torch.empty(8, 8, 64, dtype=torch.bfloat16, device=ELSEWHERE)
        k = torch.empty(8, 2, 64, dtype=torch.bfloat16, device=ELSEWHERE)
        step = varlen.KernelAttention(kernel, varlen.kernel_rows(inputs))
        out = step.attend(q, k, k, *pages)
    assert (tuple(out.shape), out.dtype, out.device.type) == ((8, 512), shape.dtype, ELSEWHERE)


def test_on_the_cpu_and_in_float32_there_is_no_kernel() -> None:
    half = HeadShape(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, PAGE)
    assert varlen.paged_kernel(half, CPU) is None
    assert varlen.paged_kernel(SHAPE, torch.device("cuda", 0)) is None


def test_what_can_be_captured() -> None:
    gpu = torch.device("cuda", 0)
    assert varlen.can_capture(SHAPE, gpu, 2048 // PAGE)
    assert not varlen.can_capture(SHAPE, gpu, 2048 // PAGE + 1)
    assert not varlen.can_capture(SHAPE, CPU, 1)
