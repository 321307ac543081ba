"""A whole engine from an EngineConfig: model facts, memory, runner, executor, vocabulary.

The one place that knows all rooms by name.  Nothing here steps the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from stepahead.config import DTYPE_BYTES, EngineConfig, ModelFacts, Resolved, resolve
from stepahead.engine import Engine, limits_of
from stepahead.errors import ConfigError, UnsupportedModel
from stepahead.grammar.vocabulary import Vocabulary as TokenVocabulary
from stepahead.loop.base import Executor
from stepahead.model.sparse import (
    KVGroup,
    SparseSpec,
    bytes_per_token,
    groups_of,
    sparse_weight_values,
    told,
)
from stepahead.model.spec import ModelSpec, kv_bytes_per_token, kv_width, read_spec
from stepahead.runner.spec import RunnerSpec
from stepahead.scheduler.stop import Vocabulary
from stepahead.text.texts import Texts, ToyTexts
from stepahead.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stepahead.executor.process import StartedWorker

TOY = "toy"
TOY_VOCAB = 512
TOY_MAX_LEN = 4096
_LOAD = "stepahead.model.load:load"
_KERNELS = ("stepahead.model.kernel_linear", "stepahead.model.fused")
_TOY_MODEL = "stepahead.model.toy:ToyModel"
_TOY_CELL_BYTES = 8
_TOY_LAYERS = 8
_DRAFTERS = {
    "none": "",
    "ngram": "stepahead.runner.ngram:NgramDrafter",
    "mtp": "stepahead.runner.mtp:MtpDrafter",
}


@dataclass(frozen=True)
class ModelParts:
    """What an engine is assembled around.

    factory  "module:function" that the runner's process calls with `options` for the model, and
             with device="cuda" where that is where it runs
    part     as factory, for a stage: called with `stage` and `stages`, too; "" if it can't be cut
    notes    what was changed from the model's files, and why
    groups   page tensors of the pool, where they are of more than one kind
    mtp      whether `factory` gives a model with the layer that draft=mtp drafts with
    """

    facts: ModelFacts
    texts: Texts
    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    part: str = ""
    notes: tuple[str, ...] = ()
    groups: tuple[KVGroup, ...] = ()
    mtp: bool = False


@dataclass(frozen=True)
class Assembly:
    """An engine ready to take requests, its texts, and the settings with the reasons for them."""

    engine: Engine
    texts: Texts
    resolved: Resolved
    settings: tuple[str, ...]


def build_engine(config: EngineConfig, chat_template: str | None = None) -> Assembly:
    """The engine that `config` describes, ready.

    `chat_template` is a template's text that replaces the model's own.  Raises ConfigError,
    NotEnoughMemory or ModelError; nothing is left running then.
    """
    worker = _early_worker(config)
    try:
        return assemble(config, model_parts(config, chat_template), worker)
    except BaseException:
        if worker is not None:
            worker.close()
        raise


def _early_worker(config: EngineConfig) -> StartedWorker | None:
    """The runner's process, which loads torch while this one reads the model's files.

    None where the runner is in this process, or in several.
    """
    if config.executor != "process" or config.pipeline_stages > 1:
        return None
    from stepahead.executor.process import BUILDER, StartedWorker

    names = (BUILDER, _TOY_MODEL if config.model == TOY else _LOAD)
    kernels = _KERNELS if config.model != TOY and config.device != "cuda" else ()
    return StartedWorker((*(name.partition(":")[0] for name in names), *kernels))


def model_parts(config: EngineConfig, chat_template: str | None = None) -> ModelParts:
    """What the files of `config.model` say, without reading weights; ModelError if they can't."""
    if config.model == TOY:
        _refuse_mtp(config, "the toy")
        return toy_parts()
    spec = read_spec(config.model)
    if spec.sparse is None:
        _refuse_mtp(config, spec.architecture)
    texts = Tokenizer.load(config.model, chat_template)
    width = kv_width(spec, DTYPE_BYTES[config.dtype], config.quantization)
    facts = ModelFacts(
        vocab_size=spec.vocab_size,
        max_len=spec.max_len,
        eos_ids=_eos_ids(spec, texts),
        kv_bytes_per_token=kv_bytes_per_token(spec, width),
        weight_bytes=0 if spec.sparse is not None else weight_bytes(spec, config),
        num_layers=spec.num_layers,
        state_bytes=spec.hidden_size * DTYPE_BYTES[config.dtype],
        packs=spec.sparse is None,
    )
    options = {"path": config.model, "dtype": config.dtype}
    if spec.sparse is not None:
        whole = ModelParts(facts, texts, _LOAD, options, notes=spec.notes)
        return _sparse_parts(whole, spec, spec.sparse, config)
    options |= {"quantization": config.quantization, "invariant": config.batch_invariant}
    options["settle_threads"] = config.threads is None and config.pipeline_stages == 1
    part = "stepahead.parallel.pipeline:load_part"
    return ModelParts(facts, texts, _LOAD, options, part, spec.notes)


def _refuse_mtp(config: EngineConfig, model: str) -> None:
    if config.draft == "mtp":
        raise ConfigError(
            f"draft=mtp, but {model} has no layer that drafts (MTP); use draft=ngram or draft=none"
        )


def _sparse_parts(
    parts: ModelParts, spec: ModelSpec, sparse: SparseSpec, config: EngineConfig
) -> ModelParts:
    """With groups of pages, and with the MTP layer where it is wanted and there."""
    width = DTYPE_BYTES[config.dtype]
    mtp = config.draft == "mtp" and sparse.mtp_layers > 0
    groups = groups_of(sparse, width, mtp)
    facts = replace(
        parts.facts,
        kv_bytes_per_token=bytes_per_token(groups),
        weight_bytes=weight_values(spec, mtp) * width,
    )
    notes = parts.notes
    if sparse.mtp_layers and not mtp:
        idle = f"model.layers.{spec.num_layers} (MTP) stays on disk; draft=mtp drafts with it"
        notes = (*notes, idle)
    options = parts.options | {"drafts": mtp}
    return replace(parts, facts=facts, options=options, notes=notes, groups=groups, mtp=mtp)


def toy_parts(vocab_size: int = TOY_VOCAB, max_len: int = TOY_MAX_LEN) -> ModelParts:
    """The hash model: token ids only."""
    texts = ToyTexts(vocab_size)
    facts = ModelFacts(
        vocab_size,
        max_len,
        texts.eos_ids,
        _TOY_CELL_BYTES,
        num_layers=_TOY_LAYERS,
        state_bytes=2 * _TOY_CELL_BYTES,
    )
    options = {"vocab_size": vocab_size, "max_len": max_len}
    part = "stepahead.parallel.pipeline:ToyPart"
    return ModelParts(facts, texts, _TOY_MODEL, options, part)


def assemble(
    config: EngineConfig, parts: ModelParts, worker: StartedWorker | None = None
) -> Assembly:
    """An engine around any model that the runner's process can build from `parts`.

    `worker` is that process, where it has been started already.
    """
    resolved = _resolved(config, parts)
    vocabulary = Vocabulary(parts.texts.token_bytes, parts.texts.special_ids)
    executor, clock_ns = _executor(config.executor, runner_spec(resolved, parts), worker)
    try:
        engine = Engine(resolved, executor, vocabulary, clock_ns)
    except BaseException:  # memory may be short for its tables, or Ctrl-C may come
        executor.close()
        raise
    engine.observer.garbage.freeze()
    notes = (*parts.notes, *_pool_note(resolved, parts.groups), *getattr(executor, "notes", ()))
    told_settings = (*settings(resolved), *notes)
    return Assembly(engine, parts.texts, resolved, told_settings)


def _resolved(config: EngineConfig, parts: ModelParts) -> Resolved:
    """Without drafts where it is the model's files that lack the layer for them."""
    if config.draft != "mtp" or parts.mtp:
        return resolve(config, parts.facts)
    settled = resolve(replace(config, draft="none", draft_tokens=None), parts.facts)
    reason = "draft=none: the model's files have no layer that drafts (MTP)"
    return replace(settled, reasons=(*settled.reasons, reason))


def _pool_note(resolved: Resolved, groups: tuple[KVGroup, ...]) -> tuple[str, ...]:
    if not groups:
        return ()
    tokens = (resolved.pages - 1) * resolved.config.page_size
    return (f"KV pool: {told(groups)}; room for {tokens:,} tokens",)


def runner_spec(resolved: Resolved, parts: ModelParts) -> RunnerSpec:
    """What the runner's process needs to know."""
    config = resolved.config
    assert config.threads is not None
    # a model on the CPU need not know of places; the hostile device is the CPU
    place = {"device": "cuda"} if config.device == "cuda" else {}
    stages = config.pipeline_stages
    if stages > 1 and not parts.part:
        raise ConfigError(f"pipeline_stages={stages}, but this model can't be cut into stages")
    return RunnerSpec(
        factory=parts.factory if stages == 1 else parts.part,
        options=parts.options | place,
        device=config.device,
        device_seed=config.device_seed,
        max_rows=config.max_rows,
        num_slots=config.num_slots,
        num_pages=resolved.pages,
        page_size=config.page_size,
        max_pages=limits_of(resolved).max_pages,
        eos_ids=resolved.facts.eos_ids,
        threads=config.threads,
        relay=config.relay,
        depth=config.steps_ahead,
        fence=config.fence,
        check=config.debug,
        stages=stages,
        step_tokens=config.max_step_tokens,
        state_bytes=resolved.facts.state_bytes,
        drafter=_DRAFTERS[config.draft],
        draft_tokens=config.step_width - 1,
        processor=config.logits_processor or "",
        vocabulary=token_vocabulary(resolved.facts, parts.texts),
    )


def token_vocabulary(facts: ModelFacts, texts: Texts) -> TokenVocabulary | None:
    """What grammars are made for; None where no answer can keep to one, as without an end of
    sequence."""
    try:
        return TokenVocabulary.of(texts, facts.vocab_size, facts.eos_ids)
    except UnsupportedModel:
        return None


def settings(resolved: Resolved) -> tuple[str, ...]:
    """One line for each option: its effective value, and why where it was settled or changed."""
    reasons = {reason.partition("=")[0]: reason for reason in resolved.reasons}
    values = {option.name: getattr(resolved.config, option.name) for option in fields(EngineConfig)}
    return tuple(
        reasons.pop(name, f"{name}={value}") for name, value in values.items() if value is not None
    ) + tuple(reasons.values())


def weight_values(spec: ModelSpec, drafts: bool = False) -> int:
    """How many numbers the model's weights are, embeddings included; with what only drafts if it
    does."""
    tables = (1 if spec.tied_head else 2) * spec.vocab_size * spec.hidden_size
    if spec.sparse is not None:
        dims = (spec.hidden_size, spec.num_heads, spec.intermediate_size)
        return tables + sparse_weight_values(spec.sparse, *dims, drafts) + spec.hidden_size
    head = spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * head + 2 * kv)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * layer + tables


def weight_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of a model without `sparse`.

    Embeddings that are tied to the head are there once, but on a CPU whose kernels can't run the
    model: there the head is laid out for torch's.  In int8 blocks of 32 weights have a multiple of
    their channel's unit, in int4, where the head is in int8, a scale and a least value.  Of stages
    each end has its own.
    """
    stages = config.pipeline_stages > 1  # the first has its own
    fused = config.device == "cuda" or _fused(spec, config)
    copies = 1 + (not spec.tied_head or not fused) + (spec.tied_head and stages)
    width, table = DTYPE_BYTES[config.dtype], spec.vocab_size * spec.hidden_size
    layers = weight_values(spec) - (1 if spec.tied_head else 2) * table
    if config.quantization == "none":
        return (layers + copies * table) * width
    of_32 = {"float16": 64, "int8": 33, "int4": 20}[config.quantization]  # bytes of 32 weights
    units = {"float16": 0, "int8": 4, "int4": 0}[config.quantization] * _channels(spec)
    if config.quantization != "float16":
        units += 4 * spec.vocab_size
    weights = layers * of_32 + table * max(of_32, 33)
    return (copies - 1) * table * width + weights // 32 + units


def _channels(spec: ModelSpec) -> int:
    """Outputs of all layers' matrices."""
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return spec.num_layers * (qkv + 2 * spec.hidden_size + 2 * spec.intermediate_size)


def _fused(spec: ModelSpec, config: EngineConfig) -> bool:
    """Whether the CPU's kernels run all of its layers."""
    return spec.fusable and config.dtype == "float32"


def _eos_ids(spec: ModelSpec, texts: Texts) -> tuple[int, ...]:
    ids = dict.fromkeys((*spec.eos_token_ids, *texts.eos_ids))
    # The tokenizer may know more tokens than the model; and an id that no token has ends nothing,
    # as in transformers, but as an index of logits it would mean another token or none.
    return tuple(token for token in ids if 0 <= token < spec.vocab_size)


def _executor(
    kind: str, spec: RunnerSpec, worker: StartedWorker | None
) -> tuple[Executor, Callable[[], int]]:
    """Where the runner is to run, and the clock of the times in its results."""
    if spec.stages > 1:
        from stepahead.executor.pipeline import PipelineExecutor

        return PipelineExecutor(spec), time.perf_counter_ns
    if kind == "process":
        from stepahead.executor.process import ProcessExecutor

        # where no plan comes while a step runs there is nothing to do beside it
        beside = spec.device == "cpu" and spec.depth > 1
        return ProcessExecutor(replace(spec, beside=beside), worker=worker), time.perf_counter_ns
    # torch comes with these: a host whose runner is a process of its own does without it
    from stepahead.executor.failures import decode_build_failure, encode_build_failure
    from stepahead.executor.inline import InlineExecutor
    from stepahead.runner.build import build_runner

    try:
        executor = InlineExecutor(build_runner(spec))
    except (Exception, SystemExit) as error:  # the words, and the kinds, that a worker would send
        raise decode_build_failure(encode_build_failure(error)) from error
    return executor, executor.now_ns
