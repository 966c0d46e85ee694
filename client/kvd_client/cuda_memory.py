"""CUDA memory that another process can map: by its IPC handle, or by descriptors.

Either names whole allocations, so a storage is the allocations that it lies in and an
offset. Memory of cudaMalloc is one allocation and has an IPC handle. Virtual memory (of
expandable segments, of vLLM's cumem allocator) has none; it may be several allocations
mapped one after another, each of which is exported as a descriptor where its allocator
asked for that when it made it. What is given away must stay mapped: an engine that
remaps its memory registers anew.
"""

from collections.abc import Sequence
from typing import Self

from kvd_client import cuda_driver
from kvd_client.arguments import shown, whole
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_client.memory import LARGER_ALLOCATIONS, Descriptors, Memory
from kvd_proto.messages import MAX_SEGMENTS, IpcHandle, VmmHandle, VmmSegment

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
"""Where an allocation begins, as this process sees it, and its bytes."""


class DeviceMemory(Memory):
    """One storage in CUDA memory, made by `at`; `device` is "cuda:" and the device's UUID.

    Args:
        ordinal: the device's number in this process.
        device: its name.
        allocations: that the storage lies in, in order.
        offset: where the storage begins in the first.
        nbytes: of the storage.
        ipc: the one allocation's IPC handle; empty where they are exported as descriptors.
        descriptors: these; none where there is an IPC handle.
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

        Any thread may call it; it need not have a context.

        Raises:
            UsageError: an invalid address or size.
            UnsupportedMemory: memory that no other process can map, or no CUDA driver.
            CudaError: the driver refuses; the address is no device memory of this process.
        """
        if not isinstance(address, int) or not 0 < address < 2**64:
            raise UsageError(f"address={shown(address)}: a device pointer is needed")
        whole("nbytes", nbytes, 1)
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
                        descriptors = _exported(allocations)
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
    found: list[Allocation] = []
    at = address
    while at < address + nbytes:
        if len(found) == MAX_SEGMENTS:
            raise UnsupportedMemory(
                f"{nbytes} bytes at {address:#x} lie in more than {MAX_SEGMENTS} CUDA allocations;"
                f" {LARGER_ALLOCATIONS}"
            )
        base, size = cuda_driver.allocation_of(at)
        found.append((base, size))
        at = base + size
    return found


def _exported(allocations: Sequence[Allocation]) -> Descriptors:
    """Return new descriptors of allocations of the virtual memory management."""
    fds: list[int] = []
    try:
        for base, nbytes in allocations:
            descriptor, fabric = cuda_driver.exports(base)
            if not descriptor:
                reason, remedy = (
                    ("it can be exported to a fabric only", _FABRIC_REMEDY)
                    if fabric
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
