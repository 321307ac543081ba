"""Frames over a stream socket between the host and its worker.  Knows no plan and no process.

    frame    uint32 length, uint8 kind, `length` bytes        (little endian)

A Unix socket pair: one system call for a small frame on either side, waits asleep in the kernel, a
send that takes what fits, and an end that either side sees at once.  Pipes, and shared memory with
an eventfd, are 3 to 6 µs a step cheaper (benchmarks/transport.py) and have no hang-up: a process
that the worker left behind could keep the host waiting for ever.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from enum import IntEnum
from functools import partial

from stepahead.executor.aside import Aside

_HEADER = struct.Struct("<IB")
_HEADER_BYTES = _HEADER.size
_INBOX_BYTES = 1 << 16


class Kind(IntEnum):
    """What a frame holds."""

    START = 0  # host to worker, once: how to build the runner
    PLAN = 1
    CONTROL = 2
    READY = 3  # worker to host, once: the runner is built, or
    BUILD_FAILED = 4  # why it isn't
    RESULT = 5


class Channel:
    """One end of the socket, which it owns.  One thread sends at a time, and one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._held = 0  # bytes of the inbox that have come and are not yet handed out
        self._backlog = Aside("stepahead-send")

    def send(self, kind: Kind, payload: bytes) -> None:
        """Hands a frame over and never waits: what the socket won't take now, a thread sends.

        Without that, a large frame would wait for a peer that is in a forward.  OSError when the
        other side is known to be gone.
        """
        frame = _HEADER.pack(len(payload), kind) + payload
        sent = self._send_some(frame) if self._backlog.idle else 0
        if sent < len(frame):
            self._backlog.put(partial(self._send_rest, frame[sent:]))

    def _send_some(self, frame: bytes) -> int:
        try:
            return self._sock.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_rest(self, frame: bytes) -> None:
        # The other side is gone: whoever receives from it, or sends next, is told so.
        with contextlib.suppress(OSError):
            self._sock.sendall(frame)

    def receive(self) -> tuple[int, bytes]:
        """The next frame's kind and bytes; waits, asleep.  EOFError or OSError at the end.

        What has come is kept in the inbox, so an interrupted wait (Ctrl-C) loses nothing.
        """
        while self._held < _HEADER_BYTES:
            self._fill(len(self._inbox))
        length, kind = _HEADER.unpack_from(self._inbox)
        end = _HEADER_BYTES + length
        if self._held < end:
            self._fill_to(end)
        payload = bytes(self._inbox[_HEADER_BYTES:end])
        rest = self._held - end
        if rest:
            self._inbox[:rest] = self._inbox[end : self._held]
        self._held = rest
        return kind, payload

    def _fill_to(self, end: int) -> None:
        if end > len(self._inbox):
            self._grow(end)
        while self._held < end:
            # The kernel gathers a large frame without coming back for each piece of it.
            self._fill(end, socket.MSG_WAITALL)

    def _fill(self, end: int, flags: int = 0) -> None:
        count = self._sock.recv_into(self._inbox[self._held : end], 0, flags)
        if count == 0:
            raise EOFError("the other side is gone")
        self._held += count

    def _grow(self, size: int) -> None:
        larger = memoryview(bytearray(size))
        larger[: self._held] = self._inbox[: self._held]
        self._inbox = larger

    def wait(self, timeout_s: float) -> bool:
        """Whether something came, or the other side went, within `timeout_s`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def wait_for_end(self) -> None:
        """Sleeps until the other side is gone; what it sends meanwhile wakes nobody."""
        poll = select.poll()
        poll.register(self._sock, 0)  # a hang-up is always reported
        poll.poll()

    def hang_up(self) -> None:
        """Ends every wait on either side, from any thread; what has come can still be received."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Sends what is left and closes the socket."""
        self._backlog.close()
        self._sock.close()
