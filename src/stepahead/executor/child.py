"""A process of our own, from its start to its end: nothing of it stays behind.  Knows no plans.

The child is a plain `python -c`, not multiprocessing's spawn, which would import the parent's main
script again and break every script without an `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from weakref import WeakMethod

# -P and the parent's sys.path first: nothing in the current folder may stand in for a module.
_BOOT = (
    "import sys; fds = int(sys.argv[1]), int(sys.argv[2]); sys.path[:] = sys.argv[3:]; "
    "from importlib import import_module; import_module({!r}).main(*fds)"
)
WORKER = "stepahead.executor.worker"
_PR_SET_PDEATHSIG = 1
# A process with no handler of SIGTERM is gone in milliseconds, whatever it computes; one that was
# killed too, unless it hangs in the kernel, and then no wait helps.
_ASKED_S = 1.0
_KILLED_S = 1.0
END_S = _ASKED_S + _KILLED_S  # the most that `stop` takes beside its grace


def die_with_parent() -> None:
    """In the child: the kernel kills it when the parent goes, whatever the child is busy with.

    Linux only; elsewhere the child's own watch of its channel remains.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A running worker.

    One thread starts it, waits for its end and then calls `on_end`.  It is that thread's child: the
    kernel ties the death signal to the thread that forked, and the caller's may end before the
    engine does.  `on_end` is weak: were the thread to hold the channel, an executor that is dropped
    without close() would not close its pipes, which ends the worker.
    """

    def __init__(
        self,
        fds: tuple[int, int],
        on_end: WeakMethod[Callable[[], None]],
        more_fds: tuple[int, ...] = (),
        module: str = WORKER,
    ) -> None:
        """Takes over `fds`, the child's end of the channel, and `more_fds`, which it has under the
        same numbers; OSError when nothing can start.

        The child's life is `main(read_fd, write_fd)` of `module`.
        """
        started: Future[subprocess.Popen[bytes]] = Future()
        self._keeper = threading.Thread(
            target=_keep,
            args=(fds, more_fds, module, started, on_end),
            name="stepahead-worker-keeper",
            daemon=True,
        )
        self._keeper.start()
        self._process = started.result()
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        self._keeper.join(timeout_s)
        return not self._keeper.is_alive()

    def stop(self, grace_s: float) -> None:
        """Waits `grace_s` for it to end by itself, then asks, then kills; at most END_S more."""
        try:
            if not self.wait(grace_s):
                self.ask()
                self.wait(_ASKED_S)
        finally:  # an impatient second Ctrl-C leaves nothing behind either
            if self._keeper.is_alive():
                self._process.kill()
                self.wait(_KILLED_S)

    def ask(self) -> None:
        """SIGTERM, unless it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._process.kill()

    @property
    def code(self) -> int | None:
        """What it ended with, a signal's number negative; None while it runs."""
        return self._process.returncode

    def end(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is None:
            return "can't be stopped"
        if code >= 0:
            return f"exited with code {code}; its last words are on stderr"
        return f"was killed by {_signal_name(-code)}{_HINTS.get(-code, '')}"


def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """Stops all as `Child.stop` does, side by side: in the time that it takes for one."""
    try:
        if not _all_gone(children, grace_s):
            for child in children:
                child.ask()
            _all_gone(children, _ASKED_S)
    finally:
        for child in children:
            child.kill()
        _all_gone(children, _KILLED_S)


def _all_gone(children: Sequence[Child], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    return all(child.wait(max(0.0, deadline_s - time.monotonic())) for child in children)


_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the kernel does that when memory runs out: see dmesg, ask for fewer pages",
    signal.SIGSEGV: "; its Python stacks are on stderr",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _keep(
    fds: tuple[int, int],
    more_fds: tuple[int, ...],
    module: str,
    started: Future[subprocess.Popen[bytes]],
    on_end: WeakMethod[Callable[[], None]],
) -> None:
    # The child is born with this and never hears Ctrl-C, which goes to the whole terminal: the
    # parent is to decide.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = _start(fds, more_fds, module)
    except BaseException as error:  # else the caller would wait for ever
        started.set_exception(error)
        return
    finally:
        for fd in (*fds, *more_fds):
            os.close(fd)
    started.set_result(process)
    process.wait()
    if (tell := on_end()) is not None:
        tell()


# Read when the worker loads its OpenMP library: how long a thread spins for its next operation
# before it sleeps.  The default spins on through the host's turn and anybody else's (docs/LOG.md).
_SPIN_BRIEFLY = {"GOMP_SPINCOUNT": "1000"}


def _start(fds: tuple[int, int], more_fds: tuple[int, ...], module: str) -> subprocess.Popen[bytes]:
    paths = [os.fspath(path) for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.format(module), *map(str, fds), *paths],
        stdin=subprocess.DEVNULL,
        stdout=_stderr(),  # what a model prints must not mix with the answers on stdout
        stderr=_stderr(),
        pass_fds=(*fds, *more_fds),
        # a signal to our whole group (a terminal's, `timeout`'s) is ours to decide on: were it to
        # end the worker, what is under way would fail instead of ending in order
        start_new_session=True,
        env=_SPIN_BRIEFLY | os.environ,
    )


def _stderr() -> int:
    """Where the worker's words go; a program may have closed its stderr."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
