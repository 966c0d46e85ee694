"""Host memory that another process can map: by descriptor, without a name.

The daemon maps what a worker shares. If its file could lose pages under the mapping, the
process that touches them would end by a signal. A seal (fcntl(2), F_SEAL_SHRINK) prevents
that for good, and only files of memfd_create(2) can carry one.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from kvd_client.arguments import shown, whole
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_proto.channel import close_all, duplicated
from kvd_proto.control import CONTROL_BYTES, ControlWords
from kvd_proto.messages import HOST, Handle, HostHandle

LARGER_ALLOCATIONS = (
    "have the allocator make larger ones: PyTorch's expandable segments are of 20 MiB, remove"
    " expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"
)
"""The remedy for memory that lies in too many allocations."""


def sealed_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a new zeroed memory file of fixed size.

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
    """Return whether the descriptor's file cannot be shortened any more."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of another kind
        return False


def seal(fd: int) -> None:
    """Keep the descriptor's file from being shortened.

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


class ControlPage(ControlWords):
    """A worker's control page, which only this process and its CUDA streams write."""

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


class Descriptors:
    """Descriptors that are closed together, with this object at the latest.

    Attributes:
        fds: their numbers; empty once closed.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self._closing = weakref.finalize(self, close_all, self.fds)

    @classmethod
    def duplicated(cls, fds: Sequence[int]) -> Self:
        """Return descriptors of the same files.

        Raises:
            OSError: the limit of open files leaves no room; none is left open.
        """
        return cls(duplicated(fds))

    def close(self) -> None:
        """Close them. May be called again."""
        self._closing()
        self.fds = ()

    def __repr__(self) -> str:
        return f"<Descriptors {', '.join(map(str, self.fds)) or 'closed'}>"


class Memory:
    """One storage that another process can map. It owns its descriptors, not the memory.

    Attributes:
        device: "host", or "cuda:" and the device's UUID.
        nbytes: of the storage.
        offset: where it begins in the first of its files or allocations.
        fds: descriptors of the files or allocations that it lies in, in order; none where it is
            named otherwise, or once it is closed.
        identities: of these; equal for storages that lie in one, while they are open.
    """

    def __init__(
        self,
        device: str,
        nbytes: int,
        offset: int,
        descriptors: Descriptors,
        identities: Sequence[object],
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self.offset = offset
        self.identities = tuple(identities)
        self.closed = False
        self._descriptors = descriptors

    @property
    def fds(self) -> tuple[int, ...]:
        """See Memory."""
        return self._descriptors.fds

    def handle(self, numbers: Sequence[int]) -> Handle:
        """Return how a registration names it, if its descriptors, if any, have these numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the descriptors; what is mapped stays mapped. May be called again."""
        self._descriptors.close()
        self.closed = True

    def __repr__(self) -> str:
        numbers = ", ".join(map(str, self.fds))
        state = "closed" if self.closed else f"fd {numbers}" if numbers else "IPC handle"
        place = f"{self.nbytes} bytes at {self.offset} on {self.device}"
        return f"<{type(self).__name__} {place}, {state}>"


class HostMemory(Memory):
    """One storage in shared host memory.

    Args:
        fd: a descriptor of memfd_create(2), taken over. Its file is sealed against shrinking.
        nbytes: how much of it is the storage.
        offset: where in the file the storage begins.

    Raises:
        UsageError: not an open descriptor, or not numbers.
        UnsupportedMemory: the file is smaller than offset + nbytes, or cannot be sealed.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        whole("nbytes", nbytes, 0)
        whole("offset", offset, 0)
        try:
            file = os.fstat(fd)
        except (OSError, OverflowError, TypeError) as error:
            raise UsageError(f"fd={shown(fd)}: an open descriptor is needed: {error}") from error
        if not nbytes or file.st_size < offset + nbytes:
            raise UnsupportedMemory(
                f"nbytes={nbytes} from offset={offset} do not lie inside a file of {file.st_size}"
                " bytes"
            )
        seal(fd)
        super().__init__(HOST, nbytes, offset, Descriptors((fd,)), [(file.st_dev, file.st_ino)])
        self._array: npt.NDArray[np.uint8] | None = None  # where it was allocated here

    @classmethod
    def allocate(cls, nbytes: int) -> Self:
        """Return new zeroed memory, mapped here as `array`.

        Raises:
            UsageError: not a size above 0.
            UnsupportedMemory: the system has no room for it.
        """
        whole("nbytes", nbytes, 1)
        fd = -1
        try:
            fd = sealed_file("kvd-memory", nbytes)
            array = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise UnsupportedMemory(f"nbytes={nbytes} cannot be allocated: {error}") from error
        memory = cls(fd, nbytes)
        memory._array = array
        return memory

    def handle(self, numbers: Sequence[int]) -> HostHandle:
        """See Memory."""
        return HostHandle(fd_index=numbers[0], offset=self.offset)

    @property
    def fd(self) -> int:
        """The file's descriptor; -1 once it is closed."""
        return self.fds[0] if self.fds else -1

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """u8[nbytes], writable; it keeps the memory mapped for as long as it lives.

        Raises:
            UsageError: this memory was not made by `allocate`.
        """
        if self._array is None:
            raise UsageError("this memory belongs to a tensor; use the tensor")
        return self._array
