"""CUDA memory that another process can map: by its IPC handle, or by a descriptor.

Whichever it is names the whole allocation that a storage lies in, so a storage
is the allocation and an offset. Memory of cudaMalloc has an IPC handle. Memory
of the virtual memory management (expandable segments, sleep mode) has none; it
is exported as a descriptor where its allocator asked for that when it made it.
What is given away must stay mapped: an engine that remaps its memory registers anew.
"""

from typing import Self

from kvd_client import cuda_driver
from kvd_client.arguments import shown, whole
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_client.memory import Memory
from kvd_proto.messages import IpcHandle, VmmHandle

_REMEDY = (
    "PyTorch's expandable segments and vLLM's sleep mode make such memory: remove"
    " expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF, turn sleep mode off, or use an"
    " allocator that makes one exportable allocation of each storage"
)


class DeviceMemory(Memory):
    """One storage in CUDA memory, made by `at`; `device` is "cuda:" and the device's UUID.

    Args:
        ordinal: the device's number in this process.
        device: its name.
        base: where the allocation begins, as this process sees it.
        allocation: its bytes.
        offset: where the storage begins in it.
        nbytes: of the storage.
        ipc: the allocation's IPC handle; empty where it is exported as a descriptor.
        fd: that descriptor; -1 where there is an IPC handle.
    """

    def __init__(
        self,
        ordinal: int,
        device: str,
        base: int,
        allocation: int,
        *,
        offset: int,
        nbytes: int,
        ipc: bytes = b"",
        fd: int = -1,
    ) -> None:
        super().__init__(device, nbytes, offset, fd)
        self.ordinal = ordinal
        self.identity = base
        self.allocation = allocation
        self.ipc = ipc

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
                ends = base + allocation - address
                if nbytes > ends:
                    raise UnsupportedMemory(
                        f"{nbytes} bytes at {address:#x} lie in several CUDA allocations, the first"
                        f" ends after {ends}; {_REMEDY}"
                    )
                ipc, fd = b"", -1
                if cuda_driver.has_ipc_handle(address):
                    ipc = cuda_driver.ipc_handle(base)
                elif cuda_driver.can_export(address):
                    fd = cuda_driver.export(base)
                else:
                    raise UnsupportedMemory(
                        f"{nbytes} bytes at {address:#x} lie in CUDA memory that no other process"
                        f" can map; {_REMEDY}"
                    )
        finally:
            context.release()
        offset = address - base
        return cls(ordinal, device, base, allocation, offset=offset, nbytes=nbytes, ipc=ipc, fd=fd)

    def handle(self, fd_index: int) -> IpcHandle | VmmHandle:
        """See Memory."""
        if self.ipc:
            return IpcHandle(handle=self.ipc, allocation=self.allocation, offset=self.offset)
        return VmmHandle(fd_index=fd_index, allocation=self.allocation, offset=self.offset)
