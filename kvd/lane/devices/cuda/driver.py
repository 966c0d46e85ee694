"""The CUDA driver as the daemon uses it: with copies.py the only module that names its functions.

Thin wrappers over `cuda.bindings.driver`: numbers in, numbers out, and every failure a CudaError
that says what was attempted. `free`, `close_ipc` and functions named `wait_…` wait for the device,
no other function does. The bindings are imported at the first call, so a daemon without them serves
host memory.

An error code does not tell whether the context is lost: the driver returns 999 or 719 for a bad
handle, too, and works on. `is_alive` asks the context.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from types import ModuleType
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaError, CudaMissing, LaneError

_log = logging.getLogger(__name__)

Context = NewType("Context", object)
Stream = NewType("Stream", object)
Event = NewType("Event", object)
Addresses = npt.NDArray[np.uint64]

OLDEST = 12000
"""The oldest driver that serves, 1000 * major + 10 * minor: the bindings find nothing in others."""
WHOLE = 12080
"""From this driver on many fragments are copied by one call."""

_NOT_READY = 600
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3  # compute modes


# ----------------------------------------------------------------------- calls


@cache
def bindings() -> ModuleType:
    """The module of the bindings.

    Raises:
        CudaMissing: they are not installed.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # an extra; host lanes do without
    except ImportError as error:
        raise CudaMissing(
            f"a CUDA device needs the package cuda-bindings ({error});"
            " install it with: pip install cuda-bindings"
        ) from error
    module: ModuleType = driver
    return module


def call(attempted: str, name: str, *arguments: object) -> Any:
    """Call a driver function; its result: None, one value, or a tuple.

    Raises:
        CudaError: the call failed, or this driver lacks the function.
    """
    code, *values = _called(attempted, name, *arguments)
    check(code, attempted)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def _called(attempted: str, name: str, *arguments: object) -> tuple[Any, ...]:
    """What the function returned, its code first."""
    try:
        returned: tuple[Any, ...] = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise CudaError(-1, f"{name} is not in this driver ({error})", attempted) from error
    except (ValueError, KeyError) as error:  # a code that bindings 13, 12 do not know
        raise CudaError(-1, f"{name} failed ({error})", attempted) from error
    return returned


def check(code: Any, attempted: str) -> None:
    """Raise what a call returned.

    Args:
        code: the bindings' name of a code, or the driver's number of it.
        attempted: what the call was for.

    Raises:
        CudaError: the code is not success.
    """
    if not code:
        return
    name = getattr(code, "name", "")
    if not name:
        try:
            name = bindings().CUresult(code).name
        except (ValueError, KeyError):
            name = "an error that the bindings do not know"
    raise CudaError(int(code), name, attempted)


class Undo(ExitStack):
    """Calls that undo others, made in reverse order, however many of them fail.

    The first error is raised, or the one that ended the block; others are logged.
    """

    def add(self, undo: Callable[..., object], *arguments: object) -> None:
        """Call `undo` with these arguments at the end."""

        def exit_(_kind: object, error: BaseException | None, _trace: object) -> None:
            try:
                undo(*arguments)
            except LaneError as failure:
                if error is None:
                    raise
                _log.error("not undone: %s", failure)  # not what is raised

        self.push(exit_)


# -------------------------------------------------------------- driver, devices


def start() -> None:
    """Load and initialise the driver.

    Raises:
        CudaMissing: it is not installed or too old, or there is no device.
        CudaError: it cannot be initialised.
    """
    cuda = bindings()
    try:
        (code,) = cuda.cuInit(0)
    except RuntimeError as error:  # what the bindings raise where no library is found
        raise CudaMissing(
            f"libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver, or in a"
            " container let the runtime mount it (NVIDIA_DRIVER_CAPABILITIES=compute)"
        ) from error
    except (ValueError, KeyError) as error:
        raise CudaError(-1, f"cuInit failed ({error})", "initialising the CUDA driver") from error
    if code.name == "CUDA_ERROR_NO_DEVICE":
        raise CudaMissing(
            "the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES, and in a container at"
            " NVIDIA_VISIBLE_DEVICES"
        )
    check(code, "initialising the CUDA driver")
    have = version()
    if have < OLDEST:
        raise CudaMissing(
            f"the NVIDIA driver is too old: it is for CUDA {shown(have)}, kvd needs"
            f" {shown(OLDEST)} or newer (driver 525), and is fast from {shown(WHOLE)} on"
            " (driver 570); update the driver"
        )


def version() -> int:
    """The CUDA version of the driver, 1000 * major + 10 * minor."""
    return int(call("asking for the driver's version", "cuDriverGetVersion"))


def shown(number: int) -> str:
    """A version as people write it: 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def shortcomings() -> str:
    """What this driver lacks, and the remedy; empty where it lacks nothing.

    Raises:
        CudaError: the driver does not report its version.
    """
    have = version()
    if have >= WHOLE:
        return ""
    return (
        f"the NVIDIA driver is old: it is for CUDA {shown(have)}, and only from {shown(WHOLE)} on"
        " (driver 570) are many fragments copied in one call; kvd works, slower, until the driver"
        " is updated"
    )


def devices() -> list[tuple[int, bytes]]:
    """Every device that this process sees: its handle and its UUID, which is a slice's for MIG."""
    count = call("counting devices", "cuDeviceGetCount")
    # Bindings older than CUDA 13 have both; there the plain name gives that of the whole GPU.
    newer = hasattr(bindings(), "cuDeviceGetUuid_v2")
    name = "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid"
    seen = []
    for index in range(count):
        device = call(f"opening device {index}", "cuDeviceGet", index)
        uuid = call(f"asking device {index} for its UUID", name, device)
        seen.append((int(device), bytes(uuid.bytes)))
    return seen


def device_name(device: int) -> str:
    """What its maker calls it."""
    name: bytes = call("asking for a device's name", "cuDeviceGetName", 256, device)
    return name.split(b"\0")[0].decode(errors="replace")


def memory_of(device: int) -> int:
    """Bytes of memory that it has, free or not."""
    return int(call("asking for a device's memory", "cuDeviceTotalMem", device))


def pci_bus_id(device: int) -> str:
    """Where it sits, as `0000:17:00.0`."""
    text: bytes = call("asking for a device's bus id", "cuDeviceGetPCIBusId", 64, device)
    return text.split(b"\0")[0].decode(errors="replace")


def can_share(device: int) -> tuple[bool, bool]:
    """Whether its memory can be shared by IPC handle, and as a file descriptor."""
    return (
        bool(_attribute(device, "IPC_EVENT_SUPPORTED")),
        bool(_attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
    )


def refusal(device: int) -> str:
    """Why no context may be made on a device, and the remedy; empty where one may.

    In mode EXCLUSIVE_PROCESS the context of this process would lock the engine's out, or fail
    because the engine's is there. With MPS the server's process is the only one.

    Raises:
        CudaError: the driver does not report the mode.
    """
    mode = int(_attribute(device, "COMPUTE_MODE"))
    if mode == _PROHIBITED:
        return "the GPU's compute mode is PROHIBITED; nvidia-smi -c DEFAULT changes it"
    if mode != _EXCLUSIVE_PROCESS:
        return ""
    try:
        if _attribute(device, "MPS_ENABLED"):
            return ""
    except CudaError:  # an older driver, which does not say
        pass
    return (
        "the GPU's compute mode is EXCLUSIVE_PROCESS: only one process may use it, the engine or"
        " kvd; nvidia-smi -c DEFAULT changes it, or run both under MPS"
    )


def _attribute(device: int, name: str) -> int:
    attempted = f"asking a device for {name}"
    kind = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if kind is None:
        raise CudaError(-1, "the bindings do not know it", attempted)
    return int(call(attempted, "cuDeviceGetAttribute", kind, device))


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
    except CudaError:
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
    code = _called(attempted, name, what)[0]
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
