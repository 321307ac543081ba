"""Hands a trace to ui.perfetto.dev in the reader's own browser; the trace does not leave it.

Serves one page and the file on loopback.  The page opens the UI, waits until it answers, and gives
it the bytes from window to window.  Then it says so here and the server ends.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

UI = "https://ui.perfetto.dev"
_PINNED = "scheduler|compute|device idle"

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>stepahead trace open</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 4em auto; padding: 0 1em; }
button { font: inherit; padding: .4em 1em; }</style></head>
<body><h1>@NAME@</h1><p id="says" role="status">Opening @UI@ …</p>
<p><button id="open">Open in Perfetto</button></p>
<p>The trace goes from this window to that one; it is not uploaded.</p><script>
"use strict";
const UI = "@UI@", says = document.getElementById("says");
const trace = fetch("/trace").then(answer => answer.arrayBuffer());
let timer = null;
function start() {
  const ui = window.open(UI);
  if (!ui) { says.textContent = "The browser has blocked the window; press the button."; return; }
  says.textContent = "Waiting for Perfetto …";
  clearInterval(timer);
  timer = setInterval(() => ui.postMessage("PING", UI), 50);
  window.onmessage = async event => {
    if (event.origin !== UI || event.source !== ui || event.data !== "PONG") return;
    clearInterval(timer); window.onmessage = null;
    const buffer = await trace;
    ui.postMessage({ perfetto: { buffer, title: @TITLE@, fileName: @TITLE@, keepApiOpen: false,
      startupCommands: [{ id: "dev.perfetto.PinTracksByRegex", args: ["@PINNED@"] }] } }, UI);
    says.textContent = "Perfetto has the trace; this window can be closed.";
    fetch("/done", { method: "POST" });
  };
}
document.getElementById("open").onclick = start;
start();
</script></body></html>
"""


class HandOver:
    """The server, on a free port of loopback; `url` is where the page is."""

    def __init__(self, trace: bytes, name: str) -> None:
        self.done = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(trace, name, self.done))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> HandOver:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the page has handed the trace over; False when the time is up first."""
        return self.done.wait(timeout_s)


def _handler(trace: bytes, name: str, done: threading.Event) -> type[BaseHTTPRequestHandler]:
    title = json.dumps(name).replace("<", "\\u003c")
    shown = name.replace("&", "&amp;").replace("<", "&lt;")
    page = _PAGE.replace("@UI@", UI).replace("@PINNED@", _PINNED)
    page = page.replace("@TITLE@", title).replace("@NAME@", shown)

    class Handler(BaseHTTPRequestHandler):
        server_version = "stepahead"

        def do_GET(self) -> None:
            if not self._allowed():
                return
            if self.path == "/":
                self._send(200, "text/html; charset=utf-8", page.encode())
            elif self.path == "/trace":
                self._send(200, "application/octet-stream", trace)
            else:
                self._send(404, "text/plain", b"only / and /trace are here\n")

        def do_POST(self) -> None:
            if not self._allowed():
                return
            known = self.path == "/done"
            self._send(204 if known else 404, "text/plain", b"")
            if known:
                done.set()

        def _allowed(self) -> bool:
            """A foreign page may have its name point here: only loopback's own names are served."""
            port = self.server.server_address[1]  # type: ignore[misc]
            if self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}"):
                return True
            self._send(403, "text/plain", b"ask for 127.0.0.1 by name\n")
            return False

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    return Handler
