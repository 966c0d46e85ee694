"""Device memory for tests without torch: allocate, fill, read back, hand out.

For processes that have the test driver; everything goes through cuda-bindings.
"""

import ctypes
import mmap
from typing import Any

from cuda.bindings import driver

GRANULARITY = 2 * 2**20
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


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
    """Memory of cuMemCreate, mapped.

    Args:
        exportable: whether a descriptor may be asked for.
    """

    def __init__(self, nbytes: int = GRANULARITY, *, exportable: bool = True) -> None:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = access.location
        if exportable:
            properties.requestedHandleTypes = POSIX_FD
        self.allocation = call("cuMemCreate", nbytes, properties, 0)
        super().__init__(int(call("cuMemAddressReserve", nbytes, 0, 0, 0)), nbytes)
        call("cuMemMap", self.address, nbytes, 0, self.allocation, 0)
        call("cuMemSetAccess", self.address, nbytes, [access], 1)

    def descriptor(self) -> int:
        """A file descriptor of it, the caller's to close."""
        return int(call("cuMemExportToShareableHandle", self.allocation, POSIX_FD, 0))


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
