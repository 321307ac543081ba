"""The Llama architecture and its kin: Mistral, Qwen2, Qwen3, Gemma 3. A plain model on one device.

It knows arithmetic; it must not know requests, ranks or how its weights got here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.cache.pools import KVPool
from stepahead.model.attention import paged, varlen
from stepahead.model.attention.paged import HeadShape
from stepahead.model.batch import StepInputs, one_by_one
from stepahead.model.layers import Linear, RMSNorm, Rope, empty_parameter, rotate
from stepahead.model.packed import Packing, pack
from stepahead.model.spec import Activation, ModelSpec

if TYPE_CHECKING:
    from stepahead.model.fused import FusedLayers

StepAttention = paged.StepAttention | varlen.KernelAttention | varlen.GatherAttention
_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@dataclass(frozen=True)
class LayerStep:
    """What a step is to the layers of a kind, those that see all or those that see a window:
    rotations as `rotate` takes them, cells int64[T] to write to, and what to attend to."""

    cos_dev: Tensor
    signed_sin_dev: Tensor
    cells_dev: Tensor
    attention: StepAttention


class Embedding(nn.Module):
    """A vector for each token id, times `scale`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float | None = None) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)
        self._scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64[T] to [T, hidden]."""
        found = F.embedding(token_ids, self.weight)
        # the scale is rounded to the weights' dtype: models were trained with it so
        return found if self._scale is None else found * found.new_tensor(self._scale)


class Attention(nn.Module):
    """Queries, keys and values from one stacked matrix, rotated, written to the pool, attended."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = spec.num_heads
        self.head_dim = spec.head_dim
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(spec.hidden_size, (q_rows, kv_rows, kv_rows), spec.qkv_bias)
        self.o = Linear(q_rows, (spec.hidden_size,), spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self._qk_heads = spec.num_heads + spec.num_kv_heads

    def forward(self, x: Tensor, step: LayerStep, kv: KVPool) -> Tensor:
        """[T, hidden] to the same."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv[:, : self._qk_heads], qkv[:, self._qk_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        qk = rotate(qk, step.cos_dev, step.signed_sin_dev)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        kv.write(self.layer, step.cells_dev, k, v)
        return self.o(step.attention.attend(q, k, v, kv.k[self.layer], kv.v[self.layer]))


class MLP(nn.Module):
    """down(act(gate x) * up x), gate and up from one stacked matrix; act is `activation`."""

    def __init__(
        self, hidden_size: int, size: int, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.size = size
        self.gate_up = Linear(hidden_size, (size, size), bias)
        self.down = Linear(size, (hidden_size,), bias)
        self._activate = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        both = self.gate_up(x)
        return self.down(self._activate(both[:, : self.size]).mul_(both[:, self.size :]))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, before another one where the spec says so, and added
    to what came in.  `windowed`: it sees a window only."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_eps)

        self.windowed = spec.sees_window(layer)
        self.attention_norm = norm()
        self.attention = Attention(spec, layer)
        self.after_attention_norm = norm() if spec.post_norms else None
        self.mlp_norm = norm()
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, spec.activation)
        self.after_mlp_norm = norm() if spec.post_norms else None

    def forward(self, x: Tensor, step: LayerStep, kv: KVPool) -> Tensor:
        """[T, hidden] to the same; x itself is overwritten."""
        seen = self.attention(self.attention_norm(x), step, kv)
        x += seen if self.after_attention_norm is None else self.after_attention_norm(seen)
        made = self.mlp(self.mlp_norm(x))
        x += made if self.after_mlp_norm is None else self.after_mlp_norm(made)
        return x


class Llama(nn.Module):
    """The whole model. Call it under torch.inference_mode(); its parameters need no gradients.

    Made without memory: `weights.load_model` or `weights.random_model` give it parameters.
    """

    fine_fence = True  # page tables are read in the call and not after it

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.invariant = False  # what a row gets is the same to the bit, whatever is beside it
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, spec.embed_scale)
        self.rope = Rope(spec.rope, spec.head_dim, spec.max_len)
        self.window_rope = self.rope
        if spec.window_rope is not None:
            self.window_rope = Rope(spec.window_rope, spec.head_dim, spec.max_len)
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        # no layer comes after it that could amplify its rounding
        self.head = Linear(spec.hidden_size, (spec.vocab_size,), fine_sums=False)
        self._fused: FusedLayers | None = None
        self.dtype = torch.float32  # of weights, states and pools; norms may keep float32
        self._kv_dtype: torch.dtype | None = None  # as that
        self.notes: tuple[str, ...] = ()  # what was found out on this machine

    def fuse(self, how: Packing) -> None:
        """Run all layers as one kernel from now on, where the model's shape allows it; its matrices
        are laid out as `how` says, for kernels."""
        from stepahead.model.fused import FusedLayers  # kernels are compiled at import

        assert how.team is not None
        if not self.spec.fusable or self.dtype != torch.float32:
            return
        if how.quantization != "none":
            self._kv_dtype = torch.float16
        if self.spec.tied_head and isinstance(self.embed, Embedding):
            self._tie(how)
        self._fused = FusedLayers(self, how.team)
        if how.settle_threads and how.team.threads > 1:
            self.notes = (self._fused.settle_threads(),)

    def _tie(self, how: Packing) -> None:
        """Embeddings are looked up where the head lies; a stage without the head lays it out for
        that alone, so that it sees the same numbers as the whole does."""
        from stepahead.model.kernel_linear import KernelLinear, TiedEmbedding

        head = self.head
        if not isinstance(head, KernelLinear):
            assert isinstance(self.embed, Embedding)
            plain = Linear(self.spec.hidden_size, (self.spec.vocab_size,), fine_sums=False)
            plain.weight = self.embed.weight
            home = nn.Sequential(plain)
            pack(home, "0", plain, how)
            head = home[0]
        assert isinstance(head, KernelLinear)
        self.add_module("embed", TiedEmbedding(head, self.spec.embed_scale))

    def forward(self, inputs: StepInputs, kv: KVPool) -> Tensor:
        """Run a step: write its keys and values, return hidden states [T, hidden], normed."""
        return self.finish(self.embed(inputs.token_ids_dev), inputs, kv)

    def finish(self, x: Tensor, inputs: StepInputs, kv: KVPool) -> Tensor:
        """The layers and the norm behind the last: as `run`, normed."""
        if self._fused is not None:
            return self._fused.run(x, inputs, kv, self.norm)
        return self.norm(self.run(x, inputs, kv))

    def run(self, x: Tensor, inputs: StepInputs, kv: KVPool) -> Tensor:
        """The layers alone: [T, hidden] to the same; x itself is overwritten."""
        if self._fused is not None:
            return self._fused.run(x, inputs, kv, None)
        if self.invariant:
            inputs = one_by_one(inputs)
        kinds = {layer.windowed for layer in self._layers()}
        steps = {windowed: self._lay_out(x, inputs, kv, windowed) for windowed in kinds}
        for layer in self._layers():
            x = layer(x, steps[layer.windowed], kv)
        return x

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]  # a ModuleList forgets what it holds

    def _lay_out(self, x: Tensor, inputs: StepInputs, kv: KVPool, windowed: bool) -> LayerStep:
        rope = self.window_rope if windowed else self.rope
        cos, signed_sin = rope(inputs.positions_dev, x.dtype)
        heads = self._heads(kv.page_size, windowed)
        # on the CPU lengths cost nothing to look at, and looking saves memory traffic
        if x.device.type == "cpu":
            attention: StepAttention = paged.lay_out(inputs, heads, kv.num_pages)
        else:
            attention = varlen.lay_out(inputs, heads)
        return LayerStep(cos, signed_sin, inputs.cells_dev, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden states [R, hidden]."""
        return self.head(hidden).float()

    def new_kv(self, num_pages: int, page_size: int) -> KVPool:
        """A pool of this model's shape and dtype, on its device."""
        spec = self.spec
        return KVPool(
            *(len(self.layers), num_pages, page_size, spec.num_kv_heads, spec.head_dim),
            dtype=self._kv_dtype or self.dtype,
            device=self._weight.device,
        )

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        """Whether a decode step can be captured, with page tables of `max_pages` columns, and costs
        no more for it."""
        kinds = {layer.windowed for layer in self._layers()}
        return all(
            varlen.can_capture(self._heads(page_size, windowed), self._weight.device, max_pages)
            for windowed in kinds
        )

    @property
    def _weight(self) -> Tensor:
        """Any: they are all on one device."""
        return next(self.parameters())

    def _heads(self, page_size: int, windowed: bool) -> HeadShape:
        spec = self.spec
        return HeadShape(
            *(spec.num_heads, spec.num_kv_heads, spec.head_dim, self.dtype, page_size),
            scale=spec.attention_scale,
            window=spec.sliding_window if windowed else None,
        )
