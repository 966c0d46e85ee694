"""The pipe by whose end of file workers know that this process is gone.

Its write end stays open here alone, for life. The kernel lets go of a dying
process's descriptors from the highest number down (seen by timing it), and a
device's driver stops its copies when its own descriptors go. So the pipe must
have a lower number than they: then end of file means that nothing of this
process moves bytes any more.
"""

import fcntl
import os

_HIGH = 64


def open_lifeline() -> int:
    """The read end; to be called before a device is opened.

    The write end takes the lowest number that is free now, and nothing below it may be closed
    while the process lives.
    """
    read_end, write_end = os.pipe()
    moved = move_up(read_end)
    lower = os.dup(write_end)
    if lower > write_end:
        os.close(lower)
    else:
        os.close(write_end)
    return moved


def move_up(descriptor: int) -> int:
    """Give a descriptor that will be closed another, high number."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return moved
