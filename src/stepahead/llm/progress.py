"""A progress bar on stderr: requests done, tokens a second in and out.  Knows counts only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY_S = 0.2


class Bar:
    """Counts, and draws at most five times a second; draws nothing when it is not `shown`.

    `shown=None` draws when stderr is a terminal; a closed one has no bar.  `total=None` when nobody
    knows.
    """

    def __init__(self, total: int | None, shown: bool | None, done: int = 0) -> None:
        self.done = done
        self.tokens_in = 0
        self.tokens_out = 0
        self._total = total
        self._began_s = self._drawn_s = time.monotonic()
        wanted = sys.stderr is not None and (sys.stderr.isatty() if shown is None else shown)
        self._progress: Progress | None = _progress() if wanted else None

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.add_task("", total=self._total, completed=self.done, rates="")
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._draw(self._progress)
            self._progress.stop()

    def count(self, done: int, tokens_in: int, tokens_out: int) -> None:
        """Adds to the counts."""
        self.done += done
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out
        if self._progress is not None and time.monotonic() - self._drawn_s >= _EVERY_S:
            self._draw(self._progress)

    def _draw(self, progress: Progress) -> None:
        self._drawn_s = time.monotonic()
        since_s = max(self._drawn_s - self._began_s, 1e-9)
        rates = f"{self.tokens_in / since_s:,.0f} in {self.tokens_out / since_s:,.0f} out tokens/s"
        progress.update(progress.task_ids[0], completed=self.done, rates=rates)
        progress.refresh()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,  # its thread would take turns with the loop
    )
