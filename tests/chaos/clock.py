"""A wall clock that the harness can move under the daemon, by a small preloaded library."""

import subprocess
from pathlib import Path

from tests.chaos.shared import words
from tests.fakecuda.build import NoCompiler, compiler

SOURCE = Path(__file__).with_name("clock.c")
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
YEAR = 365 * 86_400
JUMPS = (-20 * YEAR, -86_400, -30, -1, 1, 30, 86_400, 20 * YEAR, 79 * YEAR, 100 * YEAR)
"""Seconds; 32 bits hold 80 years from now."""


class WallClock:
    """How far the clock of the daemons is from the machine's.

    `missing` says why it cannot be moved here, if it cannot.
    """

    def __init__(self, folder: Path) -> None:
        self._offset = words(folder / "clock", 1)
        self.missing = ""
        self.environment: dict[str, str] = {}
        library = folder / "clock.so"
        try:
            command = [compiler(), *FLAGS, str(SOURCE), "-o", str(library)]
        except NoCompiler as error:
            self.missing = str(error)
            return
        subprocess.run(command, check=True, timeout=60)
        self.environment = {
            "LD_PRELOAD": str(library),
            "KVD_CHAOS_CLOCK": str(folder / "clock"),
        }

    def jump(self, seconds: int) -> None:
        """From now on the clock is so far ahead of the machine's, or behind it."""
        self._offset[0] = seconds & 0xFFFF_FFFF_FFFF_FFFF

    def __repr__(self) -> str:
        return f"<WallClock {self._offset[0]}>"
