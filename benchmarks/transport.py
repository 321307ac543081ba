"""How plans and results should cross between the host and its worker: ways, measured side by side.

The regime is steady decode: a plan of a few bytes goes over, a result of 256 tokens (1 KB) comes
back, both encoded and decoded as in production, every wait asleep.  Two processes on two cores:
most of the wall time is the kernel waking a sleeper, so what a way costs the processors is shown
beside it; a host that spins instead would answer sooner and take the core that the device needs.

    echo      the worker answers at once: wall time of a round trip (p50, p99), and CPU time of
              each side for it, all its threads
    overlap   the worker computes about half a millisecond in forty short calls that let the
              interpreter's lock go, as a small model does in torch, and the next plan is always
              there before it is done; the host works 60 us between two steps: wall time of a step
              beyond the forward's, and CPU time of the host's thread in launch and land

The ways: `pipe` is stepahead.executor.channel, which was chosen; `pipe+reader` the same with a
thread between the worker's pipe and its runner; `executor` the whole of ProcessExecutor (launch and
land).  The others live here only.  Rounds alternate between the ways; the table shows the median of
rounds.  A busy machine shows: with one core left for both sides, `beyond` grows by the host's work.

On two quiet cores (AMD EPYC, a virtual machine; 5 rounds) pipes and shared memory were within 1 us
of each other; an echo took 13 us by pipe, 15 by socket, 45 with a reader thread, 92 by zmq.  Pipes
were chosen over shared memory because the kernel cleans them up and tells a side when the other
one ends.

Last line: JSON, in microseconds; `cpu_us` is the host's in `overlap`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from stepahead.executor.channel import Channel, Kind, open_channel
from stepahead.executor.process import ProcessExecutor
from stepahead.plan import (
    NO_INTS,
    Plan,
    Result,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
)
from stepahead.runner.spec import RunnerSpec

ROUNDS = 7
STEPS = 600
WARM_UP = 50
HOST_WORK_US = 60.0
FORWARD_CALLS = 40
FORWARD_BYTES = bytes(16_000)
TOKENS = np.arange(256, dtype=np.int32)
CHOSEN = "pipe"


@dataclass(frozen=True)
class End:
    """One side of a way."""

    send: Callable[[bytes], Any]
    receive: Callable[[], bytes]


@dataclass(frozen=True)
class Way:
    """A transport made before the fork; each side opens its end after it."""

    host: Callable[[], End]
    worker: Callable[[], End]


# --- the ways -------------------------------------------------------------------------------


def channel_end(channel: Channel) -> End:
    return End(lambda data: channel.send(Kind.PLAN, data), lambda: channel.receive()[1])


def pipe_way() -> Way:
    host, fds = open_channel()
    return Way(lambda: channel_end(host), lambda: channel_end(Channel(*fds)))


def reader_way() -> Way:
    def worker() -> End:
        end = channel_end(Channel(*fds))
        inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def read() -> None:
            while True:
                inbox.put(end.receive())

        threading.Thread(target=read, daemon=True).start()
        return End(end.send, inbox.get)

    host, fds = open_channel()
    return Way(lambda: channel_end(host), worker)


def socket_way() -> Way:
    """A Unix socket pair; the buffered reading is that of the channel, without its checks."""

    def end(sock: socket.socket) -> End:
        inbox = b""

        def receive() -> bytes:
            nonlocal inbox
            while len(inbox) < 4 or len(inbox) < (size := 4 + struct.unpack_from("<I", inbox)[0]):
                inbox += sock.recv(65536)
            payload, inbox = inbox[4:size], inbox[size:]
            return payload

        return End(lambda data: sock.send(struct.pack("<I", len(data)) + data), receive)

    ours, theirs = socket.socketpair()
    return Way(lambda: end(ours), lambda: end(theirs))


def connection_way() -> Way:
    ours, theirs = multiprocessing.Pipe()
    return Way(
        lambda: End(ours.send_bytes, ours.recv_bytes),
        lambda: End(theirs.send_bytes, theirs.recv_bytes),
    )


def shared_memory_way(signals: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]) -> Way:
    """One slot of shared memory a direction (enough for a few steps ahead: eight messages), and a
    pair of (wake, sleep) calls."""
    slots, slot_bytes = 8, 4096

    def half() -> tuple[Callable[[bytes], None], Callable[[], bytes]]:
        memory = memoryview(mmap.mmap(-1, slots * slot_bytes))
        wake, sleep = signals()
        sent = received = 0

        def send(data: bytes) -> None:
            nonlocal sent
            start = sent % slots * slot_bytes
            struct.pack_into("<I", memory, start, len(data))
            memory[start + 4 : start + 4 + len(data)] = data
            sent += 1
            wake()

        def receive() -> bytes:
            nonlocal received
            sleep()
            start = received % slots * slot_bytes
            received += 1
            (length,) = struct.unpack_from("<I", memory, start)
            return bytes(memory[start + 4 : start + 4 + length])

        return send, receive

    there, back = half(), half()
    return Way(lambda: End(there[0], back[1]), lambda: End(back[0], there[1]))


def eventfd_signals() -> tuple[Callable[[], Any], Callable[[], Any]]:
    fd = os.eventfd(0, os.EFD_SEMAPHORE)
    return lambda: os.eventfd_write(fd, 1), lambda: os.eventfd_read(fd)


def semaphore_signals() -> tuple[Callable[[], Any], Callable[[], Any]]:
    semaphore = multiprocessing.get_context("fork").Semaphore(0)
    return semaphore.release, semaphore.acquire


def zmq_way() -> Way:
    path = f"ipc://@stepahead-transport-{os.getpid()}-{time.monotonic_ns()}"  # leaves no file

    def end(bind: bool) -> End:
        pair = zmq.Context.instance().socket(zmq.PAIR)
        pair.linger = 0
        if bind:
            pair.bind(path)
        else:
            pair.connect(path)
        return End(pair.send, pair.recv)

    return Way(lambda: end(True), lambda: end(False))


WAYS: dict[str, Callable[[], Way]] = {
    "pipe": pipe_way,
    "pipe+reader": reader_way,
    "socket": socket_way,
    "mp.Connection": connection_way,
    "shm+eventfd": lambda: shared_memory_way(eventfd_signals),
    "shm+semaphore": lambda: shared_memory_way(semaphore_signals),
    "zmq ipc": zmq_way,
}


# --- the two sides --------------------------------------------------------------------------


def forward() -> None:
    for _ in range(FORWARD_CALLS):
        hashlib.sha256(FORWARD_BYTES)


def answer(plan: Plan) -> Result:
    """A plan with grants asks for a forward; a negative step for this process's CPU time, in
    microseconds."""
    start_ns = time.monotonic_ns()
    if len(plan.grants):
        forward()
    end_ns = time.monotonic_ns()
    tokens = TOKENS if plan.step >= 0 else np.array([time.process_time_ns() // 1000], np.int64)
    return Result(plan.step, tokens, start_ns, end_ns)


def work(end: End) -> None:
    while True:
        end.send(encode_result(answer(decode_plan(end.receive()))))


class Host:
    """The host's side of a way: launch and land, as the loop sees them."""

    def __init__(self, end: End) -> None:
        self._end = end

    def launch(self, plan: Plan) -> None:
        self._end.send(encode_plan(plan))

    def land(self) -> Result:
        return decode_result(self._end.receive())


class ExecutorHost:
    """The same over the real thing."""

    def __init__(self, executor: ProcessExecutor) -> None:
        self._executor = executor
        self._flights: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def launch(self, plan: Plan) -> None:
        self._flights.put(self._executor.launch(plan))

    def land(self) -> Result:
        return self._flights.get().land()


class EchoRunner:
    """What `work` does, as a runner for the real executor; a step is its own flight."""

    def __init__(self, _: RunnerSpec) -> None:
        self._result = Result(0, TOKENS)

    def launch(self, plan: Plan) -> EchoRunner:
        self._result = answer(plan)
        return self

    def ready(self) -> bool:
        return True

    def land(self) -> Result:
        return self._result

    def close(self) -> None:
        pass


# --- measuring ------------------------------------------------------------------------------


def worker_cpu_us(host: Host | ExecutorHost) -> int:
    host.launch(Plan(-1, NO_INTS, True))
    return int(host.land().tokens[0])


def echo(host: Host | ExecutorHost) -> tuple[list[float], float, float]:
    """Round trips, and each side's CPU time of one, in microseconds."""
    times_us = []
    worker_us, host_ns = -worker_cpu_us(host), -time.process_time_ns()
    for step in range(STEPS):
        start_ns = time.perf_counter_ns()
        host.launch(Plan(step, NO_INTS, True))
        host.land()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    host_ns += time.process_time_ns()
    worker_us += worker_cpu_us(host)
    return times_us, host_ns / STEPS / 1e3, worker_us / STEPS


def overlap(host: Host | ExecutorHost, forward_us: float) -> tuple[float, float]:
    """Of a step whose successor is always there in time, in microseconds: wall time beyond its
    forward, and CPU time of the host's launch and land."""
    plan = Plan(1, NO_INTS, True, grants=TOKENS[:3])
    host.launch(plan)
    times_us, cpu_ns = [], 0
    last_ns = time.perf_counter_ns()
    for _ in range(STEPS):
        cpu_ns -= time.thread_time_ns()
        host.launch(plan)
        host.land()
        cpu_ns += time.thread_time_ns()
        now_ns = time.perf_counter_ns()
        times_us.append((now_ns - last_ns) / 1e3)
        last_ns = now_ns
        while time.perf_counter_ns() - now_ns < HOST_WORK_US * 1e3:
            pass
    host.land()
    return float(np.median(times_us)) - forward_us, cpu_ns / STEPS / 1e3


def undisturbed_forward_us() -> float:
    times_us = []
    for _ in range(200):
        start_ns = time.perf_counter_ns()
        forward()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return float(np.median(times_us))


def measure(host: Host | ExecutorHost, numbers: dict[str, list[float]]) -> None:
    for step in range(WARM_UP):
        host.launch(Plan(step, NO_INTS, True))
        host.land()
    times_us, host_us, worker_us = echo(host)
    numbers["p50"].append(float(np.percentile(times_us, 50)))
    numbers["p99"].append(float(np.percentile(times_us, 99)))
    numbers["host"].append(host_us)
    numbers["worker"].append(worker_us)
    beyond_us, cpu_us = overlap(host, undisturbed_forward_us())
    numbers["overlap"].append(beyond_us)
    numbers["overlap_host"].append(cpu_us)


def measure_way(make: Callable[[], Way], numbers: dict[str, list[float]]) -> None:
    way = make()
    pid = os.fork()
    if not pid:
        try:
            work(way.worker())
        finally:
            os._exit(1)
    try:
        measure(Host(way.host()), numbers)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def measure_executor(numbers: dict[str, list[float]]) -> None:
    executor = ProcessExecutor(RunnerSpec("none:none"), 30.0, f"{Path(__file__).stem}:EchoRunner")
    try:
        time.sleep(0.2)  # numpy's threads spin for a moment after they are made
        measure(ExecutorHost(executor), numbers)
    finally:
        executor.close()


def main() -> None:
    """All ways in turn, a few times over; a table, and last a line of JSON."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    names = [*WAYS, "executor"]
    found = {
        name: {key: [] for key in ("p50", "p99", "host", "worker", "overlap", "overlap_host")}
        for name in names
    }
    for _ in range(rounds):
        for name, make in WAYS.items():
            measure_way(make, found[name])
        measure_executor(found["executor"])
    rows = {name: {key: float(np.median(v)) for key, v in found[name].items()} for name in names}
    print(f"microseconds; median of {rounds} rounds of {STEPS} steps\n")
    print(f"{'':14} {'echo':^15} {'CPU of an echo':^18} {'overlap':^18}")
    print(
        f"{'way':14} {'p50':>7} {'p99':>7} {'host':>9} {'worker':>8} {'beyond':>9} {'host CPU':>8}"
    )
    for name, row in rows.items():
        print(
            f"{name:14} {row['p50']:7.1f} {row['p99']:7.1f} {row['host']:9.1f} "
            f"{row['worker']:8.1f} {row['overlap']:9.1f} {row['overlap_host']:8.1f}"
        )

    def column(key: str) -> dict[str, float]:
        return {name: round(row[key], 1) for name, row in rows.items()}

    line = {
        "bench": "transport",
        "us_p50": column("p50"),
        "us_p99": column("p99"),
        "cpu_us": column("overlap_host"),
        "echo_cpu_us": column("host"),
        "echo_worker_cpu_us": column("worker"),
        "beyond_us": column("overlap"),
        "chosen": CHOSEN,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
