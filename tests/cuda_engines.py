"""Engines around the toy on the CUDA device: the real one, or the one on its stand-in."""

from __future__ import annotations

from engines import Variant, resolved, runner_spec, toy_engine
from harness import Client, Run
from stepahead.device.cuda import CudaDevice
from stepahead.executor.inline import InlineExecutor
from stepahead.model.toy import ToyModel
from stepahead.runner.runner import Runner
from workloads import Workload


def play_on_cuda(work: Workload, variant: Variant) -> Run:
    """The workload on a toy engine of this variant's loop, depth and fence; the toy lives where the
    device says."""
    spec = runner_spec(resolved(work.options, variant))
    device = CudaDevice(spec.depth)
    model = ToyModel(**spec.options, device=str(device.place))
    runner = Runner(model, device, spec, model.vocab_size)
    engine = toy_engine(work.options, variant, executor=InlineExecutor(runner))
    try:
        return Client(engine, work).play()
    finally:
        engine.close()
