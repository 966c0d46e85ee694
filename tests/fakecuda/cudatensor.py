"""Device memory for tests without torch: allocate, fill, read back, hand out.

For processes that have the test driver; everything goes through cuda-bindings.
"""

import ctypes
import mmap
from typing import Any

from cuda.bindings import driver

GRANULARITY = 2 * 2**20
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


def call(name: str, *arguments: object) -> Any:
    """Call a driver function; None, its one result, or a tuple."""
    code, *results = getattr(driver, name)(*arguments)
    if int(code):
        raise RuntimeError(f"{name}: error {int(code)}")
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


def code_of(name: str, *arguments: object) -> int:
    """Call a driver function for its error code."""
    return int(getattr(driver, name)(*arguments)[0])


def use_device(ordinal: int = 0) -> None:
    """Start the driver and make a device's primary context this thread's."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal)))


def new_stream() -> int:
    """The handle of a new stream that the legacy default stream does not order."""
    return int(call("cuStreamCreateWithPriority", 1, 0))


def host_address(address: int) -> int:
    """Where this process finds registered memory that devices find at `address`."""
    by_host = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER
    return int(call("cuPointerGetAttribute", by_host, address))


class DeviceBytes:
    """Bytes of device memory at `address`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy in; waits."""
        assert offset + len(data) <= self.nbytes
        call("cuMemcpyHtoD", self.address + offset, data, len(data))

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:
        """Copy out; waits."""
        out = ctypes.create_string_buffer(self.nbytes - offset if nbytes is None else nbytes)
        call("cuMemcpyDtoH", ctypes.addressof(out), self.address + offset, len(out))
        return out.raw


class DeviceMemory(DeviceBytes):
    """An allocation of cuMemAlloc."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(int(call("cuMemAlloc", nbytes)), nbytes)

    def handle(self) -> bytes:
        """The 64 bytes with which another process opens it."""
        handle = call("cuIpcGetMemHandle", self.address)
        return ctypes.string_at(handle.getPtr(), 64)

    def free(self) -> None:
        """Give it back."""
        call("cuMemFree", self.address)


class VirtualMemory(DeviceBytes):
    """Memory of cuMemCreate, mapped; several segments one after another.

    Args:
        nbytes: of each segment.
        segments: how many.
        kinds: of handles that may be asked for.
    """

    def __init__(
        self, nbytes: int = GRANULARITY, segments: int = 1, *, kinds: Any = POSIX_FD
    ) -> None:
        total = nbytes * segments
        super().__init__(int(call("cuMemAddressReserve", total, 0, 0, 0)), total)
        self._segment = nbytes
        self._kinds = kinds
        self.map()

    def map(self) -> None:
        """Have memory at the address, with nothing known in it."""
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = access.location
        if self._kinds is not None:
            properties.requestedHandleTypes = self._kinds
        self.allocations = []
        for at in range(self.address, self.address + self.nbytes, self._segment):
            allocation = call("cuMemCreate", self._segment, properties, 0)
            call("cuMemMap", at, self._segment, 0, allocation, 0)
            self.allocations.append(allocation)
        call("cuMemSetAccess", self.address, self.nbytes, [access], 1)

    def unmap(self) -> None:
        """Give the memory back and keep the address, as an engine does that sleeps."""
        call("cuMemUnmap", self.address, self.nbytes)
        for allocation in self.allocations:
            call("cuMemRelease", allocation)
        self.allocations = []

    def descriptors(self) -> list[int]:
        """A file descriptor of each segment, the caller's to close."""
        return [
            int(call("cuMemExportToShareableHandle", allocation, POSIX_FD, 0))
            for allocation in self.allocations
        ]


class PinnedBytes:
    """Registered host memory."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self._view = ctypes.c_char.from_buffer(self.bytes)
        self.address = ctypes.addressof(self._view)
        call("cuMemHostRegister", self.address, nbytes, 3)

    def unregister(self) -> None:
        """Make it ordinary memory again."""
        call("cuMemHostUnregister", self.address)
