"""A worker's control page, which only this process and its CUDA streams write."""

import ctypes
import mmap
import os

from kvd_client.memory import sealed_file
from kvd_proto.control import CONTROL_BYTES, ControlWords


class ControlPage(ControlWords):
    """A new control page of this process; all words are 0."""

    nbytes = CONTROL_BYTES

    def __init__(self) -> None:
        self.fd = sealed_file("kvd-control", CONTROL_BYTES)
        super().__init__(mmap.mmap(self.fd, CONTROL_BYTES))

    @property
    def address(self) -> int:
        """Where word 0 is in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Close the descriptor; a lane that has mapped the page keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
