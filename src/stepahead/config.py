"""The options and how they are settled: one frozen dataclass, a reason for each change.

Knows no torch and no model files: what it must know of the model comes as `ModelFacts`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from stepahead import machine
from stepahead.errors import ConfigError, NotEnoughMemory

CHOICES: dict[str, tuple[str, ...]] = {
    "loop": ("serial", "overlap", "batch-queue"),
    "executor": ("inline", "process"),
    "device": ("cpu", "cuda", "hostile"),
    "fence": ("fine", "coarse"),
    "dtype": ("float32", "bfloat16"),
    "quantization": ("none", "float16", "int8", "int4"),
    "metric_names": ("stepahead", "vllm", "sglang"),
    "draft": ("none", "ngram", "mtp"),
}


def queue_depth(stages: int, ahead: bool) -> int:
    """How many steps the batch queue holds if nothing is said.

    A model in one piece is kept busy by 2.  One cut into `stages` needs a step for each, and one
    more where the runner can take it in before the first stage is free (`ahead`).
    """
    return 2 if stages == 1 else stages + ahead


# what a loop runs ahead if nothing is said; only the queue's depth can be chosen
DEPTHS = {"serial": 1, "overlap": 2, "batch-queue": queue_depth(stages=1, ahead=True)}
MAX_DEPTH = 8
MAX_STAGES = 7  # so that the queue holds a step for each, and one more
# where the next step's input token comes from
RELAYS = {"serial": "host", "overlap": "slot", "batch-queue": "row"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MAX_ROWS = 1024
MAX_DRAFTS = 6
DRAFTS = 3  # of a row in a step, if nothing is said


@dataclass(frozen=True)
class ModelFacts:
    """What the host must know of a model; bytes are as the weights will be kept.

    `packs`: whether its matrices can be quantised, and its rows kept apart to the bit.
    """

    vocab_size: int
    max_len: int
    eos_ids: tuple[int, ...]
    kv_bytes_per_token: int
    weight_bytes: int = 0
    num_layers: int = 1
    state_bytes: int = 0  # of one token, as a stage hands it to the next
    packs: bool = False


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine; None means "settle it for me" and `resolve` says how it did.

    model            a Hugging Face folder, a .gguf file, or `toy` (the hash model of the tests)
    loop             serial: the host looks after every step; overlap: one step later;
                     batch-queue: when its queue of steps is full
    depth            most steps launched and not yet retired, for batch-queue
    fence            what a plan's writes wait for: fine, the running step's last read of what they
                     overwrite; coarse, its end
    serial_prefill   a step of prompts alone waits until the one before it, of prompts alone too, is
                     retired
    executor         inline: the runner in this thread; process: in its own process
    pipeline_stages  parts that the model's layers are cut into, each in a process of its own
    device           cpu, cuda, or hostile: a CPU that runs operations in any order the edges allow
    device_seed      the hostile device's order
    dtype            float32 or bfloat16, for weights and KV
    quantization     how the CPU keeps the matrices' weights: none, as dtype says; float16; int8 or
                     int4, in blocks of 32 with a scale each
    batch_invariant  a request's logits are the same to the bit whatever else runs
    max_model_len    most positions of one request, prompt and output together
    max_rows         most requests in one step
    max_step_tokens  most positions computed in one step; longer prompts run in chunks
    page_size        token positions in a page
    num_pages        pages in the KV pool, or
    kv_memory_gb     its size in GiB
    prefix_cache     keep finished pages for prompts that begin alike
    draft            who proposes tokens for the model to check, several in one step: none, ngram
                     (what followed the last tokens where they came before), or mtp (a layer that
                     the model brings for it)
    draft_tokens     most drafts of a row in one step
    logits_processor  MODULE:NAME of code of yours that changes the logits of requests that ask for
                     it with `extra_args`; it is loaded in the runner's process
    seed             keys the noise of requests that bring no seed of their own
    threads          threads of the runner
    debug            check the scheduler's invariants at every step
    observe          a port of 127.0.0.1 that shows /state, /metrics and /trace of the engine while
                     it runs; 0 takes any free one
    metric_names     whose names the metrics have that others have too
    request_spans    export an OpenTelemetry span for each request; OTEL_ variables say where to
    """

    model: str
    loop: str = "overlap"
    depth: int | None = None
    fence: str = "fine"
    serial_prefill: bool = False
    executor: str = "process"
    pipeline_stages: int = 1
    device: str = "cpu"
    device_seed: int = 0
    dtype: str = "float32"
    quantization: str = "none"
    batch_invariant: bool = False
    max_model_len: int | None = None
    max_rows: int = 256
    max_step_tokens: int = 512
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_gb: float | None = None
    prefix_cache: bool = True
    draft: str = "none"
    draft_tokens: int | None = None
    logits_processor: str | None = None
    seed: int = 0
    threads: int | None = None
    debug: bool = False
    observe: int | None = None
    metric_names: str = "stepahead"
    request_spans: bool = False

    @property
    def steps_ahead(self) -> int:
        """D: the most steps launched and not yet retired."""
        if self.depth is not None:
            return self.depth
        stages = self.pipeline_stages
        staged = self.loop == "batch-queue" and stages > 1
        # a stage's plans wait in its pipe while it computes
        return queue_depth(stages, ahead=True) if staged else DEPTHS[self.loop]

    @property
    def relay(self) -> str:
        """Where the next step's input token comes from: `host`, `slot` or `row`.

        With stages a row is planned again when its token has come through all of them: no more than
        that many steps in the air, and the host has it by then.
        """
        if self.pipeline_stages == 1:
            return RELAYS[self.loop]
        return "row" if self.steps_ahead > self.pipeline_stages else "host"

    @property
    def step_width(self) -> int:
        """Positions of a decode row in a step: its last token, and drafts."""
        if self.draft == "none":
            return 1
        return 1 + (DRAFTS if self.draft_tokens is None else self.draft_tokens)

    @property
    def num_slots(self) -> int:
        """Slots on the device: slot 0 is padding, and D-1 batches' worth are spare."""
        return 1 + self.max_rows * self.steps_ahead


# what other engines call our fields
ALIASES = {
    "max_num_seqs": "max_rows",
    "max_running_requests": "max_rows",
    "max_num_batched_tokens": "max_step_tokens",
    "chunked_prefill_size": "max_step_tokens",
    "pipeline_parallel_size": "pipeline_stages",
    "pp_size": "pipeline_stages",
    "block_size": "page_size",
    "context_length": "max_model_len",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "num_pages",
    "random_seed": "seed",
    "num_speculative_tokens": "draft_tokens",
    "speculative_num_steps": "draft_tokens",
    "enable_deterministic_inference": "batch_invariant",
}


def config_from(model: str, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword options, in other engines' spellings too; errors name them."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    settled: dict[str, Any] = {}
    for name, value in options.items():
        target = ALIASES.get(name, name)
        if target not in fields or target == "model":
            known = ", ".join(sorted(fields - {"model"}))
            raise ConfigError(f"unknown option {name!r}; known options: {known}")
        if target in settled:
            # whichever of them came first
            alias = next(given for given in options if ALIASES.get(given) == target)
            raise ConfigError(
                f"{alias!r} is another spelling of {target!r}, which is given too; keep one"
            )
        settled[target] = value
    config = EngineConfig(model=model, **settled)
    _check(config)
    return config


_REQUIRED = ("max_rows", "max_step_tokens", "page_size", "pipeline_stages")
_AT_LEAST_ONE = (*_REQUIRED, "max_model_len", "num_pages", "threads")
_FAR_TOO_MANY = 1 << 40
_NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _check(config: EngineConfig) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            raise ConfigError(f"{name}={value!r}; choose one of {', '.join(choices)}")
    for name in _AT_LEAST_ONE:
        value = getattr(config, name)
        if value is None and name not in _REQUIRED:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _FAR_TOO_MANY:
            raise ConfigError(f"{name}={str(value)[:40]}; give a whole number of at least 1")
    _check_rest(config)


def _check_rest(config: EngineConfig) -> None:
    if config.page_size & (config.page_size - 1):
        raise ConfigError(f"page_size={config.page_size}; give a power of two, such as 16")
    if config.max_rows > MAX_ROWS:
        raise ConfigError(f"max_rows={config.max_rows}; at most {MAX_ROWS} rows are supported")
    if config.num_pages is not None and config.kv_memory_gb is not None:
        raise ConfigError("num_pages and kv_memory_gb both size the pool; give one of them")
    gib = config.kv_memory_gb
    if gib is not None and (
        isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 < gib < 1e6
    ):
        raise ConfigError(f"kv_memory_gb={gib!r}; give a positive number of GiB")
    _check_depth(config)
    for name in ("seed", "device_seed"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={value!r}; give a whole number")
    _check_observe(config)
    for name in ("serial_prefill", "batch_invariant", "prefix_cache", "debug", "request_spans"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r}; give true or false")
    if config.device == "hostile" and config.executor != "inline":
        raise ConfigError("device=hostile runs in this process only; use executor=inline")
    _check_kernels(config)
    _check_stages(config)
    _check_drafts(config)
    named = config.logits_processor
    if named is not None and not (isinstance(named, str) and _NAMED.fullmatch(named)):
        raise ConfigError(
            f"logits_processor={named!r}; give one as MODULE:NAME, such as mine.processors:Quiet"
        )


def _check_kernels(config: EngineConfig) -> None:
    if config.device == "cuda" and config.quantization != "none":
        raise ConfigError(
            f"quantization={config.quantization} runs on the CPU only for now; use "
            "quantization=none, or device=cpu"
        )
    if config.batch_invariant and (config.device == "cuda" or config.dtype != "float32"):
        raise ConfigError(
            f"batch_invariant with device={config.device} and dtype={config.dtype}: it is known of "
            "float32 on the CPU only; use device=cpu and dtype=float32, or leave it out"
        )


def _check_stages(config: EngineConfig) -> None:
    stages = config.pipeline_stages
    if stages == 1:
        return
    if stages > MAX_STAGES:
        raise ConfigError(f"pipeline_stages={stages}; at most {MAX_STAGES} are supported")
    if config.executor != "process":
        raise ConfigError(
            f"pipeline_stages={stages}: each stage is a process of its own; use executor=process"
        )
    if config.device != "cpu":
        raise ConfigError(
            f"pipeline_stages={stages} with device={config.device}: stages run on device=cpu only "
            "for now"
        )


def _check_drafts(config: EngineConfig) -> None:
    count = config.draft_tokens
    if config.draft == "none":
        if count is not None:
            raise ConfigError(f"draft_tokens={count}, but nothing drafts; give draft=ngram or mtp")
        return
    if count is not None and (
        isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_DRAFTS
    ):
        raise ConfigError(f"draft_tokens={str(count)[:40]}; give one from 1 to {MAX_DRAFTS}")
    if config.pipeline_stages > 1:
        raise ConfigError(
            f"draft={config.draft} with pipeline_stages={config.pipeline_stages}: drafts need the "
            "model in one piece for now; use draft=none or pipeline_stages=1"
        )


def _check_observe(config: EngineConfig) -> None:
    port = config.observe
    if port is None:
        if config.metric_names != "stepahead":
            raise ConfigError(
                f"metric_names={config.metric_names}, but nothing shows metrics; give observe=PORT"
            )
    elif isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"observe={str(port)[:40]}; give a port up to 65535, or 0 for a free one")


def _check_depth(config: EngineConfig) -> None:
    depth, own = config.depth, DEPTHS[config.loop]
    if depth is None:
        return
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"depth={depth!r}; give a whole number from 1 to {MAX_DEPTH}")
    if config.loop != "batch-queue" and depth != own:
        raise ConfigError(
            f"depth={depth}, but loop={config.loop} has a depth of {own}; use loop=batch-queue"
        )
    if config.loop == "batch-queue" and depth < 2:
        raise ConfigError("depth=1; batch-queue runs at least 2 deep, loop=serial has a depth of 1")


@dataclass(frozen=True)
class Resolved:
    """The effective configuration, with a reason for each thing that was settled or changed."""

    config: EngineConfig
    facts: ModelFacts
    reasons: tuple[str, ...]

    @property
    def model_len(self) -> int:
        """Most positions of one request."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def pages(self) -> int:
        """Pages of the pool, the padding page included."""
        assert self.config.num_pages is not None
        return self.config.num_pages + 1


def resolve(
    config: EngineConfig, facts: ModelFacts, bytes_available: int | None = None
) -> Resolved:
    """Fills in what was left open.  ConfigError or NotEnoughMemory when it can't be had.

    `bytes_available`: memory of the device free for weights and pool; None asks the machine.
    """
    _check(config)
    reasons: list[str] = []
    available = machine.device_memory(config.device) if bytes_available is None else bytes_available
    _check_cut(config, facts)
    _check_packs(config, facts)
    length = _settle_length(config, facts, reasons)
    pages = _settle_pages(config, facts, length, available, reasons)
    _advise_page_size(config, reasons)
    settled = dataclasses.replace(
        config,
        max_model_len=length,
        depth=_settle_depth(config, reasons),
        num_pages=pages,
        max_step_tokens=_settle_budget(config, reasons),
        draft_tokens=_settle_drafts(config, reasons),
        threads=_settle_threads(config, reasons),
    )
    return Resolved(settled, facts, tuple(reasons))


def _check_cut(config: EngineConfig, facts: ModelFacts) -> None:
    stages, layers = config.pipeline_stages, facts.num_layers
    if stages > layers:
        raise ConfigError(
            f"pipeline_stages={stages}, but the model has {layers} layer{'s' * (layers > 1)} and "
            "each stage needs one; give fewer stages"
        )


def _check_packs(config: EngineConfig, facts: ModelFacts) -> None:
    for name, off in (("quantization", "none"), ("batch_invariant", False)):
        value = getattr(config, name)
        if value != off and not facts.packs:
            raise ConfigError(f"{name}={value} is not here for this model yet; leave it out")


def _settle_depth(config: EngineConfig, reasons: list[str]) -> int:
    depth, stages = config.steps_ahead, config.pipeline_stages
    if stages > 1 and config.depth is None and config.loop == "batch-queue":
        reasons.append(f"depth={depth}: a step for each stage, and one that waits for the first")
    return depth


def _settle_budget(config: EngineConfig, reasons: list[str]) -> int:
    most = config.max_rows * config.step_width
    if config.max_step_tokens < most:
        # else decoding rows could keep a prompt waiting for as long as they run
        drafts = "" if config.step_width == 1 else ", drafts included"
        reasons.append(f"max_step_tokens={most}: every row of max_rows must fit a step{drafts}")
    return max(config.max_step_tokens, most)


def _settle_drafts(config: EngineConfig, reasons: list[str]) -> int | None:
    if config.draft == "none" or config.draft_tokens is not None:
        return config.draft_tokens
    reasons.append(f"draft_tokens={DRAFTS}: what draft={config.draft} proposes if nothing is said")
    return DRAFTS


def _settle_threads(config: EngineConfig, reasons: list[str]) -> int:
    cores, stages = machine.cores(), config.pipeline_stages
    if config.threads is None and stages > 1:
        share = max(1, cores // stages)
        reasons.append(f"threads={share}: the {cores} cores, shared by {stages} stages")
        return share
    if config.threads is None:
        reasons.append(f"threads={cores}: one for each core")
        return cores
    if config.threads > 4 * cores:
        raise ConfigError(f"threads={config.threads}; there are {cores} cores, give {cores} or so")
    return config.threads


def _settle_length(config: EngineConfig, facts: ModelFacts, reasons: list[str]) -> int:
    if config.max_model_len is None:
        reasons.append(f"max_model_len={facts.max_len}: the model's own")
        return facts.max_len
    if config.max_model_len > facts.max_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}, but the model knows {facts.max_len} positions"
        )
    return config.max_model_len


# how much of the memory that weights and tables leave goes to the pool unless its size is given
_POOL_SHARES = {
    "cpu": (0.25, "a quarter of free memory"),  # the machine is not ours alone
    "cuda": (0.85, "85 % of the GPU's free memory; a step needs some of the rest"),
}


def _settle_pages(
    config: EngineConfig, facts: ModelFacts, length: int, available: int, reasons: list[str]
) -> int:
    """Pages that requests can have; the pool has one more, for padding."""
    page_bytes = facts.kv_bytes_per_token * config.page_size
    most_useful = config.max_rows * -(-length // config.page_size)
    spare = max(0, available - facts.weight_bytes - _table_bytes(config, length))
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.kv_memory_gb is not None:
        pages = int(config.kv_memory_gb * 2**30 // page_bytes) - 1
        reasons.append(f"num_pages={pages}: kv_memory_gb={config.kv_memory_gb}")
    else:
        share, cause = _POOL_SHARES.get(config.device, _POOL_SHARES["cpu"])
        pages = min(most_useful, int(spare * share) // page_bytes - 1)
        reasons.append(
            f"num_pages={pages}: {'every row at full length' if pages == most_useful else cause}"
        )
    if pages < 1:
        raise NotEnoughMemory(f"the KV pool would hold {max(0, pages)} pages; give it more memory")
    if (pages + 1) * page_bytes > spare:
        raise NotEnoughMemory(
            f"the KV pool needs {(pages + 1) * page_bytes / 2**30:.2f} GiB, the weights "
            f"{facts.weight_bytes / 2**30:.2f} GiB and the page tables "
            f"{_table_bytes(config, length) / 2**30:.2f} GiB, but {available / 2**30:.2f} GiB are "
            "free; lower num_pages, kv_memory_gb, max_rows or max_model_len"
        )
    return pages


def _advise_page_size(config: EngineConfig, reasons: list[str]) -> None:
    if config.device == "cuda" and config.dtype != "float32" and config.page_size % 256:
        reasons.append(
            f"page_size={config.page_size}: as given; with 256 torch's own paged attention can "
            "read the pages where they lie"
        )


def _table_bytes(config: EngineConfig, length: int) -> int:
    """Page tables: an int32 on the host and an int64 on each stage for each page of each slot.  And
    what is looked up for drafts: an int32 on the device for each position of each slot."""
    entries = config.num_slots * -(-length // config.page_size)
    history = 4 * config.num_slots * length if config.draft == "ngram" else 0
    return entries * (4 + 8 * config.pipeline_stages) + history
