"""Frames over a pair of pipes between the host and its worker.  Knows no plan and no process.

    frame    uint32 length, uint8 kind, `length` bytes, the mark        (little endian)

The mark tells a frame from one whose sender died on the way, and whose hole was then filled by
what wakes the receiver.

Pipes were measured best (benchmarks/transport.py): one cheap system call for a small frame on
either side, waits asleep in the kernel, and no file or shared memory to leave behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
from enum import IntEnum
from functools import partial
from io import FileIO

from stepahead.executor.aside import Aside

_HEADER = struct.Struct("<IB")
_HEADER_BYTES = _HEADER.size
_MARK = 0xA5
_TAIL = bytes((_MARK,))
_BELL = bytes(_HEADER_BYTES + 1)  # wakes a receiver: as long as a frame, and nowhere the mark
_INBOX_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # what the kernel holds of a large frame until the other side reads


class Kind(IntEnum):
    """What a frame holds."""

    START = 0  # host to worker, once: how to build the runner
    PLAN = 1
    CONTROL = 2
    READY = 3  # worker to host, once: the runner is built, or
    BUILD_FAILED = 4  # why it isn't
    RESULT = 5
    MESSAGE = 6  # either way, between a server's front and its engine
    IMPORT = 7  # host to worker, before START: modules that the runner will need


class Channel:
    """One end.  One thread receives; all else is for any thread."""

    def __init__(self, read_fd: int, write_fd: int, bell_fd: int | None = None) -> None:
        """Takes the descriptors over.  `bell_fd`, a copy of the other side's `write_fd`, writes to
        what this end reads."""
        os.set_blocking(write_fd, False)
        self._inlet = FileIO(read_fd, "rb")
        self._outlet = FileIO(write_fd, "wb")
        self._bell = None if bell_fd is None else FileIO(bell_fd, "wb")
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._held = 0  # bytes of the inbox that have come and are not yet handed out
        self._backlog = Aside("stepahead-send")
        # Frames of two threads must not mix.  Reentrant: a signal's handler may close in a send.
        self._sending = threading.RLock()
        self._hung_up = False

    def send(self, kind: Kind, payload: bytes) -> None:
        """Hands a frame over and never waits: what the pipe won't take now, a thread sends.

        Without that, a large frame would wait for a peer that is in a forward.  OSError when the
        other side is known to be gone, ValueError after `close`.
        """
        frame = b"".join((_HEADER.pack(len(payload), kind), payload, _TAIL))
        with self._sending:
            sent = (self._outlet.write(frame) or 0) if self._backlog.idle else 0
            if sent < len(frame):
                self._backlog.put(partial(self._send_rest, frame[sent:]))

    @property
    def behind(self) -> bool:
        """Whether the other side has left so much unread that the pipe would not take it all."""
        return not self._backlog.idle

    def _send_rest(self, frame: bytes) -> None:
        poll = select.poll()
        poll.register(self._outlet, select.POLLOUT)
        rest = memoryview(frame)
        # When the other side is gone, whoever receives from it, or sends next, is told so.
        with contextlib.suppress(OSError):
            while rest and not self._hung_up:
                if poll.poll(200):
                    rest = rest[self._outlet.write(rest) or 0 :]

    def receive(self) -> tuple[int, bytes]:
        """The next frame's kind and bytes; waits, asleep.  EOFError when there will be none.

        What has come is kept in the inbox, so an interrupted wait (Ctrl-C) loses nothing.
        """
        while self._held < _HEADER_BYTES:
            self._fill(len(self._inbox))
        length = _HEADER.unpack_from(self._inbox)[0]
        self._fill_to(_HEADER_BYTES + length + 1)
        frame = self._take_whole()
        assert frame is not None, "all of it has come"
        return frame

    def receive_ready(self) -> list[tuple[int, bytes]]:
        """The frames that are whole after one read, which waits for nothing when `fileno` is
        readable.  EOFError when there will be none."""
        self._fill(len(self._inbox))
        frames: list[tuple[int, bytes]] = []
        while (frame := self._take_whole()) is not None:
            frames.append(frame)
        return frames

    def fileno(self) -> int:
        """What becomes readable when something has come."""
        return self._inlet.fileno()

    def _take_whole(self) -> tuple[int, bytes] | None:
        """The first frame in the inbox, None where not all of it has come."""
        if self._held < _HEADER_BYTES:
            return None
        length, kind = _HEADER.unpack_from(self._inbox)
        last = _HEADER_BYTES + length
        end = last + 1
        if self._held < end:
            self._make_room(end)
            return None
        if self._inbox[last] != _MARK:
            raise EOFError("the other side is gone")
        payload = bytes(self._inbox[_HEADER_BYTES:last])
        rest = self._held - end
        if rest:
            self._inbox[:rest] = self._inbox[end : self._held]
        self._held = rest
        return kind, payload

    def _make_room(self, size: int) -> None:
        if size > len(self._inbox):
            larger = memoryview(bytearray(size))
            larger[: self._held] = self._inbox[: self._held]
            self._inbox = larger

    def _fill_to(self, end: int) -> None:
        self._make_room(end)
        while self._held < end:
            self._fill(end)

    def _fill(self, end: int) -> None:
        # None after a hang-up, which may have come in the middle of a frame
        count = self._inlet.readinto(self._inbox[self._held : end])
        if not count:
            raise EOFError("the other side is gone")
        self._held += count

    def wait(self, timeout_s: float) -> bool:
        """Whether something came, or the other side went, within `timeout_s`."""
        if self._held:
            return True  # of a frame that came with the one before it
        poll = select.poll()
        poll.register(self._inlet, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def wait_for_end(self) -> None:
        """Sleeps until the other side has closed; what it sends meanwhile wakes nobody."""
        poll = select.poll()
        poll.register(self._inlet, 0)  # a hang-up is always reported
        poll.poll()

    def hang_up(self) -> None:
        """Ends every wait of this end; what has come before can still be received.

        The end of a process closes its pipes, but not if it leaves a fork of itself behind: then
        this is what keeps the host from waiting for ever.
        """
        self._hung_up = True
        with contextlib.suppress(OSError, ValueError):  # closed, or so full that nobody waits
            os.set_blocking(self._inlet.fileno(), False)
            if self._bell is not None:
                self._bell.write(_BELL)

    def close(self) -> None:
        """Sends what is left, unless hung up, and closes the pipes."""
        with self._sending:
            self._backlog.close()
            for pipe in (self._inlet, self._outlet, self._bell):
                if pipe is not None:
                    pipe.close()


def open_channel(back_bytes: int = _PIPE_BYTES) -> tuple[Channel, tuple[int, int]]:
    """The host's end, and the descriptors (read, write) of the worker's.

    `back_bytes`: how much of what the worker sends the kernel holds until the host reads.
    """
    there, back = open_pipe(), open_pipe()
    for (read_fd, _), size in ((there, _PIPE_BYTES), (back, back_bytes)):
        with contextlib.suppress(OSError):  # a limit of the machine: then a thread sends more
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, size)
    return Channel(back[0], there[1], os.dup(back[1])), (there[0], back[1])


def open_pipe() -> tuple[int, int]:
    """A pipe (read, write) whose descriptors are none of 0, 1 and 2: a program may have those
    closed, and the worker's are set anew when it starts."""
    low = os.pipe()
    try:
        read_fd, write_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in low)
    finally:
        for fd in low:
            os.close(fd)
    return read_fd, write_fd
