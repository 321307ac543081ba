"""Torn bytes, and clients that hang up anywhere: never 500, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from offline_makers import TOY_OPTIONS
from serving import Inside, inside
from stepahead.serve.options import ServeConfig

CLIENTS = 240
AT_ONCE = 8
# how long a client stays whose bytes the server may be waiting for the rest of
_PATIENCE_S = 0.3
PIECES = [b"", b"\r\n", b"\x00", b"\xff\xfe", b'"', b"{", b"}", b"]" * 9, b"null", b"1e999", b"-1"]
PIECES += [b"[" * 3000, b"\xed\xa0\x80", b'"stream": true', b"Content-Length: 7\r\n", b"\\ud800"]
PIECES += [b"Transfer-Encoding: chunked\r\n", b"GET / HTTP/1.1\r\n\r\n", b"0" * 400, b"true"]


@pytest.fixture(params=["serial", "overlap", "batch-queue"])
def server(request: pytest.FixtureRequest) -> Iterator[Inside]:
    with inside(ServeConfig(max_waiting=2), **TOY_OPTIONS, loop=request.param) as found:
        yield found


def asked(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A good request: where to, and its body."""
    prompt = [chance.randrange(2, 500) for _ in range(chance.randrange(1, 60))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": chance.randrange(1, 120)}
    body |= {"stream": chance.random() < 0.6, "logprobs": chance.choice([None, 2])}
    body |= {"echo": chance.random() < 0.3, "n": chance.randrange(1, 3)}
    return chance.choice(
        [
            ("/v1/completions", body),
            ("/v1/completions", body),
            ("/v1/embeddings", {"input": [prompt, prompt[:3]]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
            ("/detokenize", {"tokens": prompt}),
            ("/abort", {"abort_all": True}),
            ("/flush_cache", {}),
        ]
    )


def as_bytes(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def spoiled(chance: random.Random, data: bytes, places: int) -> bytes:
    """Some places of it turned, taken out, doubled, or with something put in."""
    for _ in range(places):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randrange(1, 12))
        other = bytes([chance.randrange(256)]), b"%d" % chance.randrange(600), data[at:end] * 2
        piece = chance.choice(PIECES if chance.random() < 0.5 else other)
        data = data[:at] + piece + data[end if chance.random() < 0.7 else at :]
    return data


async def client(server: Inside, seed: int, seen: Counter[str]) -> None:
    chance = random.Random(seed)
    path, fields = asked(chance)
    body = json.dumps(fields).encode()
    way = chance.choice(["stays", "spoiled body", "spoiled", "hangs up", "leaves"])
    if way == "spoiled body":  # of the right length: it is for our own code to refuse
        body = spoiled(chance, body, 1)
    data = as_bytes(path, body)
    if way == "spoiled":
        data = spoiled(chance, data, chance.randrange(1, 5))
    if way == "hangs up":
        data = data[: chance.randrange(len(data))]
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    reply = b""
    with contextlib.suppress(OSError):
        writer.write(data)
        if way == "leaves":
            reply = await reader.read(chance.randrange(1, 400))
        elif way in ("stays", "spoiled body"):
            reply = await reader.read(-1)
        elif way == "spoiled":
            with contextlib.suppress(TimeoutError):
                reply = await asyncio.wait_for(reader.read(-1), _PATIENCE_S)
    writer.transport.abort() if chance.random() < 0.5 else writer.close()
    hold(way, path, fields, reply, seen)


def hold(way: str, path: str, fields: dict[str, Any], reply: bytes, seen: Counter[str]) -> None:
    for status in re.findall(rb"^HTTP/1\.1 (\d{3})", reply, re.MULTILINE):
        seen[f"{way} {status.decode()}"] += 1
        assert status in b"200 400 403 404 405 413 415 429 503".split(), reply
    if way in ("stays", "spoiled body"):
        assert reply.startswith(b"HTTP/1.1 "), f"{path} {fields} was not answered"
    if way == "stays" and b" 200 " in reply[:20] and fields.get("stream"):
        assert b"data: [DONE]\n\n" in reply, "a stream without an end"


async def play(server: Inside, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        async with turn:
            await client(server, seed, seen)

    await asyncio.gather(*map(one, range(count)))
    return seen


def test_torn_bytes_and_clients_leave_nothing_behind(server: Inside) -> None:
    seen = asyncio.run(play(server, CLIENTS))
    print(dict(sorted(seen.items())))
    for met in ("stays 200", "spoiled body 200", "spoiled body 400", "spoiled 400", "leaves 200"):
        assert seen[met] > 0, met
    server.rest()
    state = httpx.get(f"{server.url}/state").json()
    load, requests = state["load"], state["requests"]
    assert (load["rows_running"], load["requests_waiting"], state["flights"]) == (0, 0, 0)
    assert load["pages_free"] + load["pages_evictable"] == load["pages_total"]
    assert requests["arrived"] == sum(requests["ends"].values()) > 0
    assert requests["ends"]["error"] == 0
