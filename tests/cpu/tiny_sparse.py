"""Tiny random checkpoints with sparse attention, made with transformers, and what they must hold.

Sixteen index heads: with few, relu makes equal scores of zero common, and torch.topk then picks
otherwise for rows of another length.  And what is near a tie is a cliff: a rounding error that
swaps two positions moves logits by far more than any tolerance.  So whoever compares logits first
looks, in the reference, how far from a tie each choice was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    PreTrainedModel,
)

TOPK = 16
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "index_topk": TOPK,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "routed_scaling_factor": 2.5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "n_group": 1,
    "topk_group": 1,
    # transformers has this for the norms of latents, whatever the config says
    "rms_norm_eps": 1e-6,
}
# full, full, shared, shared, full, shared
SHARING = {"index_topk_freq": 3, "index_skip_topk_offset": 2}


def make_sparse(family: str = "glm", **config: Any) -> PreTrainedModel:
    """A transformers model of the family, whose every tensor is random: norms, the bias of the
    index keys' norm and the router's correction bias too."""
    torch.manual_seed(11)
    settings = SIZES | config
    kinds = {"glm": GlmMoeDsaConfig, "deepseek": DeepseekV32Config}
    if family == "glm" and "indexer_types" not in config:
        settings = SHARING | settings
    model = AutoModelForCausalLM.from_config(
        kinds[family](**settings), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "e_score_correction_bias" in name:
                value.normal_(0.0, 0.05)
            elif value.ndim == 1:
                value.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                value.normal_(0.0, value.shape[-1] ** -0.5)
    return model.eval()


class Margins(TorchFunctionMode):
    """The least distance between the last that was chosen and the first that was not, over every
    top-k of the reference: positions, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.least = {"positions": float("inf"), "experts": float("inf")}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0]
            k = kwargs.get("k", args[1] if len(args) > 1 else 0)
            if scores.shape[-1] > k:
                self._see("positions" if k == TOPK else "experts", scores, k)
        return func(*args, **kwargs)

    def _see(self, kind: str, scores: Tensor, k: int) -> None:
        best = torch.sort(scores, descending=True).values
        apart = best[..., k - 1] - best[..., k]
        known = apart[best[..., k] > torch.finfo(scores.dtype).min]
        if len(known):
            self.least[kind] = min(self.least[kind], float(known.min()))


def reference(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """float32[len(ids), vocab] from transformers, one prompt at a time; AssertionError if a choice
    on the way was so close that rounding could turn it."""
    with torch.inference_mode(), Margins() as margins:
        logits = model(torch.tensor([ids])).logits[0].float()
    assert len(ids) <= TOPK or margins.least["positions"] < float("inf"), "nothing was left out"
    assert min(margins.least.values()) > 1e-5, f"too near a tie: {margins.least}"
    return logits


@dataclass(frozen=True)
class WithMtp:
    """A reference with a layer more, which drafts, and what that has beside a layer's tensors."""

    model: PreTrainedModel
    layer: nn.Module
    extra: dict[str, Tensor]

    def drafts(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden states, and logits for token i + 2, of all tokens but the last."""
        stem = f"model.layers.{self.model.config.num_hidden_layers}."

        def normed(x: Tensor, name: str) -> Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + SIZES["rms_norm_eps"])
            return self.extra[f"{stem}{name}.weight"] * (x * scale)

        with torch.inference_mode(), Margins() as margins:
            whole = torch.tensor([ids])
            hidden = self.model.model(whole).last_hidden_state[:, :-1]
            tokens = self.model.model.embed_tokens(whole[:, 1:])
            both = torch.cat((normed(tokens, "enorm"), normed(hidden, "hnorm")), -1)
            z = both @ self.extra[stem + "eh_proj.weight"].T
            at = torch.arange(z.shape[1]).unsqueeze(0)
            mask = torch.full((1, 1, z.shape[1], z.shape[1]), float("-inf")).triu(1)
            angles = self.model.model.rotary_emb(z, position_ids=at)
            z, _ = self.layer(z, mask, at, position_embeddings=angles)
            out = normed(z, "shared_head.norm")
            assert min(margins.least.values()) > 1e-5, f"too near a tie: {margins.least}"
            return out[0], self.model.lm_head(out)[0]


def make_with_mtp(folder: Path, *, absent: bool = False, **config: Any) -> WithMtp:
    """Writes a checkpoint whose config speaks of an MTP layer; `absent`: without its tensors."""
    kinds = ["full", "full", "shared", "shared", "full", "shared", "full"]
    big = make_sparse(num_hidden_layers=7, indexer_types=kinds, **config)
    big.save_pretrained(folder)
    with torch.no_grad():
        extra = {
            "model.layers.6.enorm.weight": torch.rand(48) + 0.5,
            "model.layers.6.hnorm.weight": torch.rand(48) + 0.5,
            "model.layers.6.shared_head.norm.weight": torch.rand(48) + 0.5,
            "model.layers.6.eh_proj.weight": torch.randn(48, 96) * 96**-0.5,
        }
    tensors = load_file(folder / "model.safetensors") | extra
    if absent:
        tensors = {n: v for n, v in tensors.items() if not n.startswith("model.layers.6.")}
    save_file(tensors, folder / "model.safetensors")
    change_config(
        folder,
        num_hidden_layers=6,
        num_nextn_predict_layers=1,
        indexer_types=kinds[:6],
        mlp_layer_types=None,
        layer_types=None,
    )
    big.config.num_hidden_layers = 6
    return WithMtp(big, big.model.layers[6], extra)


def change_config(folder: Path, **changes: Any) -> None:
    """Fields of config.json; None takes one out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def save_sparse(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write the checkpoint, by the released names."""
    model.save_pretrained(folder)
    return model
