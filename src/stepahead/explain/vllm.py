"""What vLLM makes of its flags, as far as overlap goes.  A table, and how deep its queue is."""

from __future__ import annotations

from typing import Any

from stepahead.explain.report import Overlap
from stepahead.explain.rules import DEFAULT, Rule
from stepahead.explain.words import Words
from stepahead.sync import SyncReason

VERSION = "0.32"
_ON = "--async-scheduling"
_OFF = "--no-async-scheduling"
_STAGES = "--pipeline-parallel-size"
_RANKS = "--data-parallel-size"
_DRAFTS = "--speculative-config"
_EXECUTOR = "--distributed-executor-backend"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_DRAFT_FLAGS = (_DRAFTS, "--spec-method", "--spec-model")
_POOLING_FLAGS = ("--runner", "--convert", "--task")
_GENERATING = ("", "auto", "generate", "none")
_ON_DEVICE = ("ngram_gpu", "draft_model", "dspark", "dflash", "mtp")
_EXECUTORS = ("", "mp", "uni", "external_launcher")


def asked(words: Words) -> bool:
    """Whether async scheduling was demanded by name; the last word counts."""
    return words.on(_ON) and not _off(words)


def depth(words: Words, overlap: Overlap) -> int | None:
    """Most steps launched and not yet retired."""
    stages = max(1, words.number(_STAGES))
    if overlap in ("refused", "depends"):
        return None
    if overlap == "off":
        return stages
    return 2 if stages == 1 else stages + 1


def _off(words: Words) -> bool:
    order = [g.flag.names[0] for g in words.given if g.flag and g.flag.names[0] in (_ON, _OFF)]
    return bool(order) and order[-1] == _OFF


def _drafts(words: Words) -> dict[str, Any]:
    """The drafting asked for; empty where there is none."""
    flags = {"--spec-method": "method", "--spec-model": "model"}
    named = {key: words.text(flag) for flag, key in flags.items() if words.on(flag)}
    return words.values.get(_DRAFTS, {}) | named


def _method(words: Words) -> str:
    drafts = _drafts(words)
    if "method" not in drafts and drafts.get("model") in ("ngram", "[ngram]"):
        return "ngram"
    return str(drafts.get("method", ""))


def _guessed(words: Words) -> bool:
    return bool(_drafts(words)) and not _method(words)


def _host_drafts(words: Words) -> bool:
    method = _method(words)
    on_device = method in _ON_DEVICE or "eagle" in method or method.endswith("_mtp")
    return bool(method) and not on_device


def _pooling(words: Words) -> bool:
    return any(words.text(flag) not in _GENERATING for flag in _POOLING_FLAGS)


def _old_runner(words: Words) -> bool:
    return _RUNNER in words.variables and not words.on(_RUNNER)


def _piped(words: Words) -> bool:
    return words.number(_STAGES) > 1


def _on_cpu(words: Words) -> bool:
    return words.text("--device") == "cpu" or words.variables.get("VLLM_TARGET_DEVICE") == "cpu"


RULES: tuple[Rule, ...] = (
    Rule(
        "asked off",
        (_OFF,),
        _off,
        "off",
        "Asked for. With one stage every step is awaited; with several the queue holds one step "
        "for each.",
        "the host's time in every TPOT",
    ),
    Rule(
        DEFAULT,
        (_ON,),
        lambda words: not _off(words),
        "stays",
        "Async scheduling is on unless a rule speaks against it (a pooling model may be known by "
        "its files alone); asked for by name, such a rule ends the start instead of switching it "
        "off.",
        "the line about asynchronous scheduling in the log of the start",
    ),
    Rule(
        "pooling model",
        _POOLING_FLAGS,
        lambda words: _pooling(words) and not _off(words),
        "off",
        "A pooling model has no next token to run ahead for.",
        "no queue of steps: each batch is awaited",
        asked="depends",
    ),
    Rule(
        "drafts on the host",
        _DRAFT_FLAGS,
        lambda words: _host_drafts(words) and not _off(words),
        "off",
        "This method drafts from tokens on the host, so each step has to be awaited. Overlap "
        "stays with eagle, mtp, draft_model, ngram_gpu, dspark and dflash.",
        "a warning at the start; host time between any two steps",
        (SyncReason.HOST_LENGTHS,),
        asked="refused",
    ),
    Rule(
        "method not named",
        _DRAFT_FLAGS,
        lambda words: _guessed(words) and not _off(words),
        "depends",
        "The method is found out from the drafter's files.",
        "the line about asynchronous scheduling in the log of the start",
        (SyncReason.HOST_LENGTHS,),
    ),
    Rule(
        "drafts not padded",
        (_DRAFTS,),
        lambda words: bool(_drafts(words).get("disable_padded_drafter_batch")) and not _off(words),
        "off",
        "A drafter's batch without padding needs the accepted counts on the host.",
        "a warning at the start; host time between any two steps",
        (SyncReason.HOST_LENGTHS,),
        asked="refused",
    ),
    Rule(
        "executor",
        (_EXECUTOR,),
        lambda words: words.text(_EXECUTOR) == "ray" and not _off(words),
        "off",
        "This executor does not say that it can take a step while another runs; mp, uni and "
        "external_launcher do.",
        "a warning at the start",
        asked="refused",
    ),
    Rule(
        "own executor",
        (_EXECUTOR,),
        lambda words: words.text(_EXECUTOR) not in (*_EXECUTORS, "ray") and not _off(words),
        "depends",
        "An executor class says itself whether it can take a step while another runs; if it says "
        "nothing, it can't.",
        "the line about asynchronous scheduling in the log of the start",
    ),
    Rule(
        "two batches on ROCm",
        ("--enable-dbo", "--all2all-backend"),
        lambda words: (
            words.on("--enable-dbo")
            and words.text("--all2all-backend") == "deepep_high_throughput"
            and not _off(words)
        ),
        "depends",
        "On ROCm this pair switches it off (or, asked for by name, ends the start); elsewhere it "
        "does not.",
        "a warning at the start",
    ),
    Rule(
        "stages on the older runner",
        (_RUNNER, _STAGES),
        lambda words: _old_runner(words) and _piped(words) and not _off(words),
        "off",
        "The older runner can't bring a token from the last stage to the first without the host.",
        "a queue of one step for each stage; the host's time in each round",
        (SyncReason.PIPELINE,),
        asked="refused",
    ),
    Rule(
        "CPU",
        ("--device", "VLLM_TARGET_DEVICE"),
        lambda words: _on_cpu(words) and not _off(words),
        "off",
        "On the CPU platform it is always switched off.",
        "the host's time in every TPOT",
    ),
    Rule(
        "own scheduler",
        ("--scheduler-cls",),
        lambda words: words.on("--scheduler-cls") and not _off(words),
        "depends",
        "A scheduler class that is not built on the asynchronous one loses it without a word.",
        "no warning; the host's time in every TPOT",
    ),
    Rule(
        "file of options",
        ("--config",),
        lambda words: words.on("--config"),
        "depends",
        "The file is not read here, and any option in it may decide; what the command line says "
        "goes before it.",
        "the options that the start logs",
    ),
    Rule(
        "stages",
        (_STAGES,),
        lambda words: _piped(words) and not _old_runner(words),
        "stays",
        "The queue holds a step for each stage, and one more if it is asynchronous; the decodes of "
        "a request are that many steps apart, so few requests leave stages without work.",
        "idle stages at low load; TPOT as long as a round of all stages",
        (SyncReason.PIPELINE,),
    ),
    Rule(
        "ranks",
        (_RANKS,),
        lambda words: words.number(_RANKS) > 1,
        "stays",
        "Ranks go in waves, and one without work runs an empty batch; what they agree on each step "
        "goes over the CPU instead of NCCL while overlap is on, and blocks.",
        "host time that grows with ranks; the slowest sets the pace",
    ),
    Rule(
        "structured output",
        ("--structured-outputs-config",),
        lambda words: not _pooling(words) and (not _off(words) or _piped(words)),
        "late",
        "In a step with a row whose grammar still waits for its last token, the sampling of the "
        "whole batch is put off until the step before is retired. Rows without a grammar wait too.",
        "TPOT against the share of requests with a schema or tools",
    ),
    Rule(
        "structured output with drafts",
        _DRAFT_FLAGS,
        lambda words: bool(_drafts(words)) and not _pooling(words) and not _off(words),
        "held",
        "With such rows drafts come to the host to be checked against the grammar before they are "
        "verified.",
        "accepted drafts and TPOT of those batches",
    ),
    Rule(
        "penalties on the older runner",
        (_RUNNER,),
        lambda words: _old_runner(words) and not _off(words),
        "held",
        "Penalties and banned words need the last token on the host, which waits for its copy just "
        "before sampling.",
        "TPOT of batches with such requests",
    ),
    Rule(
        "transfer of KV",
        ("--kv-transfer-config",),
        lambda words: words.on("--kv-transfer-config"),
        "stays",
        "An engine that receives KV gives blocks back only when the steps that may still write "
        "them are retired.",
        "blocks in use after requests have ended; preemptions",
    ),
    Rule(
        "no graphs",
        ("--enforce-eager",),
        lambda words: words.on("--enforce-eager"),
        "stays",
        "Each kernel is launched by the host, some 2,000 a step for a model of 80 layers: 10 to 20 "
        "ms that a plan made ahead can't hide if the forward is shorter.",
        "device idle while a thread of the worker is busy",
    ),
)
