"""How a failure is worded, and how it crosses from the worker to the host.  Knows no channel.

An error crosses as text: its message, then its traceback, which the host hangs on as a note.
"""

from __future__ import annotations

import traceback
from typing import TypeVar

import msgspec

from stepahead import errors
from stepahead.errors import RequestError, StepaheadError, StepFailed

# What a model may raise and the engine answers for.  SystemExit too: it would end a thread without
# a word, and its step would never land.  Not KeyboardInterrupt: that is the user's.
ANSWERED = (Exception, SystemExit)

_TRACE = "\nTraceback (most recent call last):\n"
_BUILD_FAILURE = msgspec.msgpack.Decoder(tuple[str, str])
_Error = TypeVar("_Error", bound=StepaheadError)


def step_failed(step: int, error: BaseException) -> StepFailed:
    """The error for a model that raised `error` in `step`, chained to it."""
    failure = StepFailed(
        f"model raised in step {step}: {_words(error)}; running requests end here, "
        "close the engine and start a new one"
    )
    failure.__cause__ = error
    return failure


class RelayedFailure(StepFailed):
    """A step failed in a stage before, which has told this one; `text` is as it was encoded."""

    def __init__(self, text: str) -> None:
        super().__init__(_parted(text)[0])
        self.text = text


def encode_step_failure(failure: StepFailed) -> str:
    """A step's failure as the text of `Result.error`."""
    if isinstance(failure, RelayedFailure):
        return failure.text
    return f"{failure}\n{_trace(failure.__cause__)}"


def decode_step_failure(text: str) -> StepFailed:
    """The inverse of encode_step_failure; the traceback comes as a note."""
    message, trace = _parted(text)
    return _with_trace(StepFailed(message), trace)


def encode_build_failure(error: BaseException) -> bytes:
    """What ended the building of a runner, as bytes."""
    if isinstance(error, StepaheadError) and not isinstance(error, RequestError):
        # The nearest type that the host knows too: a model's own is not importable there.
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return msgspec.msgpack.encode((known.__name__, str(error)))
    type_name, message = _in_house_words(error)
    return msgspec.msgpack.encode((type_name, f"{message}\n{_trace(error)}"))


def decode_build_failure(data: bytes) -> StepaheadError:
    """The error to raise on the host; one of the house's keeps its type and words."""
    type_name, text = _BUILD_FAILURE.decode(data)
    message, trace = _parted(text)
    return _with_trace(getattr(errors, type_name)(message), trace)


def _in_house_words(error: BaseException) -> tuple[str, str]:
    if _out_of_memory(error):
        return "NotEnoughMemory", (
            f"memory ran out while the runner was built ({_words(error)}); "
            "ask for fewer pages or a smaller model"
        )
    return "EngineError", f"the runner could not be built: {_words(error)}"


def _out_of_memory(error: BaseException) -> bool:
    # torch's own: a RuntimeError from the CPU allocator, OutOfMemoryError from the others
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _words(error: BaseException) -> str:
    words = str(error) or ("memory ran out" if isinstance(error, MemoryError) else "")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _trace(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


def _parted(text: str) -> tuple[str, str]:
    message, mark, trace = text.partition(_TRACE)
    return message.rstrip("\n"), (mark + trace).strip("\n")


def _with_trace(error: _Error, trace: str) -> _Error:
    if trace:
        error.add_note(f"in the runner's process:\n{trace}")
    return error
