"""docs/overlap.md is what its command makes: regenerated in small, into a copy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "overlap_figures.py"
DOCUMENT = (ROOT / "docs" / "overlap.md").read_text("utf-8")
PART = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
MEASURED = {"tpot", "classes", "cadence", "publication", "machine"}
EXACT = {"jitter", "submit", "costs", "shapes", "prefills"}
PICTURES = ("tpot", "jitter", "shapes")


@dataclass(frozen=True)
class Made:
    """What one quick run left behind."""

    folder: Path
    text: str
    found: dict[str, Any]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--quick", "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "docs" / "overlap.md", folder)
    done = run(folder)
    assert done.returncode == 0, done.stderr
    text = (folder / "overlap.md").read_text("utf-8")
    return Made(folder, text, json.loads(done.stdout.splitlines()[-1]))


def test_all_numbers_stand_between_markers_and_the_words_stay(made: Made) -> None:
    assert {name for name, _ in PART.findall(DOCUMENT)} == MEASURED | EXACT
    assert PART.sub(r"<\1>", made.text) == PART.sub(r"<\1>", DOCUMENT)
    for name, part in PART.findall(made.text):
        assert part.strip(), f"{name} was left empty"


def test_the_exact_tables_are_those_of_the_document(made: Made) -> None:
    here, there = dict(PART.findall(DOCUMENT)), dict(PART.findall(made.text))
    for name in EXACT:
        assert here[name] == there[name], f"{name} is out of date: run {SCRIPT.name}"
    # of this one the last column is measured
    exact = [
        [line.rsplit("|", 2)[0] for line in part["cadence"].split("\n")] for part in (here, there)
    ]
    assert exact[0] == exact[1], f"cadence is out of date: run {SCRIPT.name}"


def test_the_document_is_the_full_run(made: Made) -> None:
    for name in ("tpot", "publication", "classes"):
        here, there = (dict(PART.findall(text))[name] for text in (DOCUMENT, made.text))
        assert here.count("|") > there.count("|")


def test_what_is_measured_is_plausible(made: Made) -> None:
    for row in made.found["measured"]["tpot"]:
        assert row["device_busy_ms"] >= row["F_ms"]
        # a turn may begin with the device a little ahead
        assert row["tpot_ms"] > 0.7 * (row["F_ms"] + row["H_ms"] * (row["loop"] == "serial"))
    for row in made.found["classes"]:
        times = {name: value for name, value in row.items() if isinstance(value, float)}
        assert len(times) == 6
        assert min(times.values()) > 0


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_drawn_and_shown(name: str, made: Made) -> None:
    assert f"(overlap-{name}.svg)" in DOCUMENT
    for folder in (made.folder, ROOT / "docs"):
        picture = ElementTree.parse(folder / f"overlap-{name}.svg").getroot()
        assert picture.tag.endswith("svg")
        assert len(picture) > 20


def test_a_document_without_a_marker_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "overlap.md").write_text(DOCUMENT.replace("<!-- end costs -->", ""), "utf-8")
    done = run(tmp_path)
    assert done.returncode != 0
    assert "<!-- begin costs -->" in done.stderr
    assert "put the markers back" in done.stderr
