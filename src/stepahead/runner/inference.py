"""Inference mode, entered where it is not yet in force.

Entering and leaving takes as long as a few operations do, so a thread that does nothing but launch
enters it once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def inference() -> AbstractContextManager[object]:
    """In force within, whether it was before or not."""
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()
