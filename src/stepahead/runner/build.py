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
    module, function = spec.factory.split(":")
    model = getattr(import_module(module), function)(**spec.options)
    return Runner(model, build_device(spec), spec, model.vocab_size)


def build_device(spec: RunnerSpec) -> Device:
    """The device that the spec names."""
    return HostileDevice(spec.device_seed) if spec.device == "hostile" else EagerDevice()
