"""Clients that come and go at random: whatever they do, every row and page comes back."""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from offline_makers import TOY_OPTIONS
from serving import Inside, inside

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


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


def test_a_load_of_raw_sockets_leaves_no_row_page_or_task(
    server: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of benchmarks/serving.py, in small: no HTTP library that tidies up behind them.

    The slow ones have the smallest buffer there is and read 4 KB ten times a second.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    client = importlib.import_module("load_client")
    before = server.tasks()
    server.pace_s = 0.002
    host, _, port = server.url.removeprefix("http://").partition(":")
    load = client.Load(
        host,
        int(port),
        streams=24,
        output=(1, 100),
        prompt=(1, 60),
        vocabulary=500,
        seconds=1.5,
        warm_s=0.5,
        fates=["read", "slow", "leave", "abort"],
        cut=False,
    )
    heard = client.Client(load).run()
    server.pace_s = 0.0
    print(heard)
    assert heard.wrong == []
    assert heard.stuck == 0
    assert all(count > 0 for count in heard.ends.values())
    assert heard.gaps > 0
    server.rest()
    end_s = time.monotonic() + 60.0
    while server.tasks() > before and time.monotonic() < end_s:
        time.sleep(0.01)  # a connection's end is heard a little later
    assert server.tasks() <= before


def test_an_engine_waits_for_a_front_that_does_not_read() -> None:
    """Else tokens pile up, and come ever later: the front may be slower than a fast device.

    64 rows of a step take 800 bytes, so 128 KiB are full after some 170 steps, and the answers
    are much longer than that.
    """
    options = TOY_OPTIONS | {"max_rows": 64, "max_model_len": 1024, "debug": False}
    with inside(**options) as server, httpx.Client(base_url=server.url, timeout=100) as client:
        body = {"prompt": [[5, 6]], "max_tokens": 500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body | {"n": 64}) as response:
            lines = response.iter_lines()
            next(lines)
            with server.deaf():
                end_s = time.monotonic() + 60.0
                while not server.behind and server.engine.has_work and time.monotonic() < end_s:
                    time.sleep(0.001)
                assert server.behind
                assert server.engine.has_work
                landed = server.engine.scheduler.load.step
                time.sleep(0.1)
                assert server.engine.scheduler.load.step <= landed + 1
            assert sum(line.startswith("data: {") for line in lines) == 64 * 500 - 1
        server.rest()
