"""`top` in front of running engines, and the probes of an LLM: what is shown is what was done."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from stepahead import LLM, SamplingParams
from stepahead.cli.main import run_command
from stepahead.top.fetch import get
from stepahead.top.metrics import frame_of, parse
from stepahead.top.source import Server

PROMPTS = [{"prompt_token_ids": [k, *range(3, 12)]} for k in range(2, 10)]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_rows": 4,
    "num_pages": 40,
    "threads": 1,
    "executor": "inline",
    "observe": 0,
}
GIVEN = len(PROMPTS) * 40


def answer(llm: LLM) -> None:
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(("loop", "depth"), [("serial", 1), ("overlap", 2), ("batch-queue", 3)])
def test_a_running_engine_is_shown_as_it_is(loop: str, depth: int) -> None:
    more = {"depth": depth} if loop == "batch-queue" else {}
    with LLM("toy", loop=loop, **OPTIONS, **more) as llm:
        assert llm.observe_url is not None
        server = Server(llm.observe_url, 60.0)
        fresh = server.look()
        assert fresh.verdict == "nothing to do yet"
        assert (fresh.ttft, fresh.itl, fresh.running) == (None, None, 0)
        answer(llm)
        frame = server.look()
    assert frame.engine.startswith("stepahead ")
    assert (frame.model, frame.loop, frame.depth) == ("toy", loop, depth)
    assert (frame.rows, frame.pages, frame.flights) == (4, 40, 0)
    assert frame.verdict.startswith("device busy ")
    assert frame.busy_pct is not None
    assert 0 < frame.busy_pct <= 100
    assert frame.exposed_ms is not None
    assert frame.exposed_ms > 0
    assert sum(frame.idle_ms.values()) > 0
    assert frame.out_per_s is not None
    assert frame.out_per_s > 0
    for found in (frame.ttft, frame.itl):
        assert found is not None
        assert 0 < found.p50_ms <= found.p90_ms <= found.p99_ms
    assert frame.missing == ""


@pytest.mark.parametrize("names", ["vllm", "sglang"])
def test_an_engine_under_another_engines_names_is_read_as_that_one(names: str) -> None:
    with LLM("toy", metric_names=names, **OPTIONS) as llm:
        assert llm.observe_url is not None
        scrapes = []
        for at_s in (10.0, 12.0):
            text = get(llm.observe_url + "/metrics", 60.0).body.decode()
            scrapes.append(parse(text, at_s))
            answer(llm)
        frame = frame_of(scrapes[1], scrapes[0])
    assert frame.engine == {"vllm": "vLLM", "sglang": "SGLang"}[names]
    assert (frame.model, frame.running, frame.waiting) == ("toy", 0, 0)
    assert frame.out_per_s == GIVEN / 2
    assert frame.in_per_s == len(PROMPTS) * 10 / 2
    assert frame.ttft is not None
    assert frame.itl is not None
    assert frame.pages_pct == 0.0


def test_once_reads_a_running_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM("toy", **OPTIONS) as llm:
        answer(llm)
        capsys.readouterr()
        assert run_command(["top", str(llm.observe_url), "--once", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["model"] == "toy"
        assert told["verdict"].startswith("nothing to do now; before: device busy ")
    assert run_command(["top", str(llm.observe_url), "--once"]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_an_llm_has_probes_of_all_steps_or_of_the_later_ones() -> None:
    with LLM("toy", loop="overlap", **OPTIONS) as llm:
        assert llm.probes().verdict == "no step has landed yet"
        answer(llm)
        first = llm.probes()
        assert (first.loop, first.depth) == ("overlap", 2)
        assert first.tokens.spreads["gap"]["all"].count <= GIVEN
        now_ns = time.perf_counter_ns()
        assert llm.probes(now_ns).totals.steps == 0
        answer(llm)
        second = llm.probes(now_ns)
        assert 0 < second.totals.steps < llm.probes().totals.steps


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_a_host_that_computes_the_steps_itself_is_not_told_to_hide_anything(loop: str) -> None:
    with LLM("toy", loop=loop, **OPTIONS) as llm:
        answer(llm)
        found = llm.probes()
        frame = Server(str(llm.observe_url), 60.0).look()
    assert found.totals.host_computes
    for told in (found.host.verdict, found.results.verdict):
        assert told.startswith("nothing runs ahead, the host's thread is the device")
    assert "hidden" not in found.verdict + frame.verdict
    assert frame.hidden_pct is None
