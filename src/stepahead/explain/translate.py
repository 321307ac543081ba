"""The same wish as a command line of stepahead: what is translated, and what has no counterpart."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields
from typing import Any

from stepahead.config import CHOICES, EngineConfig, config_from
from stepahead.errors import ConfigError
from stepahead.explain.flags import Flag
from stepahead.explain.report import Entry, Overlap
from stepahead.explain.words import Words
from stepahead.serve.options import ServeConfig, serve_config

_STAGES = "--pipeline-parallel-size"
_SERIAL_PREFILL = "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"
_SERVER = {option.name for option in fields(ServeConfig)}
_DTYPES = {"float": "float32", "half": "float16"}


@dataclass
class Translation:
    """`options` of EngineConfig, `server` of ServeConfig; entries for the flags that became one and
    for those that did not.

    Every flag that a table knows is in one of the two lists, as it was written.
    """

    options: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    translated: list[Entry] = field(default_factory=list)
    missing: list[Entry] = field(default_factory=list)

    def command(self, model: str | None) -> str:
        """A command line that serves the same."""
        words = ["stepahead", "serve", model or "MODEL"]
        for name, value in (self.options | self.server).items():
            words += _flag(name, value)
        for name, value in self.others.items():
            words += [f"--{name}", value]
        return shlex.join(words)


def translate(words: Words, overlap: Overlap) -> Translation:
    """All that is given, one after another; the loop comes from what is left of overlap."""
    result = Translation()
    staged = words.number(_STAGES) > 1
    _choose_loop(words, overlap, staged, result)
    if not staged and not any(g.flag is not None and g.flag.to == "device" for g in words.given):
        result.options["device"] = "cuda"  # where both engines run unless they are told otherwise
    for given in words.given:
        if given.flag is not None:
            _one(words, given.text, given.flag, result)
    for name, value in words.variables.items():
        _variable(words, name, value, result)
    return result


def _choose_loop(words: Words, overlap: Overlap, staged: bool, result: Translation) -> None:
    if staged:
        result.options["loop"] = "batch-queue"  # as deep as its stages ask for
    elif overlap == "off":
        result.options["loop"] = "serial"
    elif words.engine == "sglang":
        result.options["loop"] = "overlap"
    else:
        result.options |= {"loop": "batch-queue", "depth": 2}


def _one(words: Words, text: str, flag: Flag, result: Translation) -> None:
    name = flag.names[0]
    if flag.to is None:
        result.missing.append(Entry(text, None, flag.why))
    elif flag.to == "model":
        result.translated.append(Entry(text, words.model))
    elif flag.to == "loop":
        result.translated.append(Entry(text, f"--loop {result.options['loop']}"))
    elif flag.to == "chat_template":
        result.others["chat-template"] = words.text(name)
        result.translated.append(Entry(text, f"--chat-template {words.text(name)}"))
    else:
        _option(words, text, flag, result)


def _option(words: Words, text: str, flag: Flag, result: Translation) -> None:
    assert flag.to is not None
    value, note = _value(words, flag.names[0], flag.to)
    served = flag.to in _SERVER
    if value is not None:
        try:
            if served:
                serve_config({flag.to: value})
            else:
                config_from(words.model or "MODEL", {flag.to: value})
        except ConfigError as error:
            value, note = None, f"refused here: {error}"
    if value is None:
        result.missing.append(Entry(text, None, note))
        return
    (result.server if served else result.options)[flag.to] = value
    result.translated.append(Entry(text, " ".join(_flag(flag.to, value)), note))


def _value(words: Words, name: str, option: str) -> tuple[Any, str]:
    """The option's value and a note; None where the flag's value has no counterpart."""
    given = words.values[name]
    if option in _SERVER:
        return _of_server(option, given)
    if option == "prefix_cache":
        return name == "--enable-prefix-caching", ""
    if option == "pipeline_stages":
        return given, "stages run on the CPU only so far" if given > 1 else ""
    if option == "kv_memory_gb":
        return round(given / 2**30, 3), ""
    if name == "--max-total-tokens":
        size = words.number("--page-size", EngineConfig.page_size)
        return given // max(1, size), f"in pages of {size}"
    if option == "max_step_tokens" and given < 1:
        return None, "long prompts always run in chunks; give max_step_tokens as long as a prompt"
    if option == "max_model_len" and given < 1:
        return None, "the longest that fits is not searched for; give a number"
    if option in ("dtype", "device"):
        return _named(option, _DTYPES.get(str(given), str(given)))
    if option == "quantization":
        value, note = _named(option, str(given))
        return value, note or "on the CPU only so far"
    if option == "batch_invariant":
        return True, "of float32 on the CPU only so far"
    return given, ""


def _of_server(option: str, given: Any) -> tuple[Any, str]:
    if isinstance(given, list):
        return given[0], "the first of them" if len(given) > 1 else ""
    if option == "allow_origins":
        return None, "give each origin as a word of its own, with allow_origins"
    try:
        return (float(given) if option == "shutdown_timeout" else given), ""
    except ValueError:
        return None, f"{given!r} is no number of seconds"


def _named(option: str, value: str) -> tuple[Any, str]:
    if value == "auto":
        return None, f"nothing is settled by {option}=auto; give one of {_choices(option)}"
    if value not in CHOICES[option]:
        return None, f"{option} is one of {_choices(option)}"
    return value, ""


def _choices(option: str) -> str:
    return ", ".join(choice for choice in CHOICES[option] if choice != "hostile")


def _variable(words: Words, name: str, value: str, result: Translation) -> None:
    text = f"{name}={value}"
    if name == _SERIAL_PREFILL and words.on(name):
        result.options["serial_prefill"] = True
        result.translated.append(Entry(text, "--serial-prefill"))
    else:
        result.missing.append(Entry(text, None, "a variable; this engine reads none of its own"))


def _flag(name: str, value: Any) -> list[str]:
    spelt = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{spelt}" if value else f"--no-{spelt}"]
    return [f"--{spelt}", str(value)]
