"""What a runner's building raised is raised again on the host, by its own type where it has it."""

from __future__ import annotations

import re

import pytest
from executor_fakes import build_fails

from stepahead import errors
from stepahead.errors import EngineError
from stepahead.executor.failures import ANSWERED, decode_build_failure, encode_build_failure
from stepahead.runner.spec import RunnerSpec


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("weights", errors.WeightError, r"^model.safetensors: 'lm_head' is cut off\nat byte 7$"),
        ("own", errors.WeightError, "^odd$"),
        ("model", errors.ModelError, "^no such folder$"),
        ("request", EngineError, "^the runner could not be built: PromptTooLong: too long$"),
        ("memory", errors.NotEnoughMemory, r"ran out .*\(MemoryError: memory ran out\)"),
        ("torch", errors.NotEnoughMemory, "you tried 1e15 bytes"),
        ("other", EngineError, r"^the runner could not be built: ValueError: what\?$"),
        ("exit", EngineError, "^the runner could not be built: SystemExit: 4$"),
    ],
)
def test_a_build_error_keeps_its_type(error: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(ANSWERED) as caught:
        build_fails(RunnerSpec("unused:unused", {"error": error}))
    told = decode_build_failure(encode_build_failure(caught.value))
    assert type(told) is kind
    assert re.search(words, str(told))
    foreign = error not in ("weights", "own", "model")
    assert [("build_fails" in note) for note in getattr(told, "__notes__", [])] == (
        [True] if foreign else []
    )
