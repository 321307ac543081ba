"""What kept a step from beginning although all of it lay in the device's queues.

The forward waits for the plan's way to the device: the copy of what it brings, then the writes in
the page tables, and those wait for the fence.  Only a step that brings something has such a way;
a steady one has none.  Asked when the step has landed, and times are on the device's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepahead.device.base import Event
from stepahead.runner.stage import Staged
from stepahead.sync import Cause, Held, Sync, SyncReason, Waited

# what the host waits for inside a launch is copies: out of staging, or to the host
_CAUSES = dict.fromkeys(
    (SyncReason.STAGING, SyncReason.BLOCKING_COPY, SyncReason.HOST_LENGTHS), Cause.COPY
)


@dataclass(frozen=True)
class Arrival:
    """A step whose forward was queued at `ready_ns`, after one that ended at `before`.

    Its page tables' writes, if any, were queued at `fenced_ns`, behind `fence`.
    """

    ready_ns: int
    before: Event | None
    fence: Event | None = None
    fenced_ns: int = 0

    def held(self, start_ns: int) -> tuple[Held, ...]:
        """Why the device, which could have begun, began at `start_ns`: for the time by which the
        fence had put the writes off it is the fence, else the copy."""
        could_ns = max(self.ready_ns, self.before.at_ns() if self.before else 0)
        if start_ns <= could_ns:
            return ()
        put_off_ns = max(0, self.fence.at_ns() - self.fenced_ns) if self.fence else 0
        split_ns = max(could_ns, start_ns - put_off_ns)
        spans = ((Cause.COPY, could_ns, split_ns), (Cause.FENCE, split_ns, start_ns))
        return tuple(Held(*span) for span in spans if span[1] < span[2])


def waits(waited: tuple[Waited, ...]) -> tuple[Held, ...]:
    """The host's own waits inside a launch."""
    return tuple(
        Held(_CAUSES[reason], start_ns, end_ns)
        for reason, start_ns, end_ns in waited
        if start_ns < end_ns
    )


def pulled_back(staged: Staged, waited: tuple[Waited, ...]) -> tuple[Sync, ...]:
    """Where a step could not run ahead.  A wait holds up all its rows; hidden states only make the
    landing of those that want them later."""
    wanting = len(staged.first.group.hidden_rows) + len(staged.pools)
    if staged.late is not None:
        wanting += len(staged.late.part.group.hidden_rows)
    if not waited and not wanting:
        return ()
    rows = len(staged.inputs.slots_dev)
    reasons = dict.fromkeys(wait.reason for wait in waited)
    syncs = [Sync(reason, rows) for reason in reasons]
    if wanting:
        syncs.append(Sync(SyncReason.HIDDEN_STATES, wanting))
    return tuple(syncs)
