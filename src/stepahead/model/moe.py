"""A mixture of experts: a sigmoid router with a correction bias, routed experts, a shared one.

It knows arithmetic; it must not know requests, ranks or how its weights got here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.model.layers import empty_parameter
from stepahead.model.llama import MLP
from stepahead.model.sparse import SparseSpec


class Router(nn.Module):
    """Which experts a token meets, and with what weights.

    The bias says who is chosen and not with what weight.  All of it is in float32: in bfloat16 the
    biases of a trained model are a few units in the last place apart.
    """

    keeps_float32 = True

    def __init__(self, spec: SparseSpec, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(spec.num_experts, hidden_size)
        self.bias = empty_parameter(spec.num_experts)
        self._chosen = spec.experts_per_token
        self._normed = spec.norm_topk
        self._scale = spec.routed_scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] to int64[T, k] experts and float32[T, k] weights."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        experts = (scores + self.bias).topk(self._chosen, -1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self._normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self._scale


class Experts(nn.Module):
    """down(silu(gate x) * up x) of many experts, whose matrices are stacked.

    gate_up  [experts, 2 * size, hidden], gate first
    down     [experts, hidden, size]
    """

    def __init__(self, count: int, hidden_size: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.gate_up = empty_parameter(count, 2 * size, hidden_size)
        self.down = empty_parameter(count, hidden_size, size)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden] of [T, hidden], int64[T, k] and float32[T, k]: weighted and added up.

        Tokens are put in the order of their experts, so that each expert's are one product and an
        expert that nobody meets costs nothing.  Where they begin is not read on the host.
        """
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        tokens = order // experts.shape[1]
        counts = torch.zeros(len(self.down), dtype=torch.int64, device=x.device)
        ends = counts.index_add_(0, chosen, torch.ones_like(chosen)).cumsum(0).to(torch.int32)
        both = F.grouped_mm(x.index_select(0, tokens), self.gate_up.transpose(1, 2), offs=ends)
        inner = F.silu(both[:, : self.size]).mul_(both[:, self.size :])
        out = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        out = out * weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(x).index_add_(0, tokens, out.to(x.dtype))


class MoE(nn.Module):
    """What the chosen experts give, and what the shared one does; that is not scaled."""

    def __init__(self, spec: SparseSpec, hidden_size: int) -> None:
        super().__init__()
        self.router = Router(spec, hidden_size)
        self.experts = Experts(spec.num_experts, hidden_size, spec.expert_size)
        self.shared = MLP(hidden_size, spec.shared_experts * spec.expert_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        return self.experts(x, *self.router(x)) + self.shared(x)
