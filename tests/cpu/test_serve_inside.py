"""A server whose engine the test can see: the same answers as LLM's, and everything back after."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from offline_makers import TOY_OPTIONS, tiny_llama
from serving import Inside, inside
from stepahead import LLM, SamplingParams
from stepahead.serve.options import ServeConfig
from stepahead.sync import SyncReason
from stepahead.types import RequestOutput
from text_makers import MESSAGES

LOOPS = ["serial", "overlap", "batch-queue"]
PROMPTS = [[2 + (7 * i + 3 * k) % 500 for k in range(4 + 9 * i)] for i in range(4)]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 12},
    {"seed": 5, "max_tokens": 30, "stop": ["ab", "dd"]},
    {"seed": 6, "max_tokens": 30, "stop": "ca", "include_stop_str_in_output": True},
    {"seed": 7, "max_tokens": 40, "stop_token_ids": list(range(60, 90))},
    {"seed": 8, "max_tokens": 5, "n": 3},
    {"seed": 9, "max_tokens": 6, "logprobs": 3, "temperature": 0.7},
    {"seed": 10, "max_tokens": 60, "top_k": 5, "logit_bias": {"1": 4.0}},
    {"seed": 11, "max_tokens": 60, "logit_bias": {"1": 4.0}, "min_tokens": 20, "top_p": 0.9},
    {"seed": 12, "max_tokens": 60, "logit_bias": {"1": 4.0}, "ignore_eos": True, "min_p": 0.01},
    {"seed": 13, "max_tokens": 20, "presence_penalty": 1.0, "repetition_penalty": 1.3},
]


def params_of(fields: dict[str, Any]) -> SamplingParams:
    bias = fields.get("logit_bias")
    more = {"logit_bias": {int(key): value for key, value in bias.items()}} if bias else {}
    return SamplingParams(**(fields | more))


@pytest.fixture(scope="module")
def expected() -> list[list[RequestOutput]]:
    with LLM("toy", **(TOY_OPTIONS | {"loop": "serial"})) as llm:
        return [llm.generate(PROMPTS, params_of(fields)) for fields in ASKED]


@pytest.fixture(scope="module", params=[*LOOPS, "drafts"])
def server(request: pytest.FixtureRequest) -> Iterator[Inside]:
    # of what is asked, what is pushed towards one token repeats itself: its drafts are right
    drafts = request.param == "drafts"
    options = {"draft": "ngram"} if drafts else {"loop": request.param}
    with inside(**TOY_OPTIONS, **options) as found:
        yield found
        found.rest()


@pytest.fixture(scope="module")
def overlap() -> Iterator[Inside]:
    config = ServeConfig(max_waiting=6, ping_interval=0.2, max_body_mb=0.1)
    with inside(config, **TOY_OPTIONS) as found:
        yield found
        found.rest()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def completion(server: Inside, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(server: Inside, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=60) as got:
        assert got.status_code == 200, got.read()
        assert got.headers["content-type"].startswith("text/event-stream")
        return events(got)


def refused(server: Inside, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_an_embedding_is_read_on_every_loop_and_counted_under_its_reason(server: Inside) -> None:
    before = server.engine.syncs.copy()
    body = {"input": PROMPTS, "encoding_format": "float"}
    found = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()
    # a toy's state is one number, whose length is made 1
    assert [abs(one["embedding"][0]) for one in found["data"]] == [1.0] * len(PROMPTS)
    assert found["usage"] == dict.fromkeys(
        ("prompt_tokens", "total_tokens"), sum(map(len, PROMPTS))
    )
    state = httpx.get(f"{server.url}/state").json()
    counted, reason = server.engine.syncs, SyncReason.HIDDEN_STATES
    assert state["syncs"]["hidden-states"]["rows"] == counted.rows(reason)
    assert counted.since(before).rows(reason) >= len(PROMPTS)
    again = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()
    assert again["data"] == found["data"]


def test_an_aborted_embedding_says_so(overlap: Inside) -> None:
    with overlap.paused_after(0), ThreadPoolExecutor(1) as pool:
        body = {"input": [[2, 3]], "request_id": "mine"}
        asking = pool.submit(httpx.post, f"{overlap.url}/v1/embeddings", json=body, timeout=60)
        while not httpx.post(f"{overlap.url}/abort", json={"request_id": "mine"}).json()["aborted"]:
            time.sleep(0.01)
        overlap.resume()
        answer = asking.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
    overlap.rest()


# --- the same answers -------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(len(ASKED)))
def test_served_completions_are_those_of_llm(
    server: Inside, expected: list[list[RequestOutput]], which: int
) -> None:
    found = completion(server, prompt=PROMPTS, return_token_ids=True, **ASKED[which])
    n = ASKED[which].get("n", 1)
    choices = found["choices"]
    assert [choice["index"] for choice in choices] == list(range(n * len(PROMPTS)))
    wanted = [(output, choice) for output in expected[which] for choice in output.outputs]
    for choice, (output, want) in zip(choices, wanted, strict=True):
        assert choice["text"] == want.text
        assert choice["token_ids"] == want.token_ids
        assert choice["finish_reason"] == want.finish_reason
        assert choice["stop_reason"] == want.stop_reason
        assert choice["prompt_token_ids"] == output.prompt_token_ids
        if want.logprobs is not None:
            told = choice["logprobs"]["token_logprobs"]
            ids = zip(want.logprobs, want.token_ids, strict=True)
            assert told == pytest.approx([row[token].logprob for row, token in ids])
    made = sum(len(want.token_ids) for _, want in wanted)
    read = sum(map(len, PROMPTS))
    assert found["usage"]["completion_tokens"] == made
    assert found["usage"]["prompt_tokens"] == read
    assert found["usage"]["total_tokens"] == made + read


@pytest.mark.parametrize("which", range(len(ASKED)))
def test_streamed_completions_are_those_of_llm(
    server: Inside, expected: list[list[RequestOutput]], which: int
) -> None:
    options = {"include_usage": True}
    found = streamed(
        server, prompt=PROMPTS, return_token_ids=True, stream_options=options, **ASKED[which]
    )
    *rest, last = found
    wanted = [choice for output in expected[which] for choice in output.outputs]
    texts, ids, ends = [""] * len(wanted), [[] for _ in wanted], [[] for _ in wanted]
    for one in rest:
        (choice,) = one["choices"]
        index = choice["index"]
        assert not ends[index], "something came after a choice's end"
        texts[index] += choice["text"]
        ids[index] += choice.get("token_ids") or []
        if choice["finish_reason"] is not None:
            ends[index].append((choice["finish_reason"], choice["stop_reason"]))
    assert texts == [want.text for want in wanted]
    assert ids == [want.token_ids for want in wanted]
    assert ends == [[(want.finish_reason, want.stop_reason)] for want in wanted]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(len(want.token_ids) for want in wanted)


@pytest.mark.parametrize("loop", LOOPS)
def test_served_chats_are_those_of_llm(tmp_path: Path, loop: str) -> None:
    folder = str(tiny_llama(tmp_path / "model"))
    options: dict[str, Any] = {"executor": "inline", "max_rows": 4, "threads": 1, "loop": loop}
    greedy = {"temperature": 0.0, "max_tokens": 16}
    with LLM(folder, **options) as llm:
        (want,) = llm.chat(MESSAGES, SamplingParams(**greedy, logprobs=2))
        (text,) = llm.generate("The quick brown", SamplingParams(**greedy, prompt_logprobs=1))
    with inside(**options, model=folder) as server:
        body = {"messages": MESSAGES, **greedy, "logprobs": True, "top_logprobs": 2}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        (choice,) = response.json()["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": want.outputs[0].text,
            "refusal": None,
        }
        content = choice["logprobs"]["content"]
        assert len(content) == len(want.outputs[0].token_ids)
        assert all(len(one["top_logprobs"]) == 2 for one in content)
        told = b"".join(bytes(one["bytes"]) for one in content).decode("utf-8", "replace")
        assert want.outputs[0].text in told  # which has the special tokens as well
        found = streamed(server, "/v1/chat/completions", **body)
        assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        told = "".join(one["choices"][0]["delta"]["content"] for one in found)
        assert told == want.outputs[0].text
        assert found[-1]["choices"][0]["finish_reason"] == want.outputs[0].finish_reason
        echoed = completion(server, prompt="The quick brown", **greedy, echo=True, logprobs=1)
        (choice,) = echoed["choices"]
        assert choice["text"] == "The quick brown" + text.outputs[0].text
        count = len(text.prompt_token_ids)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert text.prompt_logprobs is not None
        assert choice["logprobs"]["token_logprobs"][1:count] == pytest.approx(
            [
                row[token].logprob
                for row, token in zip(text.prompt_logprobs, text.prompt_token_ids, strict=True)
                if row is not None
            ],
            abs=1e-4,
        )
        asked = httpx.post(f"{server.url}/tokenize", json={"prompt": "The quick brown"}).json()
        assert asked["tokens"] == text.prompt_token_ids
        back = httpx.post(f"{server.url}/detokenize", json={"tokens": asked["tokens"]}).json()
        assert back == {"prompt": "The quick brown"}
        asked = httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()
        assert asked["count"] == len(want.prompt_token_ids)
        server.rest()


def test_what_the_cache_had_is_told_and_forgotten_when_asked(overlap: Inside) -> None:
    prompt = [3 + k % 300 for k in range(100)]
    httpx.post(f"{overlap.url}/flush_cache")
    cached = [
        completion(overlap, prompt=prompt, max_tokens=2)["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert cached == [{"cached_tokens": 0}, {"cached_tokens": 96}]
    flushed = httpx.post(f"{overlap.url}/flush_cache").json()["flushed_pages"]
    assert flushed >= 6
    again = completion(overlap, prompt=prompt, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_echo_without_output_tells_the_prompt_alone(overlap: Inside) -> None:
    found = completion(overlap, prompt=[2, 3, 4], echo=True, max_tokens=0, logprobs=0)
    (choice,) = found["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_streamed_echo_tells_log_probabilities_as_a_whole_one_does(
    server: Inside, max_tokens: int
) -> None:
    body: dict[str, Any] = {"prompt": [[7], *PROMPTS], "echo": True, "logprobs": 2, "seed": 3}
    body |= {"max_tokens": max_tokens, "return_token_ids": True}
    body |= {} if not max_tokens else {"n": 2, "min_tokens": max_tokens}
    whole = completion(server, **body)["choices"]
    texts = [""] * len(whole)
    told: list[dict[str, list[Any]]] = [{} for _ in whole]
    for (choice,) in (one["choices"] for one in streamed(server, **body)):
        index = choice["index"]
        assert bool(texts[index]) != ("prompt_token_ids" in choice), "the prompt comes first"
        texts[index] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            told[index].setdefault(name, []).extend(values)
    assert texts == [choice["text"] for choice in whole]
    assert told == [choice["logprobs"] for choice in whole]


def test_the_small_routes_answer(overlap: Inside) -> None:
    ask = lambda path: httpx.get(overlap.url + path)  # noqa: E731
    assert ask("/health").json() == {"status": "ok"}
    assert ask("/ready").json() == {"status": "ready"}
    assert ask("/version").json()["version"]
    assert ask("/tokenizer_info").json() == {"bos_token": None, "eos_token": "<eos>"}
    (card,) = ask("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 256)
    assert ask("/v1/models/toy").json()["id"] == "toy"
    assert ask("/v1/models/other").status_code == 404


# --- refusals ---------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong(overlap: Inside) -> None:
    ask = lambda body, status=400: refused(overlap, "/v1/completions", body, status)  # noqa: E731
    assert ask({"prompt": [2], "topp": 1})["param"] == "topp"
    assert ask({"prompt": [512]})["param"] == "prompt"
    assert ask({"prompt": [-1]})["param"] == "prompt"
    assert ask({"prompt": [1 << 80]})["param"] == "prompt"
    assert ask({"prompt": "words"})["param"] == "prompt"  # the toy reads none
    assert ask({"prompt": [2], "stop_token_ids": [512]})["param"] == "stop_token_ids"
    long = ask({"prompt": [2] * 256})
    assert (long["param"], long["code"]) == ("prompt", "context_length_exceeded")
    missing = ask({"prompt": [2], "model": "gpt-4"}, 404)
    assert (missing["param"], missing["code"]) == ("model", "model_not_found")
    assert ask({"prompt": [[2]] * 15})["code"] == "too_many"
    assert refused(overlap, "/v1/chat/completions", {})["param"] == "messages"
    assert refused(overlap, "/nowhere", {}, 404)["code"] == "not_found"
    assert refused(overlap, "/health", {}, 405)["code"] == "method_not_allowed"
    assert refused(overlap, "/detokenize", {"tokens": [512]})["param"] == "tokens"


def test_a_body_that_is_too_large_is_refused_however_it_comes(overlap: Inside) -> None:
    url = f"{overlap.url}/v1/completions"
    large = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    headers = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        for place in range(0, len(large), 10_000):
            yield large[place : place + 10_000]

    assert httpx.post(url, content=large, headers=headers).status_code == 413
    assert httpx.post(url, content=pieces(), headers=headers).status_code == 413
    form = httpx.post(url, content=b"{}", headers={"content-type": "text/plain"})
    assert form.status_code == 415


def test_a_full_server_refuses_at_once_and_takes_again(overlap: Inside) -> None:
    # eight rows and six that may wait; a choice more is refused, whatever it is
    url, body = f"{overlap.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 9, "n": 14}
    body["min_tokens"] = 9  # none of them may end early
    with (
        overlap.paused_after(4),
        httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as running,
    ):
        lines = running.iter_lines()  # were it dropped, the client would be gone
        next(lines)
        assert overlap.front.open_choices == 14
        response = httpx.post(url, json={"prompt": [2]})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
    overlap.rest()
    completion(overlap, prompt=[2], max_tokens=1)


def test_a_pool_that_is_nearly_full_refuses_who_would_wait() -> None:
    options = TOY_OPTIONS | {"num_pages": 16}
    with inside(ServeConfig(max_waiting=0), **options) as server:
        url, body = f"{server.url}/v1/completions", {"prompt": [5] * 100, "max_tokens": 156}
        with (
            server.paused_after(4),
            httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as running,
        ):
            lines = running.iter_lines()  # were it dropped, the client would be gone
            next(lines)
            # rows are free, and pages are not
            error = refused(server, "/v1/completions", {"prompt": [7] * 200}, 429)
            assert error["code"] == "queue_full"
        server.rest()
        completion(server, prompt=[7] * 200, max_tokens=1)
        server.rest()


def test_only_who_has_the_key_gets_in() -> None:
    config = ServeConfig(api_key="secret", allow_origins=["http://page.example"])
    with inside(config, **TOY_OPTIONS) as server:
        url = f"{server.url}/v1/models"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = httpx.get(url, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(url, headers={"authorization": "Bearer secret"}).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200
        preflight = {"origin": "http://page.example", "access-control-request-method": "POST"}
        asked = httpx.options(url, headers=preflight)
        assert asked.headers["access-control-allow-origin"] == "http://page.example"


def test_pages_elsewhere_may_not_ask_unless_named(overlap: Inside) -> None:
    response = httpx.get(f"{overlap.url}/v1/models", headers={"origin": "http://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_a_request_that_takes_too_long_is_told_so() -> None:
    with inside(ServeConfig(request_timeout=0.3), **TOY_OPTIONS) as server:
        body = {"prompt": [2, 3], "max_tokens": 40, "min_tokens": 40}
        with server.paused_after(0):
            error = refused(server, "/v1/completions", body, 504)
        assert error["code"] == "request_timeout"
        server.rest()
        with server.paused_after(6):
            found = streamed(server, **body)
        assert found[-1]["error"]["code"] == "request_timeout"
        assert len(found) > 1
        server.rest()


# --- clients that come and go -----------------------------------------------------------------


def test_a_client_that_leaves_gives_its_row_back(overlap: Inside) -> None:
    url, body = f"{overlap.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 250}
    counters = overlap.engine.scheduler.life.counters
    aborts = counters.aborts
    with overlap.paused_after(4):
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as running:
            lines = running.iter_lines()  # were it dropped, the client would be gone
            next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body | {"n": 2}, timeout=0.3)
        end_s = time.monotonic() + 30.0
        while counters.aborts < aborts + 3 and time.monotonic() < end_s:
            time.sleep(0.01)
    overlap.rest()
    assert counters.aborts == aborts + 3


def test_an_abort_by_name_ends_a_stream_in_order(overlap: Inside) -> None:
    url = f"{overlap.url}/v1/completions"
    body = {"prompt": [5, 6], "max_tokens": 250, "min_tokens": 250, "request_id": "mine"}
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as running:
        lines = running.iter_lines()
        with overlap.paused_after(6):
            assert json.loads(next(lines).removeprefix("data: "))["id"] == "mine"
            aborted = httpx.post(f"{overlap.url}/abort", json={"request_id": "mine"}).json()
        assert aborted == {"aborted": 1}
        *_, last, done = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert done == "data: [DONE]"
    assert httpx.post(f"{overlap.url}/abort", json={"rid": "mine"}).json() == {"aborted": 0}
    overlap.rest()


def test_a_silent_stream_is_pinged(overlap: Inside) -> None:
    url, body = f"{overlap.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 9}
    with overlap.paused_after(0):
        opened = httpx.stream("POST", url, json=body | {"stream": True}, timeout=60)
        with opened as running:
            lines = running.iter_lines()
            assert next(lines) == ": ping"  # before the first token: a long prompt
            overlap.resume()
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 1


def test_a_reader_that_does_not_read_holds_nobody_up(overlap: Inside) -> None:
    host, port = overlap.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": [5, 6], "max_tokens": 250, "n": 4, "stream": True, "logprobs": 20}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(head + body)
        end_s = time.monotonic() + 60.0
        while not overlap.front.calls and time.monotonic() < end_s:
            time.sleep(0.01)
        while overlap.front.calls and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not overlap.front.calls, "its rows waited for a client"
        completion(overlap, prompt=[2], max_tokens=3)


def test_bytes_that_make_no_sense_are_answered_or_dropped_and_never_a_fault(
    overlap: Inside,
) -> None:
    """Requests cut anywhere, with bytes changed anywhere, and clients that leave at any moment."""
    host, port = overlap.url.removeprefix("http://").split(":")
    seen: dict[bytes, int] = {}
    for seed in range(150):
        chance = random.Random(seed)
        body = json.dumps({"prompt": [5, 6], "max_tokens": 9, "stream": seed % 2 == 0}).encode()
        path = chance.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/abort"])
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        sent = bytearray(head.encode() + body)
        for _ in range(chance.choice([0, 1, 3])):
            sent[chance.randrange(len(head) // 2, len(sent))] = chance.randrange(256)
        if chance.random() < 0.4:
            del sent[chance.randrange(1, len(sent)) :]
        with socket.create_connection((host, int(port)), timeout=1.0) as client:
            client.sendall(bytes(sent))
            if chance.random() < 0.7:
                client.settimeout(0.3)  # a body that is cut is waited for
                found = _read_some(client)[9:12]
                seen[found] = seen.get(found, 0) + 1
    print(seen)
    assert b"200" in seen
    assert b"400" in seen
    assert not [status for status in seen if status.startswith(b"5")]
    overlap.rest()
    assert httpx.get(f"{overlap.url}/health").json() == {"status": "ok"}


def _read_some(client: socket.socket) -> bytes:
    try:
        return client.recv(65536)
    except OSError:
        return b""
