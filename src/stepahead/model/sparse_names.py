"""How released checkpoints of GLM-5 and DeepSeek-V3.2 name the tensors of our modules."""

from __future__ import annotations

from stepahead.model.sparse import SparseSpec

# Our module names -> the names of the tensors stacked in it; without an indexer the last are not
# there.
_PARTS = {
    "attention_norm": ("input_layernorm",),
    "attention.down": (
        "self_attn.q_a_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.indexer.wk",
        "self_attn.indexer.weights_proj",
    ),
    "attention.q_norm": ("self_attn.q_a_layernorm",),
    "attention.kv_norm": ("self_attn.kv_a_layernorm",),
    "attention.up": ("self_attn.q_b_proj", "self_attn.indexer.wq_b"),
    "attention.kv": ("self_attn.kv_b_proj",),
    "attention.o": ("self_attn.o_proj",),
    "attention.key_norm": ("self_attn.indexer.k_norm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}
_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_MTP = {
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "combine": "eh_proj",
    "norm": "shared_head.norm",
}
_EXPERT_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def sparse_names(spec: SparseSpec, path: str, name: str, parts: int) -> tuple[str, ...]:
    """The tensors stacked in parameter `name` of our module `path`; a Linear has `parts`."""
    if path in _TOP:
        return (f"{_TOP[path]}.{name}",)
    if path.startswith("mtp."):
        layer, inner = len(spec.indexers), path.removeprefix("mtp.")
        if inner in _MTP:
            return (f"model.layers.{layer}.{_MTP[inner]}.{name}",)
        inner = inner.removeprefix("layer.")
    else:
        _, layer, inner = path.split(".", 2)
    stem = f"model.layers.{layer}"
    if inner == "mlp.router":
        return (f"{stem}.mlp.gate.{'weight' if name == 'weight' else 'e_score_correction_bias'}",)
    if inner == "mlp.experts":
        return tuple(
            f"{stem}.mlp.experts.{expert}.{part}.weight"
            for expert in range(spec.num_experts)
            for part in _EXPERT_PARTS[name]
        )
    return tuple(f"{stem}.{part}.{name}" for part in _PARTS[inner][:parts])
