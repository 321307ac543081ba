"""The app on loopback: who is answered, which ports, and that nothing of it stays or spreads."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from stepahead.config import config_from
from stepahead.errors import ConfigError
from stepahead.watch.beside import Beside
from stepahead.watch.loopback import HOST, Loopback, listen

APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("127.0.0.1:{port}", True),
        ("localhost:{port}", True),
        ("LOCALHOST", True),
        ("[::1]:{port}", True),
        ("[::1]", True),
        ("127.0.0.1", True),
        ("evil.example:{port}", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:{port}", False),
        ("evil.example@127.0.0.1", False),
        ("localhost:evil", False),
        ("", False),
        ("::1", False),
        ("0.0.0.0:{port}", False),
    ],
)
def test_only_requests_to_this_machines_own_names_are_answered(host: str, answered: bool) -> None:
    """A page of somebody else may have its own name point to 127.0.0.1, and would then read what
    is served here as if it were its own; its name stays in the Host header."""
    served = Loopback(APP, listen(0))
    try:
        port = served.url.rpartition(":")[2]
        headers = {"host": host.format(port=port)}
        found = httpx.get(served.url + "/", headers=headers, trust_env=False)
    finally:
        served.close()
    assert found.status_code == (200 if answered else 403)
    if not answered:
        assert found.json()["error"]["param"] == "host"
    assert "access-control-allow-origin" not in found.headers


def test_it_listens_on_loopback_alone() -> None:
    listening = listen(0)
    with listening:
        assert listening.getsockname()[0] == HOST == "127.0.0.1"
        assert not listening.get_inheritable()


def test_a_port_that_is_taken_is_named_before_anything_else_happens() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        config = config_from("/nowhere/no-model", {"observe": port})
        with pytest.raises(ConfigError, match=rf"observe={port}: this port can't be had.*or 0 for"):
            Beside(config)


def test_a_port_can_be_had_again_at_once() -> None:
    port = 0
    for _ in range(3):
        served = Loopback(APP, listen(port))
        port = int(served.url.rpartition(":")[2])
        assert httpx.get(served.url + "/", trust_env=False).text == "here"
        served.close()
        served.close()


def test_signals_and_loggers_stay_as_they_are_and_no_thread_stays() -> None:
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
    handler = logging.NullHandler()
    loggers[2].addHandler(handler)
    before = [(log.level, log.propagate, list(log.handlers)) for log in loggers]
    threads = set(threading.enumerate())
    served = Loopback(APP, listen(0))
    try:
        assert httpx.get(served.url + "/", trust_env=False).text == "here"
        during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert during == signals
        assert all(thread.daemon for thread in set(threading.enumerate()) - threads)
    finally:
        served.close()
    assert [(log.level, log.propagate, list(log.handlers)) for log in loggers] == before
    for thread in set(threading.enumerate()) - threads:  # those that answered are on their way out
        thread.join(60)
        assert not thread.is_alive()
    loggers[2].removeHandler(handler)


def test_what_is_never_started_leaves_its_port() -> None:
    beside = Beside(config_from("toy", {"observe": 0}))
    assert beside._socket is not None
    port = beside._socket.getsockname()[1]
    beside.close()
    with socket.socket() as again:
        again.bind((HOST, port))
    Beside(config_from("toy", {})).close()


def test_nothing_of_a_server_is_imported_by_who_does_not_ask() -> None:
    words = """
import sys
import stepahead, stepahead.llm, stepahead.cli.main, stepahead.cli.options
heavy = {"starlette", "uvicorn", "prometheus_client", "opentelemetry", "httpx"}
sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)
"""
    subprocess.run([sys.executable, "-c", words], check=True, timeout=100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observe": -1}, "observe=-1; give a port"),
        ({"observe": 65536}, "observe=65536"),
        ({"observe": True}, "observe=True"),
        ({"observe": "9100"}, "observe=9100; give a port"),
        ({"metric_names": "vllm"}, "nothing shows metrics; give observe=PORT"),
        ({"metric_names": "grafana", "observe": 0}, "choose one of stepahead, vllm, sglang"),
        ({"request_spans": 1}, "request_spans=1; give true or false"),
    ],
)
def test_options_that_can_not_be_honoured_are_refused(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from("toy", options)
