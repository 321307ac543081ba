"""What a model with a compressed cache, sparse attention and experts is: GLM-5 and its kin.

Names, sizes and what memory follows from them; knows no config file, no weights, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CellKind = Literal["float32", "bfloat16", "fp8"]
_WIDTHS = {"float32": 4, "bfloat16": 2, "fp8": 1}
_SCALED_TOGETHER = 128  # values that share a float32 scale in fp8


@dataclass(frozen=True)
class SparseSpec:
    """The sizes beside those of a ModelSpec; a name that is in config.json too means the same.

    indexers      for each layer whether it owns an indexer; the others use the choice of the last
                  one that does
    experts       for each layer whether its MLP is a mixture of experts
    latent_eps    of the norms of compressed queries and latents.  transformers has 1e-6 whatever
                  the config says; the model was trained, and is served, with rms_norm_eps
    pairs, index_pairs  whether rotary positions turn neighbours (2 i, 2 i + 1), in attention and
                  in the indexer; else dimension i with i + half
    mtp_layers    layers that draft, after the others: 0 or 1.  `mtp_shares_index`: drafts after
                  the first use its choice
    weight_block  rows and columns that share a scale, of weights kept in fp8
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    indexers: tuple[bool, ...]
    experts: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    shared_experts: int
    expert_size: int
    routed_scale: float
    norm_topk: bool
    latent_eps: float
    pairs: bool = True
    index_pairs: bool = True
    mtp_layers: int = 0
    mtp_shares_index: bool = False
    weight_block: tuple[int, int] | None = None

    @property
    def row_values(self) -> int:
        """Values of a latent row: what all heads share, and the rotated key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class KVGroup:
    """Page tensors of one kind: `layers` of them, `cell_bytes` a position in each."""

    name: str
    layers: int
    cell_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Over all its layers."""
        return self.layers * self.cell_bytes


def latent_groups(
    layers: int,
    indexers: int,
    dims: tuple[int, int, int],
    rows: CellKind,
    keys: CellKind | None = None,
) -> tuple[KVGroup, KVGroup]:
    """The two groups under one page table: latent rows of `layers`, index keys of `indexers`.

    dims  values that are compressed, rotated, and of an index key
    rows  how a row is kept; fp8 has a float32 scale for each 128, and its rotated part in bfloat16
    keys  how an index key is kept, as the rows unless it is said
    """
    latent, rotated, index = dims
    row = _cell_bytes(latent, rows) + rotated * (2 if rows == "fp8" else _WIDTHS[rows])
    return (
        KVGroup("latent rows", layers, row),
        KVGroup("index keys", indexers, _cell_bytes(index, keys or rows)),
    )


def groups_of(spec: SparseSpec, dtype_bytes: int, drafts: bool = False) -> tuple[KVGroup, KVGroup]:
    """The groups of the pool of a model that runs in float32 (4) or bfloat16 (2), with those of the
    MTP layer if it drafts."""
    kind: CellKind = "float32" if dtype_bytes == 4 else "bfloat16"
    more = spec.mtp_layers if drafts else 0
    dims = (spec.kv_lora_rank, spec.rope_dim, spec.index_dim)
    return latent_groups(len(spec.indexers) + more, sum(spec.indexers) + more, dims, kind)


def bytes_per_token(groups: tuple[KVGroup, ...]) -> int:
    """Of a position, in all of them."""
    return sum(group.bytes_per_token for group in groups)


def told(groups: tuple[KVGroup, ...]) -> str:
    """The groups in words, with the bytes that a token takes in them."""
    parts = " + ".join(f"{group.layers} {group.name} of {group.cell_bytes:,}" for group in groups)
    return f"{parts} = {bytes_per_token(groups):,} bytes a token"


def sparse_weight_values(
    spec: SparseSpec, hidden: int, heads: int, dense: int, drafts: bool = False
) -> int:
    """How many numbers the layers' weights are; `dense` is the size of an MLP without experts."""
    more = (spec.mtp_layers,) if drafts and spec.mtp_layers else ()
    indexers = sum(spec.indexers) + len(more)
    moe = sum(spec.experts) + len(more)
    return (
        (len(spec.indexers) + len(more)) * _attention_values(spec, hidden, heads)
        + indexers * _indexer_values(spec, hidden)
        + moe * _moe_values(spec, hidden)
        + (len(spec.experts) - sum(spec.experts)) * 3 * hidden * dense
        + len(more) * (2 * hidden * hidden + 3 * hidden)
    )


def _cell_bytes(values: int, kind: CellKind) -> int:
    scales = 4 * -(-values // _SCALED_TOGETHER) if kind == "fp8" else 0
    return values * _WIDTHS[kind] + scales


def _attention_values(spec: SparseSpec, hidden: int, heads: int) -> int:
    """With the layer's two norms."""
    return (
        hidden * (spec.q_lora_rank + spec.row_values + 2)
        + spec.q_lora_rank * (1 + heads * (spec.nope_dim + spec.rope_dim))
        + spec.kv_lora_rank * (1 + heads * (spec.nope_dim + spec.v_dim))
        + heads * spec.v_dim * hidden
    )


def _indexer_values(spec: SparseSpec, hidden: int) -> int:
    queries = spec.index_heads * spec.index_dim * spec.q_lora_rank
    return queries + hidden * (spec.index_dim + spec.index_heads) + 2 * spec.index_dim


def _moe_values(spec: SparseSpec, hidden: int) -> int:
    each = 3 * hidden * spec.expert_size
    return (spec.num_experts + spec.shared_experts) * each + spec.num_experts * (hidden + 1)
