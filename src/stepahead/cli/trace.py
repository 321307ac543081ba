"""`stepahead trace`: record a timeline, look at it, sum it up, hold two against each other.

Files are Chrome JSON, plain or gzipped.  Reads and writes files; what they mean is in `trace/`.
"""

from __future__ import annotations

import gzip
import io
import json as json_lines
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import open as open_with_bar

from stepahead.cli.options import EngineFlags, Quiet, given, open_model, tell
from stepahead.cli.tables import show_probes
from stepahead.cli.trace_tables import diff_table, summary_tables
from stepahead.errors import ConfigError
from stepahead.observe.observer import Snapshot
from stepahead.observe.perfetto import chrome_trace
from stepahead.observe.requests import Happened
from stepahead.trace.diff import diff as diff_traces
from stepahead.trace.hand_over import HandOver
from stepahead.trace.merge import Merged
from stepahead.trace.merge import merge as merge_traces
from stepahead.trace.page import page
from stepahead.trace.read import Document, Recorded, load_bytes, parse, recorded
from stepahead.trace.summary import summarise

_BAR_FROM_BYTES = 8 << 20  # a smaller file is read before a bar could be seen
_ANSWER_S = 60.0  # most that a running engine may take to answer
_UNITS_S = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0}

app = App(name="trace")

Output = Annotated[Path | None, Parameter(alias=["-o"])]
AsJson = Annotated[bool, Parameter(help="Print one JSON document instead.", negative=())]


# --- record -----------------------------------------------------------------------------------


@app.command
def record(
    model: str | None = None,
    /,
    *,
    url: str | None = None,
    last: str | None = None,
    output: Output = None,
    num_prompts: int = 16,
    input_len: int = 64,
    output_len: int = 64,
    torch_profiler: Annotated[bool, Parameter(negative=())] = False,
    quiet: Quiet = False,
    engine: EngineFlags = None,
) -> None:
    """Write a timeline: of a running engine (--url), or of a run of its own.

    A running engine is one that was started with --observe PORT; what it did in the last seconds
    is always kept, so nothing has to be switched on before.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, or `toy`: prompts of random tokens are answered by it.
    url
        A running engine, such as http://127.0.0.1:9100.
    last
        How much of the past, such as 5s or 500ms; without it all that is kept, or the whole run.
    output
        A .json or .json.gz file; without it one named after the loop and the time.
    num_prompts
        Prompts of a run of its own, all asked at once.
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer.
    torch_profiler
        Lay what torch.profiler records of a run of its own beside it, on one clock. It slows the
        run, and needs the runner in this process (--executor inline, which it settles).
    """
    if (model is None) == (url is None):
        raise ConfigError(
            "`trace record` needs a MODEL to run or the --url of a running engine, and not both"
        )
    _check_output(output)
    last_s = None if last is None else seconds(last)
    if url is not None:
        options = [*given(engine), *(["torch_profiler"] if torch_profiler else [])]
        if options:
            raise ConfigError(
                f"{', '.join(options)} can't be set on a running engine; leave them out with --url"
            )
        data = fetch(url, last_s)
    else:
        ask = _Ask(str(model), engine, quiet, (num_prompts, input_len, output_len), last_s)
        data = _run_profiled(ask) if torch_profiler else _run(ask)
    found = parse(data, url or str(model))
    recorded(found, url or str(model))  # another engine's trace is not written under our name
    path = _write(output or _dated(found), data)
    if not quiet:
        tell(f"{len(found.events):,} events; `stepahead trace open {path}` shows them")
    print(path)


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if path.suffix == ".json" else gzip.compress(data, 6))
    return path


def seconds(text: str) -> float:
    """`5s`, `500ms`, `2.5` or `1m` in seconds; ConfigError for anything else, and for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_S or not float(match[1]):
        raise ConfigError(f"--last {text} is no length of time; give one like 5s or 500ms")
    return float(match[1]) * _UNITS_S[match[2]]


def fetch(url: str, last_s: float | None) -> bytes:
    """The trace of a running engine, as JSON; ConfigError when nobody gives one there."""
    base = url if "://" in url else f"http://{url}"
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url} is no web address; give one like http://127.0.0.1:9100")
    place = f"{base.rstrip('/')}/trace" + ("" if last_s is None else f"?last={last_s:g}s")
    try:
        with urllib.request.urlopen(place, timeout=_ANSWER_S) as answer:
            return load_bytes(io.BytesIO(answer.read()), place)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(f"{place} answers {error.code}: {_said(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{place} can't be read ({reason}); start the engine with --observe PORT"
        ) from None


def _said(error: urllib.error.HTTPError) -> str:
    """What an engine says is wrong, or that this is none."""
    try:
        return str(json_lines.loads(error.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "is it an engine started with --observe PORT?"


@dataclass(frozen=True)
class _Ask:
    """A run of its own: the model, its options, prompts (number, length, output), what is kept."""

    model: str
    engine: Any
    quiet: bool
    sizes: tuple[int, int, int]
    last_s: float | None


def _run(ask: _Ask, around: AbstractContextManager[Any] | None = None, **settled: Any) -> bytes:
    """The trace of the run, as JSON; the load is answered inside `around`."""
    from stepahead.cli.bench import Load, measure_model

    load_asked = Load(*ask.sizes)
    with open_model(ask.model, ask.engine, None, ask.quiet, **settled) as llm:
        with around or nullcontext():
            measure_model(llm, load_asked)
        snapshot = llm.engine.observer.ask(llm.engine.observer.snapshot)
        whole_s = _since_asked_s(snapshot, load_asked.num_prompts)
        return chrome_trace(snapshot, whole_s if ask.last_s is None else min(ask.last_s, whole_s))


def _run_profiled(ask: _Ask) -> bytes:
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if given(ask.engine).get("executor", "inline") != "inline":
        raise ConfigError(
            "--torch-profiler sees this process only, and --executor process runs the model in "
            "another one; leave --executor out"
        )
    wanted = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    profiler = profile(activities=[one for one in wanted if one in supported_activities()])
    ours = _run(ask, profiler, executor="inline")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.json"
        profiler.export_chrome_trace(str(path))
        merged = merge_traces(ours, path.read_bytes(), ("the engine's", "torch.profiler's"))
    if not ask.quiet:
        tell(_how(merged))
    return merged.data


def _how(merged: Merged) -> str:
    clocks = f"{merged.marks:,} marks of steps, half within {merged.spread_us:.0f} µs"
    if not merged.marks:
        clocks = "the wall clocks: there are no marks of steps"
    return f"{merged.events:,} events of torch.profiler, aligned by {clocks}"


def _since_asked_s(snapshot: Snapshot, num_prompts: int) -> float:
    """Seconds since the first of the last `num_prompts` arrived: no warm-up."""
    requests = snapshot.requests
    arrived_ns = requests.at_ns[requests.what == Happened.ARRIVED][-num_prompts:]
    return (snapshot.at_ns - int(arrived_ns[0])) / 1e9


def _check_output(output: Path | None) -> None:
    """Before a run that would be lost."""
    if output is None:
        return
    if not output.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--output {output} must end in .json or .json.gz")
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--output {output} can't be written; choose another place")


def _dated(found: Document) -> Path:
    about = (found.stepahead or {}).get("about", {})
    loop = re.sub(r"[^\w-]", "-", str(about.get("loop", "engine")))
    return Path(f"trace-{loop}-{time.strftime('%Y%m%d-%H%M%S')}.json.gz")


# --- read -------------------------------------------------------------------------------------


def _load(path: Path) -> Document:
    return parse(_bytes(path), str(path))


def _bytes(path: Path) -> bytes:
    bar = Console(stderr=True, quiet=path.stat().st_size < _BAR_FROM_BYTES)
    with open_with_bar(path, "rb", description=path.name, console=bar, transient=True) as file:
        return load_bytes(file, str(path))


def _recorded(path: Path) -> Recorded:
    return recorded(_load(path), str(path))


@app.command
def summary(file: Path, /, *, json: AsJson = False) -> None:
    """Sum a timeline up: stages, idle time by cause, the longest bubbles, time per token.

    Parameters
    ----------
    file
        A .json or .json.gz file of `trace record`.
    """
    found = summarise(_recorded(file))
    if json:
        print(json_lines.dumps(found.as_dict()))
        return
    console = Console()
    for table in summary_tables(found):
        console.print(table)
    show_probes(console, {found.probes.loop: found.probes})


@app.command
def diff(a: Path, b: Path, /, *, json: AsJson = False) -> None:
    """Align two timelines step by step and say what moved from the first to the second.

    Parameters
    ----------
    a
        The timeline before.
    b
        The timeline after; of the same load, or no step of it has its like.
    """
    found = diff_traces(_recorded(a), _recorded(b), (_short(a), _short(b)))
    if json:
        print(json_lines.dumps(asdict(found)))
        return
    Console().print(diff_table(found, (_short(a), _short(b))))
    print(found.verdict)


@app.command
def merge(ours: Path, theirs: Path, /, *, output: Output = None) -> None:
    """Lay a trace of torch.profiler beside a timeline, on one clock.

    Clocks are aligned by the ranges `stepahead step N` that the runner's process leaves in
    torch.profiler's trace, else by the wall clocks.

    Parameters
    ----------
    ours
        A timeline of `trace record`.
    theirs
        What `export_chrome_trace` wrote, of the same time.
    output
        A .json or .json.gz file; without it beside the timeline.
    """
    _check_output(output)
    merged = merge_traces(_bytes(ours), _bytes(theirs), (str(ours), str(theirs)))
    tell(_how(merged))
    print(_write(output or ours.with_name(f"{_short(ours)}-torch.json.gz"), merged.data))


@app.command(name="open")
def open_trace(
    file: Path, /, *, output: Output = None, html_only: bool = False, browser: bool = True
) -> None:
    """Show a timeline: in Perfetto, and as an HTML file that needs no network.

    Perfetto's page gets the trace from a page of loopback, in the browser; nothing is uploaded.
    The command ends when it has it.

    Parameters
    ----------
    file
        A trace, ours or torch.profiler's or another tool's in Chrome's JSON.
    output
        Where to write the HTML; without it beside the file.
    html_only
        Write the HTML and end.
    browser
        Start the browser; without it only the address is printed.
    """
    document = _load(file)
    target = output or file.with_name(f"{_short(file)}.html")
    target.write_text(page(document, _short(file)), "utf-8")
    print(target)
    if html_only:
        return
    with HandOver(file.read_bytes(), file.name) as server:
        print(server.url, flush=True)
        tell("waits until Perfetto has the trace; Ctrl-C ends it")
        if browser:
            webbrowser.open(server.url)
        server.wait()
        time.sleep(0.2)  # the page's last answer


def _short(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")
