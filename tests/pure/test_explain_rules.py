"""Other engines' rules: each published one has its line here, and every flag its place."""

from __future__ import annotations

import dataclasses
import random
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli_options import parse

from stepahead.config import EngineConfig, config_from
from stepahead.errors import ConfigError
from stepahead.explain import sglang, vllm
from stepahead.explain.build import explain_command
from stepahead.explain.flags import SGLANG, VLLM, Flag
from stepahead.explain.report import CommandReport
from stepahead.serve.options import ServeConfig
from stepahead.sync import SyncReason

# command line -> the rule that speaks, what it does, what is left of overlap, the depth
VLLM_RULES: list[tuple[str, str, str, str, int | None]] = [
    ("vllm serve m", "default", "stays", "on", 2),
    ("vllm serve m --async-scheduling", "default", "stays", "on", 2),
    ("vllm serve m --no-async-scheduling", "asked off", "off", "off", 1),
    ("vllm serve m --no-async-scheduling -pp 4", "asked off", "off", "off", 4),
    ("vllm serve m --async-scheduling --no-async-scheduling", "asked off", "off", "off", 1),
    ("vllm serve m --no-async-scheduling --async-scheduling", "default", "stays", "on", 2),
    ("vllm serve m --runner pooling", "pooling model", "off", "off", 1),
    ("vllm serve m --task embed", "pooling model", "off", "off", 1),
    (
        "vllm serve m --runner pooling --async-scheduling",
        "pooling model",
        "depends",
        "depends",
        None,
    ),
    ("""vllm serve m -sc '{"method":"ngram"}'""", "drafts on the host", "off", "off", 1),
    ("""vllm serve m -sc '{"model":"ngram"}'""", "drafts on the host", "off", "off", 1),
    ("vllm serve m --speculative-config.method medusa", "drafts on the host", "off", "off", 1),
    ("vllm serve m --spec-method suffix", "drafts on the host", "off", "off", 1),
    (
        "vllm serve m --spec-method ngram --async-scheduling",
        "drafts on the host",
        "refused",
        "refused",
        None,
    ),
    ("""vllm serve m -sc '{"model":"a/b"}'""", "method not named", "depends", "depends", None),
    (
        """vllm serve m -sc '{"method":"eagle3","disable_padded_drafter_batch":true}'""",
        "drafts not padded",
        "off",
        "off",
        1,
    ),
    (
        """vllm serve m --async-scheduling -sc.method=mtp -sc.disable_padded_drafter_batch=true""",
        "drafts not padded",
        "refused",
        "refused",
        None,
    ),
    ("vllm serve m --distributed-executor-backend ray", "executor", "off", "off", 1),
    (
        "vllm serve m --distributed-executor-backend=ray --async-scheduling",
        "executor",
        "refused",
        "refused",
        None,
    ),
    (
        "vllm serve m --distributed-executor-backend my.Executor",
        "own executor",
        "depends",
        "depends",
        None,
    ),
    (
        "vllm serve m --enable-dbo --all2all-backend deepep_high_throughput",
        "two batches on ROCm",
        "depends",
        "depends",
        None,
    ),
    (
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m -pp 2",
        "stages on the older runner",
        "off",
        "off",
        2,
    ),
    (
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m -pp=2 --async-scheduling",
        "stages on the older runner",
        "refused",
        "refused",
        None,
    ),
    ("VLLM_TARGET_DEVICE=cpu vllm serve m", "CPU", "off", "off", 1),
    ("vllm serve m --device cpu --async-scheduling", "CPU", "off", "off", 1),
    ("vllm serve m --scheduler-cls my.Scheduler", "own scheduler", "depends", "depends", None),
    ("vllm serve m --pipeline-parallel-size 4", "stages", "stays", "on", 5),
    ("vllm serve m --pipeline_parallel_size=4 --async-scheduling", "stages", "stays", "on", 5),
    ("vllm serve m -dp 8 -ep", "ranks", "stays", "on", 2),
    ("vllm serve m", "structured output", "late", "on", 2),
    ("vllm serve m --spec-method mtp", "structured output with drafts", "held", "on", 2),
    ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m", "penalties on the older runner", "held", "on", 2),
    (
        """vllm serve m --kv-transfer-config '{"kv_role":"kv_both"}'""",
        "transfer of KV",
        "stays",
        "on",
        2,
    ),
    ("vllm serve m --enforce-eager", "no graphs", "stays", "on", 2),
    ("vllm serve m --config a.yaml", "file of options", "depends", "depends", None),
]
SGLANG_RULES: list[tuple[str, str, str, str, int | None]] = [
    ("sglang serve m", "default", "stays", "on", 2),
    ("sglang serve m --disable-overlap-schedule", "asked off", "off", "off", 1),
    ("sglang serve m --pp-size 2", "stages", "off", "off", None),
    ("sglang serve m --pp-size 2 --disable-overlap-schedule", "stages", "off", "off", None),
    (
        "sglang serve m --mamba-radix-cache-strategy no_buffer",
        "mamba without a buffer",
        "refused",
        "refused",
        None,
    ),
    (
        "sglang serve m --mamba-scheduler-strategy auto",
        "mamba, strategy auto",
        "depends",
        "depends",
        None,
    ),
    (
        "SGLANG_EMBEDDINGS_SPARSE_HEAD=h.pt sglang serve m --is-embedding",
        "sparse embedding head",
        "off",
        "off",
        1,
    ),
    ("sglang serve m --dllm-algorithm LowConfidence", "diffusion model", "off", "off", 1),
    ("sglang serve m --enable-pdmux", "prefill and decode multiplexed", "refused", "refused", None),
    (
        "sglang serve m --speculative-algorithm EAGLE --device cpu",
        "drafts on a CPU",
        "off",
        "off",
        1,
    ),
    ("sglang serve m --device mps", "Apple's GPU", "off", "off", 1),
    (
        "sglang serve m --speculative-algorithm MINE",
        "drafts of a plugin",
        "depends",
        "depends",
        None,
    ),
    (
        "sglang serve m --speculative-algorithm EAGLE --speculative-eagle-topk 4",
        "a tree of drafts",
        "refused",
        "refused",
        None,
    ),
    (
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 sglang serve m",
        "two prefills in a row",
        "held",
        "on",
        2,
    ),
    (
        "sglang serve m --speculative-algo ngram",
        "grammar with drafts of the host",
        "held",
        "on",
        2,
    ),
    ("sglang serve m --speculative-algorithm NEXTN", "grammar with drafts", "stays", "on", 2),
    ("sglang serve m", "grammar", "late", "on", 2),
    ("SGLANG_ENABLE_DELAY_SAMPLE=true sglang serve m", "sampling delayed", "late", "on", 2),
    ("sglang serve m --speculative-algorithm NGRAM", "lengths on the host", "held", "on", 2),
    (
        "sglang serve m --speculative-algorithm EAGLE --enable-two-batch-overlap",
        "lengths on the host",
        "held",
        "on",
        2,
    ),
    ("sglang serve m --enable-return-hidden-states", "hidden states", "stays", "on", 2),
    ("sglang serve m --tp 8 --dp 8 --enable-dp-attention", "DP attention", "stays", "on", 2),
    ("sglang serve m --disaggregation-mode prefill", "separated", "stays", "on", 2),
    ("sglang serve m --enable-mixed-chunk", "mixed batches", "stays", "on", 2),
    ("sglang serve m --is-embedding", "embeddings", "stays", "on", 2),
    ("sglang serve m --disable-cuda-graph", "no graphs", "stays", "on", 2),
    ("sglang serve m --config a.yaml", "file of options", "depends", "depends", None),
]
# what must not be taken for a rule's condition
QUIET = [
    ("vllm serve m --distributed-executor-backend mp", "executor"),
    ("vllm serve m --distributed-executor-backend external_launcher", "own executor"),
    ("vllm serve m --spec-method eagle3", "drafts on the host"),
    ("vllm serve m --spec-method deepseek_mtp", "drafts on the host"),
    ("vllm serve m --spec-method ngram_gpu", "drafts on the host"),
    ("vllm serve m --enable-dbo --all2all-backend deepep_low_latency", "two batches on ROCm"),
    ("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve m -pp 2", "stages on the older runner"),
    ("vllm serve m -pp 1", "stages"),
    ("vllm serve m --runner generate", "pooling model"),
    ("vllm serve m --runner pooling", "structured output"),
    ("vllm serve m --no-async-scheduling --spec-method ngram", "drafts on the host"),
    ("sglang serve m --enable-pdmux --disable-overlap-schedule", "prefill and decode multiplexed"),
    (
        "sglang serve m --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
        "mamba without a buffer",
    ),
    ("sglang serve m --mamba-radix-cache-strategy extra_buffer", "mamba without a buffer"),
    ("SGLANG_USE_MLX=1 sglang serve m --device mps", "Apple's GPU"),
    ("sglang serve m --enable-two-batch-overlap", "lengths on the host"),
    ("sglang serve m --grammar-backend none", "grammar"),
    ("sglang serve m --speculative-algorithm EAGLE --speculative-eagle-topk 1", "a tree of drafts"),
    ("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=0 sglang serve m", "two prefills in a row"),
    ("sglang serve m --disaggregation-mode null", "separated"),
]


def explained(line: str) -> CommandReport:
    return explain_command(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "rule", "effect", "overlap", "depth"), [*VLLM_RULES, *SGLANG_RULES]
)
def test_each_published_rule_speaks_where_it_holds(
    line: str, rule: str, effect: str, overlap: str, depth: int | None
) -> None:
    report = explained(line)
    spoken = {finding.rule: finding.effect for finding in report.findings}
    assert spoken.get(rule) == effect
    assert (report.overlap, report.depth) == (overlap, depth)


@pytest.mark.parametrize(("line", "rule"), QUIET)
def test_a_rule_is_quiet_where_it_does_not_hold(line: str, rule: str) -> None:
    assert rule not in {finding.rule for finding in explained(line).findings}


@pytest.mark.parametrize(
    ("rules", "lines"), [(vllm.RULES, VLLM_RULES), (sglang.RULES, SGLANG_RULES)]
)
def test_no_rule_is_without_a_line(rules: Any, lines: Any) -> None:
    assert {rule.name for rule in rules} == {line[1] for line in lines}
    assert len({rule.name for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    ("line", "reasons"),
    [
        ("vllm serve m -pp 4", {"pipeline"}),
        ("vllm serve m --spec-method ngram", {"host-lengths"}),
        ("sglang serve m --pp 4", {"pipeline"}),
        ("sglang serve m --speculative-algorithm NGRAM", {"host-lengths"}),
        ("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 sglang serve m", {"serial-prefill"}),
        (
            "sglang serve m --enable-return-hidden-states",
            {"hidden-states", "blocking-copy"},
        ),
    ],
)
def test_what_has_a_name_here_is_told_by_it(line: str, reasons: set[str]) -> None:
    found = explained(line).findings
    assert {reason for finding in found for reason in finding.reasons} == reasons
    assert reasons <= {reason.value for reason in SyncReason}


def test_every_finding_names_the_version_it_was_read_from_and_the_flags_it_is_about() -> None:
    report = explained("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m -pp 4 --enforce-eager")
    assert {finding.source for finding in report.findings} == {"vLLM 0.32"}
    written = {finding.rule: finding.given for finding in report.findings}
    assert written["stages on the older runner"] == ["-pp 4", "VLLM_USE_V2_MODEL_RUNNER=0"]
    assert written["no graphs"] == ["--enforce-eager"]
    assert explained("sglang serve m").findings[0].source == "SGLang 0.5.23"


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("sglang serve m --disable-overlap-schedule", {"asked off"}),
        (
            "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 sglang serve m --pp 2 "
            "--speculative-algorithm NGRAM",
            {"stages"},
        ),
        (
            "vllm serve m --runner pooling --spec-method ngram",
            {"pooling model", "drafts on the host"},
        ),
        ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m --spec-method ngram", {"drafts on the host"}),
        # a queue of one step for each stage puts sampling off all the same
        (
            "vllm serve m -pp 2 --no-async-scheduling",
            {"asked off", "stages", "structured output"},
        ),
    ],
)
def test_where_no_step_runs_ahead_nothing_is_said_of_such_steps(line: str, rules: set[str]) -> None:
    assert {finding.rule for finding in explained(line).findings} == rules


def test_what_decides_is_told_first() -> None:
    report = explained("sglang serve m --enable-mixed-chunk --pp 2 --enable-pdmux")
    assert [finding.effect for finding in report.findings][:2] == ["refused", "off"]


# --- the same wish here ------------------------------------------------------------------------

TRANSLATED = [
    ("vllm serve m", {"loop": "batch-queue", "depth": 2, "device": "cuda"}),
    ("vllm serve m --no-async-scheduling", {"loop": "serial"}),
    ("sglang serve m", {"loop": "overlap", "device": "cuda"}),
    ("sglang serve m --pp 2", {"loop": "batch-queue", "pipeline_stages": 2}),
    ("sglang serve m --device cpu", {"device": "cpu"}),
    ("vllm serve m --max-num-seqs 64", {"max_rows": 64}),
    ("vllm serve m --max-num-batched-tokens 8k", {"max_step_tokens": 8000}),
    ("vllm serve m --max-num-batched-tokens=8K", {"max_step_tokens": 8192}),
    (
        "vllm serve m --max-model-len 128K --block-size 32",
        {"max_model_len": 2**17, "page_size": 32},
    ),
    ("vllm serve m --kv-cache-memory-bytes 8G", {"kv_memory_gb": 8.0}),
    ("vllm serve m --no-enable-prefix-caching", {"prefix_cache": False}),
    ("vllm serve m --enable-prefix-caching --seed 7", {"prefix_cache": True, "seed": 7}),
    ("vllm serve m --dtype bfloat16", {"dtype": "bfloat16"}),
    ("vllm serve m -q int8", {"quantization": "int8"}),
    ("sglang serve m --enable-deterministic-inference", {"batch_invariant": True}),
    ("sglang serve m --max-running-requests 9", {"max_rows": 9}),
    ("sglang serve m --chunked-prefill-size 2048", {"max_step_tokens": 2048}),
    ("sglang serve m --context-length 4096", {"max_model_len": 4096}),
    ("sglang serve m --disable-radix-cache", {"prefix_cache": False}),
    ("sglang serve m --page-size 64 --max-total-tokens 6400", {"page_size": 64, "num_pages": 100}),
    ("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 sglang serve m", {"serial_prefill": True}),
]


SERVER = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(ServeConfig)}
KINDS = {field.name: str(field.type) for field in dataclasses.fields(EngineConfig)}


def engine_words(command: str) -> list[str]:
    """What a stepahead command line says to the engine."""
    words = shlex.split(command)
    assert words[:2] == ["stepahead", "serve"]
    rest = words[3:]
    for flag in ("--chat-template", *SERVER):
        if flag in rest:
            at = rest.index(flag)
            del rest[at : at + 2]
    return rest


def options_of(command: str) -> dict[str, Any]:
    """The engine options of a stepahead command line; an unknown one is an error.

    Not by the command's own parser, which takes 0.1 s: that one has a test below.
    """
    words, options = engine_words(command), {}
    while words:
        flag = words.pop(0).removeprefix("--").replace("-", "_")
        on = not flag.startswith("no_")
        name = flag.removeprefix("no_")
        if KINDS[name] == "bool":
            options[name] = on
        else:
            kind = float if "float" in KINDS[name] else int if "int" in KINDS[name] else str
            options[name] = kind(words.pop(0))
    return options


def test_the_commands_own_parser_reads_a_translated_wish_the_same() -> None:
    command = explained(
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 sglang serve m --disable-radix-cache "
        "--max-running-requests 9 --dtype bfloat16 --page-size 64 --max-total-tokens 6400"
    ).command
    assert parse(*engine_words(command))[0] == options_of(command)
    command = explained("vllm serve m --kv-cache-memory-bytes 8G --max-model-len 4k").command
    assert parse(*engine_words(command))[0] == options_of(command)


@pytest.mark.parametrize(("line", "options"), TRANSLATED)
def test_a_wish_is_translated(line: str, options: dict[str, Any]) -> None:
    read = options_of(explained(line).command)
    assert options.items() <= read.items()


def test_what_a_server_was_told_is_translated_too() -> None:
    line = "vllm serve m --host 0.0.0.0 --port 9 --api-key k l --served-model-name n --max-num-seqs"
    report = explained(f"{line} 4 --shutdown-timeout 3")
    want = "--max-rows 4 --host 0.0.0.0 --port 9 --api-key k --served-name n --shutdown-timeout 3.0"
    assert report.command.endswith(want)
    notes = {entry.name: entry.words for entry in report.translated}
    assert notes["--api-key k l"] == "the first of them"
    sglang = explained("sglang serve m --max-queued-requests 7 --port 70000")
    assert sglang.command.endswith("--max-waiting 7")
    assert "port=70000" in sglang.no_counterpart[0].words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vllm serve m -tp 8", "one rank"),
        ("vllm serve m --shutdown-timeout soon", "no number of seconds"),
        ("vllm serve m --allowed-origins '[\"*\"]'", "as a word of its own"),
        ("vllm serve m --dtype auto", "float32, bfloat16"),
        ("vllm serve m --dtype half", "float32, bfloat16"),
        ("vllm serve m --quantization fp8", "quantization is one of none, float16, int8"),
        ("vllm serve m --max-num-seqs 4096", "at most 1024 rows"),
        ("vllm serve m --block-size 48", "power of two"),
        ("vllm serve m --max-model-len -1", "give a number"),
        ("sglang serve m --chunked-prefill-size -1", "in chunks"),
        ("sglang serve m --device mps", "cpu, cuda"),
        ("sglang serve m --mem-fraction-static 0.8", "kv_memory_gb"),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m", "reads none"),
    ],
)
def test_what_has_no_counterpart_is_told_with_the_reason(line: str, words: str) -> None:
    report = explained(line)
    assert any(words in entry.words for entry in report.no_counterpart)
    options_of(report.command)


def flag_words(flag: Flag, name: str) -> list[str]:
    """A flag with a value that fits it."""
    values = {"nothing": [], "number": ["4"], "json": ['{"a": 1}'], "many": ["a", "b"]}
    return [name, *values.get(flag.takes, ["word"])]


@given(st.data())
@settings(max_examples=60)
def test_every_flag_has_its_place_and_none_is_passed_over(data: st.DataObject) -> None:
    program, table = data.draw(st.sampled_from([("vllm", VLLM), ("sglang", SGLANG)]))
    known = data.draw(st.lists(st.sampled_from(table), max_size=6, unique=True))
    written = [flag_words(flag, data.draw(st.sampled_from(flag.names))) for flag in known]
    strange = [["--no-such-flag"], ["--another", "1"], ["--third=x y"]]
    written += data.draw(st.lists(st.sampled_from(strange), max_size=2, unique_by=str))
    random.Random(data.draw(st.integers(0, 99))).shuffle(written)
    report = explain_command([program, "serve", "m", *(w for words in written for w in words)])
    told = [entry.name for entry in [*report.translated, *report.no_counterpart]]
    places = [*told, *report.not_looked_at]
    assert sorted(places) == sorted(["m", *(shlex.join(words) for words in written)])
    options_of(report.command)


@given(st.data())
@settings(max_examples=40)
def test_the_order_of_flags_decides_nothing(data: st.DataObject) -> None:
    lines = [line for line, *_ in [*VLLM_RULES, *SGLANG_RULES]]
    words = shlex.split(data.draw(st.sampled_from(lines)))
    at = words.index("m") + 1
    rest = words[at:]
    if "--async-scheduling" in rest and "--no-async-scheduling" in rest:
        return  # of these two the last one counts
    groups: list[list[str]] = []
    for word in rest:
        if word.startswith("-"):
            groups.append([word])
        else:
            groups[-1].append(word)
    shuffled = data.draw(st.permutations(groups))
    other = explain_command([*words[:at], *(word for group in shuffled for word in group)])
    report = explain_command(words)
    assert (other.overlap, other.depth) == (report.overlap, report.depth)
    assert {f.rule for f in other.findings} == {f.rule for f in report.findings}


def test_the_translated_options_are_ones_that_the_engine_takes() -> None:
    for line, *_ in [*VLLM_RULES, *SGLANG_RULES]:
        config_from("m", options_of(explained(line).command))


# --- programs and words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve zai-org/GLM-5.3 -tp 8",
        "/opt/venv/bin/vllm serve zai-org/GLM-5.3 -tp=8",
        "vllm serve -tp 8 zai-org/GLM-5.3",
        "python -m vllm.entrypoints.openai.api_server --model zai-org/GLM-5.3 -tp 8",
        "env A=1 python3.12 -m vllm.entrypoints.openai.api_server --model=zai-org/GLM-5.3 -tp 8",
        "python3 -m sglang.launch_server --model-path zai-org/GLM-5.3 --tp 8",
        "sglang serve --model-path zai-org/GLM-5.3 --tp-size=8",
        "A=1 B='x y' sglang serve zai-org/GLM-5.3 --tensor-parallel-size 8",
    ],
)
def test_programs_are_known_by_their_words_wherever_they_lie(line: str) -> None:
    for report in (explained(line), explain_command([line])):
        assert report.model == "zai-org/GLM-5.3"
        assert report.not_looked_at == []
        assert report.memory is not None
        assert report.memory.parameters == 753_329_921_024


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trtllm-serve m", "'trtllm-serve m' is no command that can be read"),
        ("vllm bench serve", "'vllm bench' is no command that can be read"),
        ("vllm", "these are: `vllm serve MODEL"),
        ("A=1", "'nothing' is no command"),
        ("python server.py --model m", "'server.py --model'"),
        ("torchrun -m vllm.entrypoints.openai.api_server", "'torchrun -m'"),
        ("vllm serve m && sglang serve m", "one command at a time"),
        ("vllm serve m -pp four", "-pp: 'four' is not a whole number"),
        ("vllm serve m -pp 1.5", "'1.5' is not a whole number"),
        ("vllm serve m -pp", "-pp: its value is missing"),
        ("vllm serve m -pp --enforce-eager", "-pp: its value is missing"),
        ("vllm serve m --enforce-eager=1", "takes no value"),
        ("vllm serve m --speculative-config {method:mtp}", "is not a JSON object"),
        ("vllm serve m --speculative-config []", "is not a JSON object"),
        ("vllm serve 'm", "can't be taken apart"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        explain_command([line])
    assert words in str(refusal.value)


def test_a_flag_of_the_other_engine_is_not_looked_at() -> None:
    assert explained("sglang serve m -tp 8").not_looked_at == ["-tp 8"]
    assert explained("sglang serve m --pp_size 2").not_looked_at == ["--pp_size 2"]
    assert explained("vllm serve m --pp-size 2").not_looked_at == ["--pp-size 2"]


def test_a_command_without_a_model_is_still_read() -> None:
    report = explained("vllm serve --no-such-flag m")
    assert report.model is None
    assert report.not_looked_at == ["--no-such-flag m"]
    assert "stepahead serve MODEL " in report.command
