"""Functions of the CUDA driver: contexts, streams, events and memory.

Only this module, copies.py and `kvd.machine.cuda` name the driver's functions. `free`, `close_ipc`
and functions named `wait_…` wait for the device; no other function does.

An error code does not tell whether the context is lost: the driver also returns 999 or 719 for a
bad handle, and works on. `is_alive` queries the context.
"""

import ctypes
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaDriverError
from kvd.machine.cuda import Undo, bindings, call, call_raw, check

Context = NewType("Context", object)
Stream = NewType("Stream", object)
Event = NewType("Event", object)
Addresses = npt.NDArray[np.uint64]

_NOT_READY = 600


# ------------------------------------------------------------ contexts, streams


def retain_context(device: int) -> Context:
    """Return the device's primary context, created if need be; see `release_context`."""
    return Context(call("making a context", "cuDevicePrimaryCtxRetain", device))


def release_context(device: int) -> None:
    """Release the primary context."""
    call("releasing the context", "cuDevicePrimaryCtxRelease", device)


def use_context(context: Context) -> None:
    """Make it the calling thread's context; every thread must call this once."""
    call("making the context current", "cuCtxSetCurrent", context)


def priorities() -> tuple[int, int]:
    """Return the least and the greatest stream priority; equal if there is only one."""
    least, greatest = call("asking for priorities", "cuCtxGetStreamPriorityRange")
    return int(least), int(greatest)


def create_stream(priority: int) -> Stream:
    """Create a stream that waits for no other."""
    flags = bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    return Stream(call("creating a stream", "cuStreamCreateWithPriority", flags, priority))


def destroy_stream(stream: Stream) -> None:
    """Destroy a stream; nothing may be in flight on it."""
    call("destroying a stream", "cuStreamDestroy", stream)


def wait_for_stream(stream: Stream) -> None:
    """Wait for everything enqueued on a stream."""
    call("waiting for a stream", "cuStreamSynchronize", stream)


def is_idle(stream: Stream) -> bool:
    """Return whether everything enqueued on a stream has ended."""
    return _reached("asking whether a stream is idle", "cuStreamQuery", stream)


def is_alive(stream: Stream) -> bool:
    """Return whether the context of a stream still answers."""
    try:
        is_idle(stream)
    except CudaDriverError:
        return False
    return True


def create_event() -> Event:
    """Create an event without a timestamp."""
    flags = bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING
    return Event(call("creating an event", "cuEventCreate", flags))


def destroy_event(event: Event) -> None:
    """Destroy an event."""
    call("destroying an event", "cuEventDestroy", event)


def record(event: Event, stream: Stream) -> None:
    """Make the event mark everything enqueued on the stream until now."""
    call("recording an event", "cuEventRecord", event, stream)


def is_reached(event: Event) -> bool:
    """Return whether everything that the event marks has ended."""
    return _reached("asking whether copies have ended", "cuEventQuery", event)


def _reached(attempted: str, function: str, handle: object) -> bool:
    code = call_raw(attempted, function, handle)[0]
    if code == _NOT_READY:  # the usual answer, which is no error
        return False
    check(code, attempted)
    return True


# ---------------------------------------------------------------------- memory


def register_host(address: int, nbytes: int) -> None:
    """Pin host memory for all contexts of this process."""
    cuda = bindings()
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    call(f"pinning {nbytes} bytes of host memory", "cuMemHostRegister", address, nbytes, flags)


def unregister_host(address: int) -> None:
    """Unpin host memory that begins at this address."""
    call("unpinning host memory", "cuMemHostUnregister", address)


def device_address(address: int) -> int:
    """Return the device's address of pinned host memory."""
    return int(
        call("mapping pinned memory for the device", "cuMemHostGetDevicePointer", address, 0)
    )


def allocate(nbytes: int) -> int:
    """Allocate device memory; return its address."""
    return int(call(f"allocating {nbytes} bytes on the device", "cuMemAlloc", nbytes))


def free(address: int) -> None:
    """Free device memory."""
    call("freeing device memory", "cuMemFree", address)


def address_range(address: int) -> tuple[int, int]:
    """Return start and size of the allocation that contains an address."""
    start_address, nbytes = call("looking at an allocation", "cuMemGetAddressRange", address)
    return int(start_address), int(nbytes)


def open_ipc(handle: bytes) -> int:
    """Map another process's allocation by its handle of 64 bytes; return where it starts."""
    cuda = bindings()
    struct = cuda.CUipcMemHandle()
    ctypes.memmove(struct.getPtr(), handle, len(handle))
    flags = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(call("opening a worker's memory", "cuIpcOpenMemHandle", struct, flags))


def close_ipc(address: int) -> None:
    """Unmap an allocation that `open_ipc` mapped."""
    call("closing a worker's memory", "cuIpcCloseMemHandle", address)


def map_descriptors(segments: Sequence[tuple[int, int]], device: int, undo: Undo) -> int:
    """Map device memory by file descriptors, for the device to read and write.

    The driver refuses to map more bytes than an allocation has.

    Args:
        segments: descriptor, which stays the caller's, and size of each allocation. They are
            mapped one after another.
        device: the device's handle.
        undo: gets the calls that unmap them.

    Returns:
        The address of the first one.
    """
    cuda = bindings()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    name = "a worker's memory"
    total = sum(nbytes for _, nbytes in segments)
    reserving = f"reserving {total} bytes of addresses"
    begin = address = int(call(reserving, "cuMemAddressReserve", total, 0, 0, 0))
    undo.add(call, "giving addresses back", "cuMemAddressFree", begin, total)
    for descriptor, nbytes in segments:
        memory = call(f"importing {name}", "cuMemImportFromShareableHandle", descriptor, kind)
        undo.add(call, f"releasing {name}", "cuMemRelease", memory)
        call(f"mapping {nbytes} bytes of {name}", "cuMemMap", address, nbytes, 0, memory, 0)
        undo.add(call, f"unmapping {name}", "cuMemUnmap", address, nbytes)
        address += nbytes
    call(f"allowing access to {name}", "cuMemSetAccess", begin, total, [access], 1)
    return begin
