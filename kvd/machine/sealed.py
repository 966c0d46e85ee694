"""Files that a worker shares, as far as the daemon may trust them.

Only a memory file that is sealed against shrinking is mapped. A file that loses its pages
under a mapping ends the process that touches them, and a file of any other kind is served by a
file system whose owner may answer late or never: it is asked nothing, not even its size.
"""

import fcntl
import os

from kvd.errors import ImportFailed

HOW = "memfd_create(MFD_ALLOW_SEALING), ftruncate, then fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"


def size_of(fd: int, what: str) -> int:
    """Return the size of a file that cannot be shortened.

    Args:
        fd: the worker's descriptor.
        what: to name it in an error.

    Raises:
        ImportFailed: it is another kind of file, or could be shortened; how to make one.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # answered by the kernel alone
    except OSError:
        raise ImportFailed(f"{what} is no memory file; make it with {HOW}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ImportFailed(f"{what} could be shortened while it is mapped; make it with {HOW}")
    return os.fstat(fd).st_size
