"""All layers of a Llama-like model as one kernel call a step, on the CPU.

A pass over a model whose matrices are laid out for kernels.  The plain layers are its twin.
Knows the model's parts and where a step's pages are; it must not know requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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


class FusedLayers:
    """The layers of a model, float32 but for the matrices' weights."""

    def __init__(self, model: Llama, team: Team) -> None:
        spec = model.spec
        self._model = model
        self._team = team
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
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._room = _Room(_ROWS_AT_A_TIME, self._layouts, model, team)

    def run(self, x: Tensor, inputs: StepInputs, kv: KVPool) -> Tensor:
        """float32[T, hidden] to the same; x itself is overwritten."""
        x = x.contiguous()
        if len(x) > self._room.count:
            self._room = _Room(len(x), self._layouts, self._model, self._team)
        self._look_at(kv)
        # what the addresses point to must live until the kernel is done
        held = self._step(x, inputs)
        self._team.run(
            step.layers,
            *(self._team.address, self._fields, self._matrices, self._room.fields, held[0]),
            *(self._model.spec.rms_eps, self._scale),
        )
        return x

    def _look_at(self, kv: KVPool) -> None:
        if kv is self._pool:
            return
        self._pool = kv
        self._fields[step.PAGE_SIZE] = kv.page_size
        self._fields[step.KV_SIZE] = kv.k[0].element_size()
        for index, layer in enumerate(self._model.layers):
            place = layer.attention.layer  # type: ignore[union-attr]
            self._matrices[index, step.KEYS] = kv.k[place].data_ptr()
            self._matrices[index, step.VALUES] = kv.v[place].data_ptr()

    def _step(self, x: Tensor, inputs: StepInputs) -> tuple[np.ndarray, ...]:
        """int64[step.STEP_FIELDS], and the arrays that it points to."""
        tables, lengths = _reads(inputs)
        positions, cells = inputs.positions_dev.numpy(), inputs.cells_dev.contiguous().numpy()
        turn = self._model.spec.head_dim * 4
        everywhere = positions * turn + self._model.rope.table.data_ptr()
        windowed = positions * turn + self._model.window_rope.table.data_ptr()
        fields = np.zeros(step.STEP_FIELDS, np.int64)
        fields[step.COUNT], fields[step.X_AT] = len(x), x.data_ptr()
        fields[step.TABLES], fields[step.LENGTHS] = tables.ctypes.data, lengths.ctypes.data
        fields[step.CELLS] = cells.ctypes.data
        fields[step.COS], fields[step.WINDOW_COS] = everywhere.ctypes.data, windowed.ctypes.data
        fields[step.SCRATCH] = self._room.scratch.ctypes.data
        fields[step.SCRATCH_BYTES] = self._room.scratch.shape[1] * 4
        return fields, tables, lengths, cells, everywhere, windowed


def _reads(inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
    """For each token the address of its row's pages, and how many positions it sees."""
    count = len(inputs.cells_dev)
    tables, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    decode, pages = inputs.n_decode, inputs.decode_pages_dev
    if decode:
        tables[:decode] = pages.data_ptr() + np.arange(decode) * (pages.stride(0) * 8)
        lengths[:decode] = inputs.decode_lens_dev.numpy()
    for row in inputs.chunks:
        here = slice(row.first, row.first + row.count)
        tables[here] = row.pages_dev.data_ptr()
        lengths[here] = np.arange(row.context_len - row.count, row.context_len) + 1
    return tables, lengths


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
        self.count = -(-count // _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME
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
