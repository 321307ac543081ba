"""What SGLang makes of its flags, as far as overlap goes.  A table."""

from __future__ import annotations

from stepahead.explain.report import Overlap
from stepahead.explain.rules import DEFAULT, Rule
from stepahead.explain.words import Words
from stepahead.sync import SyncReason

VERSION = "0.5.23"
_OFF = "--disable-overlap-schedule"
_STAGES = "--pipeline-parallel-size"
_DRAFTS = "--speculative-algorithm"
_STRATEGY = "--mamba-radix-cache-strategy"
_MLX = "SGLANG_USE_MLX"
_SPARSE = "SGLANG_EMBEDDINGS_SPARSE_HEAD"
_PREFILLS = "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"
_DELAY = "SGLANG_ENABLE_DELAY_SAMPLE"
# whose grammars advance under the running step, and whose do not
_CAPABLE = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP", "STANDALONE", "DFLASH", "DSPARK")
_INCAPABLE = ("NGRAM", "UNO")


def asked(words: Words) -> bool:
    """Whether overlap was demanded by name: there is no flag for that."""
    return False


def depth(words: Words, overlap: Overlap) -> int | None:
    """Most steps launched and not yet retired; None for its pipeline, whose steps are micro-batches
    of which each stage has one."""
    if overlap in ("refused", "depends") or words.number(_STAGES) > 1:
        return None
    return 2 if overlap == "on" else 1


def _off(words: Words) -> bool:
    return words.on(_OFF)


def _drafts(words: Words) -> str:
    return words.text(_DRAFTS).upper()


def _ngram(words: Words) -> bool:
    return _drafts(words) == "NGRAM"


def _plugin(words: Words) -> bool:
    return _drafts(words) not in ("", "NONE", *_CAPABLE, *_INCAPABLE)


def _grammar(words: Words) -> bool:
    return words.text("--grammar-backend") != "none" and not words.on("--is-embedding")


def _two_batches(words: Words) -> bool:
    return words.on("--enable-two-batch-overlap")


RULES: tuple[Rule, ...] = (
    Rule(
        "asked off",
        (_OFF,),
        _off,
        "off",
        "Asked for: each result is processed before the next batch is built.",
        "the host's time in every TPOT",
    ),
    Rule(
        DEFAULT,
        (),
        lambda words: not _off(words),
        "stays",
        "Overlap is on unless a rule speaks against it (a hybrid model may bring one with its "
        "files): batch n is launched, then the result of n - 1 is processed.",
        "one step more between a stop token and the end of its row",
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
        lambda words: words.number(_STAGES) > 1,
        "off",
        "With pipeline stages another loop runs, of micro-batches: results are processed beside "
        "other micro-batches, but there is no queue of results.",
        "a warning at the start; stages idle when micro-batches are few",
        (SyncReason.PIPELINE,),
    ),
    Rule(
        "mamba without a buffer",
        (_STRATEGY,),
        lambda words: words.text(_STRATEGY) == "no_buffer" and not _off(words),
        "refused",
        "Without a second buffer a state can't outlive the step that overwrites it, so this "
        "strategy is only taken together with --disable-overlap-schedule.",
        "an assertion at the start",
    ),
    Rule(
        "mamba, strategy auto",
        (_STRATEGY,),
        lambda words: words.text(_STRATEGY) == "auto" and not _off(words),
        "depends",
        "A hybrid model for which the second buffer is not to be had falls back to no buffer, and "
        "overlap goes off with it.",
        "the resolved strategy in the log of the start",
    ),
    Rule(
        "sparse embedding head",
        (_SPARSE,),
        lambda words: bool(words.variables.get(_SPARSE)),
        "off",
        "What it gives is no token, and what runs ahead relays tokens.",
        "a warning at the start",
    ),
    Rule(
        "diffusion model",
        ("--dllm-algorithm",),
        lambda words: words.on("--dllm-algorithm"),
        "off",
        "The host looks at a block after each refinement.",
        "a warning at the start; host time between any two refinements",
    ),
    Rule(
        "prefill and decode multiplexed",
        ("--enable-pdmux",),
        lambda words: words.on("--enable-pdmux") and not _off(words),
        "refused",
        "Its own loop shares the device between the two, and is only taken together with "
        "--disable-overlap-schedule.",
        "an assertion at the start",
    ),
    Rule(
        "drafts on a CPU",
        (_DRAFTS, "--device"),
        lambda words: bool(_drafts(words)) and words.text("--device") == "cpu",
        "off",
        "Drafting on the CPU has no overlapped path.",
        "a warning at the start; the host's time in every TPOT",
    ),
    Rule(
        "Apple's GPU",
        ("--device", _MLX),
        lambda words: words.text("--device") == "mps" and not words.on(_MLX),
        "off",
        "Only the MLX loop overlaps there.",
        "the host's time in every TPOT",
    ),
    Rule(
        "drafts of a plugin",
        (_DRAFTS,),
        lambda words: _plugin(words) and not _off(words),
        "depends",
        "An algorithm that was registered without support for overlap does not start with it.",
        "an error at the start; --disable-overlap-schedule avoids it",
    ),
    Rule(
        "a tree of drafts",
        (_DRAFTS, "--speculative-eagle-topk"),
        lambda words: (
            bool(_drafts(words))
            and words.number("--speculative-eagle-topk") > 1
            and not _off(words)
        ),
        "refused",
        "The overlapped loop relays one chain of drafts a row, so it takes a topk of 1 alone.",
        "an error at the start",
    ),
    Rule(
        "two prefills in a row",
        (_PREFILLS,),
        lambda words: words.on(_PREFILLS) and not _off(words),
        "held",
        "The result of a prefill is processed before the next prefill is launched, for the first "
        "one's TTFT. With DP attention one rank's prefill holds all of them.",
        "TTFT p50 falls, throughput of prompts with it",
        (SyncReason.SERIAL_PREFILL,),
    ),
    Rule(
        "grammar with drafts of the host",
        (_DRAFTS,),
        lambda words: (
            (_drafts(words) in _INCAPABLE or _plugin(words)) and _grammar(words) and not _off(words)
        ),
        "held",
        "In a decode batch with a grammar the result before it is processed first, in every step.",
        "TPOT of batches with schemas or tools",
    ),
    Rule(
        "grammar with drafts",
        (_DRAFTS,),
        lambda words: _drafts(words) in _CAPABLE and _grammar(words) and not _off(words),
        "stays",
        "The grammar is advanced over what was accepted while the drafts are being verified.",
        "host time under the verification; it shows once it is longer",
    ),
    Rule(
        "grammar",
        ("--grammar-backend",),
        lambda words: not _drafts(words) and _grammar(words) and not _off(words),
        "late",
        "In a batch with a grammar sampling waits until the result before it is processed and the "
        "mask is there: for all rows, those without a grammar too.",
        "the device idle between logits and sampling",
    ),
    Rule(
        "sampling delayed",
        (_DELAY,),
        lambda words: words.on(_DELAY) and not _drafts(words) and not _off(words),
        "late",
        "Every batch samples only when the result before it is processed.",
        "the device idle between logits and sampling",
    ),
    Rule(
        "lengths on the host",
        (_DRAFTS, "--enable-two-batch-overlap"),
        lambda words: (
            (_ngram(words) or (bool(_drafts(words)) and _two_batches(words))) and not _off(words)
        ),
        "held",
        "Lengths are copied to the host in every step, which waits until the verification before "
        "is over; the drafting after it still overlaps. Attention that declares nothing wants them "
        "too; that of GLM-5.3 does not.",
        "host waiting in each decode step",
        (SyncReason.HOST_LENGTHS,),
    ),
    Rule(
        "hidden states",
        ("--enable-return-hidden-states",),
        lambda words: words.on("--enable-return-hidden-states") and not _off(words),
        "stays",
        "They are copied with the tokens of their step; under confidential computing in line, "
        "where the copy blocks the thread that launches.",
        "a longer copy in steps with such requests",
        (SyncReason.HIDDEN_STATES, SyncReason.BLOCKING_COPY),
    ),
    Rule(
        "DP attention",
        ("--enable-dp-attention",),
        lambda words: words.on("--enable-dp-attention"),
        "stays",
        "In every step the ranks exchange a row of numbers over the CPU, as on the device it would "
        "queue behind the running forward; ranks without work run an idle batch.",
        "host time that grows with ranks; the slowest sets the pace",
    ),
    Rule(
        "separated",
        ("--disaggregation-mode",),
        lambda words: words.text("--disaggregation-mode") in ("prefill", "decode"),
        "stays",
        "Each role has a loop of its own that overlaps. A prefill chunk's KV is sent when its "
        "result is processed, a step after it was computed.",
        "TTFT with that step in it",
    ),
    Rule(
        "mixed batches",
        ("--enable-mixed-chunk",),
        lambda words: words.on("--enable-mixed-chunk"),
        "stays",
        "Decoding rows ride on a prefill chunk; without it prefills go first and decodes wait.",
        "TPOT p99 against p50",
    ),
    Rule(
        "embeddings",
        ("--is-embedding",),
        lambda words: words.on("--is-embedding"),
        "stays",
        "Batches follow each other through the same queue; there is no token to relay.",
        "host time between batches that are short",
    ),
    Rule(
        "no graphs",
        ("--disable-cuda-graph",),
        lambda words: words.on("--disable-cuda-graph"),
        "stays",
        "Each kernel is launched by the host, some 2,000 a step for a model of 80 layers: 10 to 20 "
        "ms that a plan made ahead can't hide if the forward is shorter.",
        "device idle while the scheduler's thread is busy",
    ),
)
