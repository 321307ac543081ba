"""A link between the workers of two stages: memory for tensors, a pipe that says what is there.

The memory is a ring as deep as the steps ahead, so that the sender never waits for the receiver:
what it overwrites is of a step that has landed.  A frame in the pipe is a header, and behind it the
text of a failure where a step has none of its tensors.
"""

from __future__ import annotations

import mmap
import os
import struct

import torch
from torch import Tensor

from stepahead.device.base import Device, Event
from stepahead.executor.ends import LOST, LinkEnd, StageEnds
from stepahead.executor.failures import RelayedFailure
from stepahead.runner.hand_over import Links

# step, what the tensor is made of, its rows and columns; of a failure, the bytes of its text
_HEADER = struct.Struct("<qBII")
_FAILURE = 255
_DTYPES = (torch.int64, torch.float32, torch.bfloat16)
_MOST_TEXT_BYTES = 32 << 10  # less than a pipe takes at once


def stage_links(ends: StageEnds) -> Links:
    """In the worker: what its runner hands over through."""
    for fd in ends.fds:
        os.set_inheritable(fd, False)  # else a process started here would keep the link open

    def link(name: str, end: LinkEnd | None) -> ProcessLink | None:
        return None if end is None else ProcessLink(name, end)

    return Links(
        link("states in", ends.states_in),
        link("states out", ends.states_out),
        link("tokens in", ends.tokens_in),
        tuple(ProcessLink("tokens out", end) for end in ends.tokens_out),
    )


class ProcessLink:
    """One end, in its worker.  A neighbour that is gone ends the process."""

    def __init__(self, name: str, end: LinkEnd) -> None:
        self._name = name
        self._pipe_fd = end.pipe_fd
        self._place_bytes = end.place_bytes
        self._depth = end.depth
        self._mapping = mmap.mmap(end.memory_fd, end.place_bytes * end.depth)
        os.close(end.memory_fd)  # the mapping has a descriptor of its own
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def memory(self, step: int) -> str:
        """A place in the ring."""
        return f"/{self._name} {step % self._depth}"

    def put(self, step: int, tensor: Tensor) -> None:
        """Copies the tensor, [r] or [r, c], to the step's place, and tells the receiver."""
        rows, columns = tensor.shape[0], tensor.shape[1] if tensor.ndim == 2 else 0
        self._place(step, tensor.dtype, rows, columns).copy_(tensor)
        kind = _DTYPES.index(tensor.dtype)
        self._tell(_HEADER.pack(step, kind, rows, columns))

    def fail(self, step: int, text: str) -> None:
        """Tells the receiver that there will be no tensor of the step, and why."""
        words = text.encode()[:_MOST_TEXT_BYTES]
        self._tell(_HEADER.pack(step, _FAILURE, len(words), 0) + words)

    def sent(self, step: int, event: Event) -> None:
        """Nothing to do: the frame in the pipe is the edge."""

    def wait(self, step: int, device: Device) -> None:
        """Nothing to do: `take` waits."""

    def take(self, step: int) -> Tensor:
        """Waits, asleep, for the step's tensor, which stays where it is; RelayedFailure if it
        failed in a stage before."""
        told, kind, rows, columns = _HEADER.unpack(self._read(_HEADER.size))
        assert told == step, f"{self._name}: step {told} came where {step} was due"
        if kind == _FAILURE:
            raise RelayedFailure(self._read(rows).decode(errors="replace"))
        return self._place(step, _DTYPES[kind], rows, columns)

    def _place(self, step: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        nbytes = rows * max(columns, 1) * dtype.itemsize
        assert nbytes <= self._place_bytes, f"{self._name}: {nbytes} bytes are more than was said"
        first = step % self._depth * self._place_bytes
        flat = self._memory[first : first + nbytes].view(dtype)
        return flat.view(rows, columns) if columns else flat

    def _tell(self, frame: bytes) -> None:
        try:
            os.write(self._pipe_fd, frame)
        except OSError:
            os._exit(LOST)

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(self._pipe_fd, count - len(data))
            if not more:
                os._exit(LOST)
            data += more
        return data
