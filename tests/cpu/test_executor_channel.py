"""Frames arrive whole and in order, however the pipe cuts them."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from io import FileIO

import pytest

from stepahead.executor.channel import Channel, Kind, open_channel

HANG_S = 30.0  # nothing takes that long unless it hangs
LARGE = bytes(range(256)) * 20_000  # 5 MB; no pipe takes that at once
Pair = tuple[Channel, Channel]


def frame_of(kind: Kind, payload: bytes) -> bytes:
    """As it goes through the pipe."""
    return struct.pack("<IB", len(payload), kind) + payload + b"\xa5"


class Cut(FileIO):
    """Gives at most one byte a read, and interrupts every third one as Ctrl-C would."""

    reads = 0

    def readinto(self, buffer: memoryview) -> int | None:
        self.reads += 1
        if self.reads % 3 == 0:
            raise KeyboardInterrupt
        return super().readinto(buffer[:1])


class Halting(FileIO):
    """Takes a half of the first write, and waits a moment for what another thread may send."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb")
        self.halted = threading.Event()
        self.other_sent = threading.Event()

    def write(self, data: bytes) -> int | None:
        if self.halted.is_set():
            return super().write(data)
        count = super().write(data[: len(data) // 2])
        self.halted.set()
        self.other_sent.wait(0.2)
        return count


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The host's end and the worker's."""
    host, fds = open_channel()
    worker = Channel(*fds)
    yield host, worker
    for channel in (host, worker):
        channel.hang_up()
        channel.close()


def test_frames_come_as_they_were_sent(pair: Pair) -> None:
    left, right = pair
    sent = [(Kind.PLAN, b"one"), (Kind.CONTROL, b""), (Kind.RESULT, b"\0" * 70_000)]
    for kind, payload in sent * 2:
        left.send(kind, payload)
    assert [right.receive() for _ in range(6)] == sent * 2


def test_what_the_pipe_does_not_take_follows_in_order(pair: Pair) -> None:
    left, right = pair
    sent = [bytes([number]) + LARGE * (number % 2) for number in range(10)]
    for payload in sent:
        left.send(Kind.PLAN, payload)  # nobody receives yet: a send that waited would never return
    assert [right.receive()[1] for _ in sent] == sent
    left.send(Kind.PLAN, b"later")
    assert right.receive()[1] == b"later"


def test_a_small_frame_does_not_overtake_a_large_one(pair: Pair) -> None:
    """While somebody receives, the pipe often has room for a small one and only for it."""
    host, worker = pair
    sent = [bytes([number]) + LARGE * (number % 2) for number in range(60)]
    got: list[bytes] = []
    receiving = threading.Thread(
        target=lambda: got.extend(worker.receive()[1] for _ in sent), daemon=True
    )
    receiving.start()
    for payload in sent:
        host.send(Kind.PLAN, payload)
        time.sleep(0.001)
    receiving.join(HANG_S)
    assert got == sent


def test_a_frame_that_came_with_another_is_not_waited_for(pair: Pair) -> None:
    # both come with one read: poll sees nothing more, and the second frame once waited for a third
    host, worker = pair
    host.send(Kind.PLAN, b"one")
    host.send(Kind.PLAN, b"two")
    assert worker.wait(HANG_S)
    assert worker.receive() == (Kind.PLAN, b"one")
    assert worker.wait(0.0)
    assert worker.receive() == (Kind.PLAN, b"two")
    assert not worker.wait(0.0)


def test_frames_are_taken_as_they_come_without_waiting(pair: Pair) -> None:
    host, worker = pair
    sent = [bytes([number]) * size for number, size in enumerate((0, 5, 70_000, 3, 200_000, 1))]
    got: list[bytes] = []
    for payload in sent:
        host.send(Kind.PLAN, payload)
    while len(got) < len(sent):
        assert worker.wait(HANG_S)
        got += [payload for _, payload in worker.receive_ready()]
    assert got == sent
    host.close()
    with pytest.raises(EOFError):
        worker.receive_ready()


def test_frames_of_two_threads_do_not_mix(pair: Pair) -> None:
    """`close` may come from any thread, in the middle of a launch of another one."""
    host, worker = pair
    outlet = Halting(os.dup(host._outlet.fileno()))
    whole, host._outlet = host._outlet, outlet
    whole.close()

    def send_amid() -> None:
        outlet.halted.wait(HANG_S)
        host.send(Kind.CONTROL, b"the other's")
        outlet.other_sent.set()

    other = threading.Thread(target=send_amid)
    other.start()
    host.send(Kind.PLAN, b"the first's")
    other.join()
    assert worker.receive() == (Kind.PLAN, b"the first's")
    assert worker.receive() == (Kind.CONTROL, b"the other's")


def test_a_read_that_is_cut_and_interrupted_loses_nothing(pair: Pair) -> None:
    host, worker = pair
    whole, host._inlet = host._inlet, Cut(os.dup(host._inlet.fileno()))
    whole.close()
    sent = [bytes(number) for number in (0, 1, 300)]
    for payload in sent:
        worker.send(Kind.RESULT, payload)
    interrupts, got = 0, []
    while len(got) < len(sent):
        try:
            got.append(host.receive()[1])
        except KeyboardInterrupt:
            interrupts += 1
    assert got == sent
    assert interrupts > 100


@pytest.mark.parametrize("size", [100, 70_000])
def test_a_frame_in_two_parts_does_not_wait_for_more(pair: Pair, size: int) -> None:
    host, worker = pair
    frame = frame_of(Kind.PLAN, bytes(size))
    host._outlet.write(frame[:50])
    later = threading.Timer(0.05, host._outlet.write, [frame[50:]])
    later.start()
    assert worker.receive() == (Kind.PLAN, bytes(size))
    later.join()


@pytest.mark.parametrize("part", [0, 3, 200, 100_000])
def test_an_end_in_the_middle_of_a_frame(pair: Pair, part: int) -> None:
    """The worker's end stays open, as it does in a process that the worker left behind."""
    host, worker = pair
    worker._outlet.write(frame_of(Kind.RESULT, bytes(500_000))[:part])
    later = threading.Timer(0.1, host.hang_up)
    later.start()
    for _ in range(2):
        with pytest.raises(EOFError):
            host.receive()
    later.join()


@pytest.mark.parametrize("payload", [b"", b"ABCDEFGHIJ", bytes(10)])
@pytest.mark.parametrize("missing", range(1, 7))
def test_a_frame_that_was_cut_off_is_none(pair: Pair, payload: bytes, missing: int) -> None:
    """A worker was killed in a write.  The five bytes that then woke the host stood in for what was
    missing, up to five, and a broken result was taken for a whole one."""
    host, worker = pair
    worker.send(Kind.RESULT, b"whole")
    worker._outlet.write(frame_of(Kind.RESULT, payload)[:-missing])
    host.hang_up()
    assert host.receive() == (Kind.RESULT, b"whole")
    for _ in range(2):
        with pytest.raises(EOFError):
            host.receive()


def test_the_other_sides_end_is_an_end(pair: Pair) -> None:
    host, worker = pair
    host.send(Kind.PLAN, b"came")
    host.close()
    assert worker.receive() == (Kind.PLAN, b"came")
    with pytest.raises(EOFError):
        worker.receive()


def test_sending_to_nobody_is_an_error_and_never_waits(pair: Pair) -> None:
    host, worker = pair
    host.send(Kind.PLAN, LARGE)  # most of it waits in a thread
    worker.close()
    deadline_s = time.monotonic() + HANG_S
    while not host._backlog.idle:  # until the thread has noticed
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(BrokenPipeError):
        host.send(Kind.PLAN, b"more")


def test_hang_up_ends_a_send_that_nobody_takes(pair: Pair) -> None:
    host, _ = pair
    host.send(Kind.PLAN, LARGE)
    host.hang_up()
    host.close()  # waits for the thread that sends
    assert host._backlog.idle


def test_close_sends_what_is_left(pair: Pair) -> None:
    host, worker = pair
    host.send(Kind.PLAN, LARGE)
    closing = threading.Thread(target=host.close)
    closing.start()
    assert worker.receive() == (Kind.PLAN, LARGE)
    closing.join()


def test_what_came_before_a_hang_up_is_kept(pair: Pair) -> None:
    host, worker = pair
    worker.send(Kind.RESULT, b"came")
    worker.send(Kind.RESULT, LARGE)
    worker.hang_up()
    worker.close()
    host.hang_up()
    assert host.receive() == (Kind.RESULT, b"came")
    with pytest.raises(EOFError):  # only what the pipe holds had come
        host.receive()


def test_a_full_pipe_does_not_stop_a_hang_up(pair: Pair) -> None:
    host, worker = pair
    filler = FileIO(os.dup(worker._outlet.fileno()), "wb")
    while filler.write(bytes(1 << 16)):
        pass
    while filler.write(b"x"):  # to the last byte
        pass
    filler.close()
    host.hang_up()  # one that waited would never return: nobody reads
    assert worker._outlet.write(b"x") is None


def test_waiting_for_the_end_is_not_woken_by_frames(pair: Pair) -> None:
    host, worker = pair
    woken = threading.Event()

    def watch() -> None:
        worker.wait_for_end()
        woken.set()

    thread = threading.Thread(target=watch)
    thread.start()
    host.send(Kind.PLAN, b"a frame")
    assert not woken.wait(0.2)
    host.close()
    assert woken.wait(HANG_S)
    thread.join()


def test_wait_is_bounded(pair: Pair) -> None:
    host, worker = pair
    assert not host.wait(0.01)
    worker.send(Kind.READY, b"")
    assert host.wait(HANG_S)


def test_it_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    host, fds = open_channel()
    worker = Channel(*fds)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 5
    host.close()
    worker.close()
    assert set(os.listdir("/proc/self/fd")) <= before
