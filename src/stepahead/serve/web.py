"""The web page at /: one static file of the package, and headers that let it be nothing else.

The page holds nothing of the engine: all it shows it asks for, with the key where one is needed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request

PAGE = Path(__file__).parent / "page.html"


async def web_page(request: Request) -> Response:
    """GET /"""
    body, headers = _page()
    return Response(body, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    body = PAGE.read_bytes()
    return body, {
        "content-security-policy": _policy(body.decode()),
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }


def _policy(html: str) -> str:
    """Its own script and styles by their hashes, its own server, and nothing else at all."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(html: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
