"""Takes docs/pictures/page.png: the web page of a server, while SmolLM2 answers.

    python benchmarks/page_picture.py                  a minute
    python benchmarks/page_picture.py --folder out --dark --width 390 --height 844

Three other clients ask meanwhile, and are done before.  Needs playwright (one of the packages
for development), and a Chromium or Chrome of this machine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, expect, sync_playwright

from stepahead.cli.options import packaged_model

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
FLAGS = ("--threads", "1", "--max-model-len", "2048", "--served-name", "SmolLM2-135M-Instruct")
QUESTIONS = ("What is the capital of France?", "Why is the sky blue? Answer in two sentences.")
# others ask too, and get so many tokens
OTHERS = {"Tell me of the sea.": 30, "How do bees find flowers?": 33, "Name some rivers.": 36}


def browser() -> str:
    """Where one is; ends the program if there is none."""
    for name in BROWSERS:
        if (found := shutil.which(name)) is not None:
            return found
    sys.exit(f"none of {', '.join(BROWSERS)} is on this machine; install one")


def start() -> tuple[subprocess.Popen[str], str]:
    """A server, and its URL once it is ready."""
    command = [sys.executable, "-m", "stepahead", "serve", str(packaged_model()), "--port", "0"]
    server = subprocess.Popen([*command, *FLAGS], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if " at http://" in line:
            return server, line.partition(" at ")[2].split("/v1")[0]
    sys.exit("the server ended before it was ready")


def other_client(url: str, question: str, max_tokens: int) -> None:
    """Asks once."""
    messages: Any = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0.0}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def talk(page: Page, url: str) -> None:
    """One question answered, and the middle of the answer to the next."""
    page.goto(url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message").fill(QUESTIONS[0])
    page.get_by_label("Message").press("Enter")
    page.get_by_role("button", name="Send").wait_for(timeout=120_000)
    for asked in OTHERS.items():
        threading.Thread(target=other_client, args=(url, *asked), daemon=True).start()
    page.get_by_label("Message").fill(QUESTIONS[1])
    page.get_by_label("Message").press("Enter")
    much = re.compile(r"[\s\S]{200}")
    expect(page.locator(".theirs p").last).to_have_text(much, timeout=300_000)
    page.wait_for_timeout(300)  # the strip's next picture


def main() -> None:
    """Takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to put it")
    parser.add_argument("--dark", action="store_true", help="as by night")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=660)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    executable, (server, url) = browser(), start()
    try:
        with sync_playwright() as playwright:
            # no sandbox: it can't be had as root, and the page is our own
            options = ["--no-sandbox", "--disable-gpu"]
            window = playwright.chromium.launch(executable_path=executable, args=options)
            page = window.new_page(
                viewport={"width": given.width, "height": given.height},
                color_scheme="dark" if given.dark else "light",
            )
            talk(page, url)
            page.screenshot(path=given.folder / "page.png")
            window.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
