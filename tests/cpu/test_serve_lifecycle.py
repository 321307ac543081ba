"""A server's life as its users see it: it says where it is, ends in order, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from offline_makers import toy_flags
from serving import SRC, Served, served

TOY = ["toy", *toy_flags(max_model_len=4096)]
LONG: dict[str, Any] = {"prompt": [2, 3], "max_tokens": 2500, "min_tokens": 2500, "n": 4}


@pytest.fixture
def server() -> Iterator[Served]:
    flags = toy_flags(executor="process", max_model_len=4096)
    with served("toy", *flags, "--shutdown-timeout", "60") as found:
        yield found


def family(server: Served) -> list[psutil.Process]:
    """The server, its engine's process and the runner's."""
    me = psutil.Process(server.process.pid)
    return [me, *me.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def lines_of(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


def test_it_drains_when_it_is_told_to_end(server: Served) -> None:
    url = server.url()
    processes = family(server)
    assert len(processes) == 3  # HTTP, the engine, the runner
    completions = f"{url}/v1/completions"
    body = LONG | {"stream": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", completions, json=body) as running,
    ):
        lines = lines_of(running)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("ending: ")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 503
        late = httpx.post(completions, json={"prompt": [2]})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        *rest, done = lines
    assert done == "[DONE]"
    ends = [json.loads(line)["choices"][0]["finish_reason"] for line in rest]
    assert [end for end in ends if end] == ["length"] * 4
    assert server.end() == 0
    assert gone(processes)


def test_what_is_not_done_in_time_is_aborted_in_order() -> None:
    with served(*TOY, "--shutdown-timeout", "0") as server:
        url = server.url()
        processes = family(server)
        body = LONG | {"stream": True}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as running,
        ):
            lines = lines_of(running)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            *rest, done = lines
        assert done == "[DONE]"
        ends = [json.loads(line)["choices"][0]["finish_reason"] for line in rest]
        assert set(ends) <= {None, "abort", "length"}
        assert len([end for end in ends if end]) == 4
        assert server.end() == 0
        assert gone(processes)


def test_who_reads_slowly_hears_all_that_was_made_before_the_end() -> None:
    """Its tokens are made long before it has read them: then only the server is waited for."""
    name = "n" * 6000  # in every event: more than the kernel holds for who does not read
    with served(*TOY, "--served-name", name) as server:
        url = server.url()
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps(LONG | {"stream": True, "max_tokens": 600, "min_tokens": 600}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
            while httpx.get(f"{url}/state").json()["load"]["step"] < 599:
                time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("ending: 0 requests")
            time.sleep(3.0)  # more than others get to hear of an end
            heard = b"".join(iter(lambda: slow.recv(1 << 20), b""))
        assert heard.count(b'"length"') == 4
        assert heard.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.said)


def test_a_second_signal_ends_it_at_once(server: Served) -> None:
    url = server.url()
    processes = family(server)
    with httpx.Client(timeout=60) as client:
        request = client.build_request(
            "POST", f"{url}/v1/completions", json=LONG | {"stream": True, "n": 64}
        )
        running = client.send(request, stream=True)
        lines = lines_of(running)
        next(lines)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("ending: ")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == -signal.SIGTERM
        running.close()
    assert gone(processes)


def test_two_signals_at_the_same_instant_are_a_second_one(server: Served) -> None:
    url = server.url()
    processes = family(server)
    with httpx.Client(timeout=60) as client:
        body = LONG | {"stream": True, "n": 64}
        running = client.send(
            client.build_request("POST", f"{url}/v1/completions", json=body), stream=True
        )
        next(lines_of(running))
        server.process.send_signal(signal.SIGSTOP)  # so that it finds both when it goes on
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.process.send_signal(number)
        assert server.end() in (-signal.SIGTERM, -signal.SIGINT)
        running.close()
    assert not any("Traceback" in line for line in server.said)
    assert gone(processes)


@pytest.mark.parametrize("which", ["engine", "runner"])
def test_a_process_that_dies_ends_streams_and_server(server: Served, which: str) -> None:
    url = server.url()
    processes = family(server)
    engine = psutil.Process(server.process.pid).children()[0]
    victim = engine if which == "engine" else engine.children()[0]
    victim.suspend()  # so that it answers nobody any more
    with httpx.Client(timeout=60) as client:
        request = client.build_request(
            "POST", f"{url}/v1/completions", json=LONG | {"stream": True}
        )
        if which == "engine":
            # it is stuck before it could take the prompt: an answer, not a stream, tells of it
            os.kill(victim.pid, signal.SIGKILL)
            running = client.send(request)
            assert running.status_code == 503
            assert running.json()["error"]["code"] == "engine_failed"
        else:
            running = client.send(request, stream=True)
            assert running.status_code == 200
            os.kill(victim.pid, signal.SIGKILL)
            *_, error, done = lines_of(running)
            assert done == "[DONE]"
            assert json.loads(error)["error"]["code"] == "engine_failed"
            running.close()
        # who was told of the failure finds no server that calls itself healthy, not for a moment
        health = client.get(f"{url}/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_failed")
    assert server.end() == 1
    assert any("error: the engine has failed" in line for line in server.said)
    assert gone(processes)


@pytest.mark.parametrize("which", ["engine", "runner"])
def test_an_engine_that_dies_is_started_again(which: str) -> None:
    flags = toy_flags(executor="process", max_model_len=4096)
    with served("toy", *flags, "--restart") as server, httpx.Client(timeout=60) as client:
        url = server.url()
        completions = f"{url}/v1/completions"
        wanted = client.post(completions, json={"prompt": [2, 3], "seed": 5}).json()["choices"]
        processes = family(server)
        engine = psutil.Process(server.process.pid).children()[0]
        victim = engine if which == "engine" else engine.children()[0]
        with client.stream("POST", completions, json=LONG | {"stream": True}) as running:
            lines = lines_of(running)
            next(lines)
            victim.kill()
            *_, error, done = lines
            assert done == "[DONE]"
            assert json.loads(error)["error"]["code"] == "engine_failed"
            # unready from the moment that a stream could tell of it
            assert client.get(f"{url}/ready").status_code == 503
            server.url()  # which it tells again
        assert client.get(f"{url}/ready").status_code == 200
        assert client.get(f"{url}/health").json() == {"status": "ok"}
        found = client.post(completions, json={"prompt": [2, 3], "seed": 5}).json()
        assert found["choices"] == wanted
        assert gone(processes[1:])  # of the first engine nothing is left
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert sum("error: the engine has failed" in line for line in server.said) == 1


def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    with served("toy", *toy_flags(max_model_len=4096), "--restart") as server:
        server.url()
        me = psutil.Process(server.process.pid)
        killed: set[int] = set()
        end_s = time.monotonic() + 100.0
        while server.process.poll() is None and time.monotonic() < end_s:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in me.children():
                    child.kill()
                    killed.add(child.pid)
            time.sleep(0.02)
        assert server.end() == 1
    assert len(killed) == 3
    assert "can't be started again" in server.said[-1]


def one_line(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "stepahead", "serve", *words],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("stepahead: loading")]
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0]


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, line = one_line(*TOY, "--port", port)
    assert code == 2
    assert line.startswith(f"stepahead: error: port={port}: it can't be had on 127.0.0.1")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["/nowhere/model", "--port", "0"], 1, "/nowhere/model: no such file"),
        (["toy", "--port", "70000"], 2, "port=70000"),
        (["toy", "--request-timeout", "0"], 2, "request_timeout=0"),
        (["toy", "--max-waiting", "-1"], 2, "max_waiting=-1"),
        (["toy", "--prot", "1"], 2, "--prot"),
        (["toy", "--host", "no.such.host.invalid"], 2, "host=no.such.host.invalid"),
        (["toy", "--port", "0", "--max-rows", "0"], 2, "max_rows=0"),
        # found by the engine's process alone
        (["toy", "--port", "0", "--num-pages", str(1 << 35)], 1, "the KV pool needs"),
    ],
)
def test_a_bad_start_is_told_in_one_line(words: list[str], code: int, told: str) -> None:
    found, line = one_line(*words)
    assert found == code
    assert line.startswith("stepahead: error: ")
    assert told in line


def test_a_server_that_is_killed_takes_its_processes_along(server: Served) -> None:
    server.url()
    processes = family(server)
    server.process.kill()
    assert gone(processes)


def test_it_ends_while_it_loads() -> None:
    with served(*TOY) as server:
        server.wait_for("loading toy")
        end_s = time.monotonic() + 60.0
        while len(family(server)) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
        processes = family(server)
        # before its loop hears signals the program's own way with them ends it: 143
        server.process.send_signal(signal.SIGTERM)
        assert server.end() in (0, 143, -signal.SIGTERM)
        assert gone(processes)


def test_an_engine_that_dies_while_it_loads_is_told_in_one_line() -> None:
    with served(*TOY) as server:
        end_s = time.monotonic() + 60.0
        while len(family(server)) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
        family(server)[1].kill()
        assert server.end() == 1
    *_, last = server.said
    assert last.startswith("stepahead: error: the engine ended while it was loaded: its process")
    assert "SIGKILL" in last


def test_it_says_that_only_this_machine_can_reach_it() -> None:
    began_s = time.monotonic()
    with served(*TOY) as server:
        line = server.wait_for("serving toy at http://127.0.0.1:")
        assert "only this machine can reach it" in line
        assert "--host 0.0.0.0" in line
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
    assert time.monotonic() > began_s


def test_what_the_engine_shows_of_itself_is_served(server: Served) -> None:
    url = server.url()
    asked = {"prompt": [2, 3], "max_tokens": 5, "min_tokens": 5}
    assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 200
    state = httpx.get(f"{url}/state").json()
    assert state["about"]["model"] == "toy"
    assert state["requests"]["generated_tokens"] == 5
    assert state["requests"]["ends"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    metrics = httpx.get(f"{url}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "stepahead_generated_tokens_total" in metrics.text
    events = httpx.get(f"{url}/trace?last=1m").json()["traceEvents"]
    assert {"plan", "launch", "retire"} <= {event["name"] for event in events}
    assert httpx.get(f"{url}/trace?last=2").status_code == 400
