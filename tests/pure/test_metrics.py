"""Metrics in three dialects, read as Prometheus reads them, against the engine's own counts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engines import Variant, toy_engine
from harness import Client
from stepahead.config import CHOICES
from stepahead.engine import Engine
from stepahead.executor.virtual import Timing
from stepahead.observe.books import BookSummary
from stepahead.observe.latency import BUCKETS, Distribution, scale
from stepahead.observe.metrics import METRIC_NAMES, EngineCollector
from stepahead.observe.reading import read
from stepahead.sim.virtual import LOOPS, MS, OVERLAP, HostWork, LoopChoice, constant, host_work, rig
from stepahead.top import metrics as top
from stepahead.types import SamplingParams
from workloads import Abort, Ask, Workload

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

GRAFANA = Path(__file__).resolve().parents[2] / "grafana" / "stepahead.json"
OPTIONS: dict[str, Any] = {
    "vocab_size": 64,
    "max_model_len": 64,
    "page_size": 2,
    "num_pages": 9,
    "max_rows": 4,
}
LABELS = {
    "stepahead": {"model_name": "toy"},
    "vllm": {"model_name": "toy", "engine": "0"},
    "sglang": {"model_name": "toy", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    """At rest, after it was short of pages and had an abort, and prompts that begin alike."""
    made = toy_engine(OPTIONS, Variant("overlap", "paper"))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    asks = [Ask(0, (5, 6, 7, k), greedy) for k in range(2, 6)]
    asks.append(Ask(9, (5, 6, 7, 8), greedy, Abort("token", 2)))
    Client(made, Workload(0, OPTIONS, tuple(asks))).play()
    return made


def text_of(engine: Engine, names: str) -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: read(engine), names))
    return generate_latest(registry).decode()


def parsed(engine: Engine, names: str) -> dict[str, Metric]:
    """Families by name, as Prometheus reads them."""
    return {found.name: found for found in text_string_to_metric_families(text_of(engine, names))}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """The one sample of that name that has these labels."""
    found = [
        item.value
        for family in families.values()
        for item in family.samples
        if item.name == sample and labels.items() <= item.labels.items()
    ]
    assert len(found) == 1, f"{len(found)} samples {sample} {labels}"
    return found[0]


def test_the_option_offers_just_the_names_there_are() -> None:
    assert CHOICES["metric_names"] == METRIC_NAMES
    for buckets in BUCKETS.values():
        assert set(buckets) <= set(METRIC_NAMES)


# name of the sample, its labels, and the count of the engine that it must equal
COUNTS = {
    "stepahead": [
        ("stepahead_prompt_tokens_total", {}, "prompt"),
        ("stepahead_generated_tokens_total", {}, "generated"),
        ("stepahead_prefix_queries_total", {}, "prompt"),
        ("stepahead_prefix_hits_total", {}, "cached"),
        ("stepahead_preemptions_total", {}, "preempted"),
        ("stepahead_requests_total", {"reason": "length"}, "length"),
        ("stepahead_requests_total", {"reason": "abort"}, "abort"),
        ("stepahead_requests_running", {}, "none"),
        ("stepahead_requests_waiting", {}, "none"),
        ("stepahead_kv_used_ratio", {}, "none"),
        ("stepahead_ttft_seconds_count", {}, "first"),
        ("stepahead_itl_seconds_count", {}, "gaps"),
        ("stepahead_e2e_seconds_count", {}, "length"),
        ("stepahead_queue_seconds_count", {}, "arrived"),
        ("stepahead_request_output_tokens_sum", {}, "whole"),
    ],
    "vllm": [
        ("vllm:prompt_tokens_total", {}, "prompt"),
        ("vllm:generation_tokens_total", {}, "generated"),
        ("vllm:prefix_cache_queries_total", {}, "prompt"),
        ("vllm:prefix_cache_hits_total", {}, "cached"),
        ("vllm:num_preemptions_total", {}, "preempted"),
        ("vllm:request_success_total", {"finished_reason": "length"}, "length"),
        ("vllm:request_success_total", {"finished_reason": "abort"}, "abort"),
        ("vllm:num_requests_running", {}, "none"),
        ("vllm:num_requests_waiting", {}, "none"),
        ("vllm:kv_cache_usage_perc", {}, "none"),
        ("vllm:cache_config_info", {"block_size": "2", "num_gpu_blocks": "9"}, "one"),
        ("vllm:time_to_first_token_seconds_count", {}, "first"),
        ("vllm:inter_token_latency_seconds_count", {}, "gaps"),
        ("vllm:time_per_output_token_seconds_count", {}, "gaps"),
        ("vllm:e2e_request_latency_seconds_count", {}, "length"),
        ("vllm:request_queue_time_seconds_count", {}, "arrived"),
        ("vllm:request_prefill_time_seconds_count", {}, "first"),
        ("vllm:request_decode_time_seconds_count", {}, "length"),
        ("vllm:request_generation_tokens_sum", {}, "whole"),
        ("vllm:request_prompt_tokens_count", {}, "length"),
    ],
    "sglang": [
        ("sglang:prompt_tokens_total", {}, "prompt"),
        ("sglang:generation_tokens_total", {}, "generated"),
        ("sglang:cached_tokens_total", {"cache_source": "device"}, "cached"),
        ("sglang:num_retracted_requests_total", {}, "preempted"),
        ("sglang:num_retracted_reqs", {}, "preempted"),
        ("sglang:num_requests_total", {}, "length"),
        ("sglang:num_aborted_requests_total", {}, "abort"),
        ("sglang:num_running_reqs", {}, "none"),
        ("sglang:num_queue_reqs", {}, "none"),
        ("sglang:num_used_tokens", {}, "none"),
        ("sglang:token_usage", {}, "none"),
        ("sglang:max_total_num_tokens", {}, "pool"),
        ("sglang:time_to_first_token_seconds_count", {}, "first"),
        ("sglang:inter_token_latency_seconds_count", {}, "gaps"),
        ("sglang:e2e_request_latency_seconds_count", {}, "length"),
        ("sglang:queue_time_seconds_count", {}, "arrived"),
    ],
}


@pytest.mark.parametrize("names", METRIC_NAMES)
def test_every_count_is_the_engines_own(names: str, engine: Engine) -> None:
    counters = engine.scheduler.life.counters
    totals = engine.observer.requests.totals()
    own = {
        "none": 0,
        "one": 1,
        "pool": 9 * 2,
        "prompt": 5 * 4,
        "cached": totals.cached_tokens,
        "generated": 4 * 9 + 2,
        "whole": 4 * 9,
        "gaps": 4 * 8 + 1,
        "first": 5,
        "arrived": 5,
        "length": 4,
        "abort": 1,
        "preempted": counters.preemptions,
    }
    assert counters.preemptions > 0
    assert totals.cached_tokens > 0
    families = parsed(engine, names)
    for sample, labels, count in COUNTS[names]:
        assert value(families, sample, **LABELS[names], **labels) == own[count], sample
    assert {counters.aborts} == {1}


@pytest.mark.parametrize("names", METRIC_NAMES)
def test_every_metric_of_these_names_is_looked_at_and_has_words(names: str, engine: Engine) -> None:
    families = parsed(engine, names)
    prefix = {"stepahead": "stepahead_", "vllm": "vllm:", "sglang": "sglang:"}[names]
    told = {name for name in families if name.startswith(prefix)}
    samples = {sample for sample, _, _ in COUNTS[names]}
    seen = {name for name in told if any(sample.startswith(name) for sample in samples)}
    apart = {"sglang:gen_throughput", "sglang:cache_hit_rate"}
    ours = {name for name in told if names == "stepahead"}
    assert told - seen - apart <= ours
    assert all(family.documentation.strip() for family in families.values())
    for family in families.values():
        for sample in family.samples:
            base = LABELS["stepahead" if family.name.startswith("stepahead_") else names]
            assert base.items() <= sample.labels.items(), sample


@pytest.mark.parametrize("names", METRIC_NAMES)
def test_what_only_we_have_keeps_our_name_in_each_dialect(names: str, engine: Engine) -> None:
    families = parsed(engine, names)
    books = read(engine).books
    assert value(families, "stepahead_device_busy_seconds_total") <= books.busy_ns / 1e9
    assert value(families, "stepahead_steps_total") == engine.observer.steps.count
    assert value(families, "stepahead_requests_arrived_total") == 5
    assert value(families, "stepahead_flights") == 0
    assert value(families, "stepahead_kv_pages", state="used") == 0
    free = engine.scheduler.store.free.count
    assert value(families, "stepahead_kv_pages", state="free") == free
    assert value(families, "stepahead_info", loop="overlap", depth="2") == 1


@pytest.mark.parametrize("names", METRIC_NAMES)
def test_drafts_are_told_by_place_where_there_are_any(names: str, engine: Engine) -> None:
    words = ("draft", "spec_", "accepted")
    assert not any(word in name for name in parsed(engine, names) for word in words)
    made = toy_engine(OPTIONS, Variant("overlap", "paper", draft="paper", drafts=2))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    tokens = 0
    made.add([5, 6, 7], greedy)
    while made.has_work:
        outputs = made.step()
        tokens += 0 if outputs is None else len(outputs.tokens)
    counts = made.draft_counts()
    assert tokens == 9
    assert counts.accepted > 0
    families = parsed(made, names)
    # the first token came from the prompt
    assert counts.rows + counts.accepted == tokens - 1
    if names == "sglang":
        length = value(families, "sglang:spec_accept_length")
        assert length == pytest.approx(8 / counts.rows)
        rate = value(families, "sglang:spec_accept_rate")
        assert rate == pytest.approx(counts.accepted / counts.proposed)
        return
    given_out = {"stepahead": "stepahead_generated", "vllm": "vllm:generation"}[names]
    assert value(families, f"{given_out}_tokens_total") == tokens
    prefix = {"stepahead": "stepahead_", "vllm": "vllm:spec_decode_num_"}[names]
    per_place = {"stepahead": "accepted_tokens", "vllm": "accepted_tokens_per_pos"}[names]
    proposed = {"stepahead": "drafted_tokens", "vllm": "draft_tokens"}[names]
    assert value(families, f"{prefix}{proposed}_total") == counts.proposed
    for place, count in enumerate(counts.accepted_at):
        assert value(families, f"{prefix}{per_place}_total", position=str(place)) == count
    if names == "vllm":
        assert value(families, f"{prefix}accepted_tokens_total") == counts.accepted
        assert value(families, f"{prefix}drafts_total") == counts.drafted
        frame = top.frame_of(top.parse(text_of(made, names), 102.0), None)
        assert frame.engine == "vLLM"


@pytest.mark.parametrize("names", ["vllm", "sglang"])
def test_who_reads_the_other_engines_reads_us_by_their_names(names: str) -> None:
    """`stepahead top` knows their metrics from their own pages, not from this table."""
    made = toy_engine(OPTIONS | {"num_pages": 40}, Variant("overlap", "paper"))
    before = top.parse(text_of(made, names), 100.0)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    for first in range(2, 8):
        made.add([first, 3, 4, 5], greedy)
    for _ in range(5):
        made.step()
    frame = top.frame_of(top.parse(text_of(made, names), 102.0), before)
    assert frame.model == "toy"
    assert (frame.running, frame.waiting) == (4, 2)
    totals = made.observer.requests.totals()
    assert frame.in_per_s == totals.prompt_tokens / 2 > 0
    if names == "vllm":  # sglang's is a gauge of the engine's own clock
        assert frame.out_per_s == totals.generated_tokens / 2 > 0
    assert frame.ttft is not None
    assert frame.itl is not None
    load = made.load()
    taken = load.pages_total - load.pages_free - load.pages_evictable
    assert frame.pages_pct == pytest.approx(100 * taken / load.pages_total)


@pytest.mark.parametrize("names", METRIC_NAMES)
def test_histograms_ascend_and_end_in_their_count(names: str, engine: Engine) -> None:
    histograms = [f for f in parsed(engine, names).values() if f.type == "histogram"]
    assert len(histograms) == {"stepahead": 8, "vllm": 9, "sglang": 4}[names]
    for family in histograms:
        by_bound = {
            float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")
        }
        (count,) = [s.value for s in family.samples if s.name.endswith("_count")]
        counts = [by_bound[bound] for bound in sorted(by_bound)]
        assert counts == sorted(counts)
        assert counts[-1] == count == by_bound[float("inf")]


@pytest.mark.parametrize("source", BUCKETS)
def test_each_bucket_holds_the_values_up_to_its_bound(source: str, engine: Engine) -> None:
    found: Distribution = engine.observer.requests.totals().spreads[source]
    values = [v for v, count in found.recent.tolist() for _ in range(count)]
    for names, bounds in BUCKETS[source].items():
        exact = tuple(round(bound * scale(source)) for bound in bounds)
        assert found.upto(exact) == [sum(v <= bound for v in values) for bound in exact], names


def test_the_hosts_time_by_stage_and_the_devices_by_cause_add_up() -> None:
    rigged = rig(OVERLAP, Timing(constant(10 * MS)), host_work(4))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for _ in range(4):
        rigged.add(16, params)
    while rigged.engine.has_work:
        rigged.step()
    families = parsed(rigged.engine, "stepahead")

    def total(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in families[name].samples
            if labels.items() <= sample.labels.items()
        )

    books = rigged.engine.books.summary()
    wall_s = books.wall_ns / 1e9
    assert total("stepahead_step_host_seconds") == pytest.approx(wall_s)
    assert total("stepahead_host_seconds") == pytest.approx(wall_s)
    idle_s = total("stepahead_device_idle_seconds")
    assert total("stepahead_device_busy_seconds") + idle_s == pytest.approx(wall_s)
    hidden = sum(
        total("stepahead_step_host_seconds", stage=stage, hidden="yes")
        for stage in ("plan", "launch", "retire", "deliver")
    )
    assert hidden == pytest.approx(books.hidden_ns / 1e9)
    assert hidden > 0
    found = families["stepahead_probe_seconds"].samples
    launches = {s.labels["quantile"]: s.value for s in found if s.labels["figure"] == "interval"}
    assert launches["0.5"] == pytest.approx(0.010)
    assert {s.labels["probe"] for s in found} == {"host", "results", "launches", "tokens"}


@pytest.mark.parametrize("choice", LOOPS, ids=str)
def test_counters_never_go_back(choice: LoopChoice) -> None:
    """What a step in the air has run is not known before it lands, and stands as idle until then.
    A counter that told that would go back when it lands, and Prometheus takes a counter that goes
    back for a restart and adds all of it once more."""
    random = np.random.default_rng(7)

    def some_ns(_: object) -> int:
        return int(random.integers(0, 12 * MS))

    rigged = rig(choice, Timing(some_ns, handover_ns=MS // 3), HostWork(some_ns, some_ns))
    before: dict[str, int] = {}
    went_back_if_told_at_once = 0
    last_idle_ns = 0
    for _ in range(6):
        for _ in range(int(random.integers(1, 4))):
            tokens = int(random.integers(1, 9))
            rigged.add(16, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        while rigged.engine.has_work:
            rigged.step()
            numbers = flat(books := read(rigged.engine).books)
            assert all(numbers[name] >= before.get(name, 0) for name in numbers)
            assert books.hidden_ns + books.exposed_ns + books.waiting_ns == books.wall_ns
            assert books.busy_ns + sum(books.idle_ns.values()) == books.wall_ns
            before = numbers
            idle_ns = sum(rigged.engine.books.summary().idle_ns.values())
            went_back_if_told_at_once += idle_ns < last_idle_ns
            last_idle_ns = idle_ns
        rigged.clock.work(3 * MS)
        assert read(rigged.engine).books == rigged.engine.books.summary()
    assert (went_back_if_told_at_once > 0) == (choice.depth > 1)


def flat(books: BookSummary) -> dict[str, int]:
    numbers = {f"idle {cause}": ns for cause, ns in books.idle_ns.items()}
    for stage, ns in books.host_ns.items():
        numbers[f"{stage.name} hidden"] = books.under_device_ns[stage]
        numbers[f"{stage.name} not"] = ns - books.under_device_ns[stage]
    return numbers | {"busy": books.busy_ns, "wall": books.wall_ns, "steps": books.steps}


# --- the dashboard ------------------------------------------------------------------------------


def expressions(node: Any) -> Iterator[str]:
    """Every query of a dashboard, those of its variables too."""
    if isinstance(node, dict):
        for key, below in node.items():
            if key in ("expr", "definition") and isinstance(below, str):
                yield below
            else:
                yield from expressions(below)
    elif isinstance(node, list):
        for below in node:
            yield from expressions(below)


def test_every_query_of_the_dashboard_names_metrics_and_labels_there_are(engine: Engine) -> None:
    samples: dict[str, set[str]] = {}
    for family in parsed(engine, "stepahead").values():
        names = [sample.name for sample in family.samples] or [f"{family.name}_total"]
        for name in names:
            samples.setdefault(name, set())
        for sample in family.samples:
            samples[sample.name] |= set(sample.labels)
    samples["stepahead_syncs_total"] |= {"model_name", "reason"}
    asked = list(expressions(json.loads(GRAFANA.read_text(encoding="utf-8"))))
    assert len(asked) > 15
    for query in asked:
        named = re.findall(r"stepahead_\w+", query)
        assert named, query
        for name in named:
            assert name in samples, f"{name} of {query}"
        labels = set(re.findall(r"(\w+)\s*=~?\s*\"", query))
        grouped = re.findall(r"by \(([\w, ]+)\)", query)
        labels |= {label.strip() for group in grouped for label in group.split(",")}
        assert labels <= set().union(*(samples[name] for name in named)), query


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = GRAFANA.parents[1] / "scripts" / "dashboard"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=100)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads(GRAFANA.read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = " | ".join(panel["title"] for panel in panels)
    for word in ("Device busy", "Host hidden", "Exposed", "idle", "stage", "first token", "token"):
        assert word in titles, word
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
