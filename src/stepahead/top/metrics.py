"""The metrics of vLLM and SGLang, read as a frame: rates and percentiles are of the time between
two scrapes.

Knows their names, as published for vLLM 0.32 and SGLang 0.5.23.  Neither tells how much of the
host's work was hidden under a busy device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stepahead.top.fetch import Unreachable
from stepahead.top.frame import Frame, Quantiles

PREFIXES = {"vllm:": "vLLM", "sglang:": "SGLang"}
_MISSING = "{} does not export hidden and exposed host time, nor why its device idles"
_RATIOS = ("kv_cache_usage_perc", "token_usage", "cache_hit_rate", "fwd_occupancy")


@dataclass
class Scrape:
    """All numbers of one moment, by name without the prefix; what labels tell apart is added up.

    `buckets` are cumulative counts by upper bound.  `by` holds what one label tells apart.
    """

    prefix: str
    at_s: float
    model: str = ""
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)


def parse(text: str, at_s: float) -> Scrape:
    """A text in Prometheus' format; Unreachable if it is none, or is of another engine."""
    from prometheus_client.parser import text_string_to_metric_families

    prefix = next((each for each in PREFIXES if f"\n{each}" in f"\n{text}"), None)
    if prefix is None:
        raise Unreachable("it has no metrics of vLLM or SGLang")
    scrape, counts = Scrape(prefix, at_s), dict.fromkeys(_RATIOS, 0)
    try:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(prefix):
                for sample in family.samples:
                    _add(scrape, counts, sample.name, sample.labels, sample.value)
    except ValueError as error:
        words = str(error) or "a line is cut off"
        raise Unreachable(f"its metrics can't be read ({words})") from error
    for name, count in counts.items():
        if count:  # a share of several ranks is the mean of theirs
            scrape.values[name] /= count
    return scrape


def _add(
    scrape: Scrape, counts: dict[str, int], sample: str, labels: dict[str, str], value: float
) -> None:
    # ranks that share a batch tell the same numbers; a gauge nobody has set yet is not a number
    if not math.isfinite(value) or any(labels.get(rank, "0") != "0" for rank in _SAME):
        return
    name = sample.removeprefix(scrape.prefix)
    scrape.model = scrape.model or labels.get("model_name", "")
    if name.endswith("_bucket"):
        bounds = scrape.buckets.setdefault(name.removesuffix("_bucket"), {})
        bound = float(labels.get("le", "no bound"))
        bounds[bound] = bounds.get(bound, 0.0) + value
        return
    if name.startswith("spec_decode_num_accepted_tokens_per_pos"):
        position = int(labels.get("position", "0"))
        scrape.positions[position] = scrape.positions.get(position, 0.0) + value
        return
    if name == "cache_config_info":
        blocks = labels.get("num_gpu_blocks", "")
        name, value = "pages", float(blocks) if blocks.isdigit() else 0.0
    if name in counts:
        counts[name] += 1
    scrape.values[name] = scrape.values.get(name, 0.0) + value


_SAME = ("tp_rank", "pp_rank")


def frame_of(now: Scrape, before: Scrape | None) -> Frame:
    """The frame of `now`; without an earlier scrape, or after a restart, no rates."""
    if before is not None and (before.prefix != now.prefix or _restarted(now, before)):
        before = None
    make = _vllm if now.prefix == "vllm:" else _sglang
    return make(now, before)


def _restarted(now: Scrape, before: Scrape) -> bool:
    counters = (name for name in before.values if name.endswith("_total"))
    return any(now.values.get(name, 0.0) < before.values[name] for name in counters)


def _vllm(now: Scrape, before: Scrape | None) -> Frame:
    running, waiting = _count(now, "num_requests_running"), _count(now, "num_requests_waiting")
    drafts = _increase(now, before, "spec_decode_num_drafts_total")
    return Frame(
        engine=PREFIXES[now.prefix],
        model=now.model,
        verdict=_verdict(running, waiting, None),
        in_per_s=_rate(now, before, "prompt_tokens_total"),
        out_per_s=_rate(now, before, "generation_tokens_total"),
        ttft=_quantiles(now, before, "time_to_first_token_seconds"),
        itl=_quantiles(now, before, "inter_token_latency_seconds"),
        running=running,
        waiting=waiting,
        pages_pct=_percent(now.values.get("kv_cache_usage_perc")),
        pages=_count(now, "pages") or None,
        prefix_pct=_percent(
            _part(
                _increase(now, before, "prefix_cache_hits_total"),
                _increase(now, before, "prefix_cache_queries_total"),
            )
        ),
        drafts_pct=_accepted(now, before, drafts),
        missing=_MISSING.format(PREFIXES[now.prefix]),
    )


def _sglang(now: Scrape, before: Scrape | None) -> Frame:
    running, waiting = _count(now, "num_running_reqs"), _count(now, "num_queue_reqs")
    busy_pct = now.values.get("fwd_occupancy")
    return Frame(
        engine=PREFIXES[now.prefix],
        model=now.model,
        verdict=_verdict(running, waiting, busy_pct),
        busy_pct=busy_pct,
        in_per_s=_rate(now, before, "prompt_tokens_total"),
        out_per_s=_rate(now, before, "generation_tokens_total"),
        ttft=_quantiles(now, before, "time_to_first_token_seconds"),
        itl=_quantiles(now, before, "inter_token_latency_seconds"),
        running=running,
        waiting=waiting,
        pages_pct=_percent(now.values.get("token_usage")),
        pages=_count(now, "num_pages") or None,
        prefix_pct=_percent(now.values.get("cache_hit_rate")),
        drafts_per_step=now.values.get("spec_accept_length") or None,
        missing=_MISSING.format(PREFIXES[now.prefix]),
    )


def _verdict(running: int | None, waiting: int | None, busy_pct: float | None) -> str:
    busy = "device busy unknown" if busy_pct is None else f"device busy {busy_pct:.0f} %"
    return (
        f"{busy}, host hidden and exposed unknown; {running or 0} running, {waiting or 0} waiting"
    )


def _count(scrape: Scrape, name: str) -> int | None:
    value = scrape.values.get(name)
    return None if value is None else round(value)


def _increase(now: Scrape, before: Scrape | None, name: str) -> float | None:
    if before is None or name not in now.values:
        return None
    return now.values[name] - before.values.get(name, 0.0)


def _rate(now: Scrape, before: Scrape | None, name: str) -> float | None:
    more = _increase(now, before, name)
    if more is None or before is None or now.at_s <= before.at_s:
        return None
    return more / (now.at_s - before.at_s)


def _part(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _accepted(now: Scrape, before: Scrape | None, drafts: float | None) -> tuple[float, ...]:
    if before is None or not drafts:
        return ()
    return tuple(
        100 * (now.positions[place] - before.positions.get(place, 0.0)) / drafts
        for place in sorted(now.positions)
    )


def _quantiles(now: Scrape, before: Scrape | None, name: str) -> Quantiles | None:
    """Of what came between the two scrapes; None if nothing did."""
    if before is None or name not in now.buckets:
        return None
    earlier = before.buckets.get(name, {})
    bounds = sorted(now.buckets[name])
    upto = [now.buckets[name][bound] - earlier.get(bound, 0.0) for bound in bounds]
    if not upto or upto[-1] <= 0:
        return None
    return Quantiles(*(1e3 * quantile(bounds, upto, share) for share in (0.5, 0.9, 0.99)))


def quantile(bounds: list[float], upto: list[float], share: float) -> float:
    """The value below which `share` of those counted lie, as if each bucket were evenly filled.

    `upto` are cumulative counts by upper bound, the last of all of them.  What lies beyond the last
    finite bound is told as that bound.
    """
    rank = share * upto[-1]
    place = next(i for i, count in enumerate(upto) if count >= rank)
    low = bounds[place - 1] if place else 0.0
    if math.isinf(bounds[place]):
        return low
    below = upto[place - 1] if place else 0.0
    inside = upto[place] - below
    return low + (bounds[place] - low) * ((rank - below) / inside if inside else 1.0)
