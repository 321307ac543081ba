"""The page at /: it needs nothing from outside, is small, and is let do nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import httpx
import pytest

from stepahead.llm.reader import Reader
from stepahead.serve.app import serve_app
from stepahead.serve.front import Front
from stepahead.serve.options import ServeConfig
from stepahead.serve.web import PAGE
from stepahead.sync import Cause
from stepahead.text.texts import ToyTexts

HTML = PAGE.read_text("utf-8")
MOST_BYTES = 32 * 1024


def asked(*paths: str, **options: str) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        front = Front(ToyTexts(90), 4, None)
        app = serve_app(front, ServeConfig(**options), "toy", Reader(front.texts, 90, ()))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
        ) as client:
            found = [await client.get(path) for path in paths]
        front.close()
        return found

    return asyncio.run(run())


def inside(tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)


def test_the_page_needs_nothing_from_outside() -> None:
    assert re.findall(r"(?i)https?:|\bwss?:|[\"'(=]//|@import|\bsrc\s*=|\burl\(", HTML) == []
    (icon,) = re.findall(r"<link [^>]*>", HTML)
    assert 'href="data:image/svg+xml,' in icon
    assert re.findall(r"(?i)<(?:iframe|img|object|embed|base|form action)\b", HTML) == []


def test_the_page_is_small() -> None:
    assert len(PAGE.read_bytes()) <= MOST_BYTES


def test_the_page_may_run_its_own_script_ask_its_own_server_and_nothing_else() -> None:
    (response,) = asked("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == HTML
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    for tag in ("script", "style"):
        (text,) = inside(tag)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert policy == nothing | {"connect-src": "'self'", "img-src": "data:"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"
    # else no script or style attribute would be let run, and nobody would be told
    assert re.findall(r"<[^>]*\s(?:style|on\w+)=", re.sub(r"<script>.*</script>", "", HTML)) == []


def test_the_page_is_open_and_what_it_asks_for_is_not() -> None:
    page, *others = asked("/", "/v1/models", "/lanes", "/state", api_key="secret")
    assert page.status_code == 200
    assert {response.status_code for response in others} == {401}


def test_the_page_is_there_while_the_model_loads() -> None:
    page, lanes = asked("/", "/lanes")
    assert (page.status_code, lanes.status_code) == (200, 503)


def test_every_cause_has_a_colour_by_day_and_by_night() -> None:
    (listed,) = re.findall(r"const CAUSES = \[(.*?)\];", HTML, re.DOTALL)
    causes = re.findall(r'"([^"]+)"', listed)
    assert sorted(causes) == sorted(cause.label for cause in Cause)
    day, night = re.findall(r":root \{(.*?)\}", HTML, re.DOTALL)
    colours = [set(re.findall(r"--([\w-]+):", part)) for part in (day, night)]
    assert colours[0] == colours[1] >= {cause.replace(" ", "-") for cause in causes}
    used = set(re.findall(r"var\(--([\w-]+)\)", HTML)) | set(re.findall(r'ink\("([\w-]+)"\)', HTML))
    assert used <= colours[0]


@pytest.mark.parametrize("name", sorted(set(re.findall(r'\$\("([\w-]+)"\)', HTML))))
def test_what_the_script_looks_for_is_there_once(name: str) -> None:
    assert HTML.count(f'id="{name}"') == 1
