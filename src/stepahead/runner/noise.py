"""Sampling noise as a function of (seed, choice, position, token) alone.

So neither the loop, the batch, a preemption nor a draft changes a seeded request.  A row's key
mixes seed, choice and position; a 32-bit hash of key and token gives each logit its own Gumbel
noise, and the largest sum is a sample of the softmax.  Small errors in the logits then change a
token only where two sums nearly tie.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """splitmix64's finaliser."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, choice: int) -> int:
    """A signed 64-bit key of one request's noise."""
    key = _mix((_mix(seed & _MASK64) + 0x9E3779B97F4A7C15 * (choice + 1)) & _MASK64)
    return key - (1 << 64) if key >> 63 else key


def row_keys(keys_dev: Tensor, positions_dev: Tensor) -> Tensor:
    """int32[r]: the key of each row at the position of the token to be sampled."""
    mixed = keys_dev + positions_dev * -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * -0x4B47D0C5A1A6B6D3
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    return mixed.to(torch.int32)


def gumbel(rows_dev: Tensor, vocab_size: int) -> Tensor:
    """float32[r, vocab_size] of Gumbel noise from int32[r] row keys (murmur3's finaliser)."""
    x = torch.arange(vocab_size, dtype=torch.int32, device=rows_dev.device) * -0x61C88647
    x = x.unsqueeze(0) + rows_dev.unsqueeze(1)
    x ^= (x >> 16) & 0xFFFF
    x *= -0x7A143595
    x ^= (x >> 13) & 0x7FFFF
    x *= -0x3D4D51CB
    x ^= (x >> 16) & 0xFFFF
    # 23 bits and a half: exact in float32, and never 0 or 1
    uniform = ((x >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
