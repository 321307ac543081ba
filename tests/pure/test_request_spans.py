"""OpenTelemetry spans of requests, made after their ends; no collector, no network."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engines import Variant, toy_engine
from listener import LOOPS
from stepahead.config import config_from
from stepahead.engine import Engine
from stepahead.errors import ConfigError
from stepahead.executor.virtual import Timing
from stepahead.observe.requests import RequestLog
from stepahead.sim.virtual import MS, SERIAL, Rig, constant, host_work, rig
from stepahead.types import SamplingParams
from stepahead.watch.beside import Beside
from stepahead.watch.spans import RequestSpans, exporter_from_environment

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"vocab_size": 64, "max_model_len": 64, "page_size": 4, "max_rows": 2, "num_pages": 40}


@contextmanager
def exported(engine: Engine, every_s: float = 3600.0) -> Iterator[InMemorySpanExporter]:
    """What is exported of an engine; complete once this is left."""
    memory = InMemorySpanExporter()
    spans = RequestSpans(engine.observer, memory, every_s)
    try:
        yield memory
    finally:
        spans.close()
        spans.close()
        assert not spans._thread.is_alive()


def virtual() -> Rig:
    """A serial engine whose steps take 10 ms, with 1 ms of plan before and 3 ms after them."""
    return rig(SERIAL, Timing(constant(10 * MS)), host_work(4), rows=1)


def test_a_request_is_a_span_with_its_queue_prefill_and_decode_below_it() -> None:
    rigged = virtual()
    with exported(rigged.engine) as memory:
        rigged.add(16, GREEDY)
        rigged.add(16, GREEDY)
        while rigged.engine.has_work:
            rigged.step()
    spans = memory.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    assert [root.name for root in roots] == ["text_completion none"] * 2
    second = roots[1]
    assert second.attributes is not None
    assert dict(second.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "stepahead",
        "gen_ai.request.model": "none",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 16,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "stepahead.request_id": 1,
        "stepahead.loop": "serial",
        "stepahead.preemptions": 0,
    }
    assert second.context is not None
    parts = [s for s in spans if s.parent and s.parent.span_id == second.context.span_id]

    def ms(ns: int | None) -> float:
        assert ns is not None
        assert second.start_time is not None
        return (ns - second.start_time) / MS

    # the first one has the only row for 8 steps of 14 ms
    found = [(part.name, ms(part.start_time), ms(part.end_time)) for part in parts]
    assert found == [("queue", 0, 112), ("prefill", 112, 126), ("decode", 126, 224)]
    assert ms(second.end_time) == 224
    assert second.resource.attributes["service.name"] == "stepahead"


def test_spans_stand_at_the_time_of_day() -> None:
    engine = toy_engine(OPTIONS, Variant("overlap", "paper"))
    with exported(engine) as memory:
        before_ns = time.time_ns()
        engine.add([2, 3], GREEDY)
        while engine.has_work:
            engine.step()
        after_ns = time.time_ns()
    second_ns = 1_000_000_000  # both clocks are read one after the other
    for span in memory.get_finished_spans():
        assert span.start_time is not None
        assert span.end_time is not None
        assert before_ns - second_ns <= span.start_time <= span.end_time <= after_ns + second_ns


@pytest.mark.parametrize(("loop", "depth"), LOOPS)
def test_every_request_has_one_span_while_the_engine_runs(loop: str, depth: int) -> None:
    engine = toy_engine(OPTIONS, Variant(loop, "paper", depth=depth))
    with exported(engine, every_s=0.001) as memory:
        for first in range(2, 42):
            engine.add([first, 3], GREEDY)
        while engine.has_work:
            engine.step()
    roots = [span for span in memory.get_finished_spans() if span.parent is None]
    rids = [span.attributes["stepahead.request_id"] for span in roots if span.attributes]
    assert rids == engine.observer.requests.ends().rid.tolist()
    assert len(rids) == 40
    assert len(memory.get_finished_spans()) == 4 * 40


def test_an_end_before_the_first_token_has_only_what_it_came_to() -> None:
    engine = toy_engine(OPTIONS, Variant("serial", "paper"))
    with exported(engine) as memory:
        rids = [engine.add([first, 3], GREEDY)[0] for first in range(2, 5)]
        engine.step()
        engine.abort(rids[2])  # has waited, and nothing else
        engine.abort(rids[0])  # decodes
        while engine.has_work:
            engine.step()
    names: dict[object, list[str]] = {}
    spans = memory.get_finished_spans()
    roots = {s.context.span_id: s for s in spans if s.parent is None and s.context}
    for span in spans:
        if span.parent is not None:
            root = roots[span.parent.span_id]
            assert root.attributes is not None
            names.setdefault(root.attributes["stepahead.request_id"], []).append(span.name)
    whole = ["queue", "prefill", "decode"]
    assert names == {rids[0]: whole, rids[1]: whole, rids[2]: ["queue"]}


def test_a_failure_is_a_span_with_an_error() -> None:
    engine = toy_engine(OPTIONS, Variant("serial", "paper"))
    with exported(engine) as memory:
        log: RequestLog = engine.observer.requests
        log.arrived(0, 3)
        log.ended(0, "error", 0)
    (root, queue) = sorted(memory.get_finished_spans(), key=lambda span: span.name, reverse=True)
    assert root.status.status_code is StatusCode.ERROR
    assert queue.name == "queue"
    assert root.attributes is not None
    assert root.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_spans_are_not_lost_when_an_engine_is_closed_in_the_midst_of_a_step() -> None:
    """As by a signal's handler, on the thread that steps: nobody is answered meanwhile."""
    engine = toy_engine(OPTIONS, Variant("overlap", "paper"))
    memory = InMemorySpanExporter()
    spans = RequestSpans(engine.observer, memory, every_s=3600.0)
    engine.add([2, 3], GREEDY)
    while engine.has_work:
        engine.step()
    with engine.observer.working:
        spans.close()
    assert len(memory.get_finished_spans()) == 4


def test_what_ended_before_it_was_asked_for_is_not_told() -> None:
    rigged = virtual()
    rigged.add(16, GREEDY)
    while rigged.engine.has_work:
        rigged.step()
    with exported(rigged.engine) as memory:
        pass
    assert memory.get_finished_spans() == ()
    assert "stepahead spans" not in {thread.name for thread in threading.enumerate()}


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stepahead.watch.spans")
    for name in ("opentelemetry.sdk.resources", "opentelemetry.sdk.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'stepahead\[otel\]'"):
        Beside(config_from("toy", {"request_spans": True}))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "pip install opentelemetry-exporter-otlp-proto-http"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "pip install opentelemetry-exporter-otlp-proto-grpc",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            "pip install opentelemetry-exporter-otlp-proto-http",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "takes http/protobuf or grpc"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin"),
    ],
)
def test_an_exporter_that_is_not_there_is_named(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=words):
        exporter_from_environment()


def test_the_console_exporter_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    Beside(config_from("toy", {"request_spans": True})).close()
