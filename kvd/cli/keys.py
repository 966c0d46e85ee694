"""Single keys from a terminal, without Return."""

import contextlib
import os
import select
import termios
import time
import tty
from typing import Any, Self, TextIO


class Keys:
    """Reads keys while it is open; without a terminal to read from it only waits."""

    def __init__(self, source: TextIO) -> None:
        self._fd = source.fileno() if source.isatty() else None
        self._before: list[Any] = []

    def wait(self, seconds: float) -> str:
        """The next key within `seconds`, else an empty text."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        return os.read(self._fd, 1).decode("latin-1").lower() if ready else ""

    def __enter__(self) -> Self:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
