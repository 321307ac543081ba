"""Keys of a terminal, one at a time and without Enter; nothing where stdin is no terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType


class Keys:
    """The keyboard, while it is entered; the terminal is left as it was found."""

    def __init__(self) -> None:
        self._fd = -1
        self._before: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> Keys:
        if sys.stdin.isatty():
            self._fd = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # Ctrl-C stays what it is
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    @property
    def there(self) -> bool:
        """Whether anybody can press one."""
        return self._before is not None

    def wait(self, timeout_s: float) -> str:
        """The next key, "" if none comes in that time."""
        if not self.there:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select((self._fd,), (), (), timeout_s)
        if not ready:
            return ""
        pressed = os.read(self._fd, 1)
        return pressed.decode(errors="replace") or "q"  # b"": the terminal is gone
