"""The effective configuration, also where it would be refused: what is refused is said, and all
else is settled as if it were not."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from stepahead.config import (
    EngineConfig,
    ModelFacts,
    config_from,
    resolve,
)
from stepahead.errors import ConfigError, NotEnoughMemory
from stepahead.explain.models import Described
from stepahead.explain.report import Entry
from stepahead.machine import gpu_memory_available, memory_available

GIVEN = "as given"
_PLENTY = 1 << 62
_UNKNOWN_LEN = 1 << 20
_SIZED = ("num_pages", "max_model_len")


@dataclass(frozen=True)
class Effective:
    """`config` with all that could be settled, an entry for each option, and the refusals."""

    config: EngineConfig
    settings: tuple[Entry, ...]
    refused: tuple[Entry, ...]


def settle(model: Described, options: dict[str, Any], bytes_available: int | None) -> Effective:
    """As `config.resolve`, but refuses nothing.  ConfigError for an option that does not exist.

    `bytes_available`: memory of the device; None asks the machine.
    """
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    try:
        config = config_from(model.name, options)
    except ConfigError as error:
        if not options.keys() <= fields:
            raise
        config = EngineConfig(model=model.name, **options)
        effective = Effective(config, _entries(config, {}, {}), (_refusal(error),))
    else:
        effective = _settle(config, model, bytes_available)
    entries = tuple(_as_given(entry, options) for entry in effective.settings)
    return dataclasses.replace(effective, settings=entries)


def _as_given(entry: Entry, options: dict[str, Any]) -> Entry:
    asked = entry.name in options and entry.value == options[entry.name] and not entry.words
    return Entry(entry.name, entry.value, GIVEN) if asked else entry


def _settle(config: EngineConfig, model: Described, available: int | None) -> Effective:
    given = [name for name in _SIZED if getattr(config, name) is not None]
    refused: list[Entry] = []
    unsettled = _unknown(model.facts)
    facts = dataclasses.replace(
        model.facts,
        max_len=model.facts.max_len or config.max_model_len or _UNKNOWN_LEN,
        kv_bytes_per_token=model.facts.kv_bytes_per_token or 1,
    )
    if available is None:
        try:
            on_gpu = config.device == "cuda"
            available = gpu_memory_available() if on_gpu else memory_available()
        except ConfigError as error:
            refused.append(_refusal(error))
            unsettled.setdefault("num_pages", "there is no such device here to ask for its memory")
            available = _PLENTY
    while True:
        try:
            resolved = resolve(config, facts, available)
            break
        except NotEnoughMemory as error:
            refused.append(
                Entry(type(error).__name__, None, _memory_words(error, facts, available))
            )
            unsettled["num_pages"] = "it does not fit, see what would be refused"
            if available == _PLENTY:  # the pool's own size is what is wrong
                config = dataclasses.replace(config, num_pages=None, kv_memory_gb=None)
            available = _PLENTY
        except ConfigError as error:
            refused.append(_refusal(error))
            config = _without(config, error)
    reasons = {reason.partition("=")[0]: reason for reason in resolved.reasons}
    entries = _entries(resolved.config, reasons, unsettled, given)
    return Effective(resolved.config, entries, tuple(refused))


def _memory_words(error: NotEnoughMemory, facts: ModelFacts, available: int) -> str:
    if available == _PLENTY or facts.weight_bytes <= available:
        return str(error)
    return (
        f"the weights alone take {facts.weight_bytes / 2**30:,.1f} GiB, and "
        f"{available / 2**30:,.1f} GiB are free"
    )


def _unknown(facts: ModelFacts) -> dict[str, str]:
    """Options that can't be settled for what the model's files do not say."""
    unknown: dict[str, str] = {}
    if not facts.max_len:
        unknown["max_model_len"] = "the model's files do not say how many positions it knows"
    if not facts.kv_bytes_per_token or not facts.max_len:
        unknown["num_pages"] = "not known for this architecture"
    return unknown


def _without(config: EngineConfig, error: ConfigError) -> EngineConfig:
    """`config` without the option that the error names; raises it again if it names none."""
    if str(error).startswith("max_model_len="):
        return dataclasses.replace(config, max_model_len=None)
    if str(error).startswith("threads="):
        return dataclasses.replace(config, threads=None)
    for name in ("quantization", "batch_invariant"):
        if str(error).startswith(f"{name}="):
            return dataclasses.replace(config, **{name: getattr(EngineConfig, name)})
    raise error


def _refusal(error: ConfigError) -> Entry:
    return Entry(type(error).__name__, None, str(error))


def _entries(
    config: EngineConfig,
    reasons: dict[str, str],
    unsettled: dict[str, str],
    given: Collection[str] = (),
) -> tuple[Entry, ...]:
    """One for each option; its words are why it was settled so, where it was."""
    entries: list[Entry] = []
    for field in dataclasses.fields(EngineConfig):
        name, value = field.name, getattr(config, field.name)
        if name in unsettled:
            entries.append(Entry(name, value if name in given else None, unsettled[name]))
        elif value is not None or name in reasons:
            words = reasons.get(name, "").removeprefix(f"{name}={value}: ")
            entries.append(Entry(name, value, words))
    return tuple(entries)
