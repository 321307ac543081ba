"""A pipeline in this process: the runners of all stages, linked through the seam of their devices.

Beside hostile devices it is the property test of the hand-over: each stage has a device of its own,
all share one host, and the vector clocks check every edge between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepahead.device.base import Device, Event, Stream
from stepahead.device.eager import EagerDevice
from stepahead.device.hostile import HostileDevice, HostileModes
from stepahead.parallel.pipeline import ToyPart
from stepahead.plan import Plan, Result, decode_plan, encode_plan
from stepahead.runner.flight import RunnerFlight
from stepahead.runner.hand_over import Links
from stepahead.runner.model import Model
from stepahead.runner.runner import Runner
from stepahead.runner.spec import RunnerSpec


class InlineLink:
    """A link whose memory is a ring of tensors and whose edge is an event."""

    def __init__(self, name: str, depth: int) -> None:
        self._name = name
        self._depth = depth
        self._ring: list[Tensor | None] = [None] * depth
        self._events: dict[int, Event] = {}

    def memory(self, step: int) -> str:
        """A place in the ring."""
        return f"/{self._name} {step % self._depth}"

    def put(self, step: int, tensor: Tensor) -> None:
        """Overwrites what lay there `depth` steps ago, poisoning it for whoever still reads."""
        old = self._ring[step % self._depth]
        if old is not None:
            old.fill_(-7_777_777)
        self._ring[step % self._depth] = tensor.clone()

    def fail(self, step: int, text: str) -> None:
        """Stages in one process fail together: whoever lands hears it."""

    def sent(self, step: int, event: Event) -> None:
        """The edge's beginning."""
        self._events[step] = event

    def wait(self, step: int, device: Device) -> None:
        """The edge's end."""
        device.wait(Stream.FORWARD, self._events.pop(step))

    def take(self, step: int) -> Tensor:
        """What lies there."""
        tensor = self._ring[step % self._depth]
        assert tensor is not None, "taken before anything was left"
        return tensor


@dataclass(frozen=True)
class StagesFlight:
    """A step in the hands of all stages."""

    flights: tuple[RunnerFlight, ...]

    def ready(self) -> bool:
        """Whether the last one has it."""
        return self.flights[-1].ready()

    def land(self) -> Result:
        """What the last one has; others have no results."""
        return self.flights[-1].land()


class StagesRunner:
    """Looks like one runner."""

    def __init__(self, runners: list[Runner]) -> None:
        self.runners = runners
        self.notes = tuple(note for runner in runners for note in runner.notes)

    def launch(self, plan: Plan) -> StagesFlight:
        """Gives the plan to each, as it would arrive over a wire."""
        data = encode_plan(plan)
        return StagesFlight(tuple(runner.launch(decode_plan(data)) for runner in self.runners))

    def now_ns(self) -> int:
        """The clock of the last one, whose times are in results."""
        return self.runners[-1].now_ns()

    def close(self) -> None:
        """Closes all."""
        for runner in self.runners:
            runner.close()


def inline_links(spec: RunnerSpec) -> list[Links]:
    """The links of each stage; tokens go back only where the relay needs them."""
    stages, depth = spec.stages, spec.depth
    onwards = [InlineLink(f"states of stage {i}", depth) for i in range(stages - 1)]
    back = [InlineLink(f"tokens for stage {i}", depth) for i in range(stages - 1)]
    if spec.relay == "host":
        back = []
    return [
        Links(
            onwards[i - 1] if i else None,
            onwards[i] if i < stages - 1 else None,
            back[i] if i < len(back) else None,
            tuple(back) if i == stages - 1 else (),
        )
        for i in range(stages)
    ]


def toy_part(spec: RunnerSpec) -> Model:
    """The toy's part of a stage."""
    return ToyPart(stage=spec.stage, stages=spec.stages, **spec.options)


def stages_runner(spec: RunnerSpec, devices: list[Device], make=toy_part) -> StagesRunner:
    """The runners of all stages of a model whose parts `make` makes of a stage's spec."""
    torch.set_num_threads(1)
    runners = []
    for stage, (device, links) in enumerate(zip(devices, inline_links(spec), strict=True)):
        one = replace(spec, stage=stage)
        model = make(one)
        runners.append(Runner(model, device, one, model.vocab_size, links))
    return StagesRunner(runners)


def stage_devices(spec: RunnerSpec, hostile: bool, modes: HostileModes) -> list[Device]:
    """A device for each stage; hostile ones share a host."""
    if not hostile:
        return [EagerDevice() for _ in range(spec.stages)]
    first = HostileDevice(spec.device_seed, spec.depth, modes, name="stage 0")
    others = [
        HostileDevice(0, spec.depth, replace(modes, fail_at=None), beside=first, name=f"stage {i}")
        for i in range(1, spec.stages)
    ]
    return [first, *others]
