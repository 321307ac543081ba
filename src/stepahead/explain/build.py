"""The two documents, put together from the tables and the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepahead.errors import ModelError
from stepahead.explain import sglang, vllm
from stepahead.explain.choices import choices_of
from stepahead.explain.memory import Memory, memory_of
from stepahead.explain.models import Described, describe
from stepahead.explain.report import CommandReport, ModelReport, Overlap
from stepahead.explain.rules import Rule, findings_of, overlap_of, that_matter
from stepahead.explain.settings import settle
from stepahead.explain.translate import translate
from stepahead.explain.words import Words, read_words


@dataclass(frozen=True)
class _Engine:
    name: str
    version: str
    rules: tuple[Rule, ...]
    asked: Callable[[Words], bool]
    depth: Callable[[Words, Overlap], int | None]


_ENGINES = {
    "vllm": _Engine("vLLM", vllm.VERSION, vllm.RULES, vllm.asked, vllm.depth),
    "sglang": _Engine("SGLang", sglang.VERSION, sglang.RULES, sglang.asked, sglang.depth),
}


def explain_model(
    name: str, options: dict[str, Any], bytes_available: int | None = None
) -> ModelReport:
    """A model with these options of EngineConfig, whether or not it would start.

    `bytes_available`: memory of the device; None asks the machine.  ConfigError for an option that
    does not exist, ModelError for a model of which nothing can be read.
    """
    model = describe(name, options)
    effective = settle(model, options, bytes_available)
    return ModelReport(
        model=name,
        architecture=model.architecture,
        facts=list(model.lines),
        refused=[*model.refused, *effective.refused],
        settings=list(effective.settings),
        memory=_memory(model),
        choices=choices_of(effective.config, model),
    )


def explain_command(tokens: Sequence[str]) -> CommandReport:
    """A command line of SGLang or vLLM; ConfigError where it is none that can be read."""
    words = read_words(tokens)
    engine = _ENGINES[words.engine]
    source = f"{engine.name} {engine.version}"
    findings = findings_of(words, engine.rules, engine.asked(words), source)
    overlap = overlap_of(findings)
    depth = engine.depth(words, overlap)
    translation = translate(words, overlap)
    return CommandReport(
        engine=engine.name,
        version=engine.version,
        model=words.model,
        overlap=overlap,
        depth=depth,
        findings=that_matter(findings, overlap, depth),
        command=translation.command(words.model),
        translated=translation.translated,
        no_counterpart=translation.missing,
        not_looked_at=[given.text for given in words.given if given.flag is None],
        memory=_known_memory(words.model),
    )


def _memory(model: Described) -> Memory | None:
    return None if model.sizes is None else memory_of(model.sizes)


def _known_memory(name: str | None) -> Memory | None:
    """Of a model that is here or is known by name; others' are read by nobody."""
    if name is None:
        return None
    try:
        return _memory(describe(name, {}))
    except ModelError:
        return None
