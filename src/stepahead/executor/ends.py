"""The ends of the links between the workers of stages, as descriptors that travel.  Loads no torch.

A link is shared memory for tensors, and a pipe that says what is there.  The host makes them, hands
each end to its worker and keeps none.  The memory has no name, and is gone with the last who has
it.  Only the two ends hold a link: when one dies the other sees a broken pipe, and leaves, too, for
without its neighbour it has nothing to do.
"""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from stepahead.executor.channel import open_pipe
from stepahead.runner.spec import RunnerSpec

# what a worker ends with that has lost a neighbour: it is not to blame
LOST = 86
_ALIGNED = 64


@dataclass(frozen=True)
class LinkEnd:
    """One end, as it travels to its worker: file descriptors, and the ring's places in bytes."""

    memory_fd: int
    pipe_fd: int
    place_bytes: int
    depth: int


@dataclass(frozen=True)
class StageEnds:
    """All ends of one stage; as `runner.hand_over.Links`."""

    states_in: LinkEnd | None
    states_out: LinkEnd | None
    tokens_in: LinkEnd | None
    tokens_out: tuple[LinkEnd, ...]

    @property
    def ends(self) -> tuple[LinkEnd, ...]:
        """Those that are there."""
        single = (self.states_in, self.states_out, self.tokens_in)
        return (*(end for end in single if end is not None), *self.tokens_out)

    @property
    def fds(self) -> tuple[int, ...]:
        """All their descriptors."""
        return tuple(fd for end in self.ends for fd in (end.memory_fd, end.pipe_fd))


def open_links(spec: RunnerSpec) -> list[StageEnds]:
    """The ends of each stage, whose descriptors are the caller's to close."""
    before_last = range(spec.stages - 1)
    # where the host brings all tokens they need no way back
    relayed = len(before_last) if spec.relay == "row" else 0
    sizes = [spec.state_bytes] * len(before_last) + [8] * relayed
    links: list[tuple[LinkEnd, LinkEnd]] = []
    try:
        for token_bytes in sizes:
            # no comprehension: if one can't be opened, those before it must be closed
            links.append(_open(spec.step_tokens * token_bytes, spec.depth))  # noqa: PERF401
    except BaseException:
        _close(*(end for link in links for end in link))
        raise
    onwards, back = links[: len(before_last)], links[len(before_last) :]
    return [
        StageEnds(
            onwards[i - 1][0] if i else None,
            onwards[i][1] if i in before_last else None,
            back[i][0] if i < len(back) else None,
            tuple(sender for _, sender in back) if i == spec.stages - 1 else (),
        )
        for i in range(spec.stages)
    ]


def close_ends(stages: Iterable[StageEnds]) -> None:
    """Closes what no worker was given."""
    for stage in stages:
        _close(*stage.ends)


def _close(*ends: LinkEnd) -> None:
    for end in ends:
        os.close(end.memory_fd)
        os.close(end.pipe_fd)


def _open(place_bytes: int, depth: int) -> tuple[LinkEnd, LinkEnd]:
    """The receiver's end and the sender's."""
    place_bytes = -(-max(place_bytes, 1) // _ALIGNED) * _ALIGNED
    memory_fd = os.memfd_create("stepahead-link")
    try:
        os.ftruncate(memory_fd, place_bytes * depth)
        # each end's worker closes its own; and none of 0, 1 and 2, which are set anew there
        memory = [fcntl.fcntl(memory_fd, fcntl.F_DUPFD_CLOEXEC, 3) for _ in range(2)]
    finally:
        os.close(memory_fd)
    read_fd, write_fd = open_pipe()
    receiver = LinkEnd(memory[0], read_fd, place_bytes, depth)
    return receiver, LinkEnd(memory[1], write_fd, place_bytes, depth)


def leave_with_neighbour(ends: StageEnds) -> NoReturn:
    """Sleeps until a neighbour is gone, then ends this process, whatever it is at."""
    poll = select.poll()
    for end in ends.ends:
        poll.register(end.pipe_fd, 0)  # a broken pipe is always reported
    poll.poll()
    os._exit(LOST)
