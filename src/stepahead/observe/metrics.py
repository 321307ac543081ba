"""Prometheus metrics of a reading, under our names or under those of vLLM or SGLang.

Nothing is counted here: families are made when somebody scrapes, of numbers that are there anyway.
What another engine has a metric for has its name, its words and its labels; what only we have, the
books, the probes and the pulls back, keeps ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from stepahead.observe.latency import BUCKETS, scale
from stepahead.observe.reading import Reading

Labels = tuple[tuple[str, str], ...]
Values = dict[Labels, float]
_KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
_PREFIX = {"stepahead": "stepahead_", "vllm": "vllm:", "sglang": "sglang:"}


@dataclass(frozen=True)
class One:
    """A metric of numbers: one, or one for each set of labels."""

    kind: str
    name: str
    words: str
    value: Callable[[Reading], float | Values]


@dataclass(frozen=True)
class Spread:
    """A histogram of one of the distributions, `source`, with the buckets of `dialect`."""

    name: str
    words: str
    source: str


class EngineCollector(Collector):
    """Makes the families of a fresh reading at each scrape; `names` is one of METRIC_NAMES."""

    def __init__(self, read: Callable[[], Reading], names: str) -> None:
        self._read = read
        self._names = names

    def collect(self) -> Iterable[Metric]:
        """All families."""
        return families(self._read(), self._names)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known when they are asked for."""
        return ()


def families(reading: Reading, names: str) -> Iterator[Metric]:
    """The families of a reading in the names of METRIC_NAMES."""
    base = _base(reading, names)
    for item in _SHARED[names]:
        yield _family(item, reading, names, base)
    if reading.drafts.accepted_at:
        for item in _DRAFTS[names]:
            yield _family(item, reading, names, base)
    for item in _OWN:
        yield _family(item, reading, "stepahead", _base(reading, "stepahead"))


def _base(reading: Reading, names: str) -> Labels:
    """The labels that each metric of these names has."""
    model = ("model_name", str(reading.snapshot.about.get("model", "")))
    more: dict[str, Labels] = {
        "stepahead": (),
        "vllm": (("engine", "0"),),
        "sglang": (("engine_type", "unified"), ("tp_rank", "0"), ("pp_rank", "0")),
    }
    return (model, *more[names])


def _family(item: One | Spread, reading: Reading, names: str, base: Labels) -> Metric:
    name = _PREFIX[names] + item.name
    if isinstance(item, Spread):
        return _histogram(item, name, reading, names, base)
    found = item.value(reading)
    values = found if isinstance(found, dict) else {(): found}
    keys = [key for key, _ in (*base, *next(iter(values), ()))]
    family = _KINDS[item.kind](name, item.words, labels=keys)
    for labels, value in values.items():
        family.add_metric([text for _, text in (*base, *labels)], value)
    return family


def _histogram(item: Spread, name: str, reading: Reading, names: str, base: Labels) -> Metric:
    found, unit = reading.requests.spreads[item.source], scale(item.source)
    bounds = BUCKETS[item.source][names]
    below = found.upto(tuple(round(bound * unit) for bound in bounds))
    buckets = [
        (str(float(bound)), float(count)) for bound, count in zip(bounds, below, strict=True)
    ]
    family = HistogramMetricFamily(name, item.words, labels=[key for key, _ in base])
    buckets.append(("+Inf", float(found.count)))
    family.add_metric([text for _, text in base], buckets, found.total / unit)
    return family


# --- numbers ------------------------------------------------------------------------------------


def _about(reading: Reading) -> Values:
    about = reading.snapshot.about
    return {tuple((name, str(value)) for name, value in about.items() if name != "model"): 1.0}


def _number(reading: Reading, name: str) -> int:
    return int(reading.snapshot.about.get(name, 0))


def _taken(reading: Reading) -> int:
    """Pages that nobody else could have now."""
    load = reading.load
    return load.pages_total - load.pages_free - load.pages_evictable


def _used_ratio(reading: Reading) -> float:
    return _taken(reading) / max(1, reading.load.pages_total)


def _pages(reading: Reading) -> Values:
    load = reading.load
    counts = {"free": load.pages_free, "evictable": load.pages_evictable, "used": _taken(reading)}
    return {(("state", state),): float(count) for state, count in counts.items()}


def _ends(label: str) -> Callable[[Reading], Values]:
    return lambda reading: {
        ((label, reason),): float(count) for reason, count in reading.requests.ends.items()
    }


def _whole(reading: Reading) -> float:
    return float(reading.requests.ends["stop"] + reading.requests.ends["length"])


def _hit_rate(reading: Reading) -> float:
    return reading.requests.cached_tokens / max(1, reading.requests.prompt_tokens)


def _host(reading: Reading) -> Values:
    books = reading.books
    return {
        (("stage", stage.name.lower()), ("hidden", word)): ns / 1e9
        for stage, all_ns in books.host_ns.items()
        for word, ns in (
            ("yes", books.under_device_ns[stage]),
            ("no", all_ns - books.under_device_ns[stage]),
        )
    }


def _host_sums(reading: Reading) -> Values:
    books = reading.books
    sums = {"hidden": books.hidden_ns, "exposed": books.exposed_ns, "waiting": books.waiting_ns}
    return {(("what", what),): ns / 1e9 for what, ns in sums.items()}


def _idle(reading: Reading) -> Values:
    return {(("cause", cause),): ns / 1e9 for cause, ns in reading.books.idle_ns.items()}


def _syncs(which: str) -> Callable[[Reading], Values]:
    return lambda reading: {
        (("reason", reason),): float(counts[which])
        for reason, counts in reading.snapshot.syncs.items()
    }


def _probes(reading: Reading) -> Values:
    if reading.probes is None:
        return {}
    return {
        (("probe", name), ("figure", figure), ("kind", kind), ("quantile", quantile)): ns / 1e9
        for name, probe in reading.probes.four.items()
        for figure, kinds in probe.spreads.items()
        for kind, found in kinds.items()
        for quantile, ns in (
            ("0.5", found.p50_ns),
            ("0.9", found.p90_ns),
            ("0.99", found.p99_ns),
        )
    }


def _accepted_at(reading: Reading) -> Values:
    return {
        (("position", str(place)),): float(count)
        for place, count in enumerate(reading.drafts.accepted_at)
    }


def _accept_rate(reading: Reading) -> float:
    return reading.drafts.accepted / max(1, reading.drafts.proposed)


# --- names --------------------------------------------------------------------------------------

_OURS = (
    One("gauge", "requests_running", "Requests in a slot.", lambda r: r.load.rows_running),
    One("gauge", "requests_waiting", "Requests without a slot.", lambda r: r.load.requests_waiting),
    One("gauge", "kv_used_ratio", "Share of KV pages that nobody else could have.", _used_ratio),
    One("counter", "prompt_tokens", "Prompt tokens admitted.", lambda r: r.requests.prompt_tokens),
    One("counter", "generated_tokens", "Tokens given.", lambda r: r.requests.generated_tokens),
    One(
        "counter",
        "prefix_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda r: r.requests.prompt_tokens,
    ),
    One(
        "counter",
        "prefix_hits",
        "Prompt tokens found in the prefix cache.",
        lambda r: r.requests.cached_tokens,
    ),
    One("counter", "preemptions", "Requests put back to wait.", lambda r: r.requests.preemptions),
    One("counter", "requests", "Requests ended, by reason.", _ends("reason")),
    Spread("queue_seconds", "Arrival to first slot.", "queue"),
    Spread("prefill_seconds", "First slot to first token.", "prefill"),
    Spread("ttft_seconds", "Arrival to first token.", "ttft"),
    Spread("itl_seconds", "Token to token of a request, each one.", "itl"),
    Spread("decode_seconds", "First token to end of whole answers.", "decode"),
    Spread("e2e_seconds", "Arrival to end of whole answers.", "e2e"),
    Spread("request_prompt_tokens", "Prompt tokens of whole answers.", "prompt_tokens"),
    Spread("request_output_tokens", "Output tokens of whole answers.", "output_tokens"),
)
_VLLM = (
    One(
        "gauge",
        "num_requests_running",
        "Number of requests in model execution batches.",
        lambda r: r.load.rows_running,
    ),
    One(
        "gauge",
        "num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda r: r.load.requests_waiting,
    ),
    One(
        "gauge",
        "kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        _used_ratio,
    ),
    One(
        "counter",
        "prompt_tokens",
        "Number of prefill tokens processed.",
        lambda r: r.requests.prompt_tokens,
    ),
    One(
        "counter",
        "generation_tokens",
        "Number of generation tokens processed.",
        lambda r: r.requests.generated_tokens,
    ),
    One(
        "counter",
        "prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda r: r.requests.prompt_tokens,
    ),
    One(
        "counter",
        "prefix_cache_hits",
        "Prefix cache hits, in terms of number of cached tokens.",
        lambda r: r.requests.cached_tokens,
    ),
    One(
        "counter",
        "num_preemptions",
        "Cumulative number of preemption from the engine.",
        lambda r: r.requests.preemptions,
    ),
    One(
        "counter",
        "request_success",
        "Count of successfully processed requests.",
        _ends("finished_reason"),
    ),
    One(
        "gauge",
        "cache_config_info",
        "Information of the LLMEngine CacheConfig",
        lambda r: {
            (
                ("block_size", str(_number(r, "page_size"))),
                ("num_gpu_blocks", str(_number(r, "pages"))),
            ): 1.0
        },
    ),
    Spread("time_to_first_token_seconds", "Histogram of time to first token in seconds.", "ttft"),
    Spread("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", "itl"),
    # what boards of older versions call it
    Spread(
        "time_per_output_token_seconds", "Histogram of time per output token in seconds.", "itl"
    ),
    Spread("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", "e2e"),
    Spread(
        "request_queue_time_seconds",
        "Histogram of time spent in WAITING phase for request.",
        "queue",
    ),
    Spread(
        "request_prefill_time_seconds",
        "Histogram of time spent in PREFILL phase for request.",
        "prefill",
    ),
    Spread(
        "request_decode_time_seconds",
        "Histogram of time spent in DECODE phase for request.",
        "decode",
    ),
    Spread("request_prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
    Spread("request_generation_tokens", "Number of generation tokens processed.", "output_tokens"),
)
_SGLANG = (
    One(
        "gauge",
        "num_running_reqs",
        "The number of running requests.",
        lambda r: r.load.rows_running,
    ),
    One(
        "gauge",
        "num_queue_reqs",
        "The number of requests in the waiting queue.",
        lambda r: r.load.requests_waiting,
    ),
    One(
        "gauge",
        "num_used_tokens",
        "The number of used tokens.",
        lambda r: _taken(r) * _number(r, "page_size"),
    ),
    One("gauge", "token_usage", "The token usage.", _used_ratio),
    One(
        "gauge",
        "max_total_num_tokens",
        "Maximum total number of tokens in the KV cache pool.",
        lambda r: r.load.pages_total * _number(r, "page_size"),
    ),
    One(
        "gauge",
        "gen_throughput",
        "The generation throughput (token/s).",
        lambda r: r.per_second("samples"),
    ),
    One("gauge", "cache_hit_rate", "The prefix cache hit rate.", _hit_rate),
    One(
        "gauge",
        "num_retracted_reqs",
        "The number of retracted requests.",
        lambda r: r.requests.preemptions,
    ),
    One(
        "counter",
        "num_retracted_requests",
        "Total number of retracted requests.",
        lambda r: r.requests.preemptions,
    ),
    One(
        "counter",
        "prompt_tokens",
        "Number of prefill tokens processed.",
        lambda r: r.requests.prompt_tokens,
    ),
    One(
        "counter",
        "generation_tokens",
        "Number of generation tokens processed.",
        lambda r: r.requests.generated_tokens,
    ),
    One(
        "counter",
        "cached_tokens",
        "Number of cached prompt tokens.",
        lambda r: {(("cache_source", "device"),): r.requests.cached_tokens},
    ),
    One("counter", "num_requests", "Number of requests processed.", _whole),
    One(
        "counter",
        "num_aborted_requests",
        "Number of requests aborted.",
        lambda r: r.requests.ends["abort"],
    ),
    Spread("time_to_first_token_seconds", "Histogram of time to first token in seconds.", "ttft"),
    Spread("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", "itl"),
    Spread(
        "e2e_request_latency_seconds", "Histogram of End-to-end request latency in seconds", "e2e"
    ),
    Spread("queue_time_seconds", "Histogram of queueing time in seconds.", "queue"),
)
_SHARED: dict[str, tuple[One | Spread, ...]] = {
    "stepahead": _OURS,
    "vllm": _VLLM,
    "sglang": _SGLANG,
}
# where there are drafts
_DRAFTS: dict[str, tuple[One, ...]] = {
    "stepahead": (
        One("counter", "draft_rows", "Rows of steps, drafts or not.", lambda r: r.drafts.rows),
        One("counter", "drafted_tokens", "Drafts proposed.", lambda r: r.drafts.proposed),
        One("counter", "accepted_tokens", "Right drafts, by place in their row.", _accepted_at),
    ),
    "vllm": (
        One(
            "counter",
            "spec_decode_num_drafts",
            "Number of spec decoding drafts.",
            lambda r: r.drafts.drafted,
        ),
        One(
            "counter",
            "spec_decode_num_draft_tokens",
            "Number of draft tokens.",
            lambda r: r.drafts.proposed,
        ),
        One(
            "counter",
            "spec_decode_num_accepted_tokens",
            "Number of accepted tokens.",
            lambda r: r.drafts.accepted,
        ),
        One(
            "counter",
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            _accepted_at,
        ),
    ),
    "sglang": (
        One(
            "gauge",
            "spec_accept_length",
            "The average acceptance length of speculative decoding.",
            lambda r: r.drafts.tokens_per_row,
        ),
        One(
            "gauge",
            "spec_accept_rate",
            "The average acceptance rate of speculative decoding.",
            _accept_rate,
        ),
    ),
}
# what no other engine tells
_OWN = (
    One("gauge", "info", "What engine this is.", _about),
    One("gauge", "flights", "Steps launched and not yet retired.", lambda r: r.flights),
    One(
        "gauge", "depth", "Most steps launched and not yet retired.", lambda r: _number(r, "depth")
    ),
    One("gauge", "rows_max", "Most requests in one step.", lambda r: _number(r, "max_rows")),
    One("gauge", "kv_pages", "Pages of the KV pool, by state.", _pages),
    One("counter", "requests_arrived", "Requests taken in.", lambda r: r.requests.arrived),
    One("counter", "steps", "Steps landed.", lambda r: r.steps),
    One("counter", "step_host_seconds", "The host's time by stage; hidden under a device.", _host),
    One("counter", "host_seconds", "The host's time: hidden, exposed and waiting.", _host_sums),
    One(
        "counter",
        "device_busy_seconds",
        "The device's time in steps.",
        lambda r: r.books.busy_ns / 1e9,
    ),
    One("counter", "device_idle_seconds", "The device's time without a step, by cause.", _idle),
    One("counter", "syncs", "Steps pulled back to serial work, by reason.", _syncs("steps")),
    One("counter", "sync_rows", "Rows pulled back to serial work, by reason.", _syncs("rows")),
    One("gauge", "probe_seconds", "The four probes, by figure, kind and quantile.", _probes),
)
METRIC_NAMES = tuple(_SHARED)
