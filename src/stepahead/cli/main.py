"""The `stepahead` command: names the verbs, and turns errors into one line and an exit code.

Loads no verb before it is called, and no torch.
"""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError, UnknownCommandError, UnknownOptionError

from stepahead import __version__
from stepahead.errors import ConfigError, NotEnoughMemory, RequestError, StepaheadError
from stepahead.executor.stops import Stopped, exit_code, hear_stops, leave_signals


def _name(place: str) -> str:
    return place.partition(":")[0].rpartition(".")[2]


app = App(
    name="stepahead",
    help="An LLM serving engine that is always one step ahead of the device.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # it would end us with 130, whatever the signal was
)
# the first paragraph is told in the list of verbs, all of it by the verb's own --help
_VERBS = {
    "stepahead.cli.run:run": """Answer a file of prompts; resumable.

    A line of the input is {"prompt": "..."}, {"messages": [...]} or {"prompt_token_ids": [...]}, if
    you like with an "id" (else it is the line's number) and with sampling parameters of its own.
    Answers come as they end, with "id" and "line". After an interruption run the same command
    again: what is answered is not asked again. The exit code is 1 if some lines failed.
    """,
    "stepahead.cli.chat:chat": """Talk to a model.

    Answers are told as they come. At a terminal Ctrl-C stops an answer, not the program; /reset
    forgets the conversation, /exit or Ctrl-D leaves. With a pipe on stdin each line is a question,
    and each answer is a line.
    """,
    "stepahead.cli.serve:serve": """Serve a model over HTTP, as OpenAI's API is spoken.

    Chat and completions, streamed or whole, at http://127.0.0.1:8000/v1 unless told otherwise. It
    listens for this machine alone; --host 0.0.0.0 opens it to others, and --api-key guards it.
    Ctrl-C or SIGTERM lets running requests end for --shutdown-timeout seconds; a second one ends it
    at once.
    """,
    "stepahead.cli.bench:app": """Measure a model with each loop, or a part of the engine.

    Prompts of random tokens are asked all at once and answered greedily at full length. The last
    line on stdout is JSON.
    """,
    "stepahead.cli.trace:app": """Record a timeline of every step; open, sum up, compare.

    Timelines are Chrome's JSON, plain or gzipped: Perfetto and tools for torch.profiler's files
    read them too. A running engine is asked with --url, or a model is run for it.
    """,
    "stepahead.cli.top:top": """A running engine or server, live in the terminal.

    Reads /state of an engine with --observe PORT, or /metrics of vLLM and SGLang, and says what
    those do not tell. The exit code of --once is 1 if nothing answers.
    """,
    "stepahead.cli.demo:demo": """32 prompts with the host in the way, then with the host hidden.

    A real model, once with each loop: figures side by side, the same tokens, and a picture. The
    exit code is 1 if answers differ by more than rounding explains.
    """,
    "stepahead.cli.explain:explain": """What a configuration does to overlap, and why.

    The effective configuration of a model, with the reason for each thing that was settled, and
    what each deployment choice does to overlap; nothing is loaded, and what would be refused is
    said and not done. Or, behind --, a command line of SGLang or vLLM: what their rules make of it,
    and the same wish here.
    """,
}
for place, words in _VERBS.items():
    app.command(place, name=_name(place), help=inspect.cleandoc(words))


def main() -> None:
    """The console script."""
    hear_stops()
    _open_streams()
    try:
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt as error:  # another signal, while the end for the first was told
        code = exit_code(error.number if isinstance(error, Stopped) else signal.SIGINT)
    leave_signals()  # from here on there is nobody left to catch what they raise
    sys.exit(code)


def _open_streams() -> None:
    """Makes the standard streams fit to be used, whatever the caller left of them.

    A closed one would be None, and its number that of the next file to be opened: what a library
    tells on stderr would stand among the answers.  What an encoding does not know is replaced.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  (until the end)
            os.set_inheritable(opened.fileno(), True)
            setattr(sys, name, opened)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command line; 0 done, 1 failed, 2 called wrongly, 130 or 143 interrupted."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownCommandError as error:
        verbs = ", ".join(map(_name, _VERBS))
        words = " ".join(error.unused_tokens or ())
        return _fail(f"unknown command {words!r}; choose one of {verbs}", 2)
    except UnknownOptionError as error:
        return _fail(_of_others(error) or str(error), 2)
    except CycloptsError as error:
        return _fail(str(error), 2)
    except StepaheadError as error:
        return _fail(str(error), 2 if _is_misuse(error) else 1)
    except BrokenPipeError:
        # who read our output is gone; the interpreter must not try to flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(_words(error), 1)
    except Stopped as stop:
        return exit_code(stop.number)
    except KeyboardInterrupt:
        return exit_code(signal.SIGINT)
    return code if isinstance(code, int) else 0


def _of_others(error: UnknownOptionError) -> str | None:
    """What another engine's flag is here."""
    from stepahead.explain.flags import counterpart

    return counterpart(error.token.keyword or error.token.value)


def _is_misuse(error: StepaheadError) -> bool:
    return isinstance(error, ConfigError | RequestError) and not isinstance(error, NotEnoughMemory)


def _fail(message: str, code: int) -> int:
    print(f"stepahead: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _words(error: OSError) -> str:
    if error.filename is None:
        return str(error)
    return f"{Path(os.fsdecode(error.filename))}: {error.strerror}"
