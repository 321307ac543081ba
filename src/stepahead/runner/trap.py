"""Checks on device values that must not make the host wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def trap(ok: Tensor, message: str) -> None:
    """AssertionError unless every element of `ok`, bool[..], is true.

    Elsewhere than on the CPU the device itself stops, and the step fails when it lands.
    """
    if ok.device.type != "cpu":
        torch._assert_async(ok.all(), message)
    elif not bool(ok.all()):
        raise AssertionError(message)
