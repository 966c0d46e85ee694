"""The calls of the CUDA driver that a worker needs; no other module of the client names them.

`cuda-bindings` is imported at the first call, so that a client of host memory needs neither the
package nor a driver. Devices are ordinals of this process; streams and events are the driver's
handles as integers. Any thread may make the calls. A call that fails raises `CudaError`, whether
the driver or its bindings failed; without a driver it raises `UnsupportedMemory`.
"""

import ctypes
import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from kvd_client.errors import CudaError, UnsupportedMemory, cause

IPC_HANDLE_BYTES = 64
BINDINGS_FAILED = -1  # `CudaError.code` if the bindings failed; the driver's codes are positive


@functools.cache
def _bindings() -> ModuleType:
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # an extra, for CUDA workers only
    except ImportError as error:
        raise UnsupportedMemory(
            f"CUDA memory needs the package cuda-bindings ({error}); pip install cuda-bindings"
        ) from error
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # the loader finds no libcuda.so.1
        raise UnsupportedMemory(
            f"CUDA memory needs the NVIDIA driver, libcuda.so.1 cannot be loaded: {error}"
        ) from error
    except Exception as error:
        raise _bindings_error("cuInit", "start the CUDA driver", error) from error
    if int(code):
        raise CudaError(int(code), _name(driver, code), "start the CUDA driver")
    module: ModuleType = driver
    return module


def _name(driver: ModuleType, code: Any) -> str:
    with suppress(Exception):  # an error without a name is still reported by its number
        name_code, name = driver.cuGetErrorName(code)
        if not int(name_code):
            return str(name.decode())
    return f"error {int(code)}"


def _bindings_error(name: str, attempted: str, error: Exception) -> CudaError:
    """Return the error of a call that the bindings failed to make, or whose code is unknown."""
    text = f"{name} failed in cuda-bindings (12.9 to 13 are supported): {cause(error)}"
    return CudaError(BINDINGS_FAILED, text, attempted)


def _try(attempted: str, function: str, *arguments: Any) -> tuple[Any, list[Any]]:
    """Call a driver function; return its code, which may be an error's, and its results."""
    driver = _bindings()
    try:
        code, *results = getattr(driver, function)(*arguments)
    except Exception as error:  # ValueError: unknown code; Runtime- or AttributeError: no function
        raise _bindings_error(function, attempted, error) from error
    return code, results


def _call(attempted: str, function: str, *arguments: Any) -> Any:
    """Call a driver function; return its one result, or a tuple of several."""
    code, results = _try(attempted, function, *arguments)
    if int(code):
        raise CudaError(int(code), _name(_bindings(), code), attempted)
    return results[0] if len(results) == 1 else tuple(results)


def _constant(name: str) -> Any:
    """Return a constant of the bindings, such as "CUevent_flags.CU_EVENT_DISABLE_TIMING"."""
    driver = _bindings()
    try:
        return operator.attrgetter(name)(driver)
    except AttributeError as error:
        raise _bindings_error(name, "look up a constant", error) from error


@contextmanager
def beside_captures() -> Iterator[None]:
    """Allow this thread's calls while another thread captures a CUDA graph.

    While any thread captures a graph in global mode, CUDA refuses calls that may synchronize
    (registering host memory, allocating, querying an event), and such a call also invalidates the
    capture. A thread in relaxed mode may make them.
    """
    attempted = "make calls while another thread captures a graph"
    relaxed = _constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED")
    mode = _call(attempted, "cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        # If this fails, the thread stays in relaxed mode, which only allows more calls than before.
        with suppress(CudaError):
            _call(attempted, "cuThreadExchangeStreamCaptureMode", mode)


# --------------------------------------------------------------------- devices


def device_name(device: int) -> str:
    """Return a device's name for registrations: `cuda:` and its UUID, `cuda:MIG-` for an instance.

    Not an index, because CUDA_VISIBLE_DEVICES hides and reorders indices, but not UUIDs.
    """
    attempted = f"get the name of device {device}"
    handle = _call(attempted, "cuDeviceGet", device)
    # Before CUDA 13 the name without _v2 gives the UUID of the GPU that a MIG instance is on.
    newer = hasattr(_bindings(), "cuDeviceGetUuid_v2")
    uuid = _call(attempted, "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid", handle)
    name: bytes = _call(attempted, "cuDeviceGetName", 256, handle)
    mig = b" MIG " in name.partition(b"\0")[0]  # no attribute tells a MIG instance
    return f"cuda:{'MIG-' if mig else ''}{bytes(uuid.bytes).hex()}"


def count_devices() -> int:
    """Return how many devices this process sees."""
    return int(_call("count the devices", "cuDeviceGetCount"))


def streams_can_write(device: int) -> bool:
    """Return whether streams of this device can write 64 bits to memory."""
    attempted = f"query what streams of device {device} can do"
    handle = _call(attempted, "cuDeviceGet", device)
    kind = _constant("CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS")
    return bool(_call(attempted, "cuDeviceGetAttribute", kind, handle))


class PrimaryContext:
    """A device's primary context, which torch uses too; retained until `release`."""

    def __init__(self, device: int) -> None:
        self._attempted = f"use device {device}"
        self._device = _call(self._attempted, "cuDeviceGet", device)
        self._handle = _call(self._attempted, "cuDevicePrimaryCtxRetain", self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's current context within the block."""
        previous = _call(self._attempted, "cuCtxGetCurrent")
        if int(previous) == int(self._handle):
            yield
            return
        _call(self._attempted, "cuCtxSetCurrent", self._handle)
        try:
            yield
        finally:
            _call(self._attempted, "cuCtxSetCurrent", previous)

    def release(self) -> None:
        """Release it; the driver may destroy its objects. Never raises."""
        with suppress(CudaError):
            _call(f"stop to {self._attempted}", "cuDevicePrimaryCtxRelease", self._device)


@contextmanager
def any_context() -> Iterator[None]:
    """Make some context current within the block, as needed to look up the device of an address.

    It is the thread's own, or the primary context of a device that this process uses already. A new
    one would take memory of a device that another process may use. If this process uses no device,
    this raises `UnsupportedMemory`.
    """
    if int(_call("get this thread's context", "cuCtxGetCurrent")):
        yield
        return
    for number in range(count_devices()):
        attempted = f"query whether device {number} is in use"
        handle = _call(attempted, "cuDeviceGet", number)
        _, active = _call(attempted, "cuDevicePrimaryCtxGetState", handle)
        if active:
            context = PrimaryContext(number)
            try:
                with context.current():
                    yield
            finally:
                context.release()
            return
    raise UnsupportedMemory(
        "this process uses no CUDA device, so it has no CUDA memory: share the memory in the"
        " process that allocated it"
    )


# ---------------------------------------------------------------------- memory

_POSIX_DESCRIPTOR = "CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"


def _pointer_attribute(address: int, name: str) -> Any:
    kind = _constant(f"CUpointer_attribute.CU_POINTER_ATTRIBUTE_{name}")
    return _call(f"query address {address:#x}", "cuPointerGetAttribute", kind, address)


def device_of(address: int) -> int:
    """Return the ordinal of the device whose memory this is."""
    return int(_pointer_attribute(address, "DEVICE_ORDINAL"))


def allocation_of(address: int) -> tuple[int, int]:
    """Return base and bytes of the allocation that an address lies in."""
    base, nbytes = _call(
        f"find the allocation of address {address:#x}", "cuMemGetAddressRange", address
    )
    return int(base), int(nbytes)


def has_ipc_handle(address: int) -> bool:
    """Return whether the memory can have a legacy IPC handle."""
    return bool(_pointer_attribute(address, "IS_LEGACY_CUDA_IPC_CAPABLE"))


def ipc_handle(base: int) -> bytes:
    """Return the legacy IPC handle of an allocation, 64 bytes."""
    handle = _call(f"get the IPC handle of the memory at {base:#x}", "cuIpcGetMemHandle", base)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def export_kinds(address: int) -> tuple[bool, bool]:
    """Return whether memory can be exported as a descriptor, and whether as a fabric handle."""
    allowed = int(_pointer_attribute(address, "ALLOWED_HANDLE_TYPES"))
    kinds = (_POSIX_DESCRIPTOR, "CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC")
    as_descriptor, as_fabric = (bool(allowed & int(_constant(kind))) for kind in kinds)
    return as_descriptor, as_fabric


def export(base: int) -> int:
    """Return a new descriptor of an allocation of virtual memory."""
    attempted = f"export the memory at {base:#x}"
    kind = _constant(_POSIX_DESCRIPTOR)
    handle = _call(attempted, "cuMemRetainAllocationHandle", base)
    try:
        return int(_call(attempted, "cuMemExportToShareableHandle", handle, kind, 0))
    finally:
        # A failed release leaks one reference to this process's own memory, until it ends.
        with suppress(CudaError):
            _call(attempted, "cuMemRelease", handle)


def allocate(nbytes: int) -> int:
    """Allocate memory of the current device; return its address. The contents are undefined."""
    return int(_call(f"allocate {nbytes} bytes", "cuMemAlloc", nbytes))


def free(address: int) -> None:
    """Free memory of `allocate`."""
    _call(f"free the memory at {address:#x}", "cuMemFree", address)


def copy_in(address: int, source: int, nbytes: int) -> None:
    """Copy from host to device; return when the bytes have arrived."""
    _call(f"copy {nbytes} bytes to the device", "cuMemcpyHtoD", address, source, nbytes)
    # From pageable memory the call may return before the last bytes have arrived.
    _call(f"copy {nbytes} bytes to the device", "cuStreamSynchronize", 0)


def copy_out(target: int, address: int, nbytes: int) -> None:
    """Copy from device to host; return when the bytes have arrived."""
    _call(f"copy {nbytes} bytes from the device", "cuMemcpyDtoH", target, address, nbytes)


def register_host(address: int, nbytes: int) -> int:
    """Let devices write to host memory; return its address for them."""
    attempted = f"register {nbytes} bytes of host memory"
    flags = _constant("CU_MEMHOSTREGISTER_PORTABLE") | _constant("CU_MEMHOSTREGISTER_DEVICEMAP")
    _call(attempted, "cuMemHostRegister", address, nbytes, flags)
    try:
        return int(_call(attempted, "cuMemHostGetDevicePointer", address, 0))
    except CudaError:
        unregister_host(address)
        raise


def unregister_host(address: int) -> None:
    """Undo `register_host`, when no device writes there any more."""
    _call("unregister host memory", "cuMemHostUnregister", address)


# ----------------------------------------------------------- streams and events


def write_value(stream: int, address: int, value: int) -> None:
    """Write 64 bits when all work that is on the stream now has finished."""
    _call("write a number from a stream", "cuStreamWriteValue64", stream, address, value, 0)


def new_event() -> int:
    """Return a new event, without timing."""
    kind = _constant("CUevent_flags.CU_EVENT_DISABLE_TIMING")
    return int(_call("make an event", "cuEventCreate", int(kind)))


def record(event: int, stream: int) -> None:
    """Let the event happen when all work that is on the stream now has finished."""
    _call("record an event", "cuEventRecord", event, stream)


def stream_waits(stream: int, event: int) -> None:
    """Make later work on the stream wait for the event."""
    _call("order two streams", "cuStreamWaitEvent", stream, event, 0)


def has_happened(event: int) -> bool:
    """Return whether an event has happened, or was never recorded."""
    attempted = "query an event"
    code, _ = _try(attempted, "cuEventQuery", event)
    if int(code) == int(_constant("CUresult.CUDA_ERROR_NOT_READY")):
        return False
    if int(code):
        raise CudaError(int(code), _name(_bindings(), code), attempted)
    return True


def destroy_event(event: int) -> None:
    """Free an event."""
    _call("destroy an event", "cuEventDestroy", event)
