"""Write after read: a plan's writes wait for the running forward's reads of what they change.

The schedule stream writes the page tables directly, while the step before may still be reading
them.  *fine* waits for that step's last read, *coarse* for its end.  Fine is for models that say
when their reads are over; with any other, its end is all that is known.
"""

from __future__ import annotations

from stepahead.device.base import Device, Event, Stream


class Fence:
    """Between the forward of step n and what step n+1 writes on the schedule stream."""

    def __init__(self, device: Device, fine: bool) -> None:
        self.fine = fine
        self._device = device
        self._event: Event | None = None

    def reads_over(self, event: Event) -> None:
        """The forward's last read of what the schedule stream writes lies before the event."""
        if self.fine:
            self._event = event

    def forward_over(self, event: Event) -> None:
        """The forward ends at the event."""
        if not self.fine:
            self._event = event

    @property
    def event(self) -> Event | None:
        """What the next write has to wait for, if anything."""
        return self._event

    def before_write(self) -> None:
        """What is enqueued on the schedule stream from now on comes after those reads."""
        if self._event is not None:
            self._device.wait(Stream.SCHEDULE, self._event)
