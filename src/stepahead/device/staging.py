"""Pinned staging: what a step brings goes through a ring of host buffers, in one copy a step.

A host buffer may be written again once the copy out of it has run.  It has if the step landed, and
the ring is as deep as the steps ahead: the step that used the buffer last is retired before the one
that needs it is planned.  A step whose result nobody awaits, as one whose launch failed half-way,
promises nothing; for those each copy has an event of its own, which is asked before the buffer is
written and waited for only if it has not passed, under `SyncReason.STAGING`.

The write is declared *before* the event is asked: a device that checks accesses must see a ring
that is too short as the race it is, not as a wait that hides it.

The device's block is fresh memory each step, so that nothing on the device needs to be waited for.
Knows no streams but the one that copies, and nothing of what is staged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from stepahead.device.base import Event, Stream
from stepahead.errors import EngineError
from stepahead.sync import SyncReason

LATE = "late "  # of the ring for what comes when a step is under way
_FIRST_COUNT = 4096  # elements, 32 KB: a step that joins a few short prompts


class StagingMemory(Protocol):
    """What the ring asks of a device."""

    def pinned(self, count: int, name: str) -> Tensor:
        """Host memory int64[count] that copies are made from without blocking the host."""
        ...

    def block(self, count: int, name: str) -> Tensor:
        """Fresh memory int64[count] on the device, which stays until `name` is freed."""
        ...

    def host_writes(self, name: str) -> None:
        """The host is about to write the pinned memory `name`."""
        ...

    def copy_in(self, target: Tensor, name: str, source: Tensor, source_name: str) -> None:
        """Enqueues one copy on the schedule stream, of equal sizes; returns before it has run."""
        ...

    def record(self, stream: Stream) -> Event:
        """As in `Device`."""
        ...

    def sync(self, event: Event, reason: SyncReason) -> None:
        """As in `Device`."""
        ...


@dataclass
class _Buffer:
    """A place in the ring: its host memory, and the event of the last copy out of it.  A step that
    did not fit leaves more than one piece, of which the last is the largest."""

    name: str
    hosts: list[Tensor] = field(default_factory=list)
    copied: Event | None = None


@dataclass
class _Piece:
    """Host memory and device memory of one copy, filled up to `used`."""

    host: Tensor
    array: np.ndarray  # the host memory, as numpy sees it
    block: Tensor
    used: int = 0

    @property
    def room(self) -> int:
        """Elements that still fit."""
        return len(self.array) - self.used


class StagingRing:
    """`depth` host buffers of int64[count], used in turn; `count` doubles until a step fits."""

    def __init__(
        self, memory: StagingMemory, depth: int, count: int = _FIRST_COUNT, kind: str = ""
    ) -> None:
        """`kind` goes before the names of the memory, so that rings are told apart."""
        self.memory = memory
        self.count = count
        self._kind = kind
        self._buffers = [_Buffer(f"{kind}pinned {k}") for k in range(depth)]
        self._opened = 0

    def open(self, step: int) -> RingStaging:
        """A step's staging block, empty; known on the device as "staging STEP"."""
        buffer = self._buffers[self._opened % len(self._buffers)]
        self._opened += 1
        return RingStaging(self, buffer, f"{self._kind}staging {step}")

    def count_for(self, count: int) -> int:
        """The ring's size, doubled until `count` fits."""
        doubled = self.count
        while doubled < count:
            doubled *= 2
        return doubled


class RingStaging:
    """A step's way to the device.  EngineError for what comes after `send`."""

    def __init__(self, ring: StagingRing, buffer: _Buffer, name: str) -> None:
        self.name = name
        self._ring = ring
        self._buffer = buffer
        self._pieces: list[_Piece] = []
        self._sent = False

    def add(self, array: np.ndarray) -> Tensor:
        """The array as int64 on the device, same shape; the array may change afterwards."""
        self._check_open("an array was added")
        if not self._pieces:
            self._take_buffer(array.size)
        elif self._pieces[-1].room < array.size:
            self._add_piece(self._new_host(self._filled() + array.size))
        piece = self._pieces[-1]
        first, piece.used = piece.used, piece.used + array.size
        piece.array[first : piece.used] = array.reshape(-1)
        return piece.block[first : piece.used].view(array.shape)

    def send(self) -> None:
        """Enqueues the copy, if anything was added: one, or more where the ring has just grown."""
        self._check_open("it was sent again")
        self._sent = True
        if not self._pieces:
            return
        memory, buffer = self._ring.memory, self._buffer
        for piece in self._pieces:
            used = piece.used
            memory.copy_in(piece.block[:used], self.name, piece.host[:used], buffer.name)
        buffer.copied = memory.record(Stream.SCHEDULE)
        self._ring.count = self._ring.count_for(self._filled())

    def _check_open(self, what: str) -> None:
        if self._sent:
            raise EngineError(f"{what} after {self.name!r} was sent; a step has one copy")

    def _filled(self) -> int:
        return sum(piece.used for piece in self._pieces)

    def _take_buffer(self, count: int) -> None:
        ring, buffer = self._ring, self._buffer
        ring.memory.host_writes(buffer.name)
        if buffer.copied is not None and not buffer.copied.done():
            ring.memory.sync(buffer.copied, SyncReason.STAGING)
        buffer.copied = None
        largest = buffer.hosts[-1:]
        del buffer.hosts[:]  # the copies out of them have run
        if largest and len(largest[0]) >= ring.count_for(count):
            buffer.hosts.append(largest[0])
        self._add_piece(buffer.hosts[0] if buffer.hosts else self._new_host(count))

    def _new_host(self, count: int) -> Tensor:
        host = self._ring.memory.pinned(self._ring.count_for(count), self._buffer.name)
        self._buffer.hosts.append(host)
        return host

    def _add_piece(self, host: Tensor) -> None:
        block = self._ring.memory.block(len(host), self.name)
        self._pieces.append(_Piece(host, host.numpy(), block))
