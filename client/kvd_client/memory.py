"""Memory that another process can map: host memory by descriptor, CUDA memory by its handles.

If a file of host memory lost pages while the daemon has them mapped, the process that touches them
would get SIGBUS. A seal (fcntl(2), F_SEAL_SHRINK) prevents that for good, and only files of
memfd_create(2) can have one.

A handle of CUDA memory names whole allocations, so a storage is described by the allocations that
it lies in and an offset. Memory of cudaMalloc is one allocation and has an IPC handle. Virtual
memory (PyTorch's expandable segments, vLLM's cumem allocator) has none. It may be several
allocations mapped one after another; each is exported as a descriptor, if its allocator requested
that when it made it. Shared memory must stay mapped: an engine that remaps its memory registers
again.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from kvd_client import cuda_driver
from kvd_client.errors import UnsupportedMemory, UsageError, check_int, shown
from kvd_proto.channel import close_all
from kvd_proto.messages import (
    HOST,
    MAX_SEGMENTS,
    Handle,
    HostHandle,
    IpcHandle,
    VmmHandle,
    VmmSegment,
)

LARGER_ALLOCATIONS = (
    "have the allocator make larger ones: PyTorch's expandable segments are of 20 MiB, remove"
    " expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"
)
"""The remedy for memory that lies in too many allocations."""

_REMEDY = (
    "vLLM's cumem allocator and PyTorch's expandable segments make such memory: start vLLM"
    " without --enable-sleep-mode and --enable-cumem-allocator, and remove"
    " expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF; any other allocator must ask for POSIX"
    " file descriptors"
)
_FABRIC_REMEDY = (
    "vLLM's cumem allocator makes such memory in a process that may use an IMEX channel: give"
    " the container none (NVIDIA_IMEX_CHANNELS), and it requests descriptors, or start vLLM"
    " without --enable-sleep-mode and --enable-cumem-allocator"
)

Allocation = tuple[int, int]
"""An allocation's address in this process, and its bytes."""


def sealed_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a new zeroed memory file of fixed size.

    Raises:
        OSError: the system has no memory for it.
        OverflowError: no file can have this size.
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
    """Return whether the descriptor's file is sealed against shrinking."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of another kind
        return False


def seal(fd: int) -> None:
    """Seal the descriptor's file against shrinking.

    Raises:
        UnsupportedMemory: it cannot have the seal.
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


class Descriptors:
    """Descriptors that are closed together, at the latest with this object.

    Attributes:
        fds: their numbers; empty once closed.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self._closing = weakref.finalize(self, close_all, self.fds)

    def close(self) -> None:
        """Close them. May be called again."""
        self._closing()
        self.fds = ()


class Memory:
    """One storage that another process can map. It owns its descriptors, not the memory.

    Attributes:
        device: "host", or "cuda:" and the device's UUID.
        nbytes: of the storage.
        offset: bytes from the start of the first of its files or allocations.
        fds: descriptors of the files or allocations that it lies in, in order; none if it has an
            IPC handle, or once it is closed.
        identities: one for each descriptor; equal for storages in the same file or allocation.
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
        """Return the handle for a registration in which its descriptors have these numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the descriptors; mappings stay. May be called again."""
        self._descriptors.close()
        self.closed = True

    def __repr__(self) -> str:
        numbers = ", ".join(map(str, self.fds))
        state = "closed" if self.closed else f"fd {numbers}" if numbers else "IPC handle"
        size = f"{self.nbytes} bytes at {self.offset} on {self.device}"
        return f"<{type(self).__name__} {size}, {state}>"


class HostMemory(Memory):
    """One storage in shared host memory.

    Args:
        fd: a descriptor of memfd_create(2), taken over. Its file is sealed against shrinking.
        nbytes: of the storage.
        offset: bytes from the start of the file to the storage.

    Raises:
        UsageError: not an open descriptor, or a negative size or offset.
        UnsupportedMemory: no bytes, or some beyond the file's end; or the file cannot be sealed.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        check_int("nbytes", nbytes, 0)
        check_int("offset", offset, 0)
        try:
            status = os.fstat(fd)
        except (OSError, OverflowError, TypeError) as error:
            raise UsageError(f"fd={shown(fd)}: an open descriptor is needed: {error}") from error
        if not nbytes or status.st_size < offset + nbytes:
            raise UnsupportedMemory(
                f"nbytes={nbytes} from offset={offset} do not lie inside a file of {status.st_size}"
                " bytes"
            )
        seal(fd)
        super().__init__(HOST, nbytes, offset, Descriptors((fd,)), [(status.st_dev, status.st_ino)])
        self._array: npt.NDArray[np.uint8] | None = None  # None unless `allocate` made it

    @classmethod
    def allocate(cls, nbytes: int) -> Self:
        """Return new zeroed memory, mapped here as `array`.

        Raises:
            UsageError: not a size above 0.
            UnsupportedMemory: the system has no memory for it.
        """
        check_int("nbytes", nbytes, 1)
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
        """u8[nbytes], writable; the memory stays mapped as long as the array lives.

        Raises:
            UsageError: this memory was not made by `allocate`.
        """
        if self._array is None:
            raise UsageError("this memory belongs to a tensor; use the tensor")
        return self._array


# ------------------------------------------------------------------------ CUDA


class DeviceMemory(Memory):
    """One storage in CUDA memory, made by `at`; `device` is "cuda:" and the device's UUID.

    Args:
        ordinal: the device's number in this process.
        device: its name.
        allocations: that the storage lies in, in order.
        offset: bytes from the start of the first allocation to the storage.
        nbytes: of the storage.
        ipc: the IPC handle, if there is one allocation that has one; else empty.
        descriptors: of the allocations, if there is no IPC handle.
    """

    def __init__(
        self,
        ordinal: int,
        device: str,
        allocations: Sequence[Allocation],
        *,
        offset: int,
        nbytes: int,
        ipc: bytes = b"",
        descriptors: Descriptors | None = None,
    ) -> None:
        identities = [] if ipc else [base for base, _ in allocations]
        super().__init__(device, nbytes, offset, descriptors or Descriptors(()), identities)
        self.ordinal = ordinal
        self.allocations = tuple(allocations)
        self.ipc = ipc

    @classmethod
    def at(cls, address: int, nbytes: int) -> Self:
        """Return the storage of `nbytes` at a device pointer.

        Any thread may call it, with or without a CUDA context.

        Raises:
            UsageError: an invalid address or size.
            UnsupportedMemory: no other process can map the memory, or there is no CUDA driver.
            CudaError: the driver failed, or the address is no device memory of this process.
        """
        if not isinstance(address, int) or not 0 < address < 2**64:
            raise UsageError(f"address={shown(address)}: a device pointer is needed")
        check_int("nbytes", nbytes, 1)
        with cuda_driver.beside_captures():
            with cuda_driver.any_context():
                ordinal = cuda_driver.device_of(address)
            device = cuda_driver.device_name(ordinal)
            context = cuda_driver.PrimaryContext(ordinal)
            try:
                with context.current():
                    allocations = _allocations(address, nbytes)
                    ipc, descriptors = b"", None
                    if cuda_driver.has_ipc_handle(address) and len(allocations) == 1:
                        ipc = cuda_driver.ipc_handle(allocations[0][0])
                    else:
                        descriptors = _export(allocations)
            finally:
                context.release()
        return cls(
            ordinal,
            device,
            allocations,
            offset=address - allocations[0][0],
            nbytes=nbytes,
            ipc=ipc,
            descriptors=descriptors,
        )

    def handle(self, numbers: Sequence[int]) -> IpcHandle | VmmHandle:
        """See Memory."""
        if self.ipc:
            ((_, allocation),) = self.allocations
            return IpcHandle(handle=self.ipc, allocation=allocation, offset=self.offset)
        segments = tuple(
            VmmSegment(fd_index=number, nbytes=nbytes)
            for number, (_, nbytes) in zip(numbers, self.allocations, strict=True)
        )
        return VmmHandle(segments=segments, offset=self.offset)


def _allocations(address: int, nbytes: int) -> list[Allocation]:
    """Return the allocations that these bytes lie in, in order."""
    allocations: list[Allocation] = []
    end = address
    while end < address + nbytes:
        if len(allocations) == MAX_SEGMENTS:
            raise UnsupportedMemory(
                f"{nbytes} bytes at {address:#x} lie in more than {MAX_SEGMENTS} CUDA allocations;"
                f" {LARGER_ALLOCATIONS}"
            )
        base, size = cuda_driver.allocation_of(end)
        allocations.append((base, size))
        end = base + size
    return allocations


def _export(allocations: Sequence[Allocation]) -> Descriptors:
    """Export allocations of virtual memory; return their new descriptors."""
    fds: list[int] = []
    try:
        for base, nbytes in allocations:
            as_descriptor, as_fabric = cuda_driver.export_kinds(base)
            if not as_descriptor:
                reason, remedy = (
                    ("it can be exported to a fabric only", _FABRIC_REMEDY)
                    if as_fabric
                    else ("its allocator made it without a way to export it", _REMEDY)
                )
                raise UnsupportedMemory(
                    f"{nbytes} bytes at {base:#x} lie in CUDA memory that the daemon cannot map:"
                    f" {reason}; {remedy}"
                )
            fds.append(cuda_driver.export(base))
    except BaseException:
        Descriptors(fds).close()
        raise
    return Descriptors(fds)
