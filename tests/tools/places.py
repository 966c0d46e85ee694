"""Folders that demos make, and who uses them."""

import contextlib
import tempfile
from pathlib import Path

import psutil


def leftovers() -> set[Path]:
    """Folders of demos, wherever they may be."""
    places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    return {path for place in places for path in place.glob("kvd-demo-*")}


def in_use() -> set[Path]:
    """Those that a process names which is alive: another demo on the machine."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return {path for path in leftovers() if any(str(path) in line for line in lines)}
