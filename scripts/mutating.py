"""Takes a guard out of a copy of the tree and looks whether a test fails.  Knows no guard by name.

A mutation is killed when the test that it names fails, by name, and says what it should: an error
while tests are collected, a crash or a time-out is no proof.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "scripts", "pyproject.toml")
LIMIT_S = 600  # on a busy machine; alone, none takes a minute
_FAILED = re.compile(r"^FAILED (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """One guard taken out.

    name      unique, for the table
    prevents  the failure that the guard is there for
    file      under src/stepahead
    old       text that stands in it exactly once
    new       what stands there instead
    test      the test that must fail, as pytest names it; with or without [its parameters]
    says      what its output must hold beside that: for an edge, the race
    """

    name: str
    prevents: str
    file: str
    old: str
    new: str
    test: str
    says: str = ""

    @property
    def fails(self) -> str:
        """The name of the test function."""
        return self.test.split("::")[-1].split("[")[0]


@dataclass(frozen=True)
class Verdict:
    """What came of it; killed if the named test failed."""

    mutation: Mutation
    killed: bool
    seconds: float
    output: str


def out_of_date(mutation: Mutation, root: Path = ROOT) -> str:
    """Why the mutation does not fit the sources any more; "" if it does."""
    path = root / "src" / "stepahead" / mutation.file
    if not path.exists():
        return f"{mutation.name}: {mutation.file} is gone; name the guard's new home"
    times = path.read_text(encoding="utf-8").count(mutation.old)
    if times != 1:
        return f"{mutation.name}: its text stands {times} times in {mutation.file}, not once"
    return ""


def mutated_copy(mutation: Mutation | None, target: Path, root: Path = ROOT) -> None:
    """A copy of the tree in `target` with the mutation in it; ValueError if it is out of date."""
    if mutation is not None and (reason := out_of_date(mutation, root)):
        raise ValueError(reason)
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy(source, target / name)
    if mutation is not None:
        path = target / "src" / "stepahead" / mutation.file
        text = path.read_text(encoding="utf-8").replace(mutation.old, mutation.new)
        path.write_text(text, encoding="utf-8")


def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float = LIMIT_S) -> tuple[int, str]:
    """pytest's exit code (-1: out of time) and output, of tests in a copy that tests itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=0"]  # a verdict that changes from run to run is none
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        # what is compiled for a copy goes with it: it is found by its path, and by no later copy
        "XDG_CACHE_HOME": str(tree / ".cache"),
    }
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return -1, f"no end after {limit_s:g} s\n{late.stdout or ''}"
    return done.returncode, done.stdout + done.stderr


def judge(mutation: Mutation, root: Path = ROOT) -> Verdict:
    """Applies one mutation to a fresh copy and runs its tests there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        mutated_copy(mutation, tree, root)
        _, output = run_tests(tree, (mutation.test,))
    failed = mutation.fails in [name.split("::")[-1] for name in _FAILED.findall(output)]
    return Verdict(mutation, failed and mutation.says in output, time.monotonic() - began, output)


def table(mutations: list[Mutation]) -> str:
    """The list as Markdown, a line each."""
    rows = [
        f"| {m.prevents} | {m.name} | `{m.file}` | `{m.fails}`{f', {m.says}' if m.says else ''} |"
        for m in mutations
    ]
    return "\n".join(
        ["| prevents | guard taken out | in | noticed by |", "|---|---|---|---|", *rows]
    )


def sound(mutations: list[Mutation], root: Path = ROOT) -> str:
    """Runs all the tests named by the mutations without any of them; "" if they pass."""
    tests = tuple(dict.fromkeys(mutation.test for mutation in mutations))
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        mutated_copy(None, Path(folder), root)
        code, output = run_tests(Path(folder), tests, LIMIT_S * len(tests))
    return "" if code == 0 else output
