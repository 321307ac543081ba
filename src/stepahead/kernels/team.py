"""Threads that run one kernel together: they share its work, and wait for each other by spinning.

A team is int64[TEAM] in memory, all zero at first but for the number of threads.  Each part of a
kernel's work is taken piece by piece (`take`), so that a thread that has lost its core holds up the
others by no more than a piece.  `meet` ends a part: whoever comes last lets the others go on.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stepahead.errors import EngineError
from stepahead.kernels.emit import I32, I64, Emitter
from stepahead.kernels.jit import inner

_THREADS, _ARRIVED, _ROUND, _TAKEN = 0, 64, 128, 192  # bytes, each in a cache line of its own
_TEAM = 32
# Looks at the round before the core is offered to others: as long as the shortest parts take.
_LOOKS = 2_000
_LOG = logging.getLogger("stepahead")


@intrinsic
def _atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to an int64, and what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _atomic_load(typing_context: Any, address: Any) -> Any:
    """An int64 that others change."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.intp(types.intp), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tell the core that it spins."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86_64" in builder.module.triple:
            Emitter(builder).called("llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _yield_core(typing_context: Any) -> Any:
    """Offer the core to other threads of the machine."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emitter(builder).called("sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), generate


_add: Any = _atomic_add
_look: Any = _atomic_load
_rest: Any = _pause
_offer: Any = _yield_core


@inner
def take(team: int) -> int:
    """The next piece of this part of the work; whoever is given one that is not there is done."""
    return _add(team + _TAKEN, 1)


@inner
def threads_of(team: int) -> int:
    """How many threads it has now."""
    return _look(team + _THREADS)


@inner
def meet(team: int) -> None:
    """Wait until all threads have come here; then pieces are counted from 0 again."""
    threads = _look(team + _THREADS)
    round_now = _look(team + _ROUND)
    if _add(team + _ARRIVED, 1) == threads - 1:
        _add(team + _TAKEN, -_look(team + _TAKEN))
        _add(team + _ARRIVED, -threads)
        _add(team + _ROUND, 1)
        return
    looks = 0
    while _look(team + _ROUND) == round_now:
        _rest()
        looks += 1
        if looks > _LOOKS:
            _offer()


_Work = tuple[Callable[..., None], tuple[Any, ...]]


class _Desk:
    """Where helpers find their work; None when there will be no more."""

    def __init__(self, helpers: int, state: np.ndarray) -> None:
        # helpers may still look at it when the team's last kernel has returned to its caller
        self.state = state
        # each put is one step to an interrupt: there is work for a helper, or there is none
        self.places: list[SimpleQueue[_Work | None]] = [SimpleQueue() for _ in range(helpers)]

    def call(self, work: _Work, helpers: int) -> None:
        """May be said again: a helper does the same work once."""
        for place in self.places[:helpers]:
            place.put(work)

    def close(self) -> None:
        for place in self.places:
            place.put(None)


def _help(desk: _Desk, rank: int) -> None:
    done: _Work | None = None
    while (work := desk.places[rank - 1].get()) is not None:
        if work is done:
            continue
        done = work
        kernel, args = work
        try:
            kernel(rank, *args)
        except Exception as error:  # its arguments, before it began; the caller is told as well
            _LOG.warning("stepahead: thread %d of a kernel did not begin (%r)", rank, error)


class Team:
    """The calling thread and `threads - 1` more, which sleep between kernels.

    Kernels are compiled, and must meet before they return, so that none works on when the caller
    goes on.
    """

    def __init__(self, threads: int) -> None:
        """Raises ValueError for fewer than one."""
        if threads < 1:
            raise ValueError(f"a team of {threads} threads; it takes 1 or more")
        self._state = np.zeros(_TEAM, np.int64)
        self._desk = _Desk(threads - 1, self._state)
        self.use(threads)
        self._process = os.getpid()
        self._under_way = False  # stays true where helpers have been left in the middle
        self._alone = np.zeros(_TEAM, np.int64)
        self._alone[0] = 1
        self.address = self._state.ctypes.data
        # before there is a helper: if the system has no thread for one, the others end
        weakref.finalize(self, self._desk.close)
        for rank in range(1, threads):
            # a helper holds the desk and not the team, so that a team let go ends its helpers
            args, name = (self._desk, rank), f"kernels-{rank}"
            threading.Thread(target=_help, args=args, name=name, daemon=True).start()

    def use(self, threads: int) -> None:
        """From now on kernels run on so many of the team's threads.

        Raises ValueError for fewer than one, or more than there are: those that there are would
        wait for them without end.
        """
        most = len(self._desk.places) + 1
        if not 1 <= threads <= most:
            raise ValueError(f"{threads} threads of a team of {most}; use 1 to {most}")
        self.threads = threads
        self._state[0] = threads

    @property
    def alone(self) -> int:
        """The address of a team of the calling thread only, for what is done before another thread
        would be awake."""
        return self._alone.ctypes.data

    def run(self, kernel: Callable[..., None], *args: Any) -> None:
        """kernel(rank, *args) on every thread of the team, the caller's being rank 0.

        When it returns or raises no thread is at work any more, and the caller may free what the
        arguments' addresses lead to; but for a second interrupt within microseconds of one, from
        which on the team refuses to run.  Raises EngineError then, and in a fork of the process,
        which has no helpers; and what the kernel says of arguments that are not its own.
        """
        helpers = self.threads - 1
        if not helpers:
            kernel(0, *args)
            return
        self._check()
        work, before = (kernel, args), self._round()
        try:
            self._under_way = True
            self._desk.call(work, helpers)
            kernel(0, *args)
            self._under_way = False
        except BaseException:
            self._finish(work, helpers, before)
            raise

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise EngineError("a fork of the process whose threads these are; load the model anew")
        if self._under_way:
            raise EngineError("a kernel was interrupted and its threads disagree: start anew")

    def _round(self) -> int:
        return int(self._state[_ROUND // 8])

    def _finish(self, work: _Work, helpers: int, before: int) -> None:
        """After an interrupt: the kernel is run to its end, unless it has been.  Helpers that have
        begun wait for this thread, and the caller is about to free what they work on."""
        kernel, args = work
        # it may not take its arguments, and then none has begun
        with suppress(TypeError, OverflowError):
            self._desk.call(work, helpers)  # some may have been called, and some not
            # an interrupt does not come in the middle of a kernel, and no kernel ends without
            # having met: if nobody has, this thread has not begun
            if self._round() == before:
                kernel(0, *args)
        self._under_way = False
