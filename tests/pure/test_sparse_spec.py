"""A config of GLM-5's kind: read, or refused by field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepahead.errors import UnsupportedModel
from stepahead.model.spec import read_spec

FULL, SHARED = "full", "shared"
CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 7,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 32,
    "v_head_dim": 20,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "eos_token_id": [3, 4, 5],
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def write(folder: Path, **changes: Any) -> Path:
    """config.json with these changes; None takes a field out."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def owners(folder: Path) -> str:
    sparse = read_spec(folder).sparse
    assert sparse is not None
    return "".join("F" if owns else "S" for owns in sparse.indexers)


def test_a_config_is_read(tmp_path: Path) -> None:
    """`head_dim` is another thing in each release, and means nothing here."""
    spec = read_spec(write(tmp_path))
    sparse = spec.sparse
    assert sparse is not None
    assert (spec.num_kv_heads, spec.head_dim, spec.max_len) == (1, 8, 4096)
    assert spec.eos_token_ids == (3, 4, 5)
    assert spec.rope.theta == 8e6
    assert not spec.tied_head
    assert sparse.row_values == 40
    assert sparse.experts == (False, False, True, True, True, True, True)
    assert sparse.latent_eps == 1e-5
    assert (sparse.pairs, sparse.index_pairs) == (True, True)
    assert (sparse.mtp_layers, sparse.weight_block) == (0, None)


def test_deepseek_turns_its_index_keys_otherwise(tmp_path: Path) -> None:
    sparse = read_spec(write(tmp_path, architectures=["DeepseekV32ForCausalLM"])).sparse
    assert sparse is not None
    assert (sparse.pairs, sparse.index_pairs) == (True, False)
    said = {"rope_interleave": False, "indexer_rope_interleave": False}
    sparse = read_spec(write(tmp_path, **said)).sparse
    assert sparse is not None
    assert (sparse.pairs, sparse.index_pairs) == (False, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FFFFFFF"),
        ({"index_topk_freq": 1}, "FFFFFFF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSF"),
        ({"index_topk_freq": 3}, "FFSSFSS"),
        ({"index_topk_pattern": "FSSFSSS"}, "FSSFSSS"),
        ({"index_topk_pattern": [FULL] * 2 + [SHARED] * 5}, "FFSSSSS"),
        ({"indexer_types": [FULL] + [SHARED] * 6}, "FSSSSSS"),
        (
            {
                "indexer_types": [*[FULL] * 3, *[SHARED] * 3, FULL],
                "index_topk_pattern": "FFFSSSF",
                "index_topk_freq": 4,
                "index_skip_topk_offset": 3,
            },
            "FFFSSSF",
        ),
    ],
)
def test_who_owns_an_indexer(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert owners(write(tmp_path, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 8}, "n_group = 8 is not supported, only 1"),
        ({"topk_group": 4}, "topk_group = 4 is not supported, only 1"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only sigmoid"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported, only 1"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16' .* only float32"),
        ({"attention_bias": True}, "attention_bias = True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported, only False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported, only 4"),
        ({"qk_head_dim": 40}, "qk_head_dim = 40 is not supported, only 32"),
        ({"qk_rope_head_dim": 7, "qk_head_dim": None}, "qk_rope_head_dim = 7 .* even"),
        ({"index_head_dim": 4}, "index_head_dim = 4 .* at least qk_rope_head_dim = 8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 .* at most n_routed_experts = 8"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers = 3 .* only 0 or 1"),
        ({"hidden_size": 60}, "hidden_size = 60 is not supported, only multiples of 8"),
        ({"moe_intermediate_size": 12}, "moe_intermediate_size = 12 .* only multiples of 8"),
        ({"first_k_dense_replace": -1}, r"at `\$.first_k_dense_replace`"),
        ({"num_hidden_layers": 1 << 40}, r"at `\$.num_hidden_layers`"),
        ({"layer_types": ["indexed_attention"] * 3}, "layer_types is for 3 layers"),
        (
            {"rope_scaling": {"rope_type": "default"}},
            "rope_scaling and rope_parameters are both there and differ",
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types = 'sliding_attention' .* only"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"q_lora_rank": None}, "missing required field `q_lora_rank`"),
        ({"rope_parameters": None}, "rope_parameters.rope_theta is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 40}, "rope_theta": 1e4},
            "rope_scaling.type = 'yarn' is not supported, only 'default'",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.rope_type = 'yarn' is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5 is not supported, only 1",
        ),
        ({"indexer_types": [FULL] * 6}, "indexer_types is for 6 layers, num_hidden_layers = 7"),
        ({"indexer_types": [SHARED] + [FULL] * 6}, "indexer_types begins with 'shared'"),
        ({"index_topk_pattern": "FFFFFFX"}, "index_topk_pattern = 'X' is not supported, only"),
        (
            {"indexer_types": [FULL] * 7, "index_topk_pattern": "FFFSFFF"},
            "indexer_types says that layer 3 is 'full', index_topk_pattern = 'FFFSFFF' that it is",
        ),
        (
            {"indexer_types": [FULL] * 7, "index_topk_freq": 4, "index_skip_topk_offset": 3},
            "layer 3 is 'full', index_topk_freq = 4 with index_skip_topk_offset = 3 that it is 'sh",
        ),
        (
            {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 4},
            "mlp_layer_types = .* does not agree with first_k_dense_replace = 2",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq' .* only 'fp8'"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt = 'e5m2' .* only 'e4m3'"),
        (
            {"quantization_config": FP8 | {"activation_scheme": "static"}},
            "quantization_config.activation_scheme = 'static' is not supported, only 'dynamic'",
        ),
        (
            {"quantization_config": FP8 | {"weight_block_size": None}},
            "quantization_config.weight_block_size = None is not supported",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused_by_field_and_value(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: .*{words}"):
        read_spec(write(tmp_path, **changes))


def test_fp8_is_read_with_its_block(tmp_path: Path) -> None:
    sparse = read_spec(write(tmp_path, quantization_config=FP8 | {"scale_fmt": "ue8m0"})).sparse
    assert sparse is not None
    assert sparse.weight_block == (128, 128)
