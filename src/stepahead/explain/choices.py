"""The deployment choices: what each is here, what it does to overlap, where one would see it.

A table.  `now` says what holds in this engine and this configuration, and says so where the engine
has no such thing yet; the figures and causes in `watch` are those of a run's summary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepahead.config import EngineConfig
from stepahead.explain.models import Described
from stepahead.explain.report import ChoiceReport
from stepahead.sync import SyncReason

NOT_HERE = "not in this engine yet"
Now = Callable[[EngineConfig, Described], str]


@dataclass(frozen=True)
class Choice:
    """One row.  `reasons`: under which names the steps that it holds up are counted."""

    name: str
    title: str
    now: Now
    overlap: str
    watch: str
    reasons: tuple[SyncReason, ...] = ()


def choices_of(config: EngineConfig, model: Described) -> list[ChoiceReport]:
    """Every choice as it stands with this configuration and model."""
    reports: list[ChoiceReport] = []
    for choice in CHOICES:
        now = choice.now(config, model)
        reports.append(
            ChoiceReport(
                choice.name,
                choice.title,
                not now.startswith(NOT_HERE),
                now,
                choice.overlap,
                choice.watch,
                [reason.value for reason in choice.reasons],
            )
        )
    return reports


def _missing(words: str) -> Now:
    return lambda config, model: f"{NOT_HERE}: {words}"


_LOOPS = {
    "serial": "serial: launch, land and retire each step before the next",
    "overlap": "overlap: launch a step, then land and retire the one before it",
    "batch-queue": "batch-queue: launch until the queue is full, then land and retire the oldest",
}
_RELAYS = {
    "host": "the host brings each row's token",
    "slot": "tokens stay on the device, by slot",
    "row": "tokens stay on the device, by the rows of the last steps",
}


def _loop(config: EngineConfig, _model: Described) -> str:
    return f"{_LOOPS[config.loop]}; {_RELAYS[config.relay]}"


def _depth(config: EngineConfig, _model: Described) -> str:
    deep = config.steps_ahead
    if deep == 1:
        return "D = 1: the host waits for each step"
    spare = (deep - 1) * config.max_rows
    return f"D = {deep}: {deep - 1} unretired when the next is planned; {spare:,} spare slots"


def _stages(config: EngineConfig, _model: Described) -> str:
    stages = config.pipeline_stages
    if stages == 1:
        return "one: the model is in one piece"
    turns = min(stages, config.steps_ahead)
    return f"{stages}, a process each, on the CPU only so far; rows take turns in {turns} plans"


def _fence(config: EngineConfig, _model: Described) -> str:
    if config.fence == "coarse":
        return "coarse: a plan's page-table writes wait for the end of the running step"
    return "fine: they wait for the running step's last read, if the model says when that is"


def _chunks(config: EngineConfig, _model: Described) -> str:
    tokens = max(config.max_step_tokens, config.max_rows)
    held = "wait for each other" if config.serial_prefill else "overlap like any other"
    return f"on: at most {tokens:,} positions a step, longer prompts in chunks; prompts {held}"


def _drafts(config: EngineConfig, model: Described) -> str:
    own = f"; the model brings {model.drafts} MTP layer, not used" if model.drafts else ""
    if config.draft == "none":
        return f"no drafts (draft=ngram has them): one token a row and step{own}"
    most = config.step_width
    return f"{config.draft}: up to {most - 1} drafts, so 1 to {most} tokens a row and step{own}"


def _grammar(config: EngineConfig, _model: Described) -> str:
    if config.pipeline_stages > 1:
        return f"{NOT_HERE} with pipeline stages: such requests are refused"
    return "for each request that asks: its row alone is sampled behind the others"


def _hidden(_config: EngineConfig, _model: Described) -> str:
    return "hidden states for each request that asks (return_hidden_states); no embedding models"


def _confidential(config: EngineConfig, _model: Described) -> str:
    if config.device == "hostile":
        return "modelled by device=hostile, whose copies can be made to block"
    return f"{NOT_HERE}: copies are made by the runner's own thread, and nothing detects the mode"


def _kind(what: str) -> Now:
    def now(_config: EngineConfig, model: Described) -> str:
        of_model = "this model needs none" if model.ordinary else "whether it needs one: not known"
        return f"{NOT_HERE}: {what}; {of_model}"

    return now


CHOICES: tuple[Choice, ...] = (
    Choice(
        "loop",
        "loop",
        _loop,
        "In serial the host's time adds to every step. The other two plan a step while the device "
        "runs one, so it costs nothing until it is longer than the forward.",
        "host exposed against host hidden; idle: plan late; TPOT p50",
        (SyncReason.DRAIN,),
    ),
    Choice(
        "depth",
        "depth",
        _depth,
        "A decode step takes max(F, H, (F + H + h) / D): forward, host, hand-over. D = 2 hides a "
        "steady host; more helps where times vary. A row that stops by a token has up to D - 1 "
        "rows in the air for nothing.",
        "TPOT p99 against p50; with too few pages rows wait until others land, the queue drains",
        (SyncReason.STAGING, SyncReason.DRAIN),
    ),
    Choice(
        "fence",
        "fence",
        _fence,
        "fine lets the next plan's writes go on under the running step; coarse puts them between "
        "two steps, on the device, in each step that has new pages or rows.",
        "idle: fence; more with coarse. The host waits in neither case",
    ),
    Choice(
        "dp-attention",
        "DP attention with EP",
        _missing("one device, one rank"),
        "All ranks take the same branch in each step or their collectives do not meet, so they "
        "agree first; on the device that would queue behind the running forward. Ranks without "
        "work run an empty step, and the slowest rank sets the pace.",
        "the time of the agreement; rows by rank; prompts on one rank hold the others' decodes",
    ),
    Choice(
        "chunked-prefill",
        "chunked prefill",
        _chunks,
        "A chunk is a long forward, so it hides more host than a decode step; but its first token "
        "is published a step later than in serial, unless prompts wait for each other.",
        "TTFT p50 and p99; TPOT p99 of the rows that decode beside it",
        (SyncReason.SERIAL_PREFILL,),
    ),
    Choice(
        "speculation",
        "MTP, speculation",
        _drafts,
        "How many drafts were accepted is known on the device first: lengths are read there, and "
        "the host plans on upper bounds. A host that drafts itself (n-grams) can't run ahead.",
        "accepted drafts by position; a step verifies k + 1 positions a row, so F grows too",
        (SyncReason.HOST_LENGTHS,),
    ),
    Choice(
        "grammar",
        "grammar",
        _grammar,
        "A row's mask needs its last token on the host. Masks are made beside the runner, in the "
        "shadow of the forward, and only such rows are sampled when they are there; engines that "
        "defer the whole batch lose more.",
        "idle: mask late; against the share of such rows",
        (SyncReason.GRAMMAR,),
    ),
    Choice(
        "disaggregation",
        "prefill/decode separation",
        _missing("prefill and decode share an engine"),
        "Decode steps keep their length, as no chunk is in between. KV may be sent only when the "
        "step that wrote it is over; if the scheduler sends it, that is a step late.",
        "TTFT with the transfer in it; pages held until the peer has them",
    ),
    Choice(
        "mixed-batches",
        "mixed batches",
        lambda config, model: "on: decoding rows first, chunks in what is left of the step",
        "A step's length jumps when a chunk joins, and every decoding row waits for it; in return "
        "no step runs without them, and the loop stays filled.",
        "TPOT p99 against p50; lower max_step_tokens for smaller jumps",
    ),
    Choice(
        "pipeline",
        "pipeline stages",
        _stages,
        "A row's next token comes back after all stages, so it can be in one of so many steps; "
        "with fewer groups of rows than stages, stages idle. A queue of stages + 1 steps fills "
        "them.",
        "steps/s against the slowest stage; rows spread over as many steps as stages",
        (SyncReason.PIPELINE,),
    ),
    Choice(
        "hidden-states",
        "hidden states, embeddings",
        _hidden,
        "A row's state is thousands of times its token: the copy lengthens the landing of steps "
        "that have such rows. An embedding is one forward, so there is no next token to run "
        "ahead for.",
        "idle: copy; TPOT while such requests run; ask for states only where they are used",
        (SyncReason.HIDDEN_STATES,),
    ),
    Choice(
        "confidential",
        "confidential computing",
        _confidential,
        "A copy to the host blocks the thread that asks until the device is done, so the next "
        "launch comes late unless a thread of its own asks.",
        "idle: copy; TPOT as of the serial loop",
        (SyncReason.BLOCKING_COPY,),
    ),
    Choice(
        "hybrid-caches",
        "hybrid, mamba caches",
        _kind("keys and values only"),
        "A recurrent state is overwritten in place, so a step that was wasted has spoiled it: a "
        "loop that runs ahead keeps a second copy by slot, and can cache prefixes only where it "
        "took one.",
        "memory of states by slot, times the depth; prefix hits",
    ),
    Choice(
        "diffusion",
        "diffusion LLMs",
        _kind("one token after another"),
        "A block is refined until the host or the device says it is done. If the host does, each "
        "refinement waits for the one before.",
        "steps a block; host exposed in each",
    ),
)
