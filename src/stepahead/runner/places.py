"""Which slot has which row of device memory that only some slots need.  Host only."""

from __future__ import annotations


class Places:
    """Rows 0, 1, .. handed out and taken back; as many as there were owners at a time."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = 0

    def take(self, slot: int) -> int:
        """A row for the slot."""
        if not self._free:
            self._free.append(self._rows)
            self._rows += 1
        row = self._row_of[slot] = self._free.pop()
        return row

    def give(self, slot: int) -> None:
        """The slot is given up, whether or not it has a row."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)
