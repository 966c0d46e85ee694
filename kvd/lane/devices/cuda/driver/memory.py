"""Pinned host memory, device memory, and what other processes share of theirs."""

import ctypes
from collections.abc import Sequence

from kvd.lane.devices.cuda.driver.calls import Undo, bindings, call


def register_host(address: int, nbytes: int) -> None:
    """Pin host memory for all contexts and map it for kernels."""
    cuda = bindings()
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    call(f"pinning {nbytes} bytes of host memory", "cuMemHostRegister", address, nbytes, flags)


def unregister_host(address: int) -> None:
    """Unpin what was pinned from this address on."""
    call("unpinning host memory", "cuMemHostUnregister", address)


def device_address(address: int) -> int:
    """Where the device finds pinned host memory; copies in batches and kernels need that."""
    return int(
        call("mapping pinned memory for the device", "cuMemHostGetDevicePointer", address, 0)
    )


def allocate(nbytes: int) -> int:
    """Device memory; its address."""
    return int(call(f"allocating {nbytes} bytes on the device", "cuMemAlloc", nbytes))


def free(address: int) -> None:
    """Free device memory."""
    call("freeing device memory", "cuMemFree", address)


def address_range(address: int) -> tuple[int, int]:
    """Start and size of the allocation in which an address lies."""
    start_address, nbytes = call("looking at an allocation", "cuMemGetAddressRange", address)
    return int(start_address), int(nbytes)


def open_ipc(handle: bytes) -> int:
    """Map another process's allocation, named by a handle of 64 bytes; where it starts."""
    cuda = bindings()
    named = cuda.CUipcMemHandle()
    ctypes.memmove(named.getPtr(), handle, len(handle))
    flags = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(call("opening a worker's memory", "cuIpcOpenMemHandle", named, flags))


def close_ipc(address: int) -> None:
    """Unmap what `open_ipc` mapped."""
    call("closing a worker's memory", "cuIpcCloseMemHandle", address)


def map_descriptors(segments: Sequence[tuple[int, int]], device: int, undo: Undo) -> int:
    """Map device memory that file descriptors name, for the device to read and write.

    The driver refuses to map more of an allocation than it has.

    Args:
        segments: descriptors, which stay the caller's, each with all bytes of its allocation. They
            come to lie one after another.
        device: the device's handle.
        undo: what unmaps them.

    Returns:
        Where the first one begins.
    """
    cuda = bindings()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    named = "a worker's memory"
    total = sum(nbytes for _, nbytes in segments)
    reserving = f"reserving {total} bytes of addresses"
    start = at = int(call(reserving, "cuMemAddressReserve", total, 0, 0, 0))
    undo.add(call, "giving addresses back", "cuMemAddressFree", start, total)
    for descriptor, nbytes in segments:
        memory = call(f"importing {named}", "cuMemImportFromShareableHandle", descriptor, kind)
        undo.add(call, f"releasing {named}", "cuMemRelease", memory)
        call(f"mapping {nbytes} bytes of {named}", "cuMemMap", at, nbytes, 0, memory, 0)
        undo.add(call, f"unmapping {named}", "cuMemUnmap", at, nbytes)
        at += nbytes
    call(f"allowing access to {named}", "cuMemSetAccess", start, total, [access], 1)
    return start
