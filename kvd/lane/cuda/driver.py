"""A device as its lane uses it: contexts, streams, events and memory.

With copies.py and `kvd.machine.cuda`, which calls the driver, the only modules that name its
functions. `free`, `close_ipc` and functions named `wait_…` wait for the device, no other function
does.

An error code does not tell whether the context is lost: the driver returns 999 or 719 for a bad
handle, too, and works on. `is_alive` asks the context.
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
    """The device's primary context, made if need be; `release_context` gives it back."""
    return Context(call("making a context", "cuDevicePrimaryCtxRetain", device))


def release_context(device: int) -> None:
    """Give the primary context back."""
    call("releasing the context", "cuDevicePrimaryCtxRelease", device)


def use_context(context: Context) -> None:
    """Make it the calling thread's context; every thread needs that once."""
    call("making the context current", "cuCtxSetCurrent", context)


def priorities() -> tuple[int, int]:
    """The numbers of the least and of the greatest priority; equal where there is only one."""
    least, greatest = call("asking for priorities", "cuCtxGetStreamPriorityRange")
    return int(least), int(greatest)


def create_stream(priority: int) -> Stream:
    """A stream that waits for no other."""
    flags = bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    return Stream(call("creating a stream", "cuStreamCreateWithPriority", flags, priority))


def destroy_stream(stream: Stream) -> None:
    """Destroy it; nothing may be in flight there."""
    call("destroying a stream", "cuStreamDestroy", stream)


def wait_for_stream(stream: Stream) -> None:
    """Wait for everything that was enqueued there."""
    call("waiting for a stream", "cuStreamSynchronize", stream)


def is_idle(stream: Stream) -> bool:
    """Whether everything enqueued there has ended."""
    return _reached("asking whether a stream is idle", "cuStreamQuery", stream)


def is_alive(stream: Stream) -> bool:
    """Whether the context of a stream still answers."""
    try:
        is_idle(stream)
    except CudaDriverError:
        return False
    return True


def create_event() -> Event:
    """An event without a time."""
    flags = bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING
    return Event(call("creating an event", "cuEventCreate", flags))


def destroy_event(event: Event) -> None:
    """Destroy it."""
    call("destroying an event", "cuEventDestroy", event)


def record(event: Event, stream: Stream) -> None:
    """Let the event mark all that was enqueued on the stream until now."""
    call("recording an event", "cuEventRecord", event, stream)


def is_reached(event: Event) -> bool:
    """Whether all that the event marks has ended."""
    return _reached("asking whether copies have ended", "cuEventQuery", event)


def _reached(attempted: str, name: str, what: object) -> bool:
    code = call_raw(attempted, name, what)[0]
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
    """Unpin what was pinned from this address on."""
    call("unpinning host memory", "cuMemHostUnregister", address)


def device_address(address: int) -> int:
    """Where the device finds pinned host memory; batches need that."""
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
            are mapped one after another.
        device: the device's handle.
        undo: gets the calls that unmap them.

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
    begin = at = int(call(reserving, "cuMemAddressReserve", total, 0, 0, 0))
    undo.add(call, "giving addresses back", "cuMemAddressFree", begin, total)
    for descriptor, nbytes in segments:
        memory = call(f"importing {named}", "cuMemImportFromShareableHandle", descriptor, kind)
        undo.add(call, f"releasing {named}", "cuMemRelease", memory)
        call(f"mapping {nbytes} bytes of {named}", "cuMemMap", at, nbytes, 0, memory, 0)
        undo.add(call, f"unmapping {named}", "cuMemUnmap", at, nbytes)
        at += nbytes
    call(f"allowing access to {named}", "cuMemSetAccess", begin, total, [access], 1)
    return begin
