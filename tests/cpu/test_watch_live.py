"""Engines that are watched while they run: the same tokens, and numbers that add up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepahead import LLM, SamplingParams
from stepahead.cli.main import run_command
from stepahead.errors import ConfigError, EngineClosed, ModelError
from stepahead.watch.loopback import listen

LOOPS = ["serial", "overlap", "batch-queue"]
PROMPTS = [{"prompt_token_ids": [k, *range(3, 12)]} for k in range(2, 14)]
PARAMS = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 128, "max_rows": 4, "num_pages": 40, "threads": 1}


@contextmanager
def scraped(url: str) -> Iterator[list[httpx.Response]]:
    """Asks for everything in a tight loop; the answers."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def scrape() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            while not over.is_set():
                paths = ("/metrics", "/state", "/trace?last=100ms", "/health")
                answers.extend(client.get(path) for path in paths)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join(60)


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    """What an engine that nobody watches answers."""
    with LLM("toy", loop="serial", executor="inline", **OPTIONS) as llm:
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("executor", ["inline", "process"])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_that_is_scraped_all_the_time_answers_the_same(
    loop: str, executor: str, tokens: list[list[int]]
) -> None:
    with LLM("toy", loop=loop, executor=executor, observe=0, **OPTIONS) as llm:
        assert llm.observe_url is not None
        with scraped(llm.observe_url) as answers:
            found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in found] == tokens
        with httpx.Client(base_url=llm.observe_url, trust_env=False) as client:
            state = client.get("/state").json()
            metrics = client.get("/metrics").text
    assert {answer.status_code for answer in answers} == {200}
    assert len(answers) >= 4
    steps = [a.json()["steps"] for a in answers if a.url.path == "/state"]
    assert steps == sorted(steps)
    assert state["requests"]["generated_tokens"] == len(PROMPTS) * 48
    books = state["books"]
    assert books["hidden_ns"] + books["exposed_ns"] + books["waiting_ns"] == books["wall_ns"]
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if set(sample.labels) == {"model_name"}
    }
    assert values["stepahead_generated_tokens_total"] == len(PROMPTS) * 48
    assert values["stepahead_itl_seconds_count"] == len(PROMPTS) * 47
    assert values["stepahead_e2e_seconds_count"] == len(PROMPTS)
    with pytest.raises(httpx.ConnectError):
        httpx.get(llm.observe_url, trust_env=False)


def test_an_engine_can_be_closed_while_it_is_scraped() -> None:
    llm = LLM("toy", executor="process", observe=0, **OPTIONS)
    assert llm.observe_url is not None
    timer = threading.Timer(0.3, llm.close)
    with scraped_to_the_end(llm.observe_url):
        timer.start()
        with pytest.raises(EngineClosed):
            ask_forever(llm)
    timer.join(60)
    names = {thread.name for thread in threading.enumerate()}
    assert "stepahead watch" not in names


def ask_forever(llm: LLM) -> None:
    """Until it can't be asked."""
    while True:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@contextmanager
def scraped_to_the_end(url: str) -> Iterator[None]:
    """Asks until nobody answers."""

    def scrape() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            try:
                while True:
                    client.get("/state")
            except httpx.HTTPError:
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        assert not thread.is_alive()


def test_a_taken_port_is_told_before_a_model_is_looked_for() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"observe={port}"):
            LLM("/nowhere/no-model", observe=port)


def test_a_model_that_can_not_be_loaded_gives_the_port_back() -> None:
    with listen(0) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        with pytest.raises(ModelError):
            LLM("/nowhere/no-model", observe=port)


def test_a_bench_of_all_loops_shows_each_on_one_port(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(0) as free:
        port = free.getsockname()[1]
    words = f"bench toy --observe {port} --metric-names vllm --num-prompts 2 --input-len 4"
    more = "--output-len 4 --executor inline --num-pages 64 --threads 1"
    assert run_command([*words.split(), *more.split()]) == 0
    told = capsys.readouterr()
    assert told.err.count(f"http://127.0.0.1:{port}/state, /metrics and /trace") == 3
    assert set(json.loads(told.out.splitlines()[-1])) > set(LOOPS)


def test_the_command_says_which_free_port_it_took_even_when_it_is_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "bench toy --observe 0 --quiet --loop overlap --num-prompts 1 --input-len 4"
    more = "--output-len 2 --executor inline --num-pages 64 --threads 1"
    assert run_command([*words.split(), *more.split()]) == 0
    assert "http://127.0.0.1:" in capsys.readouterr().err


def test_spans_of_requests_are_exported_while_an_engine_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    before = set(threading.enumerate())
    with LLM("toy", executor="inline", request_spans=True, **OPTIONS) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    told = capsys.readouterr().out
    assert told.count('"name": "text_completion toy"') == len(PROMPTS)
    assert told.count('"name": "queue"') == len(PROMPTS)
    assert '"service.name": "mine"' in told
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_a_file_of_prompts_can_be_watched(tmp_path: Path) -> None:
    lines, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text('{"prompt_token_ids": [5, 6, 7]}\n', encoding="utf-8")
    words = f"run toy --input {lines} --output {answers} --observe 0 --metric-names sglang"
    more = "--max-tokens 4 --executor inline --num-pages 64 --threads 1"
    assert run_command([*words.split(), *more.split()]) == 0
    assert len(answers.read_text("utf-8").splitlines()) == 1
