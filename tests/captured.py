"""Models whose decode steps are captured wherever they run."""

from __future__ import annotations

from stepahead.model.llama import Llama
from stepahead.model.toy import ToyModel


class CapturedToy(ToyModel):
    """The toy, read through whole page tables."""

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        """Always."""
        return True


class CapturedLlama(Llama):
    """A Llama that doesn't mind wide tables on the CPU."""

    def can_capture(self, page_size: int, max_pages: int) -> bool:
        """Always."""
        return True
