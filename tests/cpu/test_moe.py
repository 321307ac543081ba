"""A mixture of experts against its formula written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parity_glm import MODELS, SPARSE
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stepahead.model.moe import Experts, MoE

MIXED: MoE = MODELS[64].layers[1].mlp


def written_out(moe: MoE, x: Tensor, normed: bool = True) -> Tensor:
    """One token after the other, in float64."""
    out = []
    for token in x.double():
        scores = torch.sigmoid(moe.router.weight.double() @ token)
        chosen = (scores + moe.router.bias.double()).sort(descending=True).indices[:2].tolist()
        whole = sum(scores[e] for e in chosen) if normed else 1.0
        total = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (moe.experts.gate_up[expert].double() @ token).chunk(2)
            inner = F.silu(gate) * up
            total += scores[expert] / whole * 2.5 * (moe.experts.down[expert].double() @ inner)
        gate, up = (moe.shared.gate_up.weight.double() @ token).chunk(2)
        out.append(total + moe.shared.down.weight.double() @ (F.silu(gate) * up))
    return torch.stack(out)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_mixture_is_its_formula(tokens: int) -> None:
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode():
        found = MIXED(x)
    torch.testing.assert_close(found.double(), written_out(MIXED, x), rtol=0, atol=2e-5)


def test_weights_need_not_be_normed() -> None:
    moe = MoE(replace(SPARSE, norm_topk=False), 32)
    moe.load_state_dict(MIXED.state_dict(), assign=True)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = moe(x)
    torch.testing.assert_close(found.double(), written_out(moe, x, False), rtol=0, atol=2e-5)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    router = MIXED.router
    with torch.inference_mode():
        plain, _ = router(x)
        scores = torch.sigmoid(x @ router.weight.T)
        before = router.bias.clone()
        try:
            router.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0, 9.0, 0.0]))
            experts, weights = router(x)
        finally:
            router.bias.copy_(before)
    assert {tuple(sorted(row)) for row in plain.tolist()} != {(2, 4)}
    assert {tuple(sorted(row)) for row in experts.tolist()} == {(2, 4)}
    of_two = scores.gather(1, experts)
    torch.testing.assert_close(weights, 2.5 * of_two / of_two.sum(1, keepdim=True))


class Products(TorchDispatchMode):
    """Multiplications of matrix products, by rows x columns x what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and isinstance(out, Tensor):
            self.count += out.numel() * args[0].shape[-1]
        return out


def test_only_the_experts_that_a_token_meets_are_computed() -> None:
    experts = Experts(50, 8, 4)
    experts.to_empty(device="cpu")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    chosen = torch.tensor([[3, 49], [3, 7], [49, 3]])
    with torch.inference_mode(), Products() as products:
        out = experts(torch.randn(3, 8), chosen, torch.ones(3, 2))
    assert products.count == 6 * (8 * 8 + 4 * 8)
    assert out.isfinite().all()
