"""What cpu_floor.py and cpu_layers.py time: products, attention, and the CPU's instructions alone.

Products are those of a whole step, by our kernels in each format and by torch's; attention is that
of a step's decode rows over paged keys and values, by our kernel and by its plain torch twin.
Weights and pools are random, and every layer has its own, so that they come from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepahead.cache.pools import KVPool
from stepahead.kernels.attend import attend, scratch_floats
from stepahead.kernels.emit import F32, I16, I32, LANES, Emitter, Value, emitted
from stepahead.kernels.gemm import Layout
from stepahead.kernels.jit import entry
from stepahead.kernels.memory import int64s
from stepahead.kernels.team import Team, meet, take
from stepahead.model.attention import paged
from stepahead.model.batch import StepInputs
from stepahead.model.kernel_linear import FORMATS, KernelLinear
from stepahead.model.layers import Linear
from stepahead.model.spec import ModelSpec

PAGE = 16
KNOWN = 100  # tokens that any vocabulary has
CONTEXT = 192  # positions a row: the middle of 128 prompt tokens and 128 new ones
Product = Callable[[Tensor], Tensor]
Matrix = tuple[int, int, bool]  # rows, columns, whether it is the head


# --- instructions -------------------------------------------------------------------------------

_SUMS = 12  # as many as a tile has: enough to hide how long one takes
_PLACES = 1024


def _different(emit: Emitter, place: Value) -> list[Value]:
    """Vectors from memory, one for each sum and one more: no compiler takes them for the same."""
    kind = emit.vector(F32)
    return [emit.load(emit.at(place, 4 * LANES * at), kind) for at in range(_SUMS + 1)]


def _write_multiply_adds(emit: Emitter, place: Value, turns: Value) -> None:
    """In float32."""
    *sums, x = _different(emit, place)

    def some(index: Value, sums: list[Value]) -> list[Value]:
        return [emit.fma(one, x, x) for one in sums]

    for at, one in enumerate(emit.loop(turns, sums, some)):
        emit.store(one, emit.at(place, 4 * LANES * at))


def _write_pair_products(emit: Emitter, place: Value, turns: Value) -> None:
    """As integer tiles have them: pairs of int16, multiplied and added to sums in int32."""
    pairs = emit.vector(I16, 2 * LANES)
    whole = [emit.builder.bitcast(one, emit.vector(I32)) for one in _different(emit, place)]
    x = emit.builder.bitcast(whole.pop(), pairs)

    def some(index: Value, sums: list[Value]) -> list[Value]:
        bits = [emit.builder.bitcast(one, pairs) for one in sums]
        products = [emit.pairs_product(one, x) for one in bits]
        return [emit.builder.add(*both) for both in zip(sums, products, strict=True)]

    for at, one in enumerate(emit.loop(turns, whole, some)):
        emit.store(one, emit.at(place, 4 * LANES * at))


_multiply_adds = emitted(2, _write_multiply_adds)
_pair_products = emitted(2, _write_pair_products)


@entry("void(int64, int64, int64, int64)")
def multiply_adds(rank: int, team: int, places: int, turns: int) -> None:
    """`turns` times one for each sum, on each thread, in _PLACES bytes of its own."""
    _multiply_adds((places + rank * _PLACES, turns))
    meet(team)


@entry("void(int64, int64, int64, int64)")
def pair_products(rank: int, team: int, places: int, turns: int) -> None:
    """The same for pairs of int16."""
    _pair_products((places + rank * _PLACES, turns))
    meet(team)


# kernel, and operations of one turn on one thread
INSTRUCTIONS: dict[str, tuple[Any, int]] = {
    "float32 multiply-add": (multiply_adds, 2 * LANES * _SUMS),
    "int16 pairs": (pair_products, 4 * LANES * _SUMS),
}


def instructions(kind: str, team: Team, turns: int) -> int:
    """Runs `turns` of them on every thread; how many operations that was."""
    kernel, operations = INSTRUCTIONS[kind]
    places = np.random.default_rng(0).random(_PLACES // 4 * team.threads, np.float32)
    team.run(kernel, team.address, places.ctypes.data, turns)
    return operations * turns * team.threads


# --- products -----------------------------------------------------------------------------------


def matrices(spec: ModelSpec) -> list[Matrix]:
    """Of a step, in order."""
    q, kv = (heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    listed = [(*shape, False) for shape in layer * spec.num_layers]
    return [*listed, (spec.vocab_size, hidden, True)]


def stored_as(quantization: str, is_head: bool) -> str:
    """The head's matrix stays in int8 where others are int4."""
    return "int8" if is_head and quantization == "int4" else quantization


def stored_bytes(spec: ModelSpec, quantization: str) -> int:
    """Of all matrices, scales included, as our kernels read them."""
    layouts = [
        Layout(FORMATS[stored_as(quantization, is_head)], rows, columns)
        for rows, columns, is_head in matrices(spec)
    ]
    return sum(layout.weight_bytes + layout.scale_bytes for layout in layouts)


def _ours(quantization: str) -> Callable[[Tensor, bool, Team], Product]:
    def make(weight: Tensor, is_head: bool, team: Team) -> Product:
        plain = Linear(weight.shape[1], (weight.shape[0],))
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        return KernelLinear(plain, stored_as(quantization, is_head), team)

    return make


def _torch_float32(weight: Tensor, is_head: bool, team: Team) -> Product:
    return lambda x: F.linear(x, weight)


def _onednn_float32(weight: Tensor, is_head: bool, team: Team) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _onednn_int8(weight: Tensor, is_head: bool, team: Team) -> Product:
    """Activations in int8 too; making them so is not counted."""
    scales = weight.abs().amax(1) / 127
    narrow = (weight / scales[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(narrow, None)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    shared = (packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda x: torch.ops.onednn.qlinear_pointwise(x.to(torch.int8), 0.02, 0, *shared)


OURS_BY_PRECISION = {"float32": "none", "float16": "float16", "int8": "int8", "int4": "int4"}
KERNELS: dict[str, Callable[[Tensor, bool, Team], Product]] = {
    **{f"ours {name}": _ours(kind) for name, kind in OURS_BY_PRECISION.items()},
    "torch float32": _torch_float32,
    "oneDNN float32": _onednn_float32,
    "oneDNN int8": _onednn_int8,
}


@dataclass(frozen=True)
class Products:
    """All of a step with one kernel, layers and head apart."""

    layers: list[tuple[int, Product]]  # with their columns
    head: tuple[int, Product]

    @classmethod
    def of(cls, kernel: str, spec: ModelSpec, team: Team) -> Products:
        """With random weights; RuntimeError and the like where torch has no such kernel."""
        made = []
        for rows, columns, is_head in matrices(spec):
            weight = torch.randn(rows, columns) * columns**-0.5
            made.append((columns, KERNELS[kernel](weight, is_head, team)))
        products = cls(made[:-1], made[-1])
        products.run({columns: torch.randn(2, columns) for columns, _ in made})
        return products

    def run(self, inputs: dict[int, Tensor]) -> None:
        """On inputs by their columns."""
        for columns, product in self.layers:
            product(inputs[columns])
        self.run_head(inputs)

    def run_head(self, inputs: dict[int, Tensor]) -> None:
        """The last of them alone."""
        columns, product = self.head
        product(inputs[columns])


def inputs_of(spec: ModelSpec, rows: int) -> dict[int, Tensor]:
    """Random ones for `Products`."""
    return {columns: torch.randn(rows, columns) for _, columns, _ in matrices(spec)}


# --- attention ----------------------------------------------------------------------------------

_COUNT, _HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE, _WINDOW = range(6)
_Q, _K, _V, _TABLES, _LENGTHS, _SCRATCH, _SCRATCH_BYTES, _OUT = range(6, 14)


_FLOAT32_SIZE = 4


@entry("void(int64, int64, int64[::1], float64)")
def attention(rank: int, team: int, given: np.ndarray, scale: float) -> None:
    """Of one layer's decode rows, as a step shares short ones out."""
    kv_heads, head_bytes = given[_KV_HEADS], given[_HEAD_DIM] * 4
    tables, lengths = int64s(given[_TABLES], given[_COUNT]), int64s(given[_LENGTHS], given[_COUNT])
    while True:
        row = take(team)
        if row >= given[_COUNT]:
            break
        offset = row * given[_HEADS] * head_bytes
        attend(
            _FLOAT32_SIZE,
            1,
            given[_Q] + offset,
            given[_HEADS] * head_bytes,
            kv_heads,
            given[_HEADS] // kv_heads,
            given[_HEAD_DIM],
            given[_K],
            given[_V],
            kv_heads * head_bytes,
            given[_PAGE_SIZE],
            tables[row],
            given[_WINDOW],
            lengths[row],
            scale,
            given[_SCRATCH] + rank * given[_SCRATCH_BYTES],
            given[_OUT] + offset,
            given[_HEADS] * head_bytes,
        )
    meet(team)


class Attention:
    """Decode rows with CONTEXT positions each, over the pools of all layers."""

    def __init__(self, spec: ModelSpec, rows: int, team: Team) -> None:
        self._spec, self._team = spec, team
        num_pages = 1 + rows * (CONTEXT // PAGE)
        heads = (spec.num_kv_heads, spec.head_dim)
        self._kv = KVPool(spec.num_layers, num_pages, PAGE, *heads, torch.float32)
        for pages in (*self._kv.k, *self._kv.v):
            pages.normal_()
        self._inputs = decode_step(rows, num_pages)
        self._q = torch.randn(rows, spec.num_heads, spec.head_dim)
        own = torch.randn(2, rows, *heads)
        self._own_k, self._own_v = own[0], own[1]
        pages = self._inputs.decode_pages_dev
        self._tables = pages.data_ptr() + np.arange(rows) * (pages.stride(0) * 8)
        self._scratch = np.empty(
            (team.threads, scratch_floats(CONTEXT, spec.num_heads)), np.float32
        )

    def _windowed(self) -> list[bool]:
        return [self._spec.sees_window(layer) for layer in range(self._spec.num_layers)]

    @property
    def _scale(self) -> float:
        return self._spec.attention_scale or self._spec.head_dim**-0.5

    def ours(self) -> Tensor:
        """All layers; [rows, heads * head_dim] of the last."""
        spec, kv, out = self._spec, self._kv, torch.empty_like(self._q)
        given = np.zeros(_OUT + 1, np.int64)
        given[_COUNT], given[_HEADS], given[_KV_HEADS] = len(out), spec.num_heads, spec.num_kv_heads
        given[_HEAD_DIM], given[_PAGE_SIZE] = spec.head_dim, PAGE
        given[_Q], given[_OUT] = self._q.data_ptr(), out.data_ptr()
        given[_TABLES] = self._tables.ctypes.data
        given[_LENGTHS] = self._inputs.decode_lens_dev.data_ptr()
        given[_SCRATCH] = self._scratch.ctypes.data
        given[_SCRATCH_BYTES] = self._scratch.shape[1] * 4
        for layer, windowed in enumerate(self._windowed()):
            given[_WINDOW] = (spec.sliding_window or 0) if windowed else 0
            given[_K], given[_V] = kv.k[layer].data_ptr(), kv.v[layer].data_ptr()
            self._team.run(attention, self._team.address, given, self._scale)
        return out.flatten(1)

    def torch(self) -> Tensor:
        """The same by the plain twin, as it is laid out once a step."""
        laid_out = {windowed: self._lay_out(windowed) for windowed in set(self._windowed())}
        out = torch.empty(0)
        for layer, windowed in enumerate(self._windowed()):
            keys, values = self._kv.k[layer], self._kv.v[layer]
            step = laid_out[windowed]
            out = step.attend(self._q, self._own_k, self._own_v, keys, values)
        return out

    def _lay_out(self, windowed: bool) -> paged.StepAttention:
        spec = self._spec
        shape = paged.HeadShape(
            *(spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.float32, PAGE),
            scale=spec.attention_scale,
            window=spec.sliding_window if windowed else None,
        )
        return paged.lay_out(self._inputs, shape, self._kv.num_pages)


def decode_step(rows: int, num_pages: int) -> StepInputs:
    """Rows with CONTEXT positions each, their pages in random order."""
    width = CONTEXT // PAGE
    pages = 1 + torch.randperm(num_pages - 1)[: rows * width].view(rows, width)
    lens = torch.full((rows,), CONTEXT)
    return StepInputs(
        token_ids_dev=torch.randint(0, KNOWN, (rows,)),
        positions_dev=lens - 1,
        cells_dev=pages[:, -1] * PAGE + PAGE - 1,
        n_decode=rows,
        decode_pages_dev=pages,
        decode_lens_dev=lens,
        decode_bounds=np.full(rows, CONTEXT),
        max_decode_len=CONTEXT,
        chunks=(),
    )
