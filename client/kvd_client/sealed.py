"""Memory files that nobody can shorten.

The daemon maps what a worker shares. If its file could lose pages under the mapping, the
process that touches them would end by a signal. A seal (fcntl(2), F_SEAL_SHRINK) rules
that out for good, and only files of memfd_create(2) can carry one.
"""

import fcntl
import os

from kvd_client.errors import UnsupportedMemory


def make(name: str, nbytes: int) -> int:
    """The descriptor of a new zeroed memory file that keeps its size.

    Raises:
        OSError: the system has no room for it.
        OverflowError: a size that no file has.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether the descriptor's file can lose no byte any more."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of another kind
        return False


def seal(fd: int) -> None:
    """See to it that the descriptor's file can lose no byte any more.

    Raises:
        UnsupportedMemory: it cannot carry the seal.
    """
    if is_sealed(fd):
        return
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        raise UnsupportedMemory(
            f"fd={fd} could be shortened while the daemon has it mapped, and cannot be sealed"
            f" against that ({error.strerror}): use HostMemory.allocate, or a descriptor of"
            " memfd_create with MFD_ALLOW_SEALING"
        ) from error
