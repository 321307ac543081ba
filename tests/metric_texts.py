"""What other engines' /metrics look like, and our own /state.

The texts of vLLM and SGLang are made from the names that vLLM 0.32 and SGLang 0.5.23 publish; they
were not recorded from running servers.
"""

from __future__ import annotations

import json
from typing import Any

Buckets = dict[str, tuple[int, ...]]  # cumulative counts


def _histogram(name: str, labels: str, bounds: tuple[str, ...], upto: tuple[int, ...]) -> str:
    lines = [f"# HELP {name} Histogram.", f"# TYPE {name} histogram"]
    lines += [
        f'{name}_bucket{{le="{bound}",{labels}}} {count}.0'
        for bound, count in zip((*bounds, "+Inf"), upto, strict=True)
    ]
    return "\n".join(
        [*lines, f"{name}_count{{{labels}}} {upto[-1]}.0", f"{name}_sum{{{labels}}} 1.5"]
    )


def vllm_text(
    *,
    prompt: int = 1000,
    generated: int = 5000,
    running: int = 12,
    hits: int = 300,
    queries: int = 1000,
    drafts: int = 100,
    accepted: tuple[int, ...] = (80, 60),
    ttft: tuple[int, ...] = (0, 5, 10, 10),
    itl: tuple[int, ...] = (0, 900, 1000, 1000),
    engine: str = "0",
) -> str:
    """vLLM's; `ttft` and `itl` count up to 0.1, 0.2, 0.4 s and to 10, 20, 40 ms, and all."""
    labels = f'engine="{engine}",model_name="glm-5.3"'
    plain = {
        "num_requests_running": ("gauge", running),
        "num_requests_waiting": ("gauge", 3),
        "kv_cache_usage_perc": ("gauge", 0.25),
        "prefix_cache_queries": ("counter", queries),
        "prefix_cache_hits": ("counter", hits),
        "num_preemptions": ("counter", 0),
        "prompt_tokens": ("counter", prompt),
        "generation_tokens": ("counter", generated),
        "spec_decode_num_drafts": ("counter", drafts),
        "spec_decode_num_draft_tokens": ("counter", 2 * drafts),
        "spec_decode_num_accepted_tokens": ("counter", sum(accepted)),
    }
    parts = []
    for name, (kind, value) in plain.items():
        sample = f"vllm:{name}" + ("_total" if kind == "counter" else "")
        parts.append(f"# HELP vllm:{name} Words.\n# TYPE vllm:{name} {kind}")
        parts.append(f"{sample}{{{labels}}} {value}")
    parts.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
    parts += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {count}.0'
        for at, count in enumerate(accepted)
    ]
    parts.append(
        f"# TYPE vllm:request_success counter\nvllm:request_success_total{{{labels},"
        'finished_reason="stop"} 9.0'
    )
    parts.append(
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{{labels},block_size="16",num_gpu_blocks="4096"}} 1.0'
    )
    long, short = ("0.1", "0.2", "0.4"), ("0.01", "0.02", "0.04")
    parts.append(_histogram("vllm:time_to_first_token_seconds", labels, long, ttft))
    parts.append(_histogram("vllm:inter_token_latency_seconds", labels, short, itl))
    return "# HELP python_info Python.\n# TYPE python_info gauge\npython_info 1.0\n" + (
        "\n".join(parts) + "\n"
    )


def sglang_text(
    *,
    generated: int = 5000,
    prompt: int = 1000,
    ttft: tuple[int, ...] = (0, 5, 10, 10),
    itl: tuple[int, ...] = (0, 900, 1000, 1000),
    rank: str = "0",
    occupancy: str = "91.5",
) -> str:
    """SGLang's, with `ttft` and `itl` as in `vllm_text`; gauges that nobody has set are NaN."""
    labels = f'engine_type="unified",model_name="glm-5.3",pp_rank="0",tp_rank="{rank}"'
    plain = {
        "num_running_reqs": ("gauge", "20.0"),
        "num_queue_reqs": ("gauge", "4.0"),
        "token_usage": ("gauge", "0.5"),
        "num_used_tokens": ("gauge", "32768.0"),
        "num_pages": ("gauge", "4096.0"),
        "cache_hit_rate": ("gauge", "0.3"),
        "gen_throughput": ("gauge", "1234.0"),
        "spec_accept_length": ("gauge", "2.4"),
        "spec_accept_rate": ("gauge", "NaN"),
        "fwd_occupancy": ("gauge", occupancy),
        "prompt_tokens": ("counter", f"{prompt}.0"),
        "generation_tokens": ("counter", f"{generated}.0"),
        "num_retracted_requests": ("counter", "0.0"),
    }
    parts = []
    for name, (kind, value) in plain.items():
        sample = f"sglang:{name}" + ("_total" if kind == "counter" else "")
        parts.append(f"# HELP sglang:{name} Words.\n# TYPE sglang:{name} {kind}")
        parts.append(f"{sample}{{{labels}}} {value}")
    long, short = ("0.1", "0.2", "0.4"), ("0.01", "0.02", "0.04")
    parts.append(_histogram("sglang:time_to_first_token_seconds", labels, long, ttft))
    parts.append(_histogram("sglang:inter_token_latency_seconds", labels, short, itl))
    return "\n".join(parts) + "\n"


MS = 1_000_000


def state_document(turn: int = 1, **changes: Any) -> dict[str, Any]:
    """Ours after `turn` hundred steps of 10 ms: 9 of them busy, 0.5 of host work hidden, 0.3
    exposed."""
    steps = 100 * turn
    plain = {
        "status": "ok",
        "about": {
            "version": "0.1.0",
            "model": "toy",
            "loop": "overlap",
            "depth": 2,
            "max_rows": 64,
            "executor": "process",
        },
        "at_ns": steps * 10 * MS,
        "unix_ns": 0,
        "load": {
            "step": steps,
            "rows_running": 48,
            "requests_waiting": 5,
            "pages_free": 500,
            "pages_cached": 200,
            "pages_evictable": 100,
            "pages_total": 1000,
        },
        "flights": 1,
        "steps": steps,
        "books": {
            "wall_ns": steps * 10 * MS,
            "hidden_ns": steps * MS // 2,
            "exposed_ns": steps * MS * 3 // 10,
            "waiting_ns": steps * MS * 92 // 10,
            "busy_ns": steps * 9 * MS,
            "host_ns": {"plan": steps * MS * 8 // 10},
            "idle_ns": {
                "plan late": steps * MS * 3 // 10,
                "copy": steps * MS * 7 // 10,
                "no work": 0,
            },
        },
        "probes": {"verdict": "device busy 90 %, since the start"},
        "syncs": {"drain": {"steps": 3, "rows": 9}},
        "requests": {"prompt_tokens": 1000 * turn, "cached_tokens": 250 * turn},
        "rates": {"steps": 100.0, "generated_tokens": 4800.0, "prompt_tokens": 640.0},
        "latencies": {
            "ttft": {"count": 9, "mean_ms": 60.0, "p50_ms": 50.0, "p90_ms": 90.0, "p99_ms": 99.0},
            "itl": {"count": 9, "mean_ms": 10.5, "p50_ms": 10.0, "p90_ms": 11.0, "p99_ms": 31.0},
            "e2e": None,
        },
    }
    return plain | changes


def state_body(turn: int = 1, **changes: Any) -> bytes:
    """As it is sent."""
    return json.dumps(state_document(turn, **changes)).encode()
