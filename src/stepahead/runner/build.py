"""A runner from its description."""

from __future__ import annotations

from importlib import import_module

import torch

from stepahead.device.base import Device
from stepahead.device.beside import BesideDevice
from stepahead.device.eager import EagerDevice
from stepahead.runner.hand_over import Links
from stepahead.runner.runner import Runner
from stepahead.runner.spec import RunnerSpec


def build_runner(spec: RunnerSpec, links: Links | None = None) -> Runner:
    """Loads the model, takes the memory, and is ready to launch; ModelError when it can't be.

    With `links` it is the runner of the spec's stage, and the factory gives a part of the model.
    """
    torch.set_num_threads(spec.threads)
    device = build_device(spec)
    module, function = spec.factory.split(":")
    part = {} if links is None else {"stage": spec.stage, "stages": spec.stages}
    model = getattr(import_module(module), function)(**spec.options, **part)
    return Runner(model, device, spec, model.vocab_size, links)


def build_device(spec: RunnerSpec) -> Device:
    """The device that the spec names; ConfigError when the machine has none."""
    if spec.device == "cuda":
        from stepahead.device.cuda import CudaDevice

        return CudaDevice(spec.depth)
    if spec.device == "hostile":
        from stepahead.device.hostile import HostileDevice

        return HostileDevice(spec.device_seed, spec.depth)
    return BesideDevice() if spec.beside else EagerDevice()
