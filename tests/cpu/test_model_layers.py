"""The parts of the models, and the random model that benchmarks run."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Pages, laid_out, random_ids
from torch import Tensor, nn
from torch.nn import functional as F

from stepahead.errors import UnsupportedModel
from stepahead.model.layers import Linear, RMSNorm, Rope, rotate
from stepahead.model.packed import AS_READ, PackedLinear, Packing, pack_linears
from stepahead.model.spec import ModelSpec, RopeSpec, kv_bytes_per_token
from stepahead.model.weights import load_model, random_model

TINY = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_len=512,
)


def filled(linear: Linear) -> Linear:
    for name, parameter in list(linear.named_parameters()):
        value = torch.randn(parameter.shape)
        setattr(linear, name, nn.Parameter(value, requires_grad=False))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 32, 200])
@pytest.mark.parametrize("fine", [True, False], ids=["fine", "coarse"])
def test_packed_gives_what_plain_gives(dtype: torch.dtype, tokens: int, fine: bool) -> None:
    torch.manual_seed(tokens)
    plain = Linear(512, (256, 512), bias=True, fine_sums=fine)
    model = nn.Sequential(filled(plain).to(dtype))
    x = torch.randn(tokens, 512, dtype=dtype)
    exact = F.linear(x.double(), model[0].weight.double(), model[0].bias.double())
    pack_linears(model)
    if torch.backends.mkldnn.is_available() and dtype == torch.float32 and not fine:
        assert isinstance(model[0], PackedLinear)
    bound = 2e-4 if dtype == torch.float32 else 0.5
    with torch.inference_mode():
        assert (model(x).double() - exact).abs().max() < bound
        if torch.backends.mkldnn.is_available() and dtype == torch.float32:
            assert (PackedLinear(plain)(x).double() - exact).abs().max() < bound


def test_small_matrices_stay_plain() -> None:
    model = nn.Sequential(filled(Linear(64, (64,), fine_sums=False)))
    pack_linears(model)
    assert isinstance(model[0], Linear)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_sums_in_pieces_are_packed_where_the_cpu_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, kind in (("AVX2", Linear), ("AVX512", PackedLinear)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        model = nn.Sequential(filled(Linear(512, (512,))))
        pack_linears(model)
        assert isinstance(model[0], kind)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("how", [AS_READ, laid_out("int8")], ids=["float32", "int8"])
def test_packing_leaves_no_plain_weights_behind(how: Packing) -> None:
    model = nn.Sequential(*(filled(Linear(512, (512,), fine_sums=False)) for _ in range(3)))
    pack_linears(model, how)
    assert list(model.parameters()) == []


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def test_rms_norm() -> None:
    norm = RMSNorm(48, 1e-3)
    norm.weight = nn.Parameter(torch.randn(48), requires_grad=False)
    for scale in (1e-3, 1.0, 1e3):  # at the smallest, eps decides
        x = torch.randn(5, 48) * scale
        expected = rms(x.double(), norm.weight.double(), 1e-3).float()
        torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)


def test_rope_turns_pairs_by_their_position() -> None:
    """As complex numbers: pair (i, i + half) is multiplied by e^(i * position * frequency)."""
    rope = Rope(RopeSpec(theta=100.0), head_dim=8, max_len=300)
    x = torch.randn(4, 3, 8)
    positions = torch.tensor([0, 299, 17, 1])
    turned = rotate(x, *rope(positions, torch.float32))
    frequency = 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    angle = positions.double()[:, None, None] * frequency
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=5e-5)


def test_random_model_is_a_function_of_its_seed() -> None:
    ids = random_ids(20, seed=1, vocab_size=1024)
    first, same, other = (
        Pages(random_model(TINY, seed, "float32")).step(chunks={"a": ids})["a"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.allclose(first, other, atol=0.1)
    best = first.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 1e-2  # greedy tokens are well defined


def test_random_model_has_no_files() -> None:
    with pytest.raises(UnsupportedModel, match="format 'random' has no files"):
        load_model(TINY, "float32")


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(TINY, 4) == 2 * 1 * 2 * 16 * 4
    pool = random_model(TINY, 0, "bfloat16").new_kv(num_pages=3, page_size=8)
    held = sum(pages.nbytes for pages in (*pool.k, *pool.v))
    assert held == 3 * 8 * kv_bytes_per_token(TINY, 2)
