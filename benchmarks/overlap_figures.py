"""Regenerates docs/overlap.md: the tables between its markers, and the three pictures beside it.

What is exact runs the real scheduler and loops on a virtual clock, and is the same everywhere; what
is measured runs them in front of a device that sleeps, on this machine.  Regimes are explained in
stepahead.sim: virtual, shapes, measured, publication, host_classes.

    python benchmarks/overlap_figures.py                        two minutes, on a quiet machine
    python benchmarks/overlap_figures.py --quick --folder COPY  few samples, into a copy: seconds

Prints the numbers as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charts import Bar, Panel, bars, diagrams, lanes

from stepahead.sim import host_classes, measured, publication, shapes
from stepahead.sim.virtual import LOOPS, OVERLAP, QUEUES, SERIAL

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = tuple(str(choice) for choice in LOOPS)
DEPTH = {str(choice): choice.depth for choice in LOOPS}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    forwards: tuple[float, ...] = (2.5, 5.0, 10.0)
    hosts: tuple[float, ...] = (1.0, 3.0, 5.0, 7.0, 9.0)
    rounds: int = 5
    steps: int = 16
    cadence_steps: int = 100
    publication_steps: int = 8
    publication_kinds: tuple[str, ...] = publication.KINDS
    class_rows: tuple[int, ...] = host_classes.ROWS
    class_repeats: int = 5
    class_steps: int = 320


QUICK = Size(
    forwards=(2.0,),
    hosts=(1.0,),
    rounds=1,
    steps=4,
    cadence_steps=8,
    publication_steps=2,
    publication_kinds=("asleep",),
    class_rows=(1, 8),
    class_repeats=1,
    class_steps=8,
)


def gather(size: Size) -> dict[str, Any]:
    """All numbers, exact ones first."""
    fine = [i * 0.25 for i in range(41)]
    return {
        "lines": shapes.grid(size.forwards, fine),
        "tpot": shapes.grid(size.forwards, size.hosts),
        "jitter": shapes.jitter(),
        "submit": shapes.submit_stage(),
        "costs": shapes.depth_costs(),
        "shapes": shapes.queue_shapes(),
        "cadence": shapes.cadence(),
        "prefills": {
            "in one step": shapes.two_prefills(chunked=False),
            "in four chunks": shapes.two_prefills(chunked=True),
        },
        "classes": host_classes.measure(size.class_rows, size.class_repeats, size.class_steps),
        "publication": publication.measure(size.publication_steps, size.publication_kinds),
        "measured": measured.measure(
            size.forwards,
            size.hosts,
            size.rounds,
            size.steps,
            (shapes.HOST_MS, size.cadence_steps),
        ),
    }


# --- tables -----------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A table; all but the first `words` columns are numbers and aligned right."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def ms(value: float) -> str:
    """Two digits behind the point, or fewer where they are zeros."""
    return f"{round(value, 2):g}"


def tpot_table(found: dict[str, Any]) -> str:
    """Exact and measured side by side."""
    exact = {(row["F_ms"], row["H_ms"], row["loop"]): row["tpot_ms"] for row in found["tpot"]}
    real = {(row["F_ms"], row["H_ms"], row["loop"]): row for row in found["measured"]["tpot"]}
    shown = (str(SERIAL), str(OVERLAP), str(QUEUES[2]))
    rows = []
    for forward, host in dict.fromkeys(key[:2] for key in exact):
        cells = [ms(forward), ms(real[forward, host, shown[0]]["device_busy_ms"]), ms(host)]
        for loop in shown:
            cells += [ms(exact[forward, host, loop]), ms(real[forward, host, loop]["tpot_ms"])]
        rows.append(cells)
    head = ["F asked", "F slept", "H"]
    for loop in shown:
        head += [f"{loop}, exact", "measured"]
    return markdown(head, rows)


def spread_table(found: dict[str, Any]) -> str:
    """TPOT by depth where times vary."""
    rows = [
        [row["spread"], ms(row["H_ms"]), *(ms(row[name]) for name in NAMES)]
        for row in found["jitter"]
    ]
    return markdown(["what varies", "mean H", *NAMES], rows)


def submit_table(found: dict[str, Any]) -> str:
    """TPOT by depth where the runner's submit is long."""
    rows = [[ms(row["submit_ms"]), *(ms(row[name]) for name in NAMES)] for row in found["submit"]]
    return markdown(["submit", *NAMES], rows)


def costs_table(found: dict[str, Any]) -> str:
    """What depth costs."""
    waste = {row["loop"]: row["waste_stop_token"] for row in found["shapes"]}
    rows = [
        [
            row["loop"],
            ms(row["first_token_ms"]),
            ms(row["abort_told_ms"]),
            ms(row["slot_back_ms"]),
            waste[row["loop"]],
        ]
        for row in found["costs"]
    ]
    head = (
        "loop",
        "first token of a newcomer",
        "abort told",
        "its slot back",
        "rows wasted a stop",
    )
    return markdown(head, rows)


def shapes_table(found: dict[str, Any]) -> str:
    """Queue shapes."""
    rows = [
        [
            row["loop"],
            row["published_as"],
            row["depth"],
            row["air_plan"],
            row["air_wait"],
            row["air_retire"],
            row["air_between"],
            f"{row['waste_length']} / {row['waste_stop_token']} / {row['waste_stop_string']}",
            ms(row["publication_ms"]),
            ms(row["publication_submit_aside_ms"]),
            ms(row["publication_submit_in_line_ms"]),
        ]
        for row in found["shapes"]
    ]
    head = (
        *("loop", "published as", "D", "plan", "wait", "retire", "between"),
        *("waste", "published after", "submit aside", "submit in line"),
    )
    return markdown(head, rows, words=2)


_HIDES = {
    "stage": ("input copies", "under the forward of the step before"),
    "read back": ("read-back", "copy stream and output thread, under the next forward"),
    "retire": ("result processing", "the host's process, under the next forward"),
    "relay": ("preparation that depends on samples", "done by the device, inside the forward"),
    "plan": ("(planning, which does not)", "the host's process, under the forward before"),
    "submit": ("(queueing the operations)", "under the forward of the step before"),
}


def classes_table(found: dict[str, Any]) -> str:
    """µs a step of each class, and where it hides."""
    values = {(row["loop"], row["rows"]): row for row in found["classes"]}
    counts = sorted({rows for _, rows in values})
    rows = []
    for name, (words, place) in _HIDES.items():
        cells = [f"{values['overlap', count][name]:.0f}" for count in counts]
        others = [f"{values[loop, counts[-1]][name]:.0f}" for loop in ("serial", "batch-queue")]
        rows.append([words, place, *cells, *others])
    most = counts[-1]
    head = (
        "class",
        "hides (overlap, batch-queue)",
        *(f"{count} row{'s' if count > 1 else ''}" for count in counts),
        f"serial, {most}",
        f"batch-queue, {most}",
    )
    return markdown(head, rows, words=2)


def cadence_table(found: dict[str, Any]) -> str:
    """Spaces between outputs."""

    def listed(values: Sequence[float]) -> str:
        return ", ".join(map(ms, values))

    real = {row["loop"]: row for row in found["measured"]["cadence"]}
    rows = []
    for row in found["cadence"]:
        each = real[row["loop"]] if row["H_ms"] == shapes.HOST_MS else None
        rows.append(
            [
                row["loop"],
                ms(row["H_ms"]),
                listed(row["fill_ms"]),
                listed(row["steady_ms"]),
                listed(row["drain_ms"]),
                f"{each['p50_ms']:.1f} ({each['p5_ms']:.1f} to {each['p95_ms']:.1f})"
                if each
                else "",
            ]
        )
    return markdown(("loop", "H", "first three", "steady", "last three", "measured, steady"), rows)


def publication_table(found: dict[str, Any]) -> str:
    """Real latencies behind a slow submit."""
    cases = {(case["submit"], case["loop"]): case for case in found["publication"]["cases"]}
    kinds = list(dict.fromkeys(kind for kind, _ in cases))
    rows = [
        [loop, *(f"{cases[k, loop]['median_ms']} / {cases[k, loop]['largest_ms']}" for k in kinds)]
        for loop in dict.fromkeys(loop for _, loop in cases)
    ]
    words = {
        "asleep": "sleeps",
        "busy": "computes in Python",
        "slices": "computes, lock let go each ms",
    }
    return markdown(("loop", *(words[kind] for kind in kinds)), rows)


def prefills_table(found: dict[str, Any]) -> str:
    """First tokens of two long prompts."""
    times: dict[str, list[str]] = {}
    for cases in found["prefills"].values():
        for case in cases:
            times.setdefault(case["loop"], []).extend(
                (ms(case["earlier_ms"]), ms(case["later_ms"]))
            )
    head = [f"{who}, {how}" for how in found["prefills"] for who in ("earlier", "later")]
    return markdown(("loop", *head), [[loop, *cells] for loop, cells in times.items()])


TABLES = {
    "tpot": tpot_table,
    "jitter": spread_table,
    "submit": submit_table,
    "costs": costs_table,
    "shapes": shapes_table,
    "classes": classes_table,
    "cadence": cadence_table,
    "publication": publication_table,
    "prefills": prefills_table,
    "machine": lambda _: machine(),
}


def machine() -> str:
    """What it was measured on."""
    import torch

    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*: (.+)", info.read_text("utf-8"))):
        name = found[1].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores ({name}), Python {platform.python_version()}, "
        f"torch {torch.__version__.partition('+')[0]}, no accelerator."
    )


# --- pictures ---------------------------------------------------------------------------------


def tpot_picture(found: dict[str, Any]) -> str:
    """TPOT against H, a panel for each F."""
    panels = []
    for forward in dict.fromkeys(row["F_ms"] for row in found["lines"]):
        drawn = ((found["lines"], (str(SERIAL), str(OVERLAP))), (found["measured"]["tpot"], NAMES))
        lines, points = (
            {
                name: [
                    (row["H_ms"], row["tpot_ms"])
                    for row in rows
                    if row["F_ms"] == forward and row["loop"] == name
                ]
                for name in names
            }
            for rows, names in drawn
        )
        panels.append(Panel(f"F = {forward:g} ms", lines, points))
    note = (
        "Lines: virtual clock, exact; the queues' lie on overlap's. "
        "Points: a sleeping device on this machine."
    )
    return diagrams(panels, "H, ms", "time per output token, ms", note)


def jitter_picture(found: dict[str, Any]) -> str:
    """TPOT by depth for each spread."""
    shown = {str(OVERLAP): "depth 2", str(QUEUES[1]): "depth 3", str(QUEUES[2]): "depth 4"}
    groups = {
        row["spread"]: {label: row[name] for name, label in shown.items()}
        for row in found["jitter"]
    }
    note = "Time per output token in ms, virtual clock, mean F = 10 ms; the dashed line is F."
    return bars(groups, shapes.FORWARD_MS, note)


def shapes_picture() -> str:
    """The first steps of three loops, host and device."""
    rows: dict[str, Mapping[str, Sequence[Bar]]] = {}
    for choice in (SERIAL, OVERLAP, QUEUES[1]):
        drawn = shapes.timeline(choice)
        rows[str(choice)] = {
            lane: [Bar(str(step), start, end, what) for what, step, start, end in drawn[lane]]
            for lane in ("host", "device")
        }
    note = f"F = {shapes.FORWARD_MS:g} ms, H = {shapes.HOST_MS:g} ms; numbers are steps"
    return lanes(rows, 64.0, "ms", note)


# --- the document -----------------------------------------------------------------------------


def marks(name: str) -> tuple[str, str]:
    """What a table stands between."""
    return f"<!-- begin {name} -->", f"<!-- end {name} -->"


def check(text: str) -> None:
    """SystemExit naming the first table that has no place in the document."""
    for name in TABLES:
        begin, end = marks(name)
        if end not in text.partition(begin)[2]:
            sys.exit(f"overlap.md has no {begin} .. {end}; put the markers back")


def filled(text: str, found: dict[str, Any]) -> str:
    """The document with what stands between its markers made anew."""
    for name, table in TABLES.items():
        begin, end = marks(name)
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{table(found)}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Regenerates docs/overlap.md and its pictures.")
    parser.add_argument("--quick", action="store_true", help="few samples, in seconds")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where overlap.md lies")
    options = parser.parse_args()
    document = options.folder / "overlap.md"
    text = document.read_text("utf-8")
    check(text)
    found = gather(QUICK if options.quick else Size())
    document.write_text(filled(text, found), "utf-8")
    pictures = {
        "tpot": tpot_picture(found),
        "jitter": jitter_picture(found),
        "shapes": shapes_picture(),
    }
    for name, picture in pictures.items():
        (options.folder / f"overlap-{name}.svg").write_text(picture, "utf-8")
    del found["lines"]  # what the picture is drawn from; its shape is in `tpot`
    print(json.dumps({"bench": "overlap_figures"} | found))


if __name__ == "__main__":
    main()
