"""Happens-before, by vector clocks: whether an edge orders two accesses to the same memory.

Each actor (the host, each stream) counts its accesses and points.  Its clock says how far it knows
every other to have come; an edge takes over what the other knew.  Two accesses that neither knows
of are a race, whether or not they happened to run in a harmless order.

Knows names of memory and of actors, nothing of what runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = "host"
Clock = dict[str, int]


class RaceError(AssertionError):
    """Two accesses to the same memory that no declared edge orders, or one to memory without
    contents: freed, or not written yet."""


@dataclass
class _Memory:
    """Who touched a piece of memory last: (actor, tick) of its writer and of its readers since."""

    writer: tuple[str, int] | None = None
    readers: dict[str, int] = field(default_factory=dict)
    blank: bool = False
    freed: bool = False


class Clocks:
    """One clock for each of `streams` and one for the host."""

    def __init__(self, streams: Iterable[str]) -> None:
        self._clocks: dict[str, Clock] = {HOST: {}} | {stream: {} for stream in streams}
        self._worked: Clock = {}  # the tick of each stream's last access
        self._memory: dict[str, _Memory] = {}

    def add(self, streams: Iterable[str]) -> None:
        """More streams, of another device of the same host."""
        self._clocks |= {stream: {} for stream in streams}

    def point(self, stream: str) -> Clock:
        """A point in the stream after all that is in it so far: what an event carries."""
        self._tick(stream)
        return dict(self._clocks[stream])

    def join(self, actor: str, clock: Clock) -> None:
        """What the actor does from now on comes after a point."""
        _join(self._clocks[actor], clock)

    def host_is_past(self, clock: Clock) -> bool:
        """Whether the host knows that a point has been passed."""
        known = self._clocks[HOST]
        return all(known.get(actor, 0) >= tick for actor, tick in clock.items())

    def check_idle(self, why: str) -> None:
        """RaceError unless the host has waited for all that any stream was given."""
        for stream, tick in self._worked.items():
            if self._clocks[HOST].get(stream, 0) < tick:
                raise RaceError(f"{why} while {stream} has work that the host did not wait for")

    def hand_out(self, name: str) -> None:
        """Fresh memory: it must be written before it is read."""
        self._memory[name] = _Memory(blank=True)

    def access(self, stream: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        """An operation enqueued now: it comes after all that the host has seen."""
        _join(self._clocks[stream], self._clocks[HOST])
        self._worked[stream] = self._touch(stream, reads, writes)

    def host_reads(self, name: str) -> None:
        """The host reads memory now."""
        self._touch(HOST, (name,), ())

    def host_writes(self, name: str) -> None:
        """The host writes memory now."""
        self._touch(HOST, (), (name,))

    def free(self, name: str) -> None:
        """The host gives memory back now; an access to it that comes later is an error."""
        self._tick(HOST)
        self._write(HOST, name, "frees")
        self._memory[name] = _Memory(freed=True)

    def _touch(self, actor: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> int:
        tick = self._tick(actor)
        for name in reads:
            self._read(actor, name)
        for name in writes:
            self._write(actor, name, "overwrites")
        return tick

    def _tick(self, actor: str) -> int:
        tick = self._clocks[actor][actor] = self._clocks[actor].get(actor, 0) + 1
        return tick

    def _read(self, actor: str, name: str) -> None:
        memory = self._live(actor, name, "reads")
        if memory.blank:
            raise RaceError(f"race on {name!r}: {actor} reads {name!r}, which was never written")
        self._check_order(actor, memory.writer, name, "reads what is being written")
        memory.readers[actor] = self._clocks[actor][actor]

    def _write(self, actor: str, name: str, verb: str) -> None:
        memory = self._live(actor, name, verb)
        self._check_order(actor, memory.writer, name, f"{verb} what is being written")
        for reader in memory.readers.items():
            self._check_order(actor, reader, name, f"{verb} what is being read")
        self._memory[name] = _Memory(writer=(actor, self._clocks[actor][actor]))

    def _live(self, actor: str, name: str, verb: str) -> _Memory:
        memory = self._memory.setdefault(name, _Memory())
        if memory.freed:
            raise RaceError(f"race on {name!r}: {actor} {verb} {name!r}, which was freed")
        return memory

    def _check_order(self, actor: str, other: tuple[str, int] | None, name: str, what: str) -> None:
        if other is not None and self._clocks[actor].get(other[0], 0) < other[1]:
            raise RaceError(f"race on {name!r}: {actor} {what} by {other[0]}")


def _join(into: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        into[actor] = max(into.get(actor, 0), tick)
