"""Frames arrive whole and in order, however the socket cuts them."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from stepahead.executor.channel import Channel, Kind

LARGE = bytes(range(256)) * 20_000  # 5 MB; no socket buffer takes that at once


class Cut(socket.socket):
    """Gives at most one byte a read, and interrupts every third one as Ctrl-C would."""

    reads = 0

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        self.reads += 1
        if self.reads % 3 == 0:
            raise KeyboardInterrupt
        return super().recv_into(buffer[:1], nbytes, flags)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = socket.socketpair()
    left, right = Channel(ends[0]), Channel(ends[1])
    yield left, right
    for channel in (left, right):
        channel.hang_up()
        channel.close()


def test_frames_come_as_they_were_sent(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    sent = [(Kind.PLAN, b"one"), (Kind.CONTROL, b""), (Kind.RESULT, b"\0" * 70_000)]
    for kind, payload in sent * 2:
        left.send(kind, payload)
    assert [right.receive() for _ in range(6)] == sent * 2


def test_what_the_socket_does_not_take_follows_in_order(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    started_s = time.monotonic()
    sent = [bytes([number]) + LARGE * (number % 2) for number in range(10)]
    for payload in sent:
        left.send(Kind.PLAN, payload)  # nobody receives yet
    assert time.monotonic() - started_s < 1
    assert [right.receive()[1] for _ in sent] == sent
    left.send(Kind.PLAN, b"later")
    assert right.receive()[1] == b"later"


def test_a_read_that_is_cut_and_interrupted_loses_nothing() -> None:
    mine, other = socket.socketpair()
    cut = Cut(fileno=mine.detach())
    sender, receiver = Channel(other), Channel(cut)
    sent = [bytes(number) for number in (0, 1, 300)]
    for payload in sent:
        sender.send(Kind.RESULT, payload)
    interrupts, got = 0, []
    while len(got) < len(sent):
        try:
            got.append(receiver.receive()[1])
        except KeyboardInterrupt:
            interrupts += 1
    assert got == sent
    assert interrupts > 100
    sender.close()
    receiver.close()


@pytest.mark.parametrize("size", [100, 70_000])
def test_a_frame_in_two_parts_does_not_wait_for_more(size: int) -> None:
    """The second read must ask for what the frame lacks, not for a full inbox."""
    mine, other = socket.socketpair()
    receiver = Channel(mine)
    frame = struct.pack("<IB", size, Kind.PLAN) + bytes(size)
    other.sendall(frame[:50])
    threading.Timer(0.05, other.sendall, [frame[50:]]).start()
    rescue = threading.Timer(5, receiver.hang_up)
    rescue.start()
    started_s = time.monotonic()
    assert receiver.receive() == (Kind.PLAN, bytes(size))
    assert time.monotonic() - started_s < 4
    rescue.cancel()
    other.close()
    receiver.close()


@pytest.mark.parametrize("part", [0, 3, 200])
def test_an_end_in_the_middle_of_a_frame(part: int) -> None:
    mine, other = socket.socketpair()
    whole, end = socket.socketpair()
    Channel(whole).send(Kind.PLAN, bytes(500))
    other.send(end.recv(part) if part else b"")
    other.close()
    receiver = Channel(mine)
    with pytest.raises(EOFError):
        receiver.receive()
    for sock in (mine, whole, end):
        sock.close()


def test_sending_to_nobody_is_an_error_and_never_waits(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(Kind.PLAN, LARGE)  # half of it waits in a thread
    right.close()
    left.close()  # which ends all the same
    with pytest.raises(OSError, match=r"descriptor|pipe"):
        left.send(Kind.PLAN, b"more")


def test_hang_up_wakes_both_sides_but_what_came_is_kept(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(Kind.RESULT, b"came")
    threading.Timer(0.1, left.hang_up).start()
    right.wait_for_end()
    assert right.receive() == (Kind.RESULT, b"came")
    with pytest.raises(EOFError):
        right.receive()
    with pytest.raises(EOFError):
        left.receive()


def test_waiting_for_the_end_is_not_woken_by_frames(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    woken = threading.Event()

    def watch() -> None:
        right.wait_for_end()
        woken.set()

    thread = threading.Thread(target=watch)
    thread.start()
    left.send(Kind.PLAN, b"a frame")
    assert not woken.wait(0.2)
    left.hang_up()
    assert woken.wait(5)
    thread.join()


def test_wait_is_bounded(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    assert not right.wait(0.01)
    left.send(Kind.READY, b"")
    assert right.wait(5)
