"""Options: other engines' spellings, what is refused, and a reason for all that was settled."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from stepahead.config import (
    ALIASES,
    CHOICES,
    MAX_DEPTH,
    MAX_DRAFTS,
    MAX_ROWS,
    MAX_STAGES,
    EngineConfig,
    ModelFacts,
    config_from,
    resolve,
)
from stepahead.errors import ConfigError, NotEnoughMemory
from stepahead.machine import _container_memory

FACTS = ModelFacts(vocab_size=64, max_len=128, eos_ids=(1,), kv_bytes_per_token=1 << 10)
PLENTY = 1 << 34
NAN, INF = float("nan"), float("inf")
NOT_COUNTS: list[Any] = [0, -1, 1.5, "2", True, NAN]

BAD: dict[str, list[Any]] = {
    "loop": ["fast", None, 1],
    "depth": [0, 1, -1, 2.0, "2", True, MAX_DEPTH + 1],
    "fence": ["none", None, True],
    "serial_prefill": [None, 1, "yes"],
    "executor": ["thread", None],
    "pipeline_stages": [*NOT_COUNTS, None, MAX_STAGES + 1],
    "device": ["cuda:99", None],
    "device_seed": ["1", 1.0, None, True],
    "dtype": ["float8", None, 32],
    "quantization": ["fp8", None, 8, True],
    "batch_invariant": [None, 1, "yes"],
    "max_model_len": NOT_COUNTS,
    "max_rows": [*NOT_COUNTS, None, MAX_ROWS + 1],
    "max_step_tokens": [*NOT_COUNTS, None],
    "page_size": [*NOT_COUNTS, None, 3, 24],
    "num_pages": NOT_COUNTS,
    "kv_memory_gb": [0, -1, "4", True, NAN, INF, 1e9],
    "prefix_cache": [None, 1, "yes"],
    "draft": ["eagle", None, 3],
    "draft_tokens": [*NOT_COUNTS, MAX_DRAFTS + 1],
    "logits_processor": ["", "mine", "mine:", ":Quiet", "mine.Quiet:", "a b:c", "../a:b", 3, True],
    "seed": ["1", 1.0, None, True],
    "threads": NOT_COUNTS,
    "debug": [None, 0, "no"],
    "observe": [-1, 65536, 1.5, "9100", True],
    "metric_names": ["grafana", None, 1],
    "request_spans": [None, 0, "no"],
}


def test_what_the_kernels_are_not_known_to_do_is_refused() -> None:
    on_gpu = {"device": "cuda"}
    for options, words in (
        ({"quantization": "int8", **on_gpu}, "quantization=int8 runs on the CPU only"),
        ({"batch_invariant": True, **on_gpu}, "batch_invariant with device=cuda"),
        ({"batch_invariant": True, "dtype": "bfloat16"}, "dtype=bfloat16: .* use device=cpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_from("model", options)
    for name, value in (("quantization", "int8"), ("batch_invariant", True)):
        config = config_from("model", {name: value})
        with pytest.raises(ConfigError, match=f"{name}={value} is not here for this model"):
            resolve(config, FACTS, PLENTY)
        assert resolve(config, dataclasses.replace(FACTS, packs=True), PLENTY).config == (
            dataclasses.replace(
                resolve(EngineConfig("model"), FACTS, PLENTY).config, **{name: value}
            )
        )


def test_the_list_covers_every_option() -> None:
    assert ["model", *BAD] == [field.name for field in dataclasses.fields(EngineConfig)]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        config_from("toy", {name: value})


@pytest.mark.parametrize(("name", "choice"), [(n, c) for n, cs in CHOICES.items() for c in cs])
def test_every_choice_is_taken(name: str, choice: str) -> None:
    beside: dict[str, dict[str, Any]] = {
        "device": {"executor": "inline"},
        "metric_names": {"observe": 0},
    }
    options = {name: choice} | beside.get(name, {})
    assert getattr(config_from("toy", options), name) == choice


@pytest.mark.parametrize("alias", ALIASES)
def test_other_engines_spellings_mean_our_options(alias: str) -> None:
    ours = ALIASES[alias]
    values: dict[str, Any] = {"prefix_cache": False, "batch_invariant": True}
    value = (values | {"pipeline_stages": 3, "draft_tokens": 2}).get(ours, 32)
    beside = {"draft": "ngram"} if ours == "draft_tokens" else {}
    found = config_from("toy", {alias: value} | beside)
    assert found == config_from("toy", {ours: value} | beside)
    assert getattr(found, ours) == value
    with pytest.raises(ConfigError, match=f"{alias!r} is another spelling of {ours!r}"):
        config_from("toy", {alias: value, ours: value})
    with pytest.raises(ConfigError, match=f"{alias!r} is another spelling of {ours!r}"):
        config_from("toy", {ours: value, alias: value})


@pytest.mark.parametrize("name", ["max_rowz", "model", ""])
def test_an_unknown_option_is_named_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'.*max_rows"):
        config_from("toy", {name: 1})


def test_two_sizes_for_one_pool_contradict() -> None:
    with pytest.raises(ConfigError, match="num_pages and kv_memory_gb"):
        config_from("toy", {"num_pages": 4, "kv_memory_gb": 1})


def test_drafts_are_settled_with_a_reason_and_fit_the_step() -> None:
    config = config_from("toy", {"draft": "ngram", "max_rows": 200, "threads": 1})
    found = resolve(config, FACTS, bytes_available=PLENTY)
    assert (found.config.draft_tokens, found.config.step_width) == (3, 4)
    assert found.config.max_step_tokens == 800
    reasons = " ".join(found.reasons)
    assert "draft_tokens=3: what draft=ngram proposes" in reasons
    assert "max_step_tokens=800: every row of max_rows must fit a step, drafts included" in reasons


def test_what_is_looked_up_for_drafts_is_counted_as_memory() -> None:
    # weights and page tables leave 3 MiB; the tokens of 513 slots of 4,096 positions are 8 MiB
    facts = ModelFacts(vocab_size=64, max_len=4096, eos_ids=(1,), kv_bytes_per_token=1 << 10)
    tables = 513 * 256 * 12
    options = {"threads": 1, "num_pages": 128}
    resolve(config_from("toy", options), facts, bytes_available=tables + (3 << 20))
    config = config_from("toy", options | {"draft": "ngram"})
    with pytest.raises(NotEnoughMemory):
        resolve(config, facts, bytes_available=tables + (3 << 20))


def test_drafts_that_nobody_makes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_tokens=3, but .*; give draft=ngram or mtp"):
        config_from("toy", {"draft_tokens": 3})


def test_drafts_and_stages_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"draft=ngram with pipeline_stages=2.*draft=none"):
        config_from("toy", {"draft": "ngram", "pipeline_stages": 2})


def test_the_hostile_device_is_inline_only() -> None:
    with pytest.raises(ConfigError, match="executor=inline"):
        config_from("toy", {"device": "hostile", "executor": "process"})


@pytest.mark.parametrize(
    ("loop", "depth", "relay"),
    [("serial", 1, "host"), ("overlap", 2, "slot"), ("batch-queue", 2, "row")],
)
def test_a_loop_has_its_depth_and_relay_and_spare_slots(loop: str, depth: int, relay: str) -> None:
    config = config_from("toy", {"loop": loop, "max_rows": 7})
    assert (config.steps_ahead, config.relay) == (depth, relay)
    assert config.num_slots == 1 + 7 * depth


def settled(available: int = PLENTY, **options: Any) -> tuple[EngineConfig, str]:
    """The effective configuration and its reasons."""
    answer = resolve(config_from("toy", options), FACTS, available)
    return answer.config, "; ".join(answer.reasons)


def test_what_is_left_open_is_settled_and_said() -> None:
    config, reasons = settled(max_rows=4)
    assert config.max_model_len == 128
    assert config.num_pages == 4 * 128 // 16
    assert config.threads is not None
    assert config.threads >= 1
    for words in ("max_model_len=128: the model's own", "num_pages=32: every row", "threads="):
        assert words in reasons


def test_what_is_given_is_kept_and_needs_no_reason() -> None:
    config, reasons = settled(
        max_model_len=64, num_pages=9, threads=3, max_rows=2, max_step_tokens=8
    )
    assert (config.max_model_len, config.num_pages, config.threads) == (64, 9, 3)
    assert config.max_step_tokens == 8
    assert reasons == ""


def test_the_pool_is_a_quarter_of_what_is_free_where_that_is_less() -> None:
    page_bytes, tables = 16 << 10, 513 * 8 * 12  # 513 slots of 8 pages, 12 bytes each
    config, reasons = settled(available=40 * page_bytes + tables)
    assert config.num_pages == 9
    assert "num_pages=9: a quarter of free memory" in reasons


def test_a_pool_in_gib_is_that_many_pages() -> None:
    config, reasons = settled(kv_memory_gb=1)
    assert config.num_pages == (1 << 30) // (16 << 10) - 1  # one is padding
    assert "kv_memory_gb=1" in reasons


def test_a_step_holds_every_row() -> None:
    config, reasons = settled(max_rows=64, max_step_tokens=8)
    assert config.max_step_tokens == 64
    assert "max_step_tokens=64" in reasons


def test_the_models_length_is_a_bound() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=129.*128"):
        settled(max_model_len=129)
    assert settled(max_model_len=128)[0].max_model_len == 128


@pytest.mark.parametrize("options", [{"num_pages": 1 << 20}, {"kv_memory_gb": 64}])
def test_a_pool_that_does_not_fit_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughMemory, match=r"GiB.*lower num_pages"):
        settled(**options)


def test_weights_take_memory_too() -> None:
    config = config_from("toy", {"num_pages": 63})
    facts = dataclasses.replace(FACTS, weight_bytes=1 << 20)
    # 513 slots of 8 pages, 12 bytes each
    enough = (1 << 20) + (64 * 16 << 10) + 513 * 8 * 12
    assert resolve(config, facts, enough).pages == 64
    with pytest.raises(NotEnoughMemory):
        resolve(config, facts, enough - 1)


def test_page_tables_count_as_memory() -> None:
    # 3 GiB of tables once passed with 1 GiB free
    facts = dataclasses.replace(FACTS, max_len=131_072)
    config = config_from("toy", {"max_rows": 1024, "page_size": 1, "num_pages": 64})
    with pytest.raises(NotEnoughMemory, match=r"page tables 3\.00 GiB"):
        resolve(config, facts, 1 << 30)


def test_threads_are_those_of_this_process() -> None:
    cores = len(os.sched_getaffinity(0))
    assert settled()[0].threads == cores
    with pytest.raises(ConfigError, match=f"threads=1000000; there are {cores} cores"):
        settled(threads=10**6)


def test_a_containers_memory_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert _container_memory(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_memory(tmp_path) == _container_memory(tmp_path / "none") == 1 << 62


@pytest.mark.parametrize("options", [{}, {"kv_memory_gb": 1e-9}])
def test_a_pool_of_no_page_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughMemory):
        settled(available=1000, **options)


def test_resolving_twice_changes_nothing() -> None:
    once, _ = settled(max_rows=4)
    again = resolve(once, FACTS, PLENTY)
    assert again.config == once
    assert again.reasons == ()
