"""All layers of a Llama-like model as one kernel call a step, on the CPU.

A pass over a model whose matrices are laid out for kernels.  The plain layers are its twin.
Knows the model's parts and where a step's pages are; it must not know requests.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from stepahead.cache.pools import KVPool
from stepahead.kernels import gemm, rows, step
from stepahead.kernels.attend import scratch_floats
from stepahead.kernels.emit import LANES
from stepahead.kernels.gemm import Layout
from stepahead.kernels.team import Team
from stepahead.kernels.tile import PANEL
from stepahead.model.batch import StepInputs
from stepahead.model.kernel_linear import Inputs, KernelLinear
from stepahead.model.layers import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stepahead.model.llama import Layer, Llama

_ACTIVATIONS = {"silu": rows.SILU, "gelu_tanh": rows.GELU_TANH}
_BAND = 256  # rows that go through all layers together
_ROWS_AT_A_TIME = 64  # buffers grow by
_TRIALS, _TRIAL_ROWS, _TRIAL_LAYERS = 6, 16, 6
_CLEARLY = 0.9  # the host may be at work meanwhile


class FusedLayers:
    """The layers of a model, float32 but for the matrices' weights."""

    def __init__(self, model: Llama, team: Team) -> None:
        spec = model.spec
        self._model = model
        self._team = team
        # what the addresses below lead to, though the model were given other weights
        self._held: list[object] = []
        # a ModuleList forgets what it holds
        self._layers = [self._described(layer) for layer in model.layers]  # type: ignore[arg-type]
        self._matrices = np.stack(self._layers)
        self._layouts = [
            part.layout for part in model.layers.modules() if isinstance(part, KernelLinear)
        ]
        self._pool: KVPool | None = None
        self._fields = np.zeros(step.MODEL_FIELDS, np.int64)
        self._fields[step.LAYERS] = len(self._layers)
        self._fields[step.HIDDEN] = spec.hidden_size
        self._fields[step.HEADS] = spec.num_heads
        self._fields[step.KV_HEADS] = spec.num_kv_heads
        self._fields[step.HEAD_DIM] = spec.head_dim
        self._fields[step.MLP] = spec.intermediate_size
        self._fields[step.ACTIVATION] = _ACTIVATIONS[spec.activation]
        self._fields[step.WINDOW] = spec.sliding_window or 0
        self._fields[step.TURNS] = self._kept(model.rope.table)
        self._fields[step.WINDOW_TURNS] = self._kept(model.window_rope.table)
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._room = _Room(_ROWS_AT_A_TIME, self._layouts, model, team)

    def run(self, x: Tensor, inputs: StepInputs, kv: KVPool, norm: RMSNorm | None) -> Tensor:
        """float32[T, hidden] to the same, at last normed if `norm` is given; x is overwritten.  Of
        rows that nobody wants then, the last layer makes keys and values only.

        Shapes, types, lengths, positions and cells are asserted, in some 10 µs a step: kernels go
        by addresses.  Page ids are not, of which there are as many as rows have pages.
        """
        assert x.dtype == torch.float32, "kernels read and write float32"
        assert x.ndim == 2 and x.shape[1] == self._model.spec.hidden_size, "states are [T, hidden]"
        self._check_step(len(x), inputs, kv)
        x = x.contiguous()
        most = min(len(x), _BAND)
        if most > self._room.count:
            self._room = _Room(most, self._layouts, self._model, self._team)
        self._look_at(kv)
        fields, held = self._step(x, inputs)
        wanted, last = inputs.wanted_dev, 0 if norm is None else _floats_at(norm.weight)
        if wanted is None or norm is None or 2 * len(wanted) > len(x):
            fields[step.LAST_NORM] = last
            self._compute(fields)
        else:
            fields[step.KEYS_OF] = len(self._layers) - 1
            self._compute(fields)
            if len(wanted):
                self._finish(x, inputs, wanted, fields, last)
        del held
        return x

    def _compute(self, fields: np.ndarray) -> None:
        # the rows of a chunk are in order: those that a band's see have been as far as these go
        for band in _bands(fields, self._model.spec.hidden_size * 4):
            self._team.run(
                step.layers,
                *(self._team.address, self._fields, self._matrices, self._room.fields, band),
                *(self._model.spec.rms_eps, self._scale),
            )

    def _finish(
        self, x: Tensor, inputs: StepInputs, wanted: Tensor, fields: np.ndarray, norm: int
    ) -> None:
        """The last layer, for some rows; what it says of their keys and values it has said."""
        rest = fields.copy()  # a helper may still look at the other
        some, places = x.index_select(0, wanted), wanted.numpy()
        cells, positions = (
            values.index_select(0, wanted) for values in (inputs.cells_dev, inputs.positions_dev)
        )
        tables, lengths = (every[places] for every in _reads(inputs))
        rest[step.COUNT], rest[step.X_AT], rest[step.DECODED] = len(some), some.data_ptr(), 0
        rest[step.CELLS], rest[step.POSITIONS] = cells.data_ptr(), positions.data_ptr()
        rest[step.TABLES], rest[step.OTHER_LENGTHS] = tables.ctypes.data, lengths.ctypes.data
        rest[step.FIRST], rest[step.KEYS_OF] = len(self._layers) - 1, len(self._layers)
        rest[step.LAST_NORM] = norm
        self._compute(rest)
        x.index_copy_(0, wanted, some)

    def settle_threads(self) -> str:
        """Use all of the team's threads, unless a small step is clearly faster with fewer, as on
        cores that share their units; and say what was seen."""
        most = self._team.threads
        times: dict[int, int] = {}
        for threads in sorted({most, *(max(1, most >> halved) for halved in (1, 2, 3)), 1}):
            self._team.use(threads)
            times[threads] = self._trial_ns()
        best = min(times, key=lambda threads: times[threads])
        self._team.use(best if times[best] < _CLEARLY * times[most] else most)
        self._pool = None  # or the trial's would be kept
        tried = ", ".join(f"{took / 1e6:.1f} ms with {threads}" for threads, took in times.items())
        return f"kernels use {self._team.threads} of {most} threads: a trial took {tried}"

    def _trial_ns(self) -> int:
        """The least time that some layers took for some rows."""
        spec, rows = self._model.spec, min(_TRIAL_ROWS, self._model.spec.max_len)
        took: list[int] = []
        shape = (2, rows, spec.num_kv_heads, spec.head_dim)
        pool = KVPool(len(self._layers), *shape, dtype=torch.float32)
        places = torch.arange(rows)
        pages = torch.ones(rows, 1, dtype=torch.int64)
        cells, lengths = places + rows, places + 1
        inputs = StepInputs(
            *(places, places, cells, rows, pages, lengths, lengths.numpy(), rows, ())
        )
        self._fields[step.LAYERS] = min(_TRIAL_LAYERS, len(self._layers))
        try:
            for _ in range(_TRIALS):
                x = torch.ones(rows, spec.hidden_size)
                begin = time.perf_counter_ns()
                self.run(x, inputs, pool, None)
                took.append(time.perf_counter_ns() - begin)
        finally:
            self._fields[step.LAYERS] = len(self._layers)
        return min(took)

    def _described(self, layer: Layer) -> np.ndarray:
        """int64[step.LAYER_FIELDS], but for the pools."""
        fields = np.zeros(step.LAYER_FIELDS, np.int64)
        attention, mlp = layer.attention, layer.mlp
        norms = {
            step.NORM: layer.attention_norm,
            step.AFTER: layer.after_attention_norm,
            step.MLP_NORM: layer.mlp_norm,
            step.MLP_AFTER: layer.after_mlp_norm,
            step.Q_NORM: attention.q_norm,
            step.K_NORM: attention.k_norm,
        }
        for field, norm in norms.items():
            fields[field] = 0 if norm is None else self._kept(norm.weight)
        fields[step.WINDOWED] = layer.windowed
        for index, part in enumerate((attention.qkv, attention.o, mlp.gate_up, mlp.down)):
            begin = step.MATRICES + index * gemm.FIELDS
            fields[begin : begin + gemm.FIELDS] = _kernel(part).matrix
            self._held.append(part)
        return fields

    def _kept(self, array: Tensor) -> int:
        """The address of float32, held as long as this is."""
        self._held.append(array.detach())
        return _floats_at(array)

    def _look_at(self, kv: KVPool) -> None:
        if kv is self._pool:
            return
        spec = self._model.spec
        shape = (kv.num_pages, kv.page_size, spec.num_kv_heads, spec.head_dim)
        for memory in (*kv.k, *kv.v):
            assert memory.dtype in (torch.float32, torch.float16), "keys are float32 or float16"
            assert memory.dtype == kv.k[0].dtype, "pools of one type"
            assert memory.shape == shape and memory.is_contiguous(), "a pool of other heads"
        self._pool = kv
        self._fields[step.PAGE_SIZE] = kv.page_size
        self._fields[step.KV_SIZE] = kv.k[0].element_size()
        for index, layer in enumerate(self._model.layers):
            place = layer.attention.layer  # type: ignore[union-attr]  # as above
            self._matrices[index, step.KEYS] = kv.k[place].data_ptr()
            self._matrices[index, step.VALUES] = kv.v[place].data_ptr()

    def _check_step(self, count: int, inputs: StepInputs, kv: KVPool) -> None:
        longest, decoded, pages = self._model.spec.max_len, inputs.n_decode, inputs.decode_pages_dev
        assert inputs.cells_dev.shape == inputs.positions_dev.shape == (count,), "a cell a token"
        assert decoded + sum(row.count for row in inputs.chunks) == count, "a row a token"
        assert inputs.decode_lens_dev.shape == (decoded,) == pages.shape[:1], "rows with pages"
        width = pages.shape[1]
        assert pages.dtype == torch.int64 and (width <= 1 or pages.stride(1) == 1), "page ids"
        seen = min(longest, width * kv.page_size)
        assert _lie_within(inputs.decode_lens_dev, 1, seen + 1), "a row longer than its pages"
        assert _lie_within(inputs.positions_dev, 0, longest), "a position beyond the model's length"
        assert _lie_within(inputs.cells_dev, 0, kv.num_pages * kv.page_size), "a cell of no page"
        for row in inputs.chunks:
            seen = min(longest, row.pages_dev.shape[0] * kv.page_size)
            assert row.count <= row.context_len <= seen, "a chunk longer than its pages"

    def _step(self, x: Tensor, inputs: StepInputs) -> tuple[np.ndarray, list[object]]:
        """int64[step.STEP_FIELDS], and what else must live as long."""
        cells, pages = inputs.cells_dev.contiguous(), inputs.decode_pages_dev
        fields = np.zeros(step.STEP_FIELDS, np.int64)
        fields[step.COUNT], fields[step.X_AT] = len(x), x.data_ptr()
        fields[step.KEYS_OF] = len(self._layers)  # there is none
        fields[step.CELLS], fields[step.POSITIONS] = cells.data_ptr(), _at(inputs.positions_dev)
        fields[step.SCRATCH] = self._room.scratch.ctypes.data
        fields[step.SCRATCH_BYTES] = self._room.scratch.shape[1] * 4
        fields[step.DECODED] = inputs.n_decode
        fields[step.PAGES], fields[step.PAGES_BYTES] = pages.data_ptr(), pages.stride(0) * 8
        fields[step.LENGTHS] = _at(inputs.decode_lens_dev)
        if not inputs.chunks:
            return fields, [cells]
        tables, lengths = _chunk_reads(inputs)
        fields[step.TABLES], fields[step.OTHER_LENGTHS] = tables.ctypes.data, lengths.ctypes.data
        return fields, [cells, tables, lengths]


def _bands(fields: np.ndarray, x_bytes: int) -> list[np.ndarray]:
    """A step as some of up to _BAND rows each, one behind the other: what more rows leave between
    two parts of a layer would not stay in the caches."""
    count, decoded = int(fields[step.COUNT]), int(fields[step.DECODED])
    bands = -(-count // _BAND)
    if bands <= 1:
        return [fields]
    given = []
    for at in range(bands):
        first, end = count * at // bands, count * (at + 1) // bands
        band, others = fields.copy(), max(first - decoded, 0)
        band[step.COUNT] = end - first
        band[step.X_AT] += first * x_bytes
        band[step.DECODED] = min(max(decoded - first, 0), end - first)
        band[step.PAGES] += first * fields[step.PAGES_BYTES]
        for place, passed in (
            *((step.CELLS, first), (step.POSITIONS, first), (step.LENGTHS, first)),
            *((step.TABLES, others), (step.OTHER_LENGTHS, others)),
        ):
            band[place] += passed * 8
        given.append(band)
    return given


def _lie_within(values: Tensor, least: int, end: int) -> bool:
    """Whether all of int64[n] are in range(least, end)."""
    assert values.dtype == torch.int64, "lengths, positions and cells are int64"
    found = values.numpy()
    # the places of the least and the largest are found in a tenth of the time that these take
    return not found.size or (
        found.item(found.argmin()) >= least and found.item(found.argmax()) < end
    )


def _at(array: Tensor) -> int:
    """The address of int64 that lie one behind the other."""
    assert array.is_contiguous() and array.dtype == torch.int64
    return array.data_ptr()


def _floats_at(array: Tensor) -> int:
    """The same of float32."""
    assert array.is_contiguous() and array.dtype == torch.float32, "kernels read float32"
    return array.data_ptr()


def _chunk_reads(inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
    """For each of the chunks' tokens the address of its row's pages, and what it sees."""
    tables = [np.full(row.count, _at(row.pages_dev)) for row in inputs.chunks]
    lengths = [np.arange(row.context_len - row.count, row.context_len) + 1 for row in inputs.chunks]
    return np.concatenate(tables), np.concatenate(lengths)


def _reads(inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
    """The same for each of the step's tokens."""
    pages = inputs.decode_pages_dev
    tables = [pages.data_ptr() + np.arange(inputs.n_decode) * pages.stride(0) * 8]
    lengths = [inputs.decode_lens_dev.numpy()]
    if inputs.chunks:
        for every, more in zip((tables, lengths), _chunk_reads(inputs), strict=True):
            every.append(more)
    return np.concatenate(tables), np.concatenate(lengths)


def _kernel(part: nn.Module) -> KernelLinear:
    assert isinstance(part, KernelLinear)
    return part


class _Room:
    """Memory between the parts of a layer, for `count` rows."""

    def __init__(self, count: int, layouts: list[Layout], model: Llama, team: Team) -> None:
        spec = model.spec
        # as many slots as threads at least: they prepare a single row each for itself
        self.count = -(-max(count, team.threads) // _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME
        self._inputs = Inputs(self.count, layouts, team.threads)
        self.fields = self._inputs.fields
        seen = spec.num_heads * spec.head_dim
        widths = {
            step.QKV: _in_panels(seen + 2 * spec.num_kv_heads * spec.head_dim),
            step.SEEN: seen,
            step.GATED: _in_panels(2 * spec.intermediate_size),
            step.ADDED: spec.hidden_size if spec.post_norms else 0,
        }
        # gates are read in whole vectors, the last ones beyond their row
        self._held = [np.empty(self.count * width + LANES, np.float32) for width in widths.values()]
        for (field, width), held in zip(widths.items(), self._held, strict=True):
            self.fields[field], self.fields[field + 1] = held.ctypes.data, width * 4
        self.fields[step.X_BYTES] = spec.hidden_size * 4
        rows = spec.hidden_size, _in_panels(spec.intermediate_size)
        group = spec.num_heads // spec.num_kv_heads
        many = [spec.num_heads * rows for rows in range(1, step.ROWS + 1)]
        scores = [scratch_floats(-(-step.MOST_SCORES // heads), heads) for heads in many]
        scores.append(scratch_floats(spec.max_len, group * step.ROWS))
        longest = max(*scores, *(row + 4 * LANES for row in rows))
        self.scratch = np.empty((team.threads, longest), np.float32)


def _in_panels(channels: int) -> int:
    return -(-channels // PANEL) * PANEL
