"""CUDA memory that another process can map: by its IPC handle, or by a descriptor.

Whichever it is names the whole allocation that a storage lies in, so a storage
is the allocation and an offset. Memory of cudaMalloc has an IPC handle. Memory
of the virtual memory management (expandable segments, sleep mode) has none; it
is exported as a descriptor where its allocator asked for that when it made it.
What is given away must stay mapped: an engine that remaps its memory registers anew.
"""

import os
import weakref
from dataclasses import dataclass, replace
from typing import Self

from kvd_client import cuda_driver
from kvd_client.arguments import shown, whole
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_proto.messages import IpcHandle, VmmHandle

_REMEDY = (
    "PyTorch's expandable segments and vLLM's sleep mode make such memory: remove"
    " expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF, turn sleep mode off, or use an"
    " allocator that makes one exportable allocation of each storage"
)


@dataclass(eq=False)
class DeviceMemory:
    """One storage in CUDA memory, made by `at`. It owns its descriptor, not the memory.

    Attributes:
        ordinal: the device's number in this process.
        device: "cuda:" and the device's UUID.
        base: where the allocation begins, as this process sees it.
        allocation: its bytes.
        offset: where the storage begins in it.
        nbytes: of the storage.
        ipc: the allocation's IPC handle; empty where it is exported as a descriptor.
        fd: that descriptor; -1 where there is an IPC handle.
    """

    ordinal: int
    device: str
    base: int
    allocation: int
    offset: int
    nbytes: int
    ipc: bytes = b""
    fd: int = -1

    def __post_init__(self) -> None:
        self.closed = False
        self._closing = weakref.finalize(self, os.close, self.fd) if self.fd >= 0 else None

    @classmethod
    def at(cls, address: int, nbytes: int) -> Self:
        """Return the storage of `nbytes` at a device pointer.

        Raises:
            UsageError: an invalid address or size.
            UnsupportedMemory: memory that no other process can map, or no CUDA driver.
            CudaError: the driver refuses; the address is no device memory of this process.
        """
        if not isinstance(address, int) or not 0 < address < 2**64:
            raise UsageError(f"address={shown(address)}: a device pointer is needed")
        whole("nbytes", nbytes, 1)
        ordinal = cuda_driver.device_of(address)
        device = cuda_driver.device_name(ordinal)
        context = cuda_driver.PrimaryContext(ordinal)
        try:
            with context.current():
                base, allocation = cuda_driver.allocation_of(address)
                ipc, fd = _share(address, nbytes, base, allocation)
        finally:
            context.release()
        return cls(
            ordinal=ordinal,
            device=device,
            base=base,
            allocation=allocation,
            offset=address - base,
            nbytes=nbytes,
            ipc=ipc,
            fd=fd,
        )

    @property
    def identity(self) -> int:
        """Equal for storages of one allocation."""
        return self.base

    def duplicate(self) -> "DeviceMemory":
        """Return the same storage with a descriptor of its own.

        Raises:
            UsageError: closed.
        """
        if self.closed:
            raise UsageError(f"{self!r}: make it anew with DeviceMemory.at")
        return replace(self, fd=os.dup(self.fd) if self.fd >= 0 else -1)

    def handle(self, fd_index: int) -> IpcHandle | VmmHandle:
        """Return how a registration names it, if its descriptor, if any, has this number."""
        if self.ipc:
            return IpcHandle(handle=self.ipc, allocation=self.allocation, offset=self.offset)
        return VmmHandle(fd_index=fd_index, allocation=self.allocation, offset=self.offset)

    def close(self) -> None:
        """Close the descriptor; the memory stays what it is. May be called again."""
        if self._closing is not None:
            self._closing()
        self.fd = -1
        self.closed = True

    def __repr__(self) -> str:
        way = "closed" if self.closed else f"fd {self.fd}" if self.fd >= 0 else "IPC handle"
        return (
            f"<DeviceMemory {self.nbytes} bytes at {self.offset} of {self.allocation},"
            f" {self.device}, {way}>"
        )


def _share(address: int, nbytes: int, base: int, allocation: int) -> tuple[bytes, int]:
    """(IPC handle, -1) or (empty, a descriptor) of the allocation."""
    ends = base + allocation - address
    if nbytes > ends:
        raise UnsupportedMemory(
            f"{nbytes} bytes at {address:#x} lie in several CUDA allocations, the first ends after"
            f" {ends}; {_REMEDY}"
        )
    if cuda_driver.has_ipc_handle(address):
        return cuda_driver.ipc_handle(base), -1
    if cuda_driver.can_export(address):
        return b"", cuda_driver.export(base)
    raise UnsupportedMemory(
        f"{nbytes} bytes at {address:#x} lie in CUDA memory that no other process can map;"
        f" {_REMEDY}"
    )
