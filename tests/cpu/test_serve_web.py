"""The page at / in a real browser: type, read, stop, see the strip move, and be told what is wrong.

Needs the package playwright and a Chromium or Chrome of the machine; nothing is downloaded.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from offline_makers import tiny_llama
from serving import Inside, inside
from stepahead.serve.options import ServeConfig

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None
)
if BROWSER is None:
    pytest.skip("no chromium or google-chrome on this machine", allow_module_level=True)

OPTIONS: dict[str, Any] = {
    "executor": "inline",
    "max_model_len": 128,
    "max_rows": 4,
    "threads": 1,
}
PATIENCE_MS = 60_000  # a busy machine is no bug
WIDE, NARROW = (1280, 800), (390, 844)
# how many pixels of the strip have the colour that the style calls so
PIXELS = """name => {
  const strip = document.getElementById("strip"), pen = strip.getContext("2d");
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  probe.fillRect(0, 0, 1, 1);
  const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
  const {data} = pen.getImageData(0, 0, strip.width, strip.height);
  let n = 0;
  for (let i = 0; i < data.length; i += 4) {
    n += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255;
  }
  return n;
}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Inside]:
    with inside(model=model, **OPTIONS) as found:
        yield found
        found.rest()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # no sandbox: it can't be had as root, and the page is our own
        options = ["--no-sandbox", "--disable-gpu"]
        sync_api.expect.set_options(timeout=PATIENCE_MS)
        found = playwright.chromium.launch(executable_path=BROWSER, args=options)
        yield found
        found.close()


@contextmanager
def opened(browser: Any, url: str, size: tuple[int, int] = WIDE, **options: Any) -> Iterator[Any]:
    """The page, ready; at the end nothing went wrong in it, and nobody else was asked."""
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    # an answer with an error status is told in the console too
    assert [words for words in wrong if "Failed to load resource" not in words] == []
    assert [where for where in asked if not where.startswith((url, "data:"))] == []


def ask(page: Any, text: str) -> None:
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Waits until it is true; Playwright's own way would have to evaluate a text in the page."""
    end_s = time.monotonic() + PATIENCE_MS / 1e3
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end_s, expression
        page.wait_for_timeout(50)


def answers(page: Any) -> list[str]:
    return [str(text) for text in page.locator(".theirs p").all_text_contents()]


def ended(page: Any) -> None:
    sync_api.expect(page.get_by_role("button", name="Send")).to_be_visible()


def answered(server: Inside, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "temperature": 0.0}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@contextmanager
def slowly(server: Inside) -> Iterator[None]:
    """Steps take so long that what happens between them can be seen."""
    server.pace_s = 0.05
    try:
        yield
    finally:
        server.pace_s = 0.0


def test_an_answer_streams_in_and_the_talk_goes_on(server: Inside, browser: Any) -> None:
    with opened(browser, server.url) as page:
        sync_api.expect(page.locator("#model")).to_have_text("toy")
        sent: list[Any] = []
        page.on("request", lambda r: r.method == "POST" and sent.append(r.post_data_json))
        with slowly(server):
            ask(page, "hello")
            sync_api.expect(page.locator(".theirs p")).not_to_be_empty()
            sync_api.expect(page.get_by_role("button", name="Stop")).to_be_visible()
            sync_api.expect(page.get_by_role("button", name="Send")).to_be_hidden()
            part = answers(page)[0]
        ended(page)
        messages = [{"role": "user", "content": "hello"}]
        whole = answers(page)[0]
        assert whole == answered(server, messages)
        assert whole.startswith(part)
        assert len(part) < len(whole)
        assert page.locator("#ttft").inner_text().endswith("s")
        assert page.locator("#tpot").inner_text().endswith("s")
        messages += [{"role": "assistant", "content": whole}]
        page.get_by_role("button", name="New chat").click()
        assert answers(page) == []
        with slowly(server):
            ask(page, "hello")
            sync_api.expect(page.locator(".theirs p")).not_to_be_empty()
            page.get_by_role("button", name="Stop").click()
        ended(page)
        (kept,) = answers(page)
        ask(page, "go on")
        ended(page)
        assert [body["messages"] for body in sent] == [
            messages[:1],
            messages[:1],
            [
                messages[0],
                {"role": "assistant", "content": kept},
                {"role": "user", "content": "go on"},
            ],
        ]
        assert all(body["stream"] is True and body["temperature"] == 0 for body in sent)


def test_escape_stops_and_the_row_is_given_back(server: Inside, browser: Any) -> None:
    with opened(browser, server.url) as page, slowly(server):
        page.get_by_label("Message").fill("line")
        page.get_by_label("Message").press("Shift+Enter")
        page.keyboard.type("two")
        assert answers(page) == []
        page.get_by_label("Message").press("Enter")
        sync_api.expect(page.locator(".theirs p")).not_to_be_empty()
        page.keyboard.press("Escape")
        ended(page)
        sync_api.expect(page.locator(".note")).to_have_text("stopped")
        assert page.locator(".mine p").inner_text() == "line\ntwo"
        sync_api.expect(page.get_by_label("Message")).to_be_focused()
        server.rest()


def test_the_strip_moves_and_its_figures_are_those_of_the_engine(
    server: Inside, browser: Any
) -> None:
    with opened(browser, server.url) as page, slowly(server):
        sync_api.expect(page.locator("#status")).to_have_text("ready")
        ask(page, "hello")
        sync_api.expect(page.locator("#rows")).to_have_text("1")
        until(page, PIXELS, "busy")
        shown = page.evaluate("document.getElementById('strip').toDataURL()")
        until(page, "before => document.getElementById('strip').toDataURL() !== before", shown)
        assert page.evaluate(PIXELS, "plan-late") > 0  # what slows it down is not a stage
        words = page.get_by_role("img").get_attribute("aria-label")
        assert words.startswith("Host and device lanes of the last ten seconds: device idle ")
        assert float(page.locator("#idle").inner_text().removesuffix(" %")) > 0
        assert page.locator("#exposed").inner_text().endswith("/step")
        assert page.locator("#engine").inner_text() == "overlap, depth 2"
        assert "plan late" in page.locator("#legend").inner_text()
        page.keyboard.press("Escape")
        ended(page)


def test_what_held_steps_up_is_marked(model: str, browser: Any) -> None:
    # one page of the cache is left for two: nothing can be planned before a flight lands
    options = OPTIONS | {"num_pages": 12, "prefix_cache": False}
    with inside(model=model, **options) as server, opened(browser, server.url) as page:
        body = {"prompt": [[5] * 60, [7] * 60], "max_tokens": 60, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        assert server.engine.syncs.as_dict().keys() == {"drain"}
        sync_api.expect(page.locator("#legend")).to_contain_text("drain ×")


def test_dark_and_light_are_two_pictures_of_one_page(server: Inside, browser: Any) -> None:
    with opened(browser, server.url, color_scheme="light") as page:
        ask(page, "hello")
        ended(page)
        until(page, PIXELS, "busy")
        ground = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(ground) == "rgb(244, 245, 247)"
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(ground) == "rgb(17, 21, 28)"
        until(page, PIXELS, "busy")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_sticks_out_at_any_width(
    server: Inside, browser: Any, size: tuple[int, int]
) -> None:
    with opened(browser, server.url, size) as page:
        ask(page, "word" * 30)
        ended(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        for name in ("#figures div", "#legend", "#log", "#composer", "header"):
            wide = "els => els.filter(el => el.scrollWidth > el.clientWidth + 1).length"
            assert page.locator(name).evaluate_all(wide) == 0, name
        assert page.locator("#composer").bounding_box()["y"] < size[1] - 80


def test_an_error_is_told_in_the_servers_words_and_the_question_given_back(
    server: Inside, browser: Any
) -> None:
    with opened(browser, server.url) as page:
        long = "a much too long question " * 60
        ask(page, long)
        alert = page.get_by_role("alert")
        sync_api.expect(alert).to_contain_text("tokens")
        response = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": long.strip()}]},
        )
        assert alert.inner_text() == response.json()["error"]["message"]
        assert page.get_by_label("Message").input_value() == long.strip()
        assert page.locator("article").count() == 0
        ask(page, "hello")
        ended(page)
        sync_api.expect(alert).to_be_hidden()
        assert len(answers(page)) == 1


def test_an_error_in_the_middle_is_told_and_what_came_is_kept(model: str, browser: Any) -> None:
    config = ServeConfig(request_timeout=2.5)
    with inside(config, model=model, **OPTIONS) as server:
        with opened(browser, server.url) as page, server.paused_after(12):
            ask(page, "hello")
            sync_api.expect(page.get_by_role("alert")).to_contain_text("2.5 s")
            ended(page)
            assert answers(page)[0] != ""
        server.rest()


def test_a_key_is_asked_for_where_one_is_needed_and_only_there(
    server: Inside, model: str, browser: Any
) -> None:
    with opened(browser, server.url) as page:
        sync_api.expect(page.locator("#model")).to_have_text("toy")
        sync_api.expect(page.get_by_label("API key")).to_be_hidden()
    locked = ServeConfig(api_key="secret")
    with inside(locked, model=model, **OPTIONS) as shut, opened(browser, shut.url) as page:
        key = page.get_by_label("API key")
        sync_api.expect(key).to_be_visible()
        sync_api.expect(page.get_by_role("alert")).to_be_hidden()
        sync_api.expect(page.locator("#status")).to_have_text("needs a key")
        key.fill("wrong")
        key.press("Enter")
        sync_api.expect(page.get_by_role("alert")).to_contain_text("no valid key")
        key.fill("secret")
        key.press("Enter")
        sync_api.expect(key).to_be_hidden()
        sync_api.expect(page.locator("#status")).to_have_text("ready")
        ask(page, "hello")
        ended(page)
        assert answers(page)[0] != ""


def test_a_page_that_nobody_sees_asks_for_nothing(server: Inside, browser: Any) -> None:
    with opened(browser, server.url) as page:
        sync_api.expect(page.locator("#status")).to_have_text("ready")
        hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s})"
        page.evaluate(hide % "true")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_load_state("networkidle")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(1500)  # one and a half of the pauses of a page that is seen
        assert asked == []
        page.evaluate(hide % "false")
        with page.expect_request(lambda request: "/lanes?from=" in request.url):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
