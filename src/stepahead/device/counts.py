"""What a device was asked to do, counted exactly.

For devices on which "none" and "one" can be asserted: waits of the host, copies, operations, idle
time.  Knows no device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stepahead.device.base import Stream
from stepahead.sync import SyncReason


@dataclass
class CopyCount:
    """Copies of one call site, and their bytes."""

    copies: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """One more."""
        self.copies += 1
        self.nbytes += nbytes


@dataclass
class DeviceCounts:
    """Counts since the device was made.

    `landings`: waits of the host for an event without a reason; `syncs`: those with one; `hidden`:
    those that nobody asked for, by call site.  `uploads`, `downloads`: copies that have run, by
    call site.  `operations`: what has run on each stream, copies included.  `idle_ns`: time
    between a forward operation's end and the next one's start, all together.
    """

    landings: int = 0
    syncs: Counter[SyncReason] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)
    uploads: dict[str, CopyCount] = field(default_factory=dict)
    downloads: dict[str, CopyCount] = field(default_factory=dict)
    operations: Counter[Stream] = field(default_factory=Counter)
    idle_ns: int = 0

    @property
    def host_waits(self) -> int:
        """Times that the host stood still for the device, whatever for."""
        return self.landings + self.syncs.total() + self.hidden.total()

    def upload(self, name: str, nbytes: int) -> None:
        """A copy to the device memory `name` has run."""
        self.uploads.setdefault(call_site(name), CopyCount()).add(nbytes)

    def download(self, name: str, nbytes: int) -> None:
        """A copy from the device memory `name` has run."""
        self.downloads.setdefault(call_site(name), CopyCount()).add(nbytes)

    def as_dict(self) -> dict[str, Any]:
        """All counts under plain names; call sites in order of appearance."""
        return {
            "landings": self.landings,
            "syncs": {
                reason.value: self.syncs[reason] for reason in SyncReason if self.syncs[reason]
            },
            "hidden": dict(self.hidden),
            "uploads": _copies(self.uploads),
            "downloads": _copies(self.downloads),
            "operations": {stream.value: self.operations[stream] for stream in Stream},
            "idle_ns": self.idle_ns,
        }


def call_site(name: str) -> str:
    """Memory's name without the number that ends it: "results" for "results 12"."""
    head, _, last = name.rpartition(" ")
    return head if head and last.isdecimal() else name


def _copies(counts: dict[str, CopyCount]) -> dict[str, dict[str, int]]:
    return {site: {"copies": c.copies, "bytes": c.nbytes} for site, c in counts.items()}
