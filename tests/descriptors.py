"""Which descriptors are open, and on which files.

Their mere number says little: the collector may close what an earlier test left, at any time.
"""

import contextlib
import os
from pathlib import Path


def open_files(process: int | str = "self") -> dict[int, str]:
    """What each descriptor of a process is open on, as the kernel shows it."""
    found = {}
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found[int(entry.name)] = str(entry.readlink())
    return found


def open_on(*files: int) -> set[int]:
    """Descriptors of this process for the files that these ones are open on; these among them."""
    wanted = {(state.st_dev, state.st_ino) for state in map(os.fstat, files)}
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            state = os.fstat(int(entry.name))
        except OSError:  # the one with which the folder is read
            continue
        if (state.st_dev, state.st_ino) in wanted:
            found.add(int(entry.name))
    return found
