"""What `top` reads: /state of ours, metrics of vLLM and SGLang, and everything that is neither."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metric_texts import sglang_text, state_body, state_document, vllm_text
from servers import Answers, serving
from stepahead.errors import ConfigError
from stepahead.top import metrics, state
from stepahead.top.fetch import Unreachable, base_url, get
from stepahead.top.frame import Frame, Quantiles
from stepahead.top.metrics import parse, quantile
from stepahead.top.source import Server

# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("9100", "http://127.0.0.1:9100"),
        (":9100", "http://127.0.0.1:9100"),
        ("gpu-7:8000", "http://gpu-7:8000"),
        ("gpu-7", "http://gpu-7"),
        (" http://gpu-7:8000/ ", "http://gpu-7:8000"),
        ("https://gpu-7/engine/", "https://gpu-7/engine"),
        ("http://gpu-7:8000/metrics", "http://gpu-7:8000"),
        ("http://gpu-7:8000/state", "http://gpu-7:8000"),
        ("[::1]:9100", "http://[::1]:9100"),
    ],
)
def test_a_place_is_a_url_a_host_or_a_port(place: str, url: str) -> None:
    assert base_url(place) == url


@pytest.mark.parametrize(
    "place", ["", "99999", "0", "ftp://gpu-7", "http://", "gpu-7:port", "http://[::1", "-1:-1"]
)
def test_what_names_no_server_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="names no server; give a URL, host:port or a port"):
        base_url(place)


# --- ours -----------------------------------------------------------------------------------------


def ours(now: dict[str, object], before: dict[str, object] | None = None) -> Frame:
    parsed = [state.parse(json.dumps(each).encode()) for each in (now, before) if each]
    return state.frame_of(parsed[0], parsed[1] if before else None)


def test_a_state_is_told_since_the_start_at_first() -> None:
    frame = ours(state_document(1))
    assert frame == Frame(
        engine="stepahead 0.1.0",
        model="toy",
        loop="overlap",
        verdict="device busy 90 %, host hidden 62 %, exposed 300 µs a step; it idles most for: "
        "copy (700 µs a step)",
        busy_pct=90.0,
        hidden_pct=62.5,
        exposed_ms=0.3,
        idle_ms={"plan late": 0.3, "copy": 0.7},
        in_per_s=640.0,
        out_per_s=4800.0,
        ttft=Quantiles(50.0, 90.0, 99.0),
        itl=Quantiles(10.0, 11.0, 31.0),
        running=48,
        waiting=5,
        rows=64,
        pages_pct=40.0,
        pages=1000,
        prefix_pct=25.0,
        flights=1,
        depth=2,
        syncs={"drain": 3},
    )


def test_a_state_is_told_since_the_look_before() -> None:
    now = state_document(2)
    now["books"] |= {"busy_ns": 900_000_000 + 500_000_000, "exposed_ns": 30_000_000 + 10_000_000}
    now["books"]["idle_ns"] = {"plan late": 530_000_000, "copy": 70_000_000, "no work": 0}
    now["requests"] = {"prompt_tokens": 1100, "cached_tokens": 300}
    frame = ours(now, state_document(1))
    assert frame.busy_pct == 50.0
    assert frame.exposed_ms == 0.1
    assert frame.idle_ms == {"plan late": 5.0}
    assert frame.prefix_pct == 50.0
    assert frame.verdict.startswith("device busy 50 %")


def test_a_step_that_has_landed_meanwhile_does_not_give_negative_idle_time() -> None:
    now = state_document(2)
    now["books"]["idle_ns"]["copy"] = 1  # it counted as idle while the step was in the air
    assert ours(now, state_document(1)).idle_ms == {"plan late": 0.3}


def test_drafts_of_an_engine_of_ours_are_told_by_place() -> None:
    assert ours(state_document(2), state_document(1)).drafts_pct == ()
    earlier = state_document(1, drafts={"drafted": 100, "accepted_at": [50, 10]})
    now = state_document(2, drafts={"drafted": 300, "accepted_at": [200, 60]})
    assert ours(now, earlier).drafts_pct == (75.0, 25.0)
    assert ours(now).drafts_pct == (pytest.approx(200 / 3), 20.0)
    assert ours(earlier, earlier).drafts_pct == ()


ANOTHER = state_document(1, about={"loop": "serial"})
ANOTHER["requests"] = {"prompt_tokens": 1900, "cached_tokens": 0}


@pytest.mark.parametrize("before", [state_document(3), ANOTHER])
def test_another_engine_at_the_same_place_is_told_since_its_own_start(
    before: dict[str, object],
) -> None:
    assert ours(state_document(2), before) == ours(state_document(2))


def test_an_engine_at_rest_says_so() -> None:
    still = state_document(1)
    waiting = ours(still, state_document(1))
    assert waiting.verdict == "no step has landed of late, and requests wait"
    still["load"] |= {"rows_running": 0, "requests_waiting": 0}
    still["flights"] = 0
    assert ours(still, state_document(1)).verdict == (
        "nothing to do now; before: device busy 90 %, since the start"
    )
    fresh = still | {"probes": None, "steps": 0}
    assert ours(fresh).verdict == "nothing to do yet"


def test_an_engine_that_has_ended_says_so() -> None:
    assert ours(state_document(1, status="failed")).verdict == "the engine has failed"
    assert ours(state_document(1, status="closed")).verdict == "the engine is closed"


# --- vLLM and SGLang ------------------------------------------------------------------------------


def test_metrics_of_vllm_are_told_between_two_scrapes() -> None:
    before = parse(vllm_text(), 100.0)
    after = parse(
        vllm_text(
            prompt=1500,
            generated=9000,
            hits=400,
            queries=1200,
            drafts=200,
            accepted=(130, 85),
            ttft=(0, 5, 20, 20),
            itl=(0, 1000, 1100, 1200),
        ),
        102.0,
    )
    frame = metrics.frame_of(after, before)
    assert frame == Frame(
        engine="vLLM",
        model="glm-5.3",
        verdict="device busy unknown, host hidden and exposed unknown; 12 running, 3 waiting",
        in_per_s=250.0,
        out_per_s=2000.0,
        # ten came, all between 0.2 and 0.4 s
        ttft=Quantiles(pytest.approx(300.0), pytest.approx(380.0), pytest.approx(398.0)),
        # 100 between 10 and 20 ms, none up to 40, 100 beyond: told as 40
        itl=Quantiles(20.0, 40.0, 40.0),
        running=12,
        waiting=3,
        pages_pct=25.0,
        pages=4096,
        prefix_pct=50.0,
        drafts_pct=(50.0, 25.0),
        missing="vLLM does not export hidden and exposed host time, nor why its device idles",
    )


def test_metrics_of_sglang_are_told_between_two_scrapes() -> None:
    before = parse(sglang_text(), 100.0)
    after = parse(sglang_text(prompt=1100, generated=6000, itl=(50, 950, 1050, 1050)), 104.0)
    frame = metrics.frame_of(after, before)
    assert frame == Frame(
        engine="SGLang",
        model="glm-5.3",
        verdict="device busy 92 %, host hidden and exposed unknown; 20 running, 4 waiting",
        busy_pct=91.5,
        in_per_s=25.0,
        out_per_s=250.0,
        ttft=None,  # nobody had a first token meanwhile
        itl=Quantiles(5.0, pytest.approx(9.0), pytest.approx(9.9)),  # 50, all up to 10 ms
        running=20,
        waiting=4,
        pages_pct=50.0,
        pages=4096,
        prefix_pct=30.0,
        drafts_per_step=2.4,
        missing="SGLang does not export hidden and exposed host time, nor why its device idles",
    )


def test_a_first_scrape_has_no_rates() -> None:
    for text in (vllm_text(), sglang_text()):
        frame = metrics.frame_of(parse(text, 1.0), None)
        assert (frame.in_per_s, frame.out_per_s, frame.ttft, frame.itl) == (None,) * 4
        assert frame.drafts_pct == ()
        assert frame.running


def test_a_gauge_that_nobody_has_set_is_not_a_number() -> None:
    frame = metrics.frame_of(parse(sglang_text(occupancy="NaN"), 1.0), None)
    assert frame.busy_pct is None
    assert frame.verdict.startswith("device busy unknown")


def test_ranks_of_one_batch_count_once_and_engines_add_up() -> None:
    both = parse(sglang_text() + sglang_text(rank="1"), 1.0)
    assert metrics.frame_of(both, None) == metrics.frame_of(parse(sglang_text(), 1.0), None)
    two = metrics.frame_of(parse(vllm_text() + vllm_text(engine="1", running=8), 1.0), None)
    assert (two.running, two.pages, two.pages_pct) == (20, 8192, 25.0)


def test_a_restart_between_two_scrapes_gives_no_rates() -> None:
    frame = metrics.frame_of(parse(vllm_text(generated=10), 2.0), parse(vllm_text(), 1.0))
    assert frame.out_per_s is None
    other = metrics.frame_of(parse(vllm_text(), 2.0), parse(sglang_text(), 1.0))
    assert other.out_per_s is None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.floats(0.01, 1.0))
def test_percentiles_of_buckets_lie_in_the_bucket_of_their_rank(
    counts: list[int], share: float
) -> None:
    bounds = [0.5 * (place + 1) for place in range(len(counts) - 1)] + [float("inf")]
    if not sum(counts):
        return
    upto = [float(sum(counts[: place + 1])) for place in range(len(counts))]
    found = quantile(bounds, upto, share)
    place = next(at for at, count in enumerate(upto) if count >= share * upto[-1])
    low = bounds[place - 1] if place else 0.0
    assert low <= found <= (low if place == len(bounds) - 1 else bounds[place])


NOISE = st.sampled_from(["{", "}", '"', ",", " ", "\n", "#", "1", "NaN", "le", "=", "_bucket", "é"])


@given(st.integers(0, 4000), st.lists(NOISE, max_size=6), st.booleans())
def test_a_damaged_text_is_refused_or_read_and_nothing_else(
    place: int, noise: list[str], whole: bool
) -> None:
    text = vllm_text()
    rest = text[place:] if whole else ""
    try:
        scrape = parse(text[:place] + "".join(noise) + rest, 1.0)
    except Unreachable:
        return
    assert metrics.frame_of(scrape, scrape).engine == "vLLM"


# --- servers --------------------------------------------------------------------------------------


def test_a_server_of_ours_is_read_and_told_against_ten_seconds_ago() -> None:
    turns, now_s = iter([1, 2, 3, 4]), [0.0]
    answers = Answers({"/state": lambda: state_body(next(turns))})
    with serving(answers) as url:
        server = Server(url, 5.0, lambda: now_s[0])
        frames = []
        for at_s in (0.0, 4.0, 8.0, 13.0):
            now_s[0] = at_s
            frames.append(server.look())
    assert answers.asked == ["/state"] * 4
    assert [frame.exposed_ms for frame in frames] == [0.3] * 4
    assert len(server._states) == 3  # the first was older than the window, and one stays to compare
    assert frames[0].verdict == frames[3].verdict


def test_a_server_of_another_engine_is_asked_for_its_metrics() -> None:
    generated, now_s = iter([5000, 6000]), iter([1.0, 3.0])
    text = {"/metrics": lambda: vllm_text(generated=next(generated)).encode()}
    answers = Answers(text)
    with serving(answers) as url:
        server = Server(url, 5.0, lambda: next(now_s))
        assert server.look().out_per_s is None
        assert server.look().out_per_s == 500.0
    assert answers.asked == ["/state", "/metrics", "/metrics"]


def test_a_server_that_goes_and_comes_back_is_read_again() -> None:
    answers = Answers({"/state": state_body(3)})
    with serving(answers) as url:
        server = Server(url, 5.0)
        before = server.look()
        answers.status["/state"] = 503
        with pytest.raises(Unreachable, match="/state answers with 503"):
            server.look()
        # and now another engine is there
        answers.status.clear()
        answers.bodies = {"/metrics": sglang_text().encode()}
        assert server.look().engine == "SGLang"
        answers.bodies = {"/state": state_body(3)}
        with pytest.raises(Unreachable):
            server.look()
        assert server.look() == before


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (Answers(), "/state does not exist and /metrics answers with 404"),
        (Answers({"/state": b"<html>hello</html>"}), "its /state is not one that can be read"),
        (Answers({"/state": b"\xff\xfe"}), "its /state is not one that can be read"),
        (Answers({"/state": b'{"about": {}}'}), "missing required field"),
        (Answers({"/state": state_body(flights="two")}), "Expected `int`"),
        (Answers({"/metrics": b"<html>hello</html>"}), "no metrics of vLLM or SGLang"),
        (Answers({"/metrics": b"up 1.0\n"}), "no metrics of vLLM or SGLang"),
        (Answers({"/metrics": b"vllm:num_requests_running{ 3"}), "its metrics can't be read"),
        (Answers({"/metrics": b"vllm:gap_seconds_bucket 3.0\n"}), "its metrics can't be read"),
        (Answers({"/metrics": vllm_text()[:-9].encode()}), r"its metrics can't be read \(\w"),
        (Answers({"/state": state_body()}, missing=10), "its answer ended in the middle"),
        (Answers({"/state": state_body()}, slow=True), "no whole answer in 0.3 s"),
        (
            Answers({"/state": b'{"error": {"message": "in one step"}}'}, {"/state": 503}),
            "/state answers with 503: in one step",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_read_is_told(answers: Answers, words: str) -> None:
    with serving(answers) as url, pytest.raises(Unreachable, match=words):
        Server(url, 0.3 if answers.slow else 5.0).look()


def test_nobody_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unreachable, match="connection refused"):
        get(url, 5.0)


def test_who_speaks_no_http_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        # it takes the connection and never says a word
        with pytest.raises(Unreachable, match=r"no whole answer in 0\.3 s"):
            get(url, 0.3)


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepahead.top.fetch.LARGEST", 1 << 20)
    answers = Answers({"/state": bytes(1 << 21)})
    with serving(answers) as url, pytest.raises(Unreachable, match="larger than 1 MiB"):
        get(url + "/state", 5.0)
