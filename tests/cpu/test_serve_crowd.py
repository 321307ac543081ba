"""Clients that come and go at random: whatever they do, every row and page comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from offline_makers import TOY_OPTIONS
from serving import Inside, inside


@pytest.fixture(params=["serial", "overlap", "batch-queue"])
def server(request: pytest.FixtureRequest) -> Iterator[Inside]:
    with inside(**TOY_OPTIONS, loop=request.param) as found:
        yield found


def test_random_clients_leave_nothing_behind(server: Inside) -> None:
    """Streams and whole answers, read to the end, left in the middle, aborted by name, refused."""
    server.pace_s = 0.003  # else the toy has answered before anybody can leave
    seen = asyncio.run(_crowd(server, 60))
    server.pace_s = 0.0
    print(seen)
    assert all(seen[kind] > 0 for kind in ("ended", "left", "aborted", "refused"))
    server.rest()


async def _crowd(server: Inside, count: int) -> dict[str, int]:
    seen = dict.fromkeys(("ended", "left", "aborted", "refused"), 0)
    limits = httpx.Limits(max_connections=12)
    async with (
        httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client,
        httpx.AsyncClient(base_url=server.url, timeout=60) as other,
    ):
        await asyncio.gather(*[_client(client, other, seen, seed) for seed in range(count)])
    return seen


async def _client(
    client: httpx.AsyncClient, other: httpx.AsyncClient, seen: dict[str, int], seed: int
) -> None:
    chance = random.Random(seed)
    stream = chance.random() < 0.7
    body: dict[str, Any] = {
        "prompt": [[chance.randrange(2, 500) for _ in range(chance.randrange(1, 60))]],
        "max_tokens": chance.randrange(1, 180),
        "n": chance.randrange(1, 4),
        "stream": stream,
        "request_id": f"r{seed}",
        "stop": chance.choice([None, ["abc", "dd"]]),
        "logprobs": chance.choice([None, 2]),
    }
    if chance.random() < 0.1:
        body["nonsense"] = 1
    way = chance.choice(["read", "leave", "abort"])
    if not stream:
        response = await client.post("/v1/completions", json=body)
        seen["ended" if response.status_code == 200 else "refused"] += 1
        return
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            seen["refused"] += 1
            return
        lines = response.aiter_lines()
        for _ in range(chance.randrange(1, 10)):
            if await anext(lines, None) is None:
                break
        if way == "leave":
            seen["left"] += 1
            return
        if way == "abort":
            found = await other.post("/abort", json={"request_id": f"r{seed}"})
            seen["aborted"] += found.json()["aborted"]
        last = [line async for line in lines if line]
        assert not last or last[-1] == "data: [DONE]"
        seen["ended"] += 1
