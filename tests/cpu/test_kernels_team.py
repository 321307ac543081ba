"""Threads that share a kernel's work: each piece once, nobody ahead, no thread left over."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import team

import stepahead.kernels
from stepahead.errors import EngineError
from stepahead.kernels import jit, step
from stepahead.kernels.jit import inner
from stepahead.kernels.team import Team, meet, take

THREADS = [1, 2, 3, 4]


TURNS = 100_000  # longer than the others take for all pieces
_BITS = (1 << 30) - 1  # no product of them overflows


@inner
def come_late(chains: np.ndarray, rank: int) -> None:
    """Each turn needs the one before, and the last one is kept: no compiler leaves any out, or
    makes many into one."""
    value = chains[rank]
    for _ in range(TURNS):
        value = (value * value + 12345) & _BITS
    chains[rank] = value


@inner
def sharing(
    rank: int, team: int, pieces: int, times: np.ndarray, late: int, chains: np.ndarray
) -> None:
    """Counts how often each piece is taken in each of two parts; rank `late` comes late to each."""
    for part in range(2):
        if rank == late:
            come_late(chains, rank)
        while True:
            piece = take(team)
            if piece >= pieces:
                break
            times[rank, part, piece] += 1
        meet(team)


@cache
def end_of_chain() -> int:
    """Where a thread is that came late to both parts."""
    value = 0
    for _ in range(2 * TURNS):
        value = (value * value + 12345) & _BITS
    return value


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(THREADS), st.integers(0, 3000), st.integers(-1, 3))
def test_each_piece_is_taken_once(threads: int, pieces: int, late: int) -> None:
    times, chains = np.zeros((threads, 2, pieces), np.int64), np.zeros(threads, np.int64)
    team(threads).run(sharing, team(threads).address, pieces, times, late, chains)
    assert (times.sum(0) == 1).all()
    # whoever was to come late did
    assert chains.tolist() == [end_of_chain() if rank == late else 0 for rank in range(threads)]


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
        gone.run(sharing, gone.address, 50, times, -1, np.zeros(1, np.int64))
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


def test_a_team_for_which_there_are_too_few_threads_ends_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, start = helpers(), threading.Thread.start
    begun: list[threading.Thread] = []

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "kernels-3":
            raise RuntimeError("can't start new thread")
        start(thread)
        begun.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Team(4)
    gc.collect()
    assert len(begun) == 2
    for thread in begun:
        thread.join(30)
    assert helpers() <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without forks")
def test_a_fork_says_that_the_threads_are_not_its_own() -> None:
    """It would wait for them without end; one thread alone needs none."""
    program = """
import os, sys
from stepahead.errors import EngineError
from stepahead.kernels.team import Team
one, two = Team(1), Team(2)
child = os.fork()
if not child:
    one.run(print)
    try:
        two.run(print)
    except EngineError as error:
        print(error)
    two.use(1)
    two.run(print)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    words = "a fork of the process whose threads these are; load the model anew"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"0\n{words}\n0\n", "")


@pytest.mark.parametrize("threads", [0, -1, 4])
def test_a_team_uses_no_more_threads_than_it_has(threads: int) -> None:
    with pytest.raises(ValueError, match=f"^{threads} threads of a team of 3; use 1 to 3$"):
        team(3).use(threads)
    assert team(3).threads == 3


@pytest.mark.parametrize("threads", [0, -1])
def test_a_team_of_nobody_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"a team of {threads} threads; it takes 1 or more"):
        Team(threads)


def test_a_kernels_cache_has_another_name_when_any_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba looks at the file of the entry alone: after a change of what it calls, or of how it is
    compiled, the old code would run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
    assert {Path(str(name)).parent for name in names} == {tmp_path / "stepahead" / "kernels"}


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


def test_that_kernels_are_compiled_is_said_until_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder alone says nothing: whoever made it may have been ended before it had one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        caplog.clear()
        folder = jit._cache_folder()
        assert "compiling kernels for this CPU, once" in caplog.text
    kept = Path(str(folder)) / "kernels_0123" / "step.layers-97.py311.nbi"
    kept.parent.mkdir()
    kept.write_bytes(b"")
    caplog.clear()
    assert jit._cache_folder() == folder
    assert caplog.text == ""


def test_kernels_that_nobody_has_loaded_for_a_month_make_room_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "stepahead" / "kernels"
    old, young = time.time() - 31 * 24 * 3600, time.time() - 29 * 24 * 3600
    names = {"0123456789abcdef": old, "fedcba9876543210": young, "a users own": old, "f" * 17: old}
    for name, loaded in names.items():
        (home / name / "kernels_0123").mkdir(parents=True)
        os.utime(home / name, (loaded, loaded))
    (home / ("d" * 16)).symlink_to(tmp_path)
    os.utime(home / ("d" * 16), (old, old), follow_symlinks=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(str(jit._cache_folder()))
    kept = {*names, "d" * 16, folder.name} - {"0123456789abcdef"}
    assert {path.name for path in home.iterdir()} == kept
    assert tmp_path.is_dir()
    # what is loaded now and then stays, and so does all while nothing new comes
    for path in (folder, home / "fedcba9876543210"):
        os.utime(path, (old, old))
    assert jit._cache_folder() == str(folder)
    assert folder.stat().st_mtime > young
    assert {path.name for path in home.iterdir()} == kept


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


def shared_by(own: Team, kernel: Callable[..., None] = sharing) -> np.ndarray:
    """How often each piece was taken, of a run that may be interrupted."""
    times = np.zeros((own.threads, 2, 500), np.int64)
    with suppress(KeyboardInterrupt):
        own.run(kernel, own.address, 500, times, -1, np.zeros(1, np.int64))
    return times.sum(0)


@pytest.mark.parametrize("called", range(4))
def test_an_interrupt_before_the_kernel_finds_it_done(
    monkeypatch: pytest.MonkeyPatch, called: int
) -> None:
    """Else the helpers that were called by then work on in memory that the caller frees."""
    own = Team(4)
    call, interrupts = own._desk.call, iter([True])

    def call_some(work: Any, helpers: int) -> None:
        if next(interrupts, False):
            call(work, called)
            raise KeyboardInterrupt
        call(work, helpers)

    monkeypatch.setattr(own._desk, "call", call_some)
    assert (shared_by(own) == 1).all()
    assert next(interrupts, None) is None
    assert (shared_by(own) == 1).all()


def test_an_interrupt_behind_the_kernel_leaves_a_team_as_good_as_before() -> None:
    interrupts = iter([True])

    def interrupted(rank: int, *args: Any) -> None:
        sharing(rank, *args)
        if rank == 0 and next(interrupts, False):
            raise KeyboardInterrupt

    own = Team(2)
    for _ in range(3):
        assert (shared_by(own, interrupted) == 1).all()
    assert next(interrupts, None) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_arguments_that_a_kernel_does_not_take_are_its_own_error(threads: int) -> None:
    own = Team(threads)
    for _ in range(3):
        with pytest.raises(TypeError, match="No matching definition"):
            own.run(step.linear, own.address, "what", *[0] * 7)
        assert (shared_by(own) == 1).all()


def test_a_team_that_was_interrupted_again_says_so_and_runs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Team(2)

    def interrupted(work: Any, helpers: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(own._desk, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.run(print)
    with pytest.raises(EngineError, match="start anew"):
        own.run(print)
