"""Folders that demos make, and who uses them."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.waiting import eventually


@contextlib.contextmanager
def nothing_is_left() -> Iterator[None]:
    """Afterwards no folder of a demo is left; but for one of another demo on the machine."""
    before = _folders()
    yield
    eventually(lambda: {path for path in _folders() - before if not _in_use(path)}, lambda x: not x)


def _folders() -> set[Path]:
    places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    return {path for place in places for path in place.glob("kvd-demo-*")}


def _in_use(path: Path) -> bool:
    """Whether a process names it which is alive."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(path) in word for word in process.cmdline()):
                return True
    return False
