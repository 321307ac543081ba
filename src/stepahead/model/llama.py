"""The Llama architecture and its kin: Mistral, Qwen2, Qwen3. A plain model on one device.

It knows arithmetic; it must not know requests, ranks or how its weights got here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.cache.pools import KVPool
from stepahead.model.attention import paged, varlen
from stepahead.model.attention.paged import HeadShape
from stepahead.model.batch import StepInputs
from stepahead.model.layers import Linear, RMSNorm, Rope, empty_parameter, rotate
from stepahead.model.spec import ModelSpec

StepAttention = paged.StepAttention | varlen.KernelAttention | varlen.GatherAttention


class Embedding(nn.Module):
    """A vector for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64[T] to [T, hidden]."""
        return F.embedding(token_ids, self.weight)


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

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cells: Tensor, step: StepAttention, kv: KVPool
    ) -> Tensor:
        """[T, hidden] to the same."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv[:, : self._qk_heads], qkv[:, self._qk_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        qk = rotate(qk, cos, sin)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        kv.write(self.layer, cells, k, v)
        return self.o(step.attend(q, k, v, kv.k[self.layer], kv.v[self.layer]))


class MLP(nn.Module):
    """down(silu(gate x) * up x), gate and up from one stacked matrix."""

    def __init__(self, hidden_size: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.size = size
        self.gate_up = Linear(hidden_size, (size, size), bias)
        self.down = Linear(size, (hidden_size,), bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        both = self.gate_up(x)
        return self.down(F.silu(both[:, : self.size]).mul_(both[:, self.size :]))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.attention = Attention(spec, layer)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cells: Tensor, step: StepAttention, kv: KVPool
    ) -> Tensor:
        """[T, hidden] to the same; x itself is overwritten."""
        x += self.attention(self.attention_norm(x), cos, sin, cells, step, kv)
        x += self.mlp(self.mlp_norm(x))
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
        self.embed = Embedding(spec.vocab_size, spec.hidden_size)
        self.rope = Rope(spec.rope, spec.head_dim, spec.max_len)
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        # no layer comes after it that could amplify its rounding
        self.head = Linear(spec.hidden_size, (spec.vocab_size,), fine_sums=False)

    def forward(self, inputs: StepInputs, kv: KVPool) -> Tensor:
        """Run a step: write its keys and values, return hidden states [T, hidden], normed."""
        return self.norm(self.run(self.embed(inputs.token_ids_dev), inputs, kv))

    def run(self, x: Tensor, inputs: StepInputs, kv: KVPool) -> Tensor:
        """The layers alone: [T, hidden] to the same; x itself is overwritten."""
        cos, sin = self.rope(inputs.positions_dev, x.dtype)
        # on the CPU lengths cost nothing to look at, and looking saves memory traffic
        lay_out = paged.lay_out if x.device.type == "cpu" else varlen.lay_out
        step = lay_out(inputs, self._heads(kv.page_size))
        for layer in self.layers:
            x = layer(x, cos, sin, inputs.cells_dev, step, kv)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden states [R, hidden]."""
        return self.head(hidden).float()

    def new_kv(self, num_pages: int, page_size: int) -> KVPool:
        """A pool of this model's shape and dtype, on its device."""
        spec, weight = self.spec, self._weight
        return KVPool(
            *(len(self.layers), num_pages, page_size, spec.num_kv_heads, spec.head_dim),
            dtype=weight.dtype,
            device=weight.device,
        )

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        """Whether a decode step can be captured, with page tables of `max_pages` columns, and costs
        no more for it."""
        return varlen.can_capture(self._heads(page_size), self._weight.device, max_pages)

    @property
    def _weight(self) -> Tensor:
        """Any: they are all of one dtype, on one device."""
        return next(self.parameters())

    def _heads(self, page_size: int) -> HeadShape:
        spec = self.spec
        dtype = self._weight.dtype
        return HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype, page_size)
