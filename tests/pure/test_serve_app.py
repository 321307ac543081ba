"""The routes around an engine that isn't there, and the pages of one that is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request  # noqa: TC002  (of a function that is run)
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from stepahead.errors import ConfigError
from stepahead.llm.prompts import Prompt
from stepahead.llm.reader import Reader
from stepahead.serve.app import serve_app
from stepahead.serve.front import Front
from stepahead.serve.messages import (
    AskPage,
    Failed,
    Flush,
    Flushed,
    Page,
    Ready,
    Refused,
    Submit,
)
from stepahead.serve.options import ServeConfig, serve_config
from stepahead.serve.pages import answer_page
from stepahead.serve.refusal import Refusal
from stepahead.text.texts import ToyTexts


class Pages:
    """An engine that answers pages and flushes, and holds no grammar."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def send(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, AskPage):
            head = (("content-type", "text/plain"), ("content-length", "5"))
            words = f"{message.path}?{message.query} {message.accept_encoding}".encode()
            loop.call_soon(self._front.take, Page(message.key, 200, head, words))
        if isinstance(message, Flush):
            loop.call_soon(self._front.take, Flushed(message.key, 3))
        if isinstance(message, Submit):
            assert message.grammar is not None
            words = ("InvalidParameter", "no answer can keep to it", "structured_outputs")
            loop.call_soon(self._front.take, Refused(message.key, *words))


def asked(
    *requests: tuple[str, str],
    state: str = "ready",
    config: ServeConfig | None = None,
    at: str = "http://localhost",
    body: dict[str, Any] | None = None,
) -> list[httpx.Response]:
    post = {"prompt": [2]} if body is None else body

    async def run() -> list[httpx.Response]:
        front = Front(ToyTexts(90), 4, None)
        front.connect(Pages(front))
        if state != "loading":
            front.take(Ready((), 128, 4))
        if state == "failed":
            front.take(Failed("its device is gone"))
        front.draining = state == "draining"
        transport = httpx.ASGITransport(
            serve_app(front, config or ServeConfig(), "toy", Reader(front.texts, 90, ()))
        )
        async with httpx.AsyncClient(transport=transport, base_url=at) as client:
            found = [
                await client.request(how, path, json=post if how == "POST" else None)
                for how, path in requests
            ]
        front.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("state", "health", "ready", "answer"),
    [
        ("loading", 200, 503, 503),
        ("draining", 200, 503, 503),
        ("failed", 503, 503, 503),
        ("ready", 200, 200, None),
    ],
)
def test_health_and_readiness(state: str, health: int, ready: int, answer: int | None) -> None:
    found = asked(("GET", "/health"), ("GET", "/ready"), state=state)
    assert [response.status_code for response in found] == [health, ready]
    if answer is not None:
        (refused,) = asked(("POST", "/v1/completions"), state=state)
        assert refused.status_code == answer
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("options", "name", "status"),
    [
        ({}, "localhost:8000", 200),
        ({}, "127.0.0.1", 200),
        ({}, "[::1]:1", 200),
        ({}, "evil.example", 403),  # which leads to 127.0.0.1, as its owner likes
        ({}, "localhost.evil.example:8000", 403),
        ({"host": "127.0.0.9"}, "127.0.0.9:80", 200),
        ({"host": "localhost"}, "127.0.0.9", 403),
        ({"host": "LocalHost"}, "evil.example", 403),
        ({"host": "0.0.0.0"}, "gpu7:8000", 200),  # open to others, under whatever name
        ({"api_key": "k"}, "evil.example", 200),  # a page elsewhere has no key
    ],
)
def test_a_page_elsewhere_can_not_ask_under_its_own_name(
    options: dict[str, Any], name: str, status: int
) -> None:
    config = ServeConfig(**options)
    (found,) = asked(("GET", "/health"), config=config, at=f"http://{name}")
    assert found.status_code == status
    if status == 403:
        assert found.json()["error"]["code"] == "host_not_allowed"


def test_what_only_the_engine_can_not_hold_is_refused_by_the_field_that_asks_for_it() -> None:
    (found,) = asked(("POST", "/v1/completions"), body={"prompt": [2], "guided_regex": "a+"})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "guided_regex"


def test_what_the_engine_shows_is_handed_on() -> None:
    state, trace, flushed = asked(
        ("GET", "/state"), ("GET", "/trace?last=5s"), ("POST", "/flush_cache")
    )
    assert state.text.startswith("/state? gzip")
    assert trace.text.startswith("/trace?last=5s ")
    assert flushed.json() == {"flushed_pages": 3}


@pytest.mark.parametrize("state", ["loading", "failed"])
def test_nothing_is_shown_of_an_engine_that_is_not_there(state: str) -> None:
    found = asked(("GET", "/state"), ("POST", "/flush_cache"), state=state)
    assert [response.status_code for response in found] == [503, 503]


def page(request: Request) -> PlainTextResponse:
    if request.query_params.get("fail"):
        raise RuntimeError("no")
    host, accepted = (request.headers[name] for name in ("host", "accept-encoding"))
    return PlainTextResponse(f"{host} {accepted} {request.query_params}", 201)


def test_a_page_is_made_in_the_engines_process() -> None:
    app = Starlette(routes=[Route("/state", page)])

    def made(path: str, query: str) -> Page:
        return asyncio.run(answer_page(app, AskPage(7, path, query, "gzip")))

    found = made("/state", "a=b")
    assert (found.key, found.status, found.body) == (7, 201, b"127.0.0.1 gzip a=b")
    assert dict(found.headers)["content-type"].startswith("text/plain")
    assert made("/nowhere", "").status == 404
    assert made("/state", "fail=1").status == 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": -1}, "port=-1"),
        ({"port": 65536}, "port=65536"),
        ({"request_timeout": float("nan")}, "request_timeout=nan"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout=-1"),
        ({"max_body_mb": float("inf")}, "max_body_mb=inf"),
        ({"ping_interval": 0.0}, "ping_interval=0"),
        ({"api_key": ""}, "api_key is empty"),
        ({"api_key": "k\udcff"}, "api_key can't be sent"),  # of a shell, no UTF-8
        ({"api_key": "k "}, "api_key can't be sent"),
        ({"hots": "a"}, "unknown option 'hots'"),
    ],
)
def test_bad_server_options_are_told_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve_config(options)


def test_a_prompt_longer_than_the_model_does_not_cross_to_the_engine() -> None:
    front = Front(ToyTexts(90), 4, None)
    front.take(Ready((), 128, 4))
    front.check_lengths([Prompt([2] * 127)])
    with pytest.raises(Refusal) as caught:
        front.check_lengths([Prompt([2]), Prompt([2] * 128)])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    front.close()
