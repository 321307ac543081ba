"""A layer with a compressed cache and sparse attention (MLA and DSA).

It keeps one latent row a token for all its heads.  Some layers own an indexer and keep a small key
a token for it; it chooses the positions that their queries read, and the layers after it share the
choice.

It knows arithmetic; it must not know requests, ranks or how its weights got here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.cache.pools import LatentPool
from stepahead.model.attention.latent import LatentAttention, Selection
from stepahead.model.layers import Linear, RMSNorm, empty_parameter, neighbours_apart, rotate
from stepahead.model.llama import MLP
from stepahead.model.moe import MoE
from stepahead.model.sparse import SparseSpec
from stepahead.model.spec import ModelSpec

Angles = tuple[Tensor, Tensor]
Choice = tuple[Selection, ...]
_KEY_NORM_EPS = 1e-6


class KeysAndValues(nn.Module):
    """kv_b_proj: each head's keys and values as functions of a latent, used whole or by halves."""

    def __init__(self, spec: ModelSpec, sparse: SparseSpec) -> None:
        super().__init__()
        self.shape = (spec.num_heads, sparse.nope_dim + sparse.v_dim)
        self.nope = sparse.nope_dim
        self.weight = empty_parameter(self.shape[0] * self.shape[1], sparse.kv_lora_rank)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [L, heads, nope] and values [L, heads, v] of latents [L, latent]."""
        both = F.linear(latents, self.weight).unflatten(1, self.shape)
        return both[..., : self.nope], both[..., self.nope :]

    def absorb(self, q: Tensor) -> Tensor:
        """[T, heads, latent] of queries [T, heads, nope]."""
        keys = self.weight.unflatten(0, self.shape)[:, : self.nope]
        return torch.bmm(q.transpose(0, 1), keys).transpose(0, 1)

    def values(self, sums: Tensor) -> Tensor:
        """[T, heads, v] of sums of latents [T, heads, latent]."""
        values = self.weight.unflatten(0, self.shape)[:, self.nope :]
        return torch.bmm(sums.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


class KeyNorm(nn.Module):
    """The layer norm of index keys, with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, _KEY_NORM_EPS)


class Attention(nn.Module):
    """Compressed attention over what an indexer chose: its own, or that of a layer before it."""

    def __init__(self, spec: ModelSpec, sparse: SparseSpec, layer: int, *, indexer: bool) -> None:
        super().__init__()
        self.layer = layer
        self.sparse = sparse
        low, latent, heads = sparse.q_lora_rank, sparse.kv_lora_rank, spec.num_heads
        # the indexer's matrices are on the same inputs: keys and weights, queries
        self._down = [low, sparse.row_values]
        self._up = [heads * (sparse.nope_dim + sparse.rope_dim)]
        if indexer:
            self._down += [sparse.index_dim, sparse.index_heads]
            self._up += [sparse.index_heads * sparse.index_dim]
        self.down = Linear(spec.hidden_size, tuple(self._down))
        self.q_norm = RMSNorm(low, sparse.latent_eps)
        self.kv_norm = RMSNorm(latent, sparse.latent_eps)
        self.up = Linear(low, tuple(self._up))
        self.kv = KeysAndValues(spec, sparse)
        self.o = Linear(heads * sparse.v_dim, (spec.hidden_size,))
        self.key_norm = KeyNorm(sparse.index_dim) if indexer else None

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        cells: Tensor,
        step: LatentAttention,
        pool: LatentPool,
        chosen: Choice | None,
    ) -> tuple[Tensor, Choice]:
        """[T, hidden] to the same, and what was chosen: `chosen` where it is given."""
        sparse = self.sparse
        low, row, *index = self.down(x).split(self._down, 1)
        q, *index_q = self.up(self.q_norm(low)).split(self._up, 1)
        whole = q.unflatten(1, (-1, sparse.nope_dim + sparse.rope_dim))
        plain, turned = whole.split((sparse.nope_dim, sparse.rope_dim), 2)
        q = torch.cat((plain, _turn(turned, angles, sparse.pairs)), 2)
        latent, key = row.split((sparse.kv_lora_rank, sparse.rope_dim), 1)
        key = _turn(key.unsqueeze(1), angles, sparse.pairs).squeeze(1)
        rows = torch.cat((self.kv_norm(latent), key), 1)
        pool.write_rows(self.layer, cells, rows)
        if self.key_norm is not None:
            # written where nothing is scored, too: a longer context will score them
            pool.write_keys(self.layer, cells, self._index_keys(index[0], angles))
            if chosen is None:
                queries = self._index_queries(index_q[0], angles)
                chosen = step.choose(queries, self._weights(index[1]), pool.keys[self.layer])
        assert chosen is not None, "a layer without an indexer came first"
        out = step.attend(q, rows, pool.rows[self.layer], chosen, self.kv)
        return self.o(out), chosen

    def _index_keys(self, keys: Tensor, angles: Angles) -> Tensor:
        assert self.key_norm is not None
        return self._turn_first(self.key_norm(keys).unsqueeze(1), angles).squeeze(1)

    def _index_queries(self, queries: Tensor, angles: Angles) -> Tensor:
        return self._turn_first(queries.unflatten(1, (-1, self.sparse.index_dim)), angles)

    def _turn_first(self, x: Tensor, angles: Angles) -> Tensor:
        """In the indexer the first dimensions are rotated, in attention the last."""
        turned = _turn(x[..., : self.sparse.rope_dim], angles, self.sparse.index_pairs)
        return torch.cat((turned, x[..., self.sparse.rope_dim :]), -1)

    def _weights(self, weights: Tensor) -> Tensor:
        return weights.float() * (self.sparse.index_heads * self.sparse.index_dim) ** -0.5


def _turn(x: Tensor, angles: Angles, pairs: bool) -> Tensor:
    return rotate(neighbours_apart(x) if pairs else x, *angles)


class Layer(nn.Module):
    """Attention and MLP or experts, each behind a norm and added to what came in."""

    def __init__(
        self, spec: ModelSpec, sparse: SparseSpec, layer: int, *, indexer: bool, experts: bool
    ) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.attention_norm = RMSNorm(hidden, spec.rms_eps)
        self.attention = Attention(spec, sparse, layer, indexer=indexer)
        self.mlp_norm = RMSNorm(hidden, spec.rms_eps)
        self.mlp = MoE(sparse, hidden) if experts else MLP(hidden, spec.intermediate_size)

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        cells: Tensor,
        step: LatentAttention,
        pool: LatentPool,
        chosen: Choice | None,
    ) -> tuple[Tensor, Choice]:
        """[T, hidden] to the same, and what was chosen; x itself is overwritten."""
        given, chosen = self.attention(self.attention_norm(x), angles, cells, step, pool, chosen)
        x += given
        x += self.mlp(self.mlp_norm(x))
        return x, chosen
