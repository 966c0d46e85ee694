"""Which descriptors are open, and on which files.

Their mere number says little: the collector may close what an earlier test left, at any time.
"""

import contextlib
import os
from pathlib import Path


def open_files(process: int | str = "self") -> dict[int, str]:
    """What each descriptor of a process is open on, as the kernel shows it."""
    files = {}
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            files[int(entry.name)] = str(entry.readlink())
    return files


def open_on(*files: int) -> set[int]:
    """Descriptors of this process for the files that these ones are open on; these among them."""
    identities = [os.fstat(file) for file in files]
    descriptors = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one with which the folder is read
            state = os.fstat(int(entry.name))
            if any(os.path.samestat(state, identity) for identity in identities):
                descriptors.add(int(entry.name))
    return descriptors
