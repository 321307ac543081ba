"""The mutations fit the sources, and the machine that runs them can tell a kill from a survival.

`scripts/mutants` runs the whole list, in minutes; here only a few that need no torch.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mutating import ROOT, Mutation, judge, out_of_date, sound, table
from mutations import MUTATIONS

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
FEW = (
    "an abort frees at once",
    "a released slot keeps its generation",
    "a hit covers the whole prompt",
)
KEEPS = BY_NAME["a released slot keeps its generation"]


def test_every_mutation_fits_the_sources_and_has_a_name_of_its_own() -> None:
    assert [reason for mutation in MUTATIONS if (reason := out_of_date(mutation))] == []
    assert len(BY_NAME) == len(MUTATIONS)
    assert len({(m.file, m.old, m.new) for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_test_that_must_notice_is_there(mutation: Mutation) -> None:
    file = ROOT / mutation.test.split("::")[0]
    assert f"def {mutation.fails}(" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FEW)
def test_a_guard_taken_out_fails_its_test_by_name(name: str) -> None:
    verdict = judge(BY_NAME[name])
    assert verdict.killed, verdict.output


def test_the_few_pass_without_a_mutation() -> None:
    # else the tests above show only that something is broken
    assert sound([BY_NAME[name] for name in FEW]) == ""


def test_what_changes_nothing_survives() -> None:
    idle = replace(KEEPS, new=f"        # nothing\n{KEEPS.old}")
    verdict = judge(idle)
    assert not verdict.killed
    assert "passed" in verdict.output


def test_a_broken_tree_is_no_kill() -> None:
    broken = replace(KEEPS, new="        (\n")
    verdict = judge(broken)
    assert not verdict.killed
    assert "SyntaxError" in verdict.output


def test_a_failure_elsewhere_is_no_kill() -> None:
    elsewhere = replace(KEEPS, test="tests/pure/test_table.py::test_neighbours_are_a_slice")
    assert not judge(elsewhere).killed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old": "no such text"}, "stands 0 times"),
        ({"old": "slot"}, "times"),
        ({"file": "x.py"}, "gone"),
    ],
)
def test_what_is_out_of_date_is_said(change: dict[str, str], words: str) -> None:
    stale = replace(KEEPS, **change)
    assert words in out_of_date(stale)
    with pytest.raises(ValueError, match=words):
        judge(stale)


def test_the_page_of_proofs_has_the_list() -> None:
    page = (ROOT / "docs" / "proof.md").read_text(encoding="utf-8")
    missing = [line for line in table(MUTATIONS).splitlines() if line not in page]
    assert missing == [], "run scripts/mutants --table and put it into docs/proof.md"


def test_a_python_without_the_tests_packages_is_refused_with_a_way_out() -> None:
    # it said of every mutation that its tests fail without it
    command = [sys.executable, "-E", "-S", str(ROOT / "scripts" / "mutants"), FEW[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "has no pytest" in done.stderr
    assert ".venv/bin/python scripts/mutants" in done.stderr
    assert done.stderr.count("\n") == 1
