"""The CUDA driver as the daemon uses it: the only module that names its functions.

Thin wrappers over `cuda.bindings.driver`: numbers in, numbers out, and every
failure a CudaError that says what was being attempted. No function waits for the
device unless its name says so. The bindings are imported at the first call, so that
a daemon without them serves host memory as before.
"""

import ctypes
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import ModuleType
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaError, CudaMissing, DeviceLost, LaneError

_log = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]
Context = NewType("Context", object)
Stream = NewType("Stream", object)
Event = NewType("Event", object)
Function = NewType("Function", object)

NOT_READY = 600
# Forms of cuMemcpyBatchAsync: the version that brought one, and whether that also tells which copy
# was wrong. A driver has those that are not newer than itself.
_BATCH_FORMS = ((13000, False), (12080, True))
# The bindings find no function in an older driver.
OLDEST = 12000
# From here on a driver has all that is used: batches, and events' times as the bindings ask.
WHOLE = 12080
# DeviceLost: nothing that was or will be asked of the context succeeds.
_LOST = frozenset(
    {
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_UNKNOWN",
    }
)


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
            " install it with: pip install 'kvd-offload[cuda]'"
        ) from error
    module: ModuleType = driver
    return module


def call(attempted: str, name: str, *arguments: object) -> Any:
    """Call a driver function; its result: None, one value, or a tuple.

    Raises:
        CudaError: it failed, or this driver has none.
        DeviceLost: it says that the context is lost.
    """
    try:
        code, *values = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise CudaError(-1, f"{name} is not in this driver ({error})", attempted) from error
    _check(code, attempted)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def _check(code: Any, attempted: str) -> None:
    if code:
        error = CudaError(int(code), code.name, attempted)
        raise DeviceLost(str(error)) if code.name in _LOST else error


class Undo(ExitStack):
    """What is to be undone in reverse order, however much of that fails.

    The first error is raised, the one that ended the block if there is one; others are logged.
    """

    def add(self, undo: Callable[..., object], *arguments: object) -> None:
        """Something was done; this undoes it."""

        def exit_(_kind: object, error: BaseException | None, _trace: object) -> None:
            try:
                undo(*arguments)
            except LaneError as failure:
                if error is None:
                    raise
                _log.error("not undone: %s", failure)  # not what is raised

        self.push(exit_)


# ------------------------------------------------------------------ devices


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
    if code.name == "CUDA_ERROR_NO_DEVICE":
        raise CudaMissing(
            "the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES, and in a container at"
            " NVIDIA_VISIBLE_DEVICES"
        )
    _check(code, "initialising the CUDA driver")
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
    """What kvd misses in this driver, and the remedy; empty where nothing.

    Raises:
        CudaError: the driver does not report its version.
    """
    have = version()
    if have >= WHOLE:
        return ""
    return (
        f"the NVIDIA driver is old: it is for CUDA {shown(have)}, and only from {shown(WHOLE)} on"
        " (driver 570) are many fragments copied in one call and copies timed by the device;"
        " kvd works, slower, until the driver is updated"
    )


def devices() -> list[tuple[int, bytes]]:
    """Every device that this process sees: its handle and its UUID, which is a slice's for MIG."""
    count = call("counting devices", "cuDeviceGetCount")
    # Bindings older than CUDA 13 have both; there the plain name gives that of the whole GPU.
    newer = hasattr(bindings(), "cuDeviceGetUuid_v2")
    name = "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid"
    found = []
    for index in range(count):
        device = call(f"opening device {index}", "cuDeviceGet", index)
        uuid = call(f"asking device {index} for its UUID", name, device)
        found.append((int(device), bytes(uuid.bytes)))
    return found


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
    kinds = bindings().CUdevice_attribute
    asked = (
        kinds.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
        kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    )
    attempted = "asking how a device's memory can be shared"
    ipc, descriptors = (call(attempted, "cuDeviceGetAttribute", kind, device) for kind in asked)
    return bool(ipc), bool(descriptors)


def retain_context(device: int) -> Context:
    """The device's primary context, made if need be; `release_context` gives it back."""
    return Context(call("making a context", "cuDevicePrimaryCtxRetain", device))


def release_context(device: int) -> None:
    """Give the primary context back."""
    call("releasing the context", "cuDevicePrimaryCtxRelease", device)


def use_context(context: Context) -> None:
    """Make it the calling thread's context; every thread needs that once."""
    call("making the context current", "cuCtxSetCurrent", context)


# --------------------------------------------------------- streams and events


def priorities() -> tuple[int, int]:
    """The numbers of the least and of the greatest priority; equal where there is only one."""
    least, greatest = call("asking for priorities", "cuCtxGetStreamPriorityRange")
    return int(least), int(greatest)


def create_stream(priority: int) -> Stream:
    """A stream that waits for no other."""
    cuda = bindings()
    flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
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


def create_event() -> Event:
    """An event that keeps its time."""
    flags = bindings().CUevent_flags.CU_EVENT_DEFAULT
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


def nanoseconds_between(start_event: Event, end_event: Event) -> int:
    """Time on the device between two events that were reached."""
    milliseconds = call("timing copies", "cuEventElapsedTime", start_event, end_event)
    return int(milliseconds * 1e6)


def _reached(attempted: str, name: str, what: object) -> bool:
    try:
        call(attempted, name, what)
    except CudaError as error:
        if error.code == NOT_READY:
            return False
        raise
    return True


# ---------------------------------------------------------------- host memory


def register_host(address: int, nbytes: int) -> None:
    """Pin host memory for all contexts and map it for kernels."""
    cuda = bindings()
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    call(f"pinning {nbytes} bytes of host memory", "cuMemHostRegister", address, nbytes, flags)


def unregister_host(address: int) -> None:
    """Unpin what was pinned from this address on."""
    call("unpinning host memory", "cuMemHostUnregister", address)


def device_address(address: int) -> int:
    """Where kernels find pinned host memory."""
    return int(call("mapping pinned memory for kernels", "cuMemHostGetDevicePointer", address, 0))


# -------------------------------------------------------------- device memory


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


def map_descriptor(descriptor: int, nbytes: int, device: int, undo: Undo) -> int:
    """Map device memory that a file descriptor names, for the device to read and write.

    The descriptor stays the caller's.
    """
    cuda = bindings()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    named = "a worker's memory"
    memory = call(f"importing {named}", "cuMemImportFromShareableHandle", descriptor, kind)
    undo.add(call, f"releasing {named}", "cuMemRelease", memory)
    reserving = f"reserving {nbytes} bytes of addresses"
    address = int(call(reserving, "cuMemAddressReserve", nbytes, 0, 0, 0))
    undo.add(call, "giving addresses back", "cuMemAddressFree", address, nbytes)
    call(f"mapping {nbytes} bytes of {named}", "cuMemMap", address, nbytes, 0, memory, 0)
    undo.add(call, f"unmapping {named}", "cuMemUnmap", address, nbytes)
    call(f"allowing access to {named}", "cuMemSetAccess", address, nbytes, [access], 1)
    return address


# --------------------------------------------------------------------- copies


def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Enqueue one copy; its source is read when the stream gets there."""
    call("enqueueing a copy", "cuMemcpyAsync", target, source, nbytes, stream)


class BatchCopy:
    """`cuMemcpyBatchAsync`, called with arrays.

    The bindings take lists of address objects, which for a piece of 500 runs cost more than
    the copy; so the function that they resolve is called with pointers to the arrays.

    Attributes:
        tells_index: whether this driver's form tells which copy was wrong.

    Raises:
        CudaError: this driver has none.
    """

    def __init__(self) -> None:
        attempted = "looking for cuMemcpyBatchAsync"
        cuda, have = bindings(), version()
        # The newest that the driver has: asked for a newer one, it could answer with an older form.
        form = next((form for form in _BATCH_FORMS if form[0] <= have), None)
        if form is None:
            raise CudaError(-1, f"not in a driver for CUDA {shown(have)}", attempted)
        wanted, self.tells_index = form
        flags = cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        named = (b"cuMemcpyBatchAsync", wanted, flags)
        address, status = call(attempted, "cuGetProcAddress", *named)
        if not int(address):
            raise CudaError(-1, f"not in this driver ({status.name})", attempted)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._function = ctypes.CFUNCTYPE(
            ctypes.c_int,
            *(pointer, pointer, pointer, size),  # targets, sources, sizes, count
            *(pointer, pointer, size),  # attributes, first indices, their number
            *((pointer,) if self.tells_index else ()),
            pointer,  # stream
        )(int(address))
        orders = cuda.CUmemcpySrcAccessOrder
        self._attributes = []  # by whether the order is any
        for order in ("STREAM", "ANY"):
            attributes = cuda.CUmemcpyAttributes()
            attributes.srcAccessOrder = getattr(orders, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}")
            self._attributes.append(attributes)

    def enqueue(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: Stream,
        *,
        source_in_any_order: bool,
    ) -> None:
        """Enqueue copies, in any order among themselves.

        Args:
            targets: uint64[n], contiguous, n > 0.
            sources: the same.
            sizes: the same, in bytes.
            stream: where.
            source_in_any_order: sources may be read at any time until the copies have ended;
                otherwise not before the stream gets there.
        """
        attributes = self._attributes[source_in_any_order]
        first, wrong = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(targets),
            attributes.getPtr(),
            ctypes.addressof(first),  # the attributes count from copy 0 on
            1,
            *((ctypes.addressof(wrong),) if self.tells_index else ()),
            int(stream),  # type: ignore[call-overload]  # the bindings' handles are numbers
        )
        _check(bindings().CUresult(code), f"enqueueing {len(targets)} copies")


# -------------------------------------------------------------------- kernels


def load_kernel(ptx: bytes, name: str, undo: Undo) -> Function:
    """Translate and load a module; its kernel of this name, which may not run when it is undone."""
    module = call("loading the copy kernel", "cuModuleLoadData", ptx + b"\0")
    undo.add(call, "unloading the copy kernel", "cuModuleUnload", module)
    found = call("finding the copy kernel", "cuModuleGetFunction", module, name.encode())
    return Function(found)


def launch(
    function: Function,
    *,
    blocks: int,
    threads: int,
    values: tuple[int, ...],
    types: tuple[type[Any], ...],
    stream: Stream,
) -> None:
    """Enqueue a kernel with these parameters."""
    shape = (blocks, 1, 1, threads, 1, 1, 0)
    call(
        "launching the copy kernel", "cuLaunchKernel", function, *shape, stream, (values, types), 0
    )
