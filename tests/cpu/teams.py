"""The tests' threads for kernels."""

from __future__ import annotations

from functools import cache

from stepahead.kernels.team import Team


@cache
def team(threads: int = 1) -> Team:
    """One team of each size for all tests of a process."""
    return Team(threads)
