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
_ROWS_AT_A_TIME = 64  # buffers grow by
_TRIALS, _TRIAL_ROWS, _TRIAL_LAYERS = 6, 16, 6
_CLEARLY = 0.9  # the host may be at work meanwhile


class FusedLayers:
    """The layers of a model, float32 but for the matrices' weights."""

    def __init__(self, model: Llama, team: Team) -> None:
        spec = model.spec
        self._model = model
        self._team = team
        # a ModuleList forgets what it holds
        self._layers = [_described(layer) for layer in model.layers]  # type: ignore[arg-type]
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
        self._fields[step.TURNS] = model.rope.table.data_ptr()
        self._fields[step.WINDOW_TURNS] = model.window_rope.table.data_ptr()
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._room = _Room(_ROWS_AT_A_TIME, self._layouts, model, team)

    def run(self, x: Tensor, inputs: StepInputs, kv: KVPool, norm: RMSNorm | None) -> Tensor:
        """float32[T, hidden] to the same, at last normed if `norm` is given; x is overwritten."""
        assert x.dtype == torch.float32, "kernels read and write float32"
        x = x.contiguous()
        if len(x) > self._room.count:
            self._room = _Room(len(x), self._layouts, self._model, self._team)
        self._look_at(kv)
        fields, held = self._step(x, inputs)
        fields[step.LAST_NORM] = _address(norm)
        self._team.run(
            step.layers,
            *(self._team.address, self._fields, self._matrices, self._room.fields, fields),
            *(self._model.spec.rms_eps, self._scale),
        )
        del held
        return x

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
        for _ in range(_TRIALS):
            x = torch.ones(rows, spec.hidden_size)
            begin = time.perf_counter_ns()
            self.run(x, inputs, pool, None)
            took.append(time.perf_counter_ns() - begin)
        self._fields[step.LAYERS] = len(self._layers)
        return min(took)

    def _look_at(self, kv: KVPool) -> None:
        if kv is self._pool:
            return
        self._pool = kv
        self._fields[step.PAGE_SIZE] = kv.page_size
        self._fields[step.KV_SIZE] = kv.k[0].element_size()
        for index, layer in enumerate(self._model.layers):
            place = layer.attention.layer  # type: ignore[union-attr]  # as above
            self._matrices[index, step.KEYS] = kv.k[place].data_ptr()
            self._matrices[index, step.VALUES] = kv.v[place].data_ptr()

    def _step(self, x: Tensor, inputs: StepInputs) -> tuple[np.ndarray, list[object]]:
        """int64[step.STEP_FIELDS], and what else must live as long."""
        cells, pages = inputs.cells_dev.contiguous(), inputs.decode_pages_dev
        fields = np.zeros(step.STEP_FIELDS, np.int64)
        fields[step.COUNT], fields[step.X_AT] = len(x), x.data_ptr()
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


def _at(array: Tensor) -> int:
    """The address of int64 that lie one behind the other."""
    assert array.is_contiguous() and array.element_size() == 8
    return array.data_ptr()


def _chunk_reads(inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
    """For each of the chunks' tokens the address of its row's pages, and what it sees."""
    tables = [np.full(row.count, _at(row.pages_dev)) for row in inputs.chunks]
    lengths = [np.arange(row.context_len - row.count, row.context_len) + 1 for row in inputs.chunks]
    return np.concatenate(tables), np.concatenate(lengths)


def _described(layer: Layer) -> np.ndarray:
    """int64[step.LAYER_FIELDS], but for the pools."""
    fields = np.zeros(step.LAYER_FIELDS, np.int64)
    attention, mlp = layer.attention, layer.mlp
    fields[step.NORM] = _address(layer.attention_norm)
    fields[step.AFTER] = _address(layer.after_attention_norm)
    fields[step.MLP_NORM] = _address(layer.mlp_norm)
    fields[step.MLP_AFTER] = _address(layer.after_mlp_norm)
    fields[step.Q_NORM] = _address(attention.q_norm)
    fields[step.K_NORM] = _address(attention.k_norm)
    fields[step.WINDOWED] = layer.windowed
    for index, part in enumerate((attention.qkv, attention.o, mlp.gate_up, mlp.down)):
        begin = step.MATRICES + index * gemm.FIELDS
        fields[begin : begin + gemm.FIELDS] = _kernel(part).matrix
    return fields


def _kernel(part: nn.Module) -> KernelLinear:
    assert isinstance(part, KernelLinear)
    return part


def _address(norm: RMSNorm | None) -> int:
    return 0 if norm is None else norm.weight.data_ptr()


class _Room:
    """Memory between the parts of a layer, for `count` rows."""

    def __init__(self, count: int, layouts: list[Layout], model: Llama, team: Team) -> None:
        spec = model.spec
        # as many slots as threads at least: they prepare a single row each for itself
        self.count = -(-max(count, team.threads) // _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME
        self._inputs = Inputs(self.count, layouts)
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
        longest = max(spec.max_len, spec.hidden_size, _in_panels(spec.intermediate_size))
        self.scratch = np.empty((team.threads, longest + 4 * LANES), np.float32)


def _in_panels(channels: int) -> int:
    return -(-channels // PANEL) * PANEL
