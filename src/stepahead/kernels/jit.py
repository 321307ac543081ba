"""How kernels are compiled: `inner` functions are called by kernels, `entry` functions by Python.

Compiling takes seconds, so what was compiled for an entry is kept in the user's cache folder, under
a name that changes with any source of this room and with the versions of numba and LLVM: numba
itself looks at the file of the entry alone, and would run an older copy of what it calls.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba

# Sums may be reordered and multiplications fused: how, the compiler decides once, so the same row
# gives the same bits in every call.  NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
_MONTH_S = 30 * 24 * 3600
_LOG = logging.getLogger("stepahead")

_Function = TypeVar("_Function", bound=Callable[..., Any])
# what it gives is called like what it took
_njit: Any = numba.njit


def inner(function: _Function) -> _Function:
    """A function that kernels call, without a cache of its own."""
    return _njit(**_OPTIONS)(function)


def inlined(function: _Function) -> _Function:
    """As `inner`, written out where it is called: for what is called once, with many arguments."""
    return _njit(forceinline=True, **_OPTIONS)(function)


def entry(signature: str) -> Callable[[_Function], _Function]:
    """A function that Python calls, of arguments that `signature` names in numba's words; it runs
    without the interpreter's lock.

    Compiled, or read from the cache, at once: whoever imports its module waits for it.
    """

    def compiled(function: _Function) -> _Function:
        folder = _cache_folder()
        if folder is not None:
            try:
                return _cached(signature, function, folder)
            except Exception as error:  # the disk may be full, a file cut short
                shutil.rmtree(folder, ignore_errors=True)
                _LOG.warning("stepahead: kernels in %s are of no use (%r)", folder, error)
        return _njit(signature, **_OPTIONS)(function)

    return compiled


def _cached(signature: str, function: _Function, folder: str) -> _Function:
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]  # set when numba is imported
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]  # as above
    try:
        return _njit(signature, cache=True, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]  # as above


def _cache_folder() -> str | None:
    """Where kernels are kept; None where nothing can be: numba would then take a folder that does
    not change with the sources, and run old code."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "stepahead" / "kernels" / _stamp()
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            _remove_unused(folder.parent)
        if next(folder.rglob("*.nbi"), None) is None:
            _LOG.warning("stepahead: compiling kernels for this CPU, once; some 20 s of one core")
        os.utime(folder)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError) as error:  # no home, or none that this user may write to
        _LOG.warning("stepahead: no folder for compiled kernels (%s): set XDG_CACHE_HOME", error)
        return None


def _remove_unused(home: Path) -> None:
    """Kernels of other versions that nobody has loaded for a month."""
    month_ago = time.time() - _MONTH_S
    for folder in home.iterdir():
        is_ours = re.fullmatch("[0-9a-f]{16}", folder.name) and not folder.is_symlink()
        with suppress(OSError):  # another process may remove it, too
            if is_ours and folder.is_dir() and folder.stat().st_mtime < month_ago:
                shutil.rmtree(folder, ignore_errors=True)


def _stamp() -> str:
    """A name for the sources of this room, and for what compiles them."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
