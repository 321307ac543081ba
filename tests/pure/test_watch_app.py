"""What an engine shows over HTTP: exact at rest, refused by name, bounded when it is busy."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from closed_form import Toy
from engines import Variant, paper, resolved, toy_engine
from stepahead.engine import Engine
from stepahead.errors import StepFailed
from stepahead.executor.virtual import Timing
from stepahead.observe.probes import probes
from stepahead.plan import Plan, Result
from stepahead.sim.virtual import LOOPS, MS, OVERLAP, SERIAL, LoopChoice, constant, host_work, rig
from stepahead.types import SamplingParams
from stepahead.watch import app as app_module
from stepahead.watch.app import watch_app
from stepahead.watch.loopback import Loopback, listen

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": 4, "num_pages": 80}


@contextmanager
def shown(engine: Engine, prefix: str = "", **options: Any) -> Iterator[httpx.Client]:
    """A client of the engine's app on loopback, mounted under `prefix`."""
    app = watch_app(engine, **options)
    served = Loopback(Starlette(routes=[Mount(prefix, app)]) if prefix else app, listen(0))
    try:
        with httpx.Client(base_url=served.url + prefix, trust_env=False, timeout=30) as client:
            yield client
    finally:
        served.close()
        assert not served._thread.is_alive()


def virtual(choice: LoopChoice = SERIAL) -> Engine:
    """An engine at rest that has answered 4 prompts of 16 tokens with 8 each: a step is 10 ms on
    the device, with 1 ms of plan before it and 3 ms of retirement after it."""
    rigged = rig(choice, Timing(constant(10 * MS)), host_work(4))
    for _ in range(4):
        rigged.add(16, GREEDY)
    while rigged.engine.has_work:
        rigged.step()
    return rigged.engine


def test_the_state_at_rest_is_exact() -> None:
    engine = virtual()
    with shown(engine) as client:
        found = client.get("/state").json()
    assert found.pop("unix_ns") > 1e18
    assert found.pop("about") == engine.observer.about
    assert found.pop("probes") == json.loads(
        json.dumps(probes(engine.observer.snapshot()).as_dict())
    )
    idle = found["books"].pop("idle_ns")
    assert sum(idle.values()) == 8 * 4 * MS
    host = found["books"].pop("host_ns")
    assert {stage: ns for stage, ns in host.items() if ns} == {
        "plan": 8 * MS,
        "wait": 80 * MS,
        "retire": 24 * MS,
    }

    def of(ms: int, count: int) -> dict[str, float]:
        return {"count": count, "mean_ms": ms, "p50_ms": ms, "p90_ms": ms, "p99_ms": ms}

    assert found == {
        "status": "ok",
        "at_ns": 112 * MS,
        "load": {
            "step": 7,
            "rows_running": 0,
            "requests_waiting": 0,
            "pages_free": 1023,
            "pages_cached": 1,
            "pages_evictable": 1,
            "pages_total": 1024,
        },
        "flights": 0,
        "steps": 8,
        "books": {
            "wall_ns": 112 * MS,
            "hidden_ns": 0,
            "exposed_ns": 32 * MS,
            "waiting_ns": 80 * MS,
            "busy_ns": 80 * MS,
            "hidden_us_per_step": 0.0,
            "exposed_us_per_step": 4000.0,
            "device_idle_pct": pytest.approx(100 * 32 / 112),
        },
        "syncs": {},
        "drafts": None,
        "requests": {
            "arrived": 4,
            "admitted": 4,
            "preemptions": 0,
            "prompt_tokens": 64,
            "cached_tokens": 0,
            "generated_tokens": 32,
            "ends": {"stop": 0, "length": 4, "abort": 0, "error": 0},
        },
        "rates": {
            "steps": pytest.approx(8 / 0.112),
            "generated_tokens": pytest.approx(32 / 0.112),
            "prompt_tokens": pytest.approx(64 / 0.112),
        },
        "latencies": {
            "queue": of(0, 4),
            "prefill": of(14, 4),
            "ttft": of(14, 4),
            "itl": of(14, 28),
            "decode": of(98, 4),
            "e2e": of(112, 4),
        },
    }


@pytest.mark.parametrize("choice", LOOPS, ids=str)
def test_both_books_in_the_state_add_up_in_each_loop(choice: LoopChoice) -> None:
    with shown(virtual(choice)) as client:
        books = client.get("/state").json()["books"]
    assert books["hidden_ns"] + books["exposed_ns"] + books["waiting_ns"] == books["wall_ns"]
    assert books["busy_ns"] + sum(books["idle_ns"].values()) == books["wall_ns"]


def test_an_engine_that_has_run_nothing_has_a_state() -> None:
    with shown(toy_engine(OPTIONS, Variant("overlap", "paper"))) as client:
        found = client.get("/state").json()
        assert client.get("/metrics").status_code == 200
        assert "traceEvents" in client.get("/trace").json()
    assert found["probes"] is None
    assert set(found["latencies"].values()) == {None}
    assert found["requests"]["arrived"] == found["steps"] == 0


def test_lanes_go_on_where_the_last_answer_ended() -> None:
    with shown(virtual()) as client:
        whole = client.get("/lanes").json()
        assert (whole["first"], whole["next"]) == (0, 11)
        rest = client.get("/lanes", params={"from": 7}).json()
    assert (rest["first"], rest["next"]) == (7, 11)
    assert rest["device"]["busy_us"] == whole["device"]["busy_us"][7:]


def test_a_trace_is_json_zipped_for_who_takes_it_and_as_long_as_asked() -> None:
    with shown(virtual(OVERLAP)) as client:
        sizes = {}
        for last in ("", "?last=1m", "?last=40ms", "?last=0.02s"):
            found = client.get("/trace" + last)
            assert found.headers["content-encoding"] == "gzip"
            sizes[last] = len(found.json()["traceEvents"])
        plain = client.get("/trace", headers={"accept-encoding": "gzip;q=0, identity"})
        assert "content-encoding" not in plain.headers
        zipped = json.loads(gzip.decompress(raw(client, "/trace")))
        assert zipped["traceEvents"] == plain.json()["traceEvents"]
    assert sizes[""] == sizes["?last=1m"] > sizes["?last=40ms"] > sizes["?last=0.02s"] > 0


def raw(client: httpx.Client, path: str) -> bytes:
    """The body as it came."""
    with client.stream("GET", path) as answer:
        return b"".join(answer.iter_raw())


@pytest.mark.parametrize(
    ("path", "words", "param"),
    [
        ("/trace?last=5", "last='5'; give a time above zero with its unit", "last"),
        ("/trace?last=", "last=''", "last"),
        ("/trace?last=0s", "above zero", "last"),
        ("/trace?last=-1s", "above zero", "last"),
        ("/trace?last=1e3s", "above zero", "last"),
        ("/trace?last=nans", "above zero", "last"),
        ("/trace?last=5s%0A", "above zero", "last"),
        ("/trace?last=1s&last=2s", "given twice", "last"),
        ("/lanes?from=-1", "the number that the last answer has as `next`", "from"),
        ("/lanes?from=1.5", "from='1.5'; give", "from"),
        ("/lanes?from=1234567890123456", "from=", "from"),
        ("/lanes?last=10s", "'last': /lanes takes only from", "last"),
        ("/trace?lats=1s", "'lats': /trace takes only last", "lats"),
        ("/state?verbose=1", "'verbose': /state takes no parameters", "verbose"),
        ("/metrics?name=x", "no parameters", "name"),
        ("/health?x=", "no parameters", "x"),
    ],
)
def test_a_question_that_is_wrong_is_refused_by_name(path: str, words: str, param: str) -> None:
    with shown(virtual()) as client:
        found = client.get(path)
    assert found.status_code == 400
    error = found.json()["error"]
    assert words in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("prefix", ["", "/observe", "/a/b"])
def test_paths_and_methods_that_are_not_there_say_what_is(prefix: str) -> None:
    with shown(virtual(), prefix) as client:
        assert client.get("/health").json() == {"status": "ok"}
        nowhere = client.get("/nope")
        posted = client.post("/state")
    assert nowhere.status_code == 404
    assert nowhere.json()["error"]["message"].endswith(
        "/state, /metrics, /lanes, /trace and /health are"
    )
    assert posted.status_code == 405
    assert "use GET" in posted.json()["error"]["message"]
    assert "GET" in posted.headers["allow"]


def test_an_answer_that_fails_says_so_and_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("ouch")

    engine = toy_engine(OPTIONS, Variant("overlap", "paper"))
    engine.add([2, 3], GREEDY)
    monkeypatch.setattr(app_module, "chrome_trace", broken)
    with shown(engine) as client:
        found = client.get("/trace")
        assert found.status_code == 500
        assert "ZeroDivisionError: ouch" in found.json()["error"]["message"]
        assert "could not be answered" in caplog.text
        while engine.has_work:
            engine.step()
        assert client.get("/state").json()["requests"]["ends"]["length"] == 1


def test_a_failed_or_closed_engine_is_not_healthy_and_can_still_be_read() -> None:
    engine = toy_engine(OPTIONS, Variant("overlap", "paper"))
    with shown(engine) as client:
        engine._failure = StepFailed("the model raised: ouch")
        failed = client.get("/health")
        engine.close()
        closed = client.get("/health")
        state = client.get("/state").json()
    assert failed.status_code == closed.status_code == 503
    assert failed.json()["error"]["message"] == "the model raised: ouch"
    assert closed.json()["error"]["code"] == "engine_closed"
    assert state["status"] == "closed"


# --- a long step --------------------------------------------------------------------------------


class Stuck:
    """An executor whose every landing waits to be let go."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.landing, self.go = threading.Event(), threading.Event()

    def launch(self, plan: Plan) -> Any:
        """A flight that lands when it is let go."""
        return StuckFlight(self, self.inner.launch(plan))

    def close(self) -> None:
        """Nothing."""


class StuckFlight:
    """A flight of it."""

    def __init__(self, executor: Stuck, inner: Any) -> None:
        self.executor, self.inner = executor, inner

    def land(self) -> Result:
        """Waits."""
        self.executor.landing.set()
        assert self.executor.go.wait(60)
        return self.inner.land()


@contextmanager
def stuck_in_a_step() -> Iterator[tuple[Engine, Stuck]]:
    """An engine that another thread steps, in the middle of a step."""
    variant = Variant("overlap", "paper")
    executor = Stuck(paper(resolved(OPTIONS, variant), Toy(64, 64)))
    engine = toy_engine(OPTIONS, variant, executor=executor)
    engine.add([2, 3], GREEDY)

    def steps() -> None:
        while engine.has_work:
            engine.step()

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        assert executor.landing.wait(60)
        yield engine, executor
    finally:
        executor.go.set()
        thread.join(60)
        assert not thread.is_alive()


def test_a_long_step_is_told_in_bounded_time_and_health_does_not_wait() -> None:
    with stuck_in_a_step() as (engine, _), shown(engine, patience_s=0.05) as client:
        for path in ("/state", "/metrics", "/trace"):
            found = client.get(path)
            assert found.status_code == 503
            assert "has been in one step for 0.05 s" in found.json()["error"]["message"]
        assert not engine.observer._asks, "the engine has to answer who has gone"
        assert client.get("/health").json() == {"status": "ok"}


def test_a_question_in_a_step_is_answered_after_it() -> None:
    with stuck_in_a_step() as (engine, executor), shown(engine, patience_s=60) as client:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.get("/state")))
        asking.start()
        while not engine.observer._asks:
            assert asking.is_alive()
        executor.go.set()
        asking.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["steps"] > 0


def test_what_is_shown_ends_in_bounded_time_while_somebody_waits_for_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with stuck_in_a_step() as (engine, executor):
        served = Loopback(watch_app(engine, patience_s=60), listen(0))
        engine.on_close(served.close)
        told: list[object] = []

        def ask() -> None:
            try:
                told.append(httpx.get(served.url + "/state", trust_env=False, timeout=60))
            except httpx.HTTPError as error:
                told.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while not engine.observer._asks:
            assert asking.is_alive()
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "a close waits for an answer that a step holds up"
        served._thread.join(20)
        assert not served._thread.is_alive(), "the server waits for it"
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        executor.go.set()
        asking.join(60)
        assert len(told) == 1


def test_rates_are_of_the_last_ten_seconds() -> None:
    rigged = rig(SERIAL, Timing(constant(10 * MS)), host_work(4))
    rigged.add(16, SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True))
    with shown(rigged.engine) as client:
        for _ in range(900):  # 14 ms each
            rigged.step()
        steady = client.get("/state").json()["rates"]
        rigged.clock.work(4000 * MS)
        paused = client.get("/state").json()["rates"]
        rigged.clock.work(7000 * MS)
        idle = client.get("/state").json()["rates"]
    assert steady["generated_tokens"] == pytest.approx(1000 / 14, rel=0.002)
    assert paused["generated_tokens"] == pytest.approx(0.6 * 1000 / 14, rel=0.002)
    assert (idle["steps"], idle["generated_tokens"]) == (0, 0)
