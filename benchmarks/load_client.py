"""The client's side of benchmarks/serving.py: raw sockets, no HTTP library, a process of its own.

One thread asks for streamed completions and reads them with epoll: `streams` at a time, a new one
as soon as one is over.  Each has a fate, drawn by the seed:

    read    reads to the end, as fast as it comes
    slow    reads `slow_bytes` ten times a second, with a buffer of a few KiB
    leave   closes its connection after some events, or before the first
    abort   has itself aborted by name after some events, and reads to the end

`Load` comes as JSON on stdin, `Heard` goes as JSON to stdout.
"""

from __future__ import annotations

import array
import dataclasses
import json
import os
import random
import select
import socket
import sys
import time
from dataclasses import dataclass, field

import numpy as np

EVENT = b"data: {"
DONE = b"data: [DONE]"
_SLOW_S = 0.1
_KEPT = len(DONE) - 1  # of what came, so that a word cut in two is still seen
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """`output` and `prompt` are ranges of tokens; fates are drawn from `fates`.

    For `seconds` a stream that is over is followed by another.  Then those that run are left in the
    middle if `cut`, else they have `patience_s` to end.  Figures are of the time after `warm_s`.
    CPU times are those of `pids`, and our own.

    After each look at what has come we sleep for `nap_s`, as a network card gathers: else the
    kernel wakes us for every event, and much of what a token costs is that.
    """

    host: str
    port: int
    streams: int
    output: tuple[int, int]
    prompt: tuple[int, int]
    vocabulary: int
    seconds: float
    warm_s: float
    fates: list[str]
    cut: bool
    slow_bytes: int = 1 << 12
    nap_s: float = 0.0
    patience_s: float = 60.0
    seed: int = 0
    pids: list[int] = field(default_factory=list)


@dataclass
class Heard:
    """What came of it; `ends` counts streams by fate, those that ended as they should.

    `wrong` are the first words of answers that were none, `stuck` the streams without an end.
    Gaps are milliseconds between two events of a stream, slow readers left out.
    """

    events: int = 0
    from_s: float = 0.0  # the monotonic clock, which all processes share
    wall_s: float = 0.0
    cpu_s: list[float] = field(default_factory=list)
    own_cpu_s: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stuck: int = 0
    gaps: int = 0
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0


def cpu_s(pid: int) -> float:
    """What a process has used, user and system, all threads; 10 ms fine."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b") ")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS


class Stream:
    """One request and its connection."""

    def __init__(self, load: Load, number: int, chance: random.Random) -> None:
        self.fate = chance.choice(load.fates)
        self.name = f"load-{load.seed}-{number}"
        self.patience = chance.choice((0, 1, 3, 8))  # events until it leaves or is aborted
        self.output = chance.randint(*load.output)
        self._most_bytes = load.slow_bytes if self.fate == "slow" else 1 << 16
        self.tail = b""
        self.events = 0
        self.last_s = 0.0
        self.socket = _connection(load, slow=self.fate == "slow")
        prompt = [chance.randrange(2, load.vocabulary) for _ in range(chance.randint(*load.prompt))]
        body = {"prompt": prompt, "max_tokens": self.output, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0.0, "request_id": self.name}
        self.socket.sendall(_post("/v1/completions", body))
        self.socket.setblocking(False)

    def read(self) -> tuple[int, bool, bytes]:
        """Events that have come, whether it is over, and the bytes of both."""
        data = self.socket.recv(self._most_bytes)
        text = self.tail + data
        over = not data or DONE in text
        events = text.count(EVENT)
        last = text.rfind(EVENT)
        self.tail = text[max(last + len(EVENT), len(text) - _KEPT) :]
        self.events += events
        return events, over, text

    @property
    def ended_well(self) -> bool:
        """Whether it has heard as much as it should have."""
        if self.fate == "abort":
            return self.events > 0
        return self.events == self.output


def _connection(load: Load, slow: bool = False) -> socket.socket:
    made = socket.socket()
    if slow:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    made.connect((load.host, load.port))
    return made


def _post(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Client:
    """All streams of a load."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.heard = Heard(ends=dict.fromkeys(load.fates, 0))
        self._chance = random.Random(load.seed)
        self._poll = select.epoll()
        self._running: dict[int, Stream] = {}
        self._slow: dict[int, Stream] = {}
        self._gaps = array.array("d")
        self._number = 0
        self._measuring = False
        self._next_slow_s = 0.0

    def run(self) -> Heard:
        """From the first request to the last end."""
        load, began = self.load, time.perf_counter()
        for _ in range(load.streams):
            self._begin()
        self._until(began + load.warm_s)
        self._measuring, at_s, used = True, time.perf_counter(), self._used()
        self._until(began + load.seconds)
        self.heard.from_s, self.heard.wall_s = at_s, time.perf_counter() - at_s
        *self.heard.cpu_s, self.heard.own_cpu_s = (
            now - before for now, before in zip(self._used(), used, strict=True)
        )
        self._measuring = False
        self._finish()
        self._sum_up()
        return self.heard

    def _used(self) -> list[float]:
        return [cpu_s(pid) for pid in (*self.load.pids, os.getpid())]

    def _begin(self) -> None:
        stream = Stream(self.load, self._number, self._chance)
        self._number += 1
        fd = stream.socket.fileno()
        self._running[fd] = stream
        if stream.fate == "slow":
            self._slow[fd] = stream  # not polled: it looks when it likes to
        else:
            self._poll.register(fd, select.EPOLLIN)
        if stream.fate == "leave" and not stream.patience:
            self._over(fd, True)

    def _until(self, end_s: float) -> None:
        while (now := time.perf_counter()) < end_s:
            self._turn(now, end_s)
            while len(self._running) < self.load.streams:
                self._begin()

    def _turn(self, now: float, end_s: float) -> None:
        time.sleep(self.load.nap_s)
        for fd, _ in self._poll.poll(max(0.0, min(end_s - now, _SLOW_S))):
            if fd in self._running:
                self._read(fd)
        if self._slow and time.perf_counter() >= self._next_slow_s:
            self._next_slow_s = time.perf_counter() + _SLOW_S
            for fd in list(self._slow):
                self._read(fd)

    def _read(self, fd: int) -> None:
        stream = self._running[fd]
        try:
            events, over, text = stream.read()
        except BlockingIOError:
            return
        if self._measuring:
            self.heard.events += events
        if events:
            self._note(stream, events)
        if (b"HTTP/1.1 " in text and b"HTTP/1.1 200" not in text) or b'{"error"' in text:
            self.heard.wrong.append(text[:300].decode("utf-8", "replace"))
            over = True
        elif stream.fate in ("leave", "abort") and stream.patience <= stream.events and events:
            over = self._act(stream) or over
        if over:
            self._over(fd, stream.fate == "leave" or stream.ended_well)

    def _note(self, stream: Stream, events: int) -> None:
        now = time.perf_counter()
        if stream.last_s and self._measuring and stream.fate != "slow":
            self._gaps.append(now - stream.last_s)
            self._gaps.extend([0.0] * (events - 1))
        stream.last_s = now

    def _act(self, stream: Stream) -> bool:
        """Leaves, or has itself aborted; whether that is its end."""
        if stream.fate == "leave":
            return True
        stream.patience = 1 << 60
        with _connection(self.load) as other:
            other.sendall(_post("/abort", {"request_id": stream.name}))
            answer = other.recv(1 << 12)
        if b"HTTP/1.1 200" not in answer:
            self.heard.wrong.append(answer[:300].decode("utf-8", "replace"))
        return False

    def _over(self, fd: int, well: bool) -> None:
        stream = self._running.pop(fd)
        if self._slow.pop(fd, None) is None:
            self._poll.unregister(fd)
        stream.socket.close()
        if well:
            self.heard.ends[stream.fate] += 1
        else:
            self._wrong(stream, "ended")

    def _wrong(self, stream: Stream, how: str) -> None:
        if len(self.heard.wrong) < 10:
            told = f"{stream.events} of {stream.output} events"
            self.heard.wrong.append(f"{how}, {stream.fate}: {told}")

    def _finish(self) -> None:
        end_s = time.perf_counter() + self.load.patience_s
        while self._running and not self.load.cut and (now := time.perf_counter()) < end_s:
            self._turn(now, end_s)
        for stream in self._running.values():
            stream.socket.close()
            if not self.load.cut:
                self.heard.stuck += 1
                self._wrong(stream, "stuck")
        self._poll.close()

    def _sum_up(self) -> None:
        self.heard.gaps = len(self._gaps)
        if self._gaps:
            p50, p99 = np.percentile(np.frombuffer(self._gaps), (50, 99)) * 1e3
            self.heard.gap_p50_ms, self.heard.gap_p99_ms = float(p50), float(p99)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(Client(Load(**json.load(sys.stdin))).run())))
