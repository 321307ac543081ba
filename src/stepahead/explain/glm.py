"""The sizes of a `GlmMoeDsaForCausalLM`: weights by tensor, cache by layer, from its config alone.

Sparse attention with an indexer over a compressed cache: one latent row a layer and token for all
heads, and a small key for each layer that owns an indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Annotated

import msgspec

from stepahead.errors import UnsupportedModel
from stepahead.explain.sizes import ROUTED, Cache, Part, Sizes
from stepahead.model.sparse import CellKind, KVGroup, bytes_per_token, latent_groups
from stepahead.model.spec import ModelSpec

ARCHITECTURE = "GlmMoeDsaForCausalLM"


class GlmShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the sizes follow from; names are those of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool | None = None
    indexer_types: list[str] | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def indexers(self) -> int:
        """Layers that own an indexer; the others use the choice of the last one that does."""
        if self.indexer_types is not None:
            return self.indexer_types.count("full")
        first = 2 if self.index_skip_topk_offset is None else self.index_skip_topk_offset
        every = max(1, self.index_topk_freq or 1)
        return sum(max(i - first + 1, 0) % every == 0 for i in range(self.num_hidden_layers))

    @property
    def latent_values(self) -> int:
        """Values of one cache row: what is shared by all heads, and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def read_shape(config: bytes, where: str) -> GlmShape:
    """A shape from a config.json's bytes; UnsupportedModel names the file and what is missing."""
    try:
        return msgspec.json.decode(config, type=GlmShape)
    except msgspec.MsgspecError as error:
        raise UnsupportedModel(f"{where}: {error}; the model needs a complete config") from error


def as_read(shape: GlmShape, spec: ModelSpec) -> GlmShape:
    """The shape with what the engine makes of its config, where several fields say one thing."""
    sparse = spec.sparse
    assert sparse is not None, "the spec of another architecture"
    return msgspec.structs.replace(
        shape,
        tie_word_embeddings=spec.tied_head,
        first_k_dense_replace=sparse.experts.count(False),
        indexer_types=["full" if owns else "shared" for owns in sparse.indexers],
        num_nextn_predict_layers=sparse.mtp_layers,
    )


def builtin_shape() -> GlmShape:
    """GLM-5.3 as it was released; the file ships with the package."""
    file = resources.files("stepahead.explain").joinpath("glm-5.3.json")
    return read_shape(file.read_bytes(), "glm-5.3")


def sizes_of(shape: GlmShape) -> Sizes:
    """Weights, the parameters that a token meets, and the cache a token takes."""
    return Sizes(
        parts=tuple(_parts(shape)),
        active_values=_active(shape),
        caches=tuple(_caches(shape)),
        splits_cache=0,  # the latent is of all heads: each GPU of a tensor-parallel group needs it
        max_len=shape.max_position_embeddings,
        quantized="fp8",
    )


def _parts(shape: GlmShape) -> Iterator[Part]:
    layers, drafts = shape.num_hidden_layers, shape.num_nextn_predict_layers
    hidden, sparse = shape.hidden_size, layers - shape.first_k_dense_replace
    tables = 1 if shape.tie_word_embeddings else 2
    yield Part("embeddings", tables * shape.vocab_size * hidden, quantized=False, spread=True)
    yield Part("norms", hidden, quantized=False, copied=True)
    yield Part("dense", 3 * hidden * shape.intermediate_size * shape.first_k_dense_replace)
    yield from _attention(shape, layers)
    yield from _indexers(shape, shape.indexers)
    yield from _experts(shape, sparse)
    if drafts:
        yield from _attention(shape, drafts)
        yield from _indexers(shape, drafts)
        yield from _experts(shape, drafts)
        yield Part("mtp", 2 * hidden * hidden * drafts, quantized=False)
        yield Part("norms", 3 * hidden * drafts, quantized=False, copied=True)


def _attention(shape: GlmShape, layers: int) -> Iterator[Part]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    down = hidden * (shape.q_lora_rank + shape.latent_values)
    split = (
        shape.q_lora_rank * heads * query
        + shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        + heads * shape.v_head_dim * hidden
    )
    norms = shape.q_lora_rank + shape.kv_lora_rank + 2 * hidden
    yield Part("attention", down * layers, copied=True)
    yield Part("attention", split * layers)
    yield Part("norms", norms * layers, quantized=False, copied=True)


def _indexers(shape: GlmShape, count: int) -> Iterator[Part]:
    heads, width = shape.index_n_heads, shape.index_head_dim
    keys = heads * width * shape.q_lora_rank + width * shape.hidden_size
    rest = heads * shape.hidden_size + 2 * width
    yield Part("indexers", keys * count, copied=True)
    yield Part("indexers", rest * count, quantized=False, copied=True)


def _experts(shape: GlmShape, layers: int) -> Iterator[Part]:
    each = 3 * shape.hidden_size * shape.moe_intermediate_size
    router = shape.n_routed_experts * shape.hidden_size
    yield Part(ROUTED, each * shape.n_routed_experts * layers, spread=True)
    yield Part("shared experts", each * shape.n_shared_experts * layers)
    yield Part("routers", router * layers, quantized=False, copied=True)


def _active(shape: GlmShape) -> int:
    """Values that one token is multiplied with, without those of drafting."""
    sparse = shape.num_hidden_layers - shape.first_k_dense_replace
    each = 3 * shape.hidden_size * shape.moe_intermediate_size
    of_experts = shape.num_experts_per_tok + shape.n_shared_experts
    matrices = [
        *_attention(shape, shape.num_hidden_layers),
        *_indexers(shape, shape.indexers),
    ]
    return (
        sum(part.values for part in matrices if part.name != "norms")
        + sparse * (each * of_experts + shape.n_routed_experts * shape.hidden_size)
        + 3 * shape.hidden_size * shape.intermediate_size * shape.first_k_dense_replace
        + shape.vocab_size * shape.hidden_size
    )


def pool_groups(
    shape: GlmShape, rows: CellKind, keys: CellKind, drafts: int = 0
) -> tuple[KVGroup, ...]:
    """Page tensors of the pool: latent rows and index keys, kept as these."""
    dims = (shape.kv_lora_rank, shape.qk_rope_head_dim, shape.index_head_dim)
    layers, owners = shape.num_hidden_layers + drafts, shape.indexers + drafts
    return latent_groups(layers, owners, dims, rows, keys)


def _caches(shape: GlmShape) -> Iterator[Cache]:
    kinds: tuple[CellKind, ...] = ("bfloat16", "fp8")
    for kind in kinds:
        plain, whole = (
            # other engines keep index keys in fp8 however they keep the rest
            bytes_per_token(pool_groups(shape, kind, "fp8", drafts))
            for drafts in (0, shape.num_nextn_predict_layers)
        )
        yield Cache(kind, plain, whole - plain)
