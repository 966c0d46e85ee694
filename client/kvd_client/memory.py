"""Host memory that another process can map: by descriptor, without a name."""

import math
import mmap
import os
import weakref
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvd_client import sealed
from kvd_client.arguments import collection, shown, size_of_file, whole
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_proto.devices import HOST
from kvd_proto.messages import HostHandle


class HostMemory:
    """One storage in shared host memory. Its descriptor is closed with it.

    Args:
        fd: a descriptor of memfd_create(2), taken over. Its file is sealed against shrinking.
        nbytes: how much of it is the storage.
        offset: where in the file the storage begins.
        array: the storage as u8[nbytes] in this process, where numpy made it.

    Raises:
        UsageError: no open descriptor, no numbers, or an array of another size.
        UnsupportedMemory: the file is smaller than offset + nbytes, or cannot be sealed.
    """

    device = HOST

    def __init__(
        self, fd: int, nbytes: int, offset: int = 0, array: npt.NDArray[np.uint8] | None = None
    ) -> None:
        for name, number in (("fd", fd), ("nbytes", nbytes), ("offset", offset)):
            if not isinstance(number, int):
                raise UsageError(f"{name}={shown(number)}: a whole number is needed")
        if array is not None and not (isinstance(array, np.ndarray) and array.nbytes == nbytes):
            raise UsageError(f"array={shown(array)}: u8[{nbytes}] is needed, or None")
        have = size_of_file(fd)
        if offset < 0 or nbytes <= 0 or have < offset + nbytes:
            raise UnsupportedMemory(
                f"nbytes={nbytes} from offset={offset} do not lie inside a file of {have} bytes"
            )
        sealed.seal(fd)
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self.nbytes = nbytes
        self.offset = offset
        self._array = array

    @classmethod
    def allocate(cls, nbytes: int) -> Self:
        """New zeroed memory, mapped here as `array`.

        Raises:
            UsageError: no size above 0.
            UnsupportedMemory: the system has no room for it.
        """
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise UsageError(f"nbytes={shown(nbytes)}: a number of bytes above 0 is needed")
        fd = -1
        try:
            fd = sealed.make("kvd-memory", nbytes)
            array = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise UnsupportedMemory(f"nbytes={nbytes} cannot be allocated: {error}") from error
        return cls(fd, nbytes, array=array)

    def part(self, offset: int, nbytes: int) -> "HostMemory":
        """A range of this memory as a storage of its own, with a descriptor of its own.

        Raises:
            UsageError: outside this memory; or closed.
        """
        whole("offset", offset, 0)
        whole("nbytes", nbytes, 1)
        if self.fd < 0 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"offset={offset}, nbytes={nbytes}: bytes {offset}..{offset + nbytes} of {self!r}"
                " are not there"
            )
        array = None if self._array is None else self._array[offset : offset + nbytes]
        return HostMemory(os.dup(self.fd), nbytes, self.offset + offset, array)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.fd < 0

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for parts of one file.

        Raises:
            UsageError: closed.
        """
        if self.fd < 0:
            raise UsageError(f"{self!r}: allocate new memory")
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def duplicate(self) -> "HostMemory":
        """The same storage with a descriptor of its own."""
        return self.part(0, self.nbytes)

    def handle(self, fd_index: int) -> HostHandle:
        """How a registration names it, where its descriptor has this number."""
        return HostHandle(fd_index=fd_index, offset=self.offset)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """u8[nbytes], writable; it keeps the memory mapped for as long as it lives.

        Raises:
            UsageError: this memory was not made by `allocate`.
        """
        if self._array is None:
            raise UsageError("this memory belongs to a tensor; use the tensor")
        return self._array

    def view(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The memory from its start on as an array of this dtype and shape.

        Raises:
            UsageError: that does not fit.
        """
        try:
            kind = np.dtype(dtype)
        except (TypeError, ValueError) as error:
            raise UsageError(f"dtype={shown(dtype)}: a dtype of numpy is needed") from error
        sizes = collection("shape", shape, "sizes")
        if kind.hasobject or not kind.itemsize:
            raise UsageError(f"dtype={kind}: one whose items are plain bytes is needed")
        for size in sizes:
            whole("shape", size, 0)
        items = math.prod(sizes)
        if items * kind.itemsize > self.nbytes:
            raise UsageError(f"{kind}{list(sizes)} does not fit {self.nbytes} bytes")
        return self.array[: items * kind.itemsize].view(kind).reshape(sizes)

    def close(self) -> None:
        """Close the descriptor; what is mapped stays mapped. May be called again."""
        self._closing()
        self.fd = -1

    def __repr__(self) -> str:
        state = "closed" if self.fd < 0 else f"fd {self.fd}"
        return f"<HostMemory {self.nbytes} bytes at {self.offset}, {state}>"
