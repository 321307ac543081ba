"""Threads that share a kernel's work: each piece once, nobody ahead, no thread left over."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import team

import stepahead.kernels
from stepahead.errors import EngineError
from stepahead.kernels import jit
from stepahead.kernels.jit import inner
from stepahead.kernels.team import Team, meet, take

THREADS = [1, 2, 3, 4]


@inner
def sharing(rank: int, team: int, pieces: int, times: np.ndarray, late: int) -> None:
    """Counts how often each piece is taken in each of two parts; rank `late` comes late to each."""
    for part in range(2):
        idle = 0.0
        while rank == late and idle < 1e5:
            idle += 1.0
        while True:
            piece = take(team)
            if piece >= pieces:
                break
            times[rank, part, piece] += 1
        meet(team)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(THREADS), st.integers(0, 3000), st.integers(-1, 3))
def test_each_piece_is_taken_once(threads: int, pieces: int, late: int) -> None:
    times = np.zeros((threads, 2, pieces), np.int64)
    team(threads).run(sharing, team(threads).address, pieces, times, late)
    assert (times.sum(0) == 1).all()


@inner
def looking(rank: int, team: int, rounds: int, said: np.ndarray, heard: np.ndarray) -> None:
    """In each round one thread is late; all say the round, meet, and look at what was said."""
    threads = len(said)
    for turn in range(rounds):
        idle = 0.0
        while rank == turn % threads and idle < 3e6:
            idle += said[rank] + 2.0
        said[rank] = turn
        meet(team)
        for other in range(threads):
            heard[turn, rank, other] = said[other]
        meet(team)


@pytest.mark.parametrize("threads", THREADS)
def test_nobody_goes_on_before_all_have_met(threads: int) -> None:
    """Whoever is late is so by milliseconds, and who does not wait looks within nanoseconds."""
    rounds = 2 * threads
    said, heard = np.full(threads, -1, np.int64), np.full((rounds, threads, threads), -9, np.int64)
    team(threads).run(looking, team(threads).address, rounds, said, heard)
    assert (heard == np.arange(rounds)[:, None, None]).all()


def helpers() -> set[threading.Thread]:
    """The threads of all teams."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("kernels-")}


@pytest.mark.parametrize("threads", THREADS)
def test_a_team_let_go_ends_its_threads(threads: int) -> None:
    before = helpers()
    gone = Team(threads)
    own = helpers() - before
    assert len(own) == threads - 1
    times = np.zeros((threads, 2, 50), np.int64)
    for used in range(threads, 0, -1):
        gone.use(used)
        gone.run(sharing, gone.address, 50, times, -1)
        assert times.sum() == 100
        assert (times[used:] == 0).all()
        times[:] = 0
    del gone
    gc.collect()
    for thread in own:
        thread.join(30)
    assert not any(thread.is_alive() for thread in own)


def test_a_team_nobody_lets_go_does_not_keep_a_program_from_ending() -> None:
    program = "from stepahead.kernels.team import Team; kept = Team(3); print(kept.threads)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize("threads", [0, -1])
def test_a_team_of_nobody_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"a team of {threads} threads; it takes 1 or more"):
        Team(threads)


def test_a_kernels_cache_has_another_name_when_any_source_changes(tmp_path: Path) -> None:
    """numba looks at the file of the entry alone: after a change of what it calls, or of how it is
    compiled, the old code would run."""
    room = tmp_path / "kernels"
    shutil.copytree(Path(stepahead.kernels.__file__).parent, room)
    spec = importlib.util.spec_from_file_location("copied_jit", room / "jit.py")
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    names = [copied._cache_folder()]
    assert copied._cache_folder() == names[0]
    for source in ("tile.py", "attend.py", "step.py"):
        with (room / source).open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        names.append(copied._cache_folder())
    assert len(set(names)) == 4


def test_without_a_folder_of_its_own_for_them_nothing_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba would take the next best one, whose name does not change with the sources."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(jit, "_njit", lambda *_, **options: asked.append(options) or (lambda f: f))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    jit.entry("void()")(print)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", raise_no_home)
    jit.entry("void()")(print)
    assert len(asked) == 2
    assert not any("cache" in options for options in asked)


def raise_no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_damaged_cache_is_thrown_away_and_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise EOFError("Ran out of input")
        return lambda function: function

    monkeypatch.setattr(jit, "_njit", damaged)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.entry("void()")(print) is print
    assert list((tmp_path / "stepahead" / "kernels").iterdir()) == []


def test_a_team_that_was_interrupted_says_so_and_runs_no_more() -> None:
    team = Team(1)

    def interrupted(rank: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team.run(interrupted)
    with pytest.raises(EngineError, match="start anew"):
        team.run(print)
