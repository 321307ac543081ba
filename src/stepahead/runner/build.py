"""A runner from its description."""

from __future__ import annotations

from importlib import import_module

import torch

from stepahead.device.base import Device
from stepahead.device.eager import EagerDevice
from stepahead.device.hostile import HostileDevice
from stepahead.runner.runner import Runner
from stepahead.runner.spec import RunnerSpec


def build_runner(spec: RunnerSpec) -> Runner:
    """Loads the model, takes the memory, and is ready to launch; ModelError when it can't be."""
    torch.set_num_threads(spec.threads)
    device = build_device(spec)
    module, function = spec.factory.split(":")
    model = getattr(import_module(module), function)(**spec.options)
    return Runner(model, device, spec, model.vocab_size)


def build_device(spec: RunnerSpec) -> Device:
    """The device that the spec names; ConfigError when the machine has none."""
    if spec.device == "cuda":
        from stepahead.device.cuda import CudaDevice

        return CudaDevice(spec.depth)
    if spec.device == "hostile":
        return HostileDevice(spec.device_seed, spec.depth)
    return EagerDevice()
